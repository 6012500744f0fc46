"""Values and expressions: the nodes of a fusion, before and after sizes are bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from .domain import BoundDomain
from .dtype import DataType
from .held_integers import HeldInteger
from .op import HostOp, Op, Window
from .promises import Promises
from .scalar import Scalar
from .stream import Stream
from .window import Read


@dataclass(eq=False)
class BoundTensor:
    """A tensor with sizes.  ``domain`` is the one mutable cell: it is swapped whole, never edited."""

    name: str
    dtype: DataType
    domain: BoundDomain

    @property
    def axes(self) -> tuple[tuple[object, ...], ...]:
        return self.domain.logical

    @property
    def ndim(self) -> int:
        return len(self.domain.logical)

    def __repr__(self) -> str:
        return self.name


Value = BoundTensor | Scalar


@dataclass(frozen=True, eq=False)
class Expr:
    """``outputs = op(*inputs)``: ``ir/op.py`` has the ops.

    partial: of a reduction of which ranks have parts, how many axes of the ranks stand before the output's own.
    chunk: the stage of a stream whose chunks it reads and makes; ``None`` for all that is not cut into chunks.
    """

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[BoundTensor, ...]
    partial: int = 0
    chunk: int | None = None

    @property
    def output(self) -> BoundTensor:
        return self.outputs[0]

    @cached_property
    def tensors(self) -> tuple[BoundTensor, ...]:
        """The inputs that are tensors, in order."""
        return tuple(v for v in self.inputs if isinstance(v, BoundTensor))


def reads_of(expr: Expr) -> tuple[Read, ...]:
    """The axes along which a window reads at other places."""
    assert isinstance(expr.op, Window), f"{expr.op.name} is no window"
    return expr.op.reads


@dataclass(frozen=True, eq=False)
class HostExpr:
    """``output = op(*inputs)`` on numbers, worked out on the host in every call."""

    op: HostOp
    inputs: tuple[Scalar, ...]
    output: Scalar
    held: tuple[HeldInteger, ...] = ()
    """What computes with the output in a narrower integer type."""


@dataclass
class BoundFusion:
    """A fusion with sizes: ``exprs`` in an order in which they can run."""

    inputs: list[Value]
    outputs: list[BoundTensor]
    exprs: list[Expr]
    host: list[HostExpr] = field(default_factory=list[HostExpr])
    """What host scalars are computed from scalar inputs, in order."""
    aliases: dict[BoundTensor, BoundTensor] = field(default_factory=dict["BoundTensor", "BoundTensor"])
    """Outputs that are written into an input's storage, and that input."""
    streams: list[tuple[BoundTensor, Stream]] = field(default_factory=list[tuple["BoundTensor", Stream]])
    """Tensors that were told to be made or read in chunks."""
    is_settled: bool = False
    """Is it agreed how inputs come?  One that is on no mesh is then whole on every rank, whatever would be better."""
    ranks_per_node: int = 8
    """Neighbours in the world that share a host."""
    promises: Promises = field(default_factory=Promises)
    has_cheap_sums: bool = False
    """Do kernels sum up numbers of a row over ranks themselves?  Then two such sums are no dearer than one gather, and
    partial sums are added up by the kernel that reads them."""
    passes_sums: bool = False
    """Do ranks pass sums of 16 bits on inside of the kernels that read them?  Then of whatever size."""

    def producer_of(self) -> dict[BoundTensor, Expr]:
        return {out: expr for expr in self.exprs for out in expr.outputs}

    def tensors(self) -> list[BoundTensor]:
        """Every tensor once, inputs first, then in order of definition."""
        found: dict[BoundTensor, None] = dict.fromkeys(v for v in self.inputs if isinstance(v, BoundTensor))
        for expr in self.exprs:
            found.update(dict.fromkeys(expr.outputs))
        return list(found)
