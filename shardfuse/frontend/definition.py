"""FusionDefinition: the door.  A fusion is written in a ``with``, then executed on local tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, cast, get_args

import torch

from ..arguments import checked
from ..base_error import shown
from ..errors import DefinitionError, InputError, NoReproError
from ..executor.binding import Argument
from ..executor.options import Backend, CompileOptions
from ..executor.uncompiled import uncompiled
from ..ir.caller_lines import lines_named
from ..ir.dtype import DataType
from ..ir.expr import Number, Scalar
from ..ir.fusion import Fusion, FusionInput
from ..ir.tensor_view import TensorView
from ..ops.build import Ops
from ..ops.host import python_number
from .descriptor import Contiguity, check_data_type, checked_layout, data_type_of, like, refused
from .detection import has_dtensor
from .repro import Described, repro_script, reproduced
from .script import definition_script
from .validation import validated

if TYPE_CHECKING:  # what runs a fusion is imported when the first one is run
    from ..executor.choices import Tuned
    from ..executor.timeline import Timeline
    from ..executor.timing import Timer
    from .dtensor import DTensorExecutor
    from .executor_cache import FusionExecutorCache
    from .explain import Explanation


_closing = Lock()
"""Held while a definition is closed: threads that run it first close it once."""


_LONGEST_VECTOR = 1024
"""Sizes of a shape: more than any tensor has dims."""
_METHODS = (
    "define_tensor",
    "from_pytorch",
    "define_vector",
    "define_scalar",
    "add_output",
    "execute",
    "tune",
    "validate",
)


@checked(refused, _METHODS)
class FusionDefinition:
    """A fusion: inputs by ``define_tensor`` and ``define_scalar``, ops by ``fd.ops``, results by ``add_output``.

    >>> with FusionDefinition() as fd:
    ...     x = fd.define_tensor([-1, 512], contiguity=True, dtype=DataType.Float)
    ...     fd.add_output(fd.ops.sum(fd.ops.mul(x, x), [-1]))
    >>> (y,) = fd.execute([torch.randn(8, 512)])

    ``backend``: "triton" or "torch"; left out, Triton where the tensors are on a GPU.  Raises ``DefinitionError``.

    All ops, inputs and outputs are said within the ``with``, all shardings and layouts before the first run.
    """

    def __init__(self, *, backend: Backend | None = None) -> None:
        self.fusion = Fusion()
        self.ops = Ops(self.fusion)
        if backend is not None and backend not in get_args(Backend):
            known = f"one of {', '.join(map(repr, get_args(Backend)))}, or None"
            raise DefinitionError("FusionDefinition", f"backend={backend!r}", known)
        self._options = CompileOptions.from_environment(backend)
        self._fec: FusionExecutorCache | None = None
        self._dtensors: DTensorExecutor | None = None
        self._described: list[Described] | None = None

    @classmethod
    def recording(cls, fusion: Fusion) -> FusionDefinition:
        """A definition that goes on recording in ``fusion``."""
        fd = cls()
        fd.fusion = fusion
        fd.ops = Ops(fusion)
        return fd

    def __enter__(self) -> FusionDefinition:
        if self._fec is None:
            self.fusion.closed = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._fec is None:
            self.fusion.closed = "after its `with` block had ended"

    # defining

    def define_tensor(
        self,
        shape: Sequence[int] | None = None,
        contiguity: Contiguity = None,
        dtype: DataType = DataType.Float,
        is_cpu: bool = False,
        stride_order: Sequence[int] | None = None,
        *,
        sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        static_sizes: bool = False,
        allocation_rank: bool = False,
    ) -> TensorView:
        """An input.

        ``shape``: unsharded sizes, -1 where symbolic.  ``contiguity``: for each dim in stride order, whether it is laid
        out without a gap before the next (``None`` for a broadcast: a size of 1, or an expanded one); a bool says it of
        all; left out, any strides fit.  ``stride_order``: for each dim its place in memory, 0 innermost.

        ``sizes``, ``strides``: those of a tensor like which the input is, symbolic unless ``static_sizes``.
        ``allocation_rank``: tensors come with one dim for each allocation axis, a mesh axis being 1.
        Raises ``DefinitionError``.
        """
        self.fusion.check_open("define_tensor")
        if sizes is not None or strides is not None:
            shape, contiguity, stride_order = like(sizes, strides, static_sizes)
        if shape is None:
            raise DefinitionError("define_tensor", "neither shape nor sizes", "one of them")
        check_data_type("define_tensor", dtype)
        flags, order = checked_layout(shape, contiguity, stride_order)
        tv = self.fusion.new_tensor(shape, dtype, is_cpu=is_cpu)
        tv.allocation_rank = allocation_rank
        self.fusion.inputs.append(FusionInput(tv, flags, order))
        return tv

    def from_pytorch(self, tensor: torch.Tensor, static_sizes: bool = False) -> TensorView:
        """An input like ``tensor``: its dtype and layout, sizes symbolic unless ``static_sizes``.

        A CPU tensor without dims is one also where the fusion runs on a GPU.
        """
        return self.define_tensor(
            sizes=tensor.shape,
            strides=tensor.stride(),
            dtype=data_type_of(tensor),
            static_sizes=static_sizes,
            is_cpu=tensor.device.type == "cpu" and tensor.ndim == 0,
        )

    def define_vector(self, size: int) -> list[Scalar]:
        """``size`` integer inputs, to be used as a shape."""
        if not 0 <= size <= _LONGEST_VECTOR:
            raise DefinitionError("define_vector", f"size={size}", f"0 to {_LONGEST_VECTOR} sizes")
        return [self.define_scalar(dtype=DataType.Int) for _ in range(size)]

    def define_scalar(self, value: Number | DataType | None = None, dtype: DataType | None = None) -> Scalar:
        """With a value a constant, else an input of the fusion (``dtype`` Double where nothing is said)."""
        self.fusion.check_open("define_scalar")
        if isinstance(value, DataType):
            value, dtype = None, value
        if dtype is not None:
            check_data_type("define_scalar", dtype)
        if value is None:
            scalar = self.fusion.new_scalar(dtype or DataType.Double)
            self.fusion.inputs.append(FusionInput(scalar))
            return scalar
        number = cast(Number, python_number(value))
        return self.fusion.new_scalar(dtype or _number_type(number), number, is_literal=True)

    def add_output(
        self,
        tv: TensorView,
        alias_input: TensorView | None = None,
        *,
        stride_order: Sequence[int] | None = None,
        allocation_rank: bool = False,
    ) -> None:
        """``tv`` is returned by ``execute``, in the order of the calls.

        ``alias_input``: an input into whose storage ``tv`` is written instead, at the end of the call; it is then not
        returned.  ``stride_order``: for each dim its place in memory, 0 innermost.  An input that is an output comes as
        a copy.
        """
        self.fusion.check_open("add_output")
        if not isinstance(tv, TensorView):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DefinitionError("add_output", repr(tv), "a TensorView of this definition")
        self.fusion.check_own("add_output", tv)
        inputs = [i.val for i in self.fusion.inputs]
        if alias_input is not None:
            if alias_input not in inputs or alias_input in self.fusion.aliases.values():
                raise DefinitionError(
                    "add_output", f"alias_input={alias_input}", "an input that no other output is written to"
                )
            if alias_input.dtype is not tv.dtype or alias_input.ndim != tv.ndim:
                raise DefinitionError("add_output", f"{tv} for {alias_input}", "the rank and dtype of the input")
        if tv in inputs or tv in self.fusion.outputs:
            tv = self.ops.set(tv)
        if stride_order is not None:
            if sorted(stride_order) != list(range(tv.ndim)):
                found = f"stride_order={list(stride_order)} for {tv}"
                raise DefinitionError("add_output", found, f"a permutation of {tv.ndim} places")
            order = sorted(range(tv.ndim), key=lambda d: -(stride_order[d] % tv.ndim))
            tv.set_allocation_domain([tv.domain.logical[d] for d in order])
        tv.allocation_rank = tv.allocation_rank or allocation_rank
        self.fusion.outputs.append(tv)
        if alias_input is not None:
            self.fusion.aliases[tv] = alias_input

    # running

    @property
    def fec(self) -> FusionExecutorCache:
        """The executor; with it the definition is closed."""
        if self._fec is None:
            with _closing:
                self._close()
        assert self._fec is not None, "made now, or by another thread"
        return self._fec

    def _close(self) -> None:
        if self._fec is not None:
            return
        from shardfuse.frontend.dtensor import DTensorExecutor
        from shardfuse.frontend.executor_cache import FusionExecutorCache

        said = [i.val.domain if isinstance(i.val, TensorView) else None for i in self.fusion.inputs]
        self._dtensors = DTensorExecutor(self.fusion, said, self._options)
        self._fec = FusionExecutorCache(self.fusion, self._options)

    @property
    def _last(self) -> FusionExecutorCache:
        """The executor of the last call."""
        fec = self.fec
        return fec if self._dtensors is None or self._dtensors.last is None else self._dtensors.last

    @uncompiled
    def execute(
        self,
        inputs: Sequence[Argument],
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None = None,
        device: torch.device | str | int | None = None,
        save_repro_inputs: bool = False,
    ) -> list[torch.Tensor]:
        """Run on this rank's tensors; returns this rank's outputs.  With a DTensor among them, outputs are DTensors.

        Outputs carry no graph, whatever the backend: a fusion is no op of autograd.  An input that requires a gradient
        while autograd records is warned of, once for each definition (``NoGradientsWarning``).  For gradients take
        ``shardfuse.nn``, or run one fusion in the forward and one in the backward of a ``torch.autograd.Function``.

        ``device``: where outputs come to be; left out, where the inputs are.  ``save_repro_inputs``: remember shapes,
        strides and dtypes for ``last_repro_script``.

        ``sizes``: unsharded shapes of inputs where a shard of symbolic size is uneven; without it such a size costs an
        exchange of 8 bytes a call.  An output that is not on this rank's mesh comes as ``None``.
        Raises ``InputError``, ``InputCountError``, ``ShapeError``, ``ShardingError``, ``EmptyFusionError``.
        """
        if save_repro_inputs:
            self._described = [Described.of(v) for v in inputs]
        fec, home = self.fec, _device(device)
        self._check_sizes(sizes)
        assert self._dtensors is not None, "made with the executor"
        with lines_named(self.fusion), reproduced(lambda: self.repro_script_for(inputs)):
            if has_dtensor(inputs):
                return self._dtensors.execute(inputs, sizes, home)  # pyright: ignore[reportReturnType]
            outputs = fec.execute(inputs, sizes=sizes, device=home)
            self._dtensors.last_variant = None
            return outputs  # pyright: ignore[reportReturnType]

    def tune(
        self,
        inputs: Sequence[Argument],
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None = None,
        device: torch.device | str | int | None = None,
        seconds: float | None = None,
        timer: Timer | None = None,
    ) -> list[Tuned]:
        """Tune the kernels for these inputs (as for ``execute``): later calls of their sizes run what was chosen.

        Params near those proposed are compiled, checked against them and timed on random tensors, with a bar on stderr;
        choices are kept in the cache directory.  Every rank calls it: one tunes for all.  Gives, for each segment that
        has kernels, what was proposed and chosen with its microseconds.  ``SHARDFUSE_AUTOTUNE=1`` does so before each
        first run on a GPU.

        ``seconds``: to stop trying after; left out, half of SHARDFUSE_TIMEOUT.  ``timer``: microseconds of several runs
        that take turns, instead of CUDA events.
        Raises ``TuningUnavailableError`` without a GPU, and what ``execute`` does.
        """
        fec, home = self.fec, _device(device)
        self._check_sizes(sizes)
        tuner = fec.tuner(timer, seconds)
        assert self._dtensors is not None, "made with the executor"
        with lines_named(self.fusion), reproduced(lambda: self.repro_script_for(inputs)):
            if has_dtensor(inputs):
                return self._dtensors.tune(inputs, sizes, home, tuner)
            tuned = fec.tune(inputs, sizes, home, tuner)
            self._dtensors.last_variant = None
            return tuned

    def execute_with_dtensors(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Run on DTensors; returns DTensors.

        An input about which the definition says nothing is sharded as its DTensor is; unsharded sizes are those of the
        DTensors.
        A plain tensor among them is this rank's piece.
        Raises ``InputError`` where a DTensor contradicts the definition, ``PlacementError``, and what ``execute`` does.
        """
        if not has_dtensor(inputs):
            for k, (declared, value) in enumerate(zip(self.fusion.inputs, inputs, strict=False)):
                if isinstance(declared.val, TensorView):
                    kind = type(value).__name__
                    raise InputError(k, declared.val.name, kind, "a DTensor", "use execute() where there are none")
        return self.execute(inputs)

    def validate(
        self,
        inputs: Sequence[Argument],
        reference_outputs: Sequence[torch.Tensor] | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> list[torch.Tensor]:
        """``execute``, with the outputs compared to ``reference_outputs``, or to the same ops one by one in torch.

        On one rank, or of DTensors, which are compared whole.  ``device``: as of ``execute``.  Raises
        ``ValidationError``.
        """
        run = partial(self.execute, inputs, device=device)
        return validated(self.fusion, inputs, run, reference_outputs, _device(device))

    def repro_script_for(self, inputs: Sequence[Argument] | None = None) -> str:
        """A script that defines this fusion and, with ``inputs``, runs it on random tensors of their layout."""
        return repro_script(self, None if inputs is None else [Described.of(v) for v in inputs])

    def last_repro_script(self) -> str:
        """The script for the inputs of the last ``execute(..., save_repro_inputs=True)``.  Raises ``NoReproError``."""
        if self._described is None:
            raise NoReproError
        return repro_script(self, self._described)

    def explain(
        self,
        inputs: Sequence[torch.Tensor | Number] | None = None,
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None = None,
    ) -> Explanation:
        """Segments, kernels, collectives and bytes of the plan for ``inputs`` (local) or ``sizes`` (unsharded).

        With neither, of the last plan that ran.  Raises ``NoPlanError``.
        """
        from shardfuse.frontend.explain import explain_plan

        self._check_sizes(sizes)
        with lines_named(self.fusion), reproduced(lambda: self.repro_script_for(inputs)):
            fec = self.fec
            if self._dtensors is not None and has_dtensor(inputs or ()):
                return explain_plan(*self._dtensors.plan_for(inputs or (), sizes))
            plan = (fec if inputs is not None else self._last).plan_for(inputs, sizes)
            is_last = inputs is None and sizes is None
            return explain_plan(plan, self._dtensors.moved if is_last and self._dtensors is not None else ())

    def timeline(
        self, inputs: Sequence[Argument], *, sizes: Mapping[TensorView, Sequence[int]] | None = None
    ) -> Timeline:
        """What ran when, on which stream, in a run on this rank's tensors (after one to warm up); prints as bars.

        Every rank of the fusion's meshes calls it.  ``.chrome_trace()`` is JSON for chrome://tracing and Perfetto.
        """
        fec = self.fec
        self._check_sizes(sizes)
        assert self._dtensors is not None, "made with the executor"
        with lines_named(self.fusion):
            if has_dtensor(inputs):
                return self._dtensors.timeline(inputs, sizes)
            found = fec.timeline(inputs, sizes)
        self._dtensors.last_variant = None
        return found

    def _check_sizes(self, sizes: Mapping[TensorView, Sequence[int]] | None) -> None:
        """Raises ``DefinitionError`` for what is no input, and for a shape of another rank."""
        inputs = [i.val for i in self.fusion.inputs] if sizes else []
        for tv, shape in (sizes or {}).items():
            if tv not in inputs:
                raise DefinitionError("sizes", repr(tv), "TensorViews that are inputs of this definition")
            if len(shape) != tv.ndim:
                raise DefinitionError("sizes", f"{list(shape)} for {tv!r}", f"{tv.ndim} unsharded sizes")

    def last_trace(self) -> str:
        """The text of every stage of the last plan, and of the host program and kernels that ran."""
        return self._last.last_trace()

    def __repr__(self) -> str:
        return definition_script(self.fusion)


def _device(named: torch.device | str | int | None) -> torch.device | None:
    """A number is a GPU's; a GPU without a number is the current one."""
    if named is None:
        return None
    try:
        device = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    except (RuntimeError, TypeError, ValueError):
        expected = "a torch.device, its text, or a GPU's number of 0 or more"
        raise DefinitionError("execute", f"device={shown(named)}", expected) from None
    is_any = device.type == "cuda" and cast(int | None, device.index) is None
    return torch.device("cuda", torch.cuda.current_device()) if is_any else device


def _number_type(value: Number) -> DataType:
    if isinstance(value, bool):
        return DataType.Bool
    if isinstance(value, int):
        return DataType.Int
    return DataType.Double if isinstance(value, float) else DataType.ComplexDouble
