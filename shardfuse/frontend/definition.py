"""FusionDefinition: the door.  A fusion is written in a ``with``, then executed on local tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import DefinitionError
from ..executor.binding import Argument
from ..executor.options import Backend, CompileOptions
from ..ir.dtype import DataType
from ..ir.expr import Number, Scalar
from ..ir.fusion import Fusion, FusionInput
from ..ir.tensor_view import TensorView
from ..ops.build import Ops
from .executor_cache import FusionExecutorCache
from .explain import Explanation, explain_plan
from .script import definition_script

Contiguity = bool | Sequence[bool | None] | None


class FusionDefinition:
    """A fusion: inputs by ``define_tensor`` and ``define_scalar``, ops by ``fd.ops``, results by ``add_output``.

    >>> with FusionDefinition() as fd:
    ...     x = fd.define_tensor([-1, 512], contiguity=True, dtype=DataType.Float)
    ...     fd.add_output(fd.ops.sum(fd.ops.mul(x, x), [-1]))
    >>> (y,) = fd.execute([torch.randn(8, 512)])

    ``backend``: "triton" or "torch"; left out, Triton where the tensors are on a GPU.
    """

    def __init__(self, *, backend: Backend | None = None) -> None:
        self.fusion = Fusion()
        self.ops = Ops(self.fusion)
        self._options = CompileOptions.from_environment(backend)
        self._fec: FusionExecutorCache | None = None

    def __enter__(self) -> FusionDefinition:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    # defining

    def define_tensor(
        self,
        shape: Sequence[int],
        contiguity: Contiguity = None,
        dtype: DataType = DataType.Float,
        is_cpu: bool = False,
        stride_order: Sequence[int] | None = None,
        *,
        allocation_rank: bool = False,
    ) -> TensorView:
        """An input.

        ``shape``: unsharded sizes, -1 where symbolic.  ``contiguity``: for each dim in stride order, whether it is laid
        out without a gap before the next (``None`` for a broadcast); a bool says it of all; left out, any strides fit.
        ``stride_order``: for each dim its place in memory, 0 innermost.  ``allocation_rank``: tensors come with one dim
        for each allocation axis, a mesh axis being 1.  Raises ``DefinitionError``.
        """
        self._open("define_tensor")
        ndim = len(shape)
        for k, n in enumerate(shape):
            if n < -1:
                raise DefinitionError("define_tensor", f"shape[{k}] = {n}", "a size, or -1 where it is symbolic")
        flags = _contiguity(contiguity, ndim)
        order = tuple(k % ndim for k in stride_order or ())
        if order and sorted(order) != list(range(ndim)):
            raise DefinitionError("define_tensor", f"stride_order={stride_order}", f"a permutation of {ndim} places")
        tv = self.fusion.new_tensor(shape, dtype, is_cpu=is_cpu)
        tv.allocation_rank = allocation_rank
        self.fusion.inputs.append(FusionInput(tv, flags, order))
        return tv

    def define_scalar(self, value: Number | DataType | None = None, dtype: DataType | None = None) -> Scalar:
        """With a value a constant, else an input of the fusion (``dtype`` Double where nothing is said)."""
        self._open("define_scalar")
        if isinstance(value, DataType):
            value, dtype = None, value
        if value is None:
            scalar = self.fusion.new_scalar(dtype or DataType.Double)
            self.fusion.inputs.append(FusionInput(scalar))
            return scalar
        return self.fusion.new_scalar(dtype or _number_type(value), value, is_literal=True)

    def add_output(
        self,
        tv: TensorView,
        *,
        stride_order: Sequence[int] | None = None,
        allocation_rank: bool = False,
    ) -> None:
        """``tv`` is returned by ``execute``, in the order of the calls.

        ``stride_order``: for each dim its place in memory, 0 innermost.  An input that is an output comes as a copy.
        """
        self._open("add_output")
        if not isinstance(tv, TensorView):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DefinitionError("add_output", repr(tv), "a TensorView of this definition")
        if any(i.val is tv for i in self.fusion.inputs) or tv in self.fusion.outputs:
            tv = self.ops.set(tv)
        if stride_order is not None:
            order = sorted(range(tv.ndim), key=lambda d: -(stride_order[d] % tv.ndim))
            tv.set_allocation_domain([tv.domain.logical[d] for d in order])
        tv.allocation_rank = tv.allocation_rank or allocation_rank
        self.fusion.outputs.append(tv)

    def _open(self, what: str) -> None:
        if self._fec is not None:
            raise DefinitionError(what, "a call after the fusion was first run", "all of the definition before it")

    # running

    @property
    def fec(self) -> FusionExecutorCache:
        """The executor; with it the definition is closed."""
        if self._fec is None:
            self._fec = FusionExecutorCache(self.fusion, self._options)
        return self._fec

    def execute(
        self,
        inputs: Sequence[Argument],
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None = None,
        device: torch.device | str | None = None,
    ) -> list[torch.Tensor]:
        """Run on this rank's tensors; returns this rank's outputs.

        ``sizes``: unsharded shapes of inputs where a shard of symbolic size is uneven; without it such a size costs an
        exchange of 8 bytes a call.  An output that is not on this rank's mesh comes as ``None``.
        Raises ``InputError``, ``InputCountError``, ``ShapeError``, ``ShardingError``, ``EmptyFusionError``.
        """
        home = torch.device(device) if isinstance(device, str) else device
        return self.fec.execute(inputs, sizes=sizes, device=home)  # pyright: ignore[reportReturnType]

    def explain(
        self,
        inputs: Sequence[torch.Tensor | Number] | None = None,
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None = None,
    ) -> Explanation:
        """Segments, kernels, collectives and bytes of the plan for ``inputs`` (local) or ``sizes`` (unsharded).

        With neither, of the last plan that ran.  Raises ``NoPlanError``.
        """
        return explain_plan(self.fec.plan_for(inputs, sizes))

    def last_trace(self) -> str:
        """The text of every stage of the last plan, and of the host program and kernels that ran."""
        return self.fec.last_trace()

    def __repr__(self) -> str:
        return definition_script(self.fusion)


def _contiguity(contiguity: Contiguity, ndim: int) -> tuple[bool | None, ...]:
    if contiguity is None:
        return ()
    if isinstance(contiguity, bool):
        return (contiguity,) * ndim
    if len(contiguity) != ndim:
        raise DefinitionError("define_tensor", f"contiguity={list(contiguity)}", f"{ndim} entries, one for each dim, or a bool")
    return tuple(contiguity)


def _number_type(value: Number) -> DataType:
    if isinstance(value, bool):
        return DataType.Bool
    if isinstance(value, int):
        return DataType.Int
    return DataType.Double if isinstance(value, float) else DataType.ComplexDouble
