"""A fusion as its author recorded it: sizes symbolic, transforms and shardings as they were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import DefinitionError
from ..source_line import caller_line
from .dtype import DataType
from .held_integers import HeldInteger, is_narrow
from .op import RecordOp
from .promises import Promises
from .scalar import Number, Scalar
from .tensor_view import TensorView

Val = TensorView | Scalar
V = TypeVar("V", TensorView, Scalar)


@dataclass(frozen=True, eq=False)
class Record:
    """One op of a definition, of tensors or of host scalars.  Parameters of ``op`` may be scalars of the fusion."""

    op: RecordOp
    inputs: tuple[Val, ...]
    outputs: tuple[Val, ...]


@dataclass(frozen=True)
class FusionInput:
    """A declared input.  ``stride_order``: each dim's place in memory, 0 innermost; empty is the logical order."""

    val: Val
    contiguity: tuple[bool | None, ...] = ()
    stride_order: tuple[int, ...] = ()

    @property
    def dim_order(self) -> tuple[int, ...]:
        """The dims as they lie in memory, outermost first; empty is the logical order."""
        return tuple(sorted(range(len(self.stride_order)), key=lambda d: -self.stride_order[d]))


class Fusion:
    """Inputs, records and outputs, in the order in which they were said."""

    def __init__(self) -> None:
        self.inputs: list[FusionInput] = []
        self.records: list[Record] = []
        self.outputs: list[TensorView] = []
        self.aliases: dict[TensorView, TensorView] = {}
        """Outputs that are written into an input's storage and not returned."""
        self.given_up: tuple[TensorView, ...] = ()
        """Inputs that nobody reads behind a call, each in a storage that nothing else has: an output may be stored over
        one.  Rows with gaps between them are given up with these, and with as large a gap behind the last row."""
        self.promises = Promises()
        self.wraps_integers = False
        """Do integers beyond a narrower type wrap, as eager torch has it?  Else they are refused."""
        self.held: dict[Scalar, tuple[HeldInteger, ...]] = {}
        """What computes in a narrower integer type with a scalar whose value is not known yet."""
        self.closed: str | None = None
        """Since when nothing more may be recorded."""
        self.first_owner: str | None = None
        """What ran it first, where that is a module: errors about calls name it in place of the definition's line."""
        self._own: dict[Val, None] = {}
        self._tensors = 0
        self._scalars = 0

    def new_tensor(self, shape: Sequence[int], dtype: DataType, *, is_cpu: bool = False) -> TensorView:
        self._tensors += 1
        return self._owned(TensorView(f"T{self._tensors - 1}", shape, dtype, is_cpu=is_cpu))

    def new_scalar(self, dtype: DataType, value: Number | None = None, *, is_literal: bool = False) -> Scalar:
        self._scalars += 1
        line = None if is_literal else caller_line()
        return self._owned(Scalar(f"S{self._scalars - 1}", dtype, value, is_literal, line))

    def _owned(self, val: V) -> V:
        self._own[val] = None
        return val

    def check_open(self, method: str) -> None:
        """Raise ``DefinitionError`` where nothing more may be recorded."""
        if self.closed is not None:
            raise DefinitionError(method, f"a call {self.closed}", "all of the definition before it")

    def check_own(self, method: str, val: Val) -> None:
        """Raise ``DefinitionError`` for a value of another definition."""
        if val not in self._own:
            raise DefinitionError(method, f"{val!r} of another definition", "TensorViews and scalars of this one")

    def close(self) -> None:
        """The fusion is run: nothing of it changes any longer."""
        self.closed = "after the fusion was first run"
        for tv in self.tensors():
            tv.is_closed = True

    def reopen(self) -> None:
        """For a copy that is to be changed."""
        self.closed = None
        for tv in self.tensors():
            tv.is_closed = False

    def record(self, op: RecordOp, inputs: Sequence[Val], output: Val | Sequence[Val]) -> None:
        self.check_open(f"ops.{op.name}")
        for val in (*inputs, *op.scalars()):
            self.check_own(f"ops.{op.name}", val)
        outputs = (output,) if isinstance(output, TensorView | Scalar) else tuple(output)
        self.records.append(Record(op, tuple(inputs), outputs))

    def hold(self, op: str, argument: str, scalar: Scalar, dtype: DataType) -> None:
        """In every call ``dtype``, in which ``op`` computes, has to hold the integer ``scalar``."""
        if is_narrow(dtype) and scalar.dtype.is_integral and not (scalar.is_literal or self.wraps_integers):
            self.held[scalar] = (*self.held.get(scalar, ()), HeldInteger(op, argument, dtype, caller_line()))

    def shape_scalars(self) -> list[Scalar]:
        """The scalar inputs that shapes depend on, in order: a plan holds for their values only."""
        made = {out: r for r in self.records for out in r.outputs if isinstance(out, Scalar)}
        todo = [v for r in self.records for v in r.op.scalars()]
        found: dict[Scalar, None] = {}
        while todo:
            scalar = todo.pop()
            if scalar in made:
                todo += [v for v in made[scalar].inputs if isinstance(v, Scalar)]
            else:
                found[scalar] = None
        return [i.val for i in self.inputs if isinstance(i.val, Scalar) and i.val in found]

    def tensors(self) -> list[TensorView]:
        """Every TensorView once, in order of definition."""
        found = [i.val for i in self.inputs if isinstance(i.val, TensorView)]
        found += [out for r in self.records for out in r.outputs if isinstance(out, TensorView)]
        return found
