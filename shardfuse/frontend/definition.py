"""FusionDefinition: the door.  A fusion is written in a ``with``, then executed on local tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, SupportsIndex, cast, get_args

import torch

from ..arguments import checked
from ..base_error import shown
from ..errors import DefinitionError, NotPickledError
from ..executor.options import Backend, CompileOptions
from ..ir.dtype import DataType
from ..ir.fusion import Fusion, FusionInput
from ..ir.scalar import Number, Scalar
from ..ir.tensor_view import TensorView
from ..ops.build import Ops
from ..ops.host import number_type, python_number
from .descriptor import Contiguity, check_data_type, checked_layout, constant_of, data_type_of, like, refused
from .promise_arguments import Invariant, promised
from .running import Running
from .script import definition_script

_LONGEST_VECTOR = 1024
"""Sizes of a shape: more than any tensor has dims."""
_METHODS = (
    "define_tensor",
    "from_pytorch",
    "define_vector",
    "define_scalar",
    "add_output",
    "promise",
    "_execute",
    "execute_with_dtensors",
    "tune",
    "validate",
    "explain",
    "timeline",
)


@checked(refused, _METHODS)
class FusionDefinition(Running):
    """A fusion: inputs by ``define_tensor`` and ``define_scalar``, ops by ``fd.ops``, results by ``add_output``.

        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 512], contiguity=True, dtype=DataType.Float)
            fd.add_output(fd.ops.sum(fd.ops.mul(x, x), [-1]))
        (y,) = fd.execute([torch.randn(8, 512)])

    ``backend``: "triton" or "torch"; left out, Triton where the tensors are on a GPU.  ``invariant``, ``accumulate``:
    see ``promise``.  Raises ``DefinitionError``.

    Ops, inputs and outputs are declared within the ``with``, shardings and layouts before the first run.
    """

    def __init__(
        self,
        *,
        backend: Backend | None = None,
        invariant: Invariant = None,
        accumulate: Literal["float32"] | None = None,
    ) -> None:
        self.fusion = Fusion()
        self.fusion.promises = promised("FusionDefinition", invariant, accumulate)
        self.ops = Ops(self.fusion)
        if backend is not None and backend not in get_args(Backend):
            known = f"one of {', '.join(map(repr, get_args(Backend)))}, or None"
            raise DefinitionError("FusionDefinition", f"backend={backend!r}", known)
        self._options = CompileOptions.from_environment(backend)
        self._fec = None
        self._dtensors = None
        self._described = None

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

    def promise(self, *, invariant: Invariant = None, accumulate: Literal["float32"] | None = None) -> None:
        """What results keep bit for bit; what cannot be kept is refused when a plan is made (``PromiseError``).

        ``invariant="batch"``: a row's result is the same whatever the number of rows, and whatever its place among
        them.  ``"ranks"``: a result is the same on 1, 2, 4 and 8 ranks.  Both: ``("batch", "ranks")``.
        ``accumulate="float32"``: 16-bit numbers are added in float32 across ranks, by whichever collective.

        What is not named here is no longer promised.  Raises ``DefinitionError``.
        """
        self.fusion.check_open("promise")
        self.fusion.promises = promised("promise", invariant, accumulate)

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
        """Declare a tensor that is passed to each call; inputs are passed in the order of their declarations.

        shape: unsharded sizes, -1 for one that may differ from call to call.
        contiguity: True for a contiguous tensor; or for each dim in stride order, whether it is laid out without a gap
        before the next (None for a broadcast: a size of 1, or an expanded one).  Left out, any strides fit.
        dtype, is_cpu: the element type; whether the tensor is on the CPU also where the fusion runs on a GPU.
        stride_order: for each dim its place in memory, 0 innermost.
        sizes, strides: in place of shape, those of an example; symbolic unless ``static_sizes``.
        allocation_rank: tensors come with one dim for each allocation axis, a mesh axis being 1.

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
        """Declare an input like ``tensor``: its dtype and layout, sizes symbolic unless ``static_sizes``.

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
        """Declare ``size`` integer inputs, to be used as a shape."""
        if not 0 <= size <= _LONGEST_VECTOR:
            raise DefinitionError("define_vector", f"size={size}", f"0 to {_LONGEST_VECTOR} sizes")
        return [self.define_scalar(dtype=DataType.Int) for _ in range(size)]

    def define_scalar(self, value: Number | DataType | None = None, dtype: DataType | None = None) -> Scalar:
        """Declare a number: a constant of ``value``, or without one an input of each call (Double by default).

        A constant has to be one that an input of ``dtype`` takes.  Raises ``DefinitionError``.
        """
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
        kind = dtype or number_type(number)
        expected = constant_of(number, kind, is_said=dtype is not None)
        if expected is not None:
            raise DefinitionError("define_scalar", f"value {shown(number)}", expected)
        return self.fusion.new_scalar(kind, number, is_literal=True)

    def add_output(
        self,
        tv: TensorView,
        alias_input: TensorView | None = None,
        *,
        stride_order: Sequence[int] | None = None,
        allocation_rank: bool = False,
    ) -> None:
        """Have ``execute`` return ``tv``; outputs are returned in the order of these calls.

        alias_input: an input whose storage ``tv`` is written into instead, at the end of the call; ``tv`` is then not
        returned.
        stride_order: for each dim its place in memory, 0 innermost.

        An input that is an output is returned as a copy.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> FusionDefinition:
        memo[id(self)] = copied = object.__new__(type(self))
        kept = {name: value for name, value in self.__dict__.items() if name != "_again"}
        copied.__dict__.update(copy.deepcopy(kept, memo))
        return copied

    def __copy__(self) -> FusionDefinition:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotPickledError

    def __repr__(self) -> str:
        return definition_script(self.fusion)
