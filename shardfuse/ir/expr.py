"""Values and expressions: the nodes of a fusion, before and after sizes are bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..source_line import SourceLine
from .domain import BoundDomain
from .dtype import DataType
from .promises import Promises
from .stream import Stream

Number = int | float | bool | complex


@dataclass(eq=False)
class Scalar:
    """A host number.  ``value`` is ``None`` for a fusion input and for what is computed from one.

    ``is_literal``: written into kernels as it is; else a kernel argument, so that a new value needs no new kernel.
    ``line``: of the caller's program, where it was made.
    """

    name: str
    dtype: DataType
    value: Number | None = None
    is_literal: bool = False
    line: SourceLine | None = None

    def __repr__(self) -> str:
        return repr(self.value) if self.is_literal else self.name


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
Attribute = object


@dataclass(frozen=True, eq=False)
class Expr:
    """``outputs = op(*inputs, **attributes)``.

    The vocabulary of ``op``: every pointwise name of the op table; ``cast``; reductions ``sum prod max min any all``
    with ``axes: tuple[int, ...]`` (kept axes only in the output: there is no keepdim); shape changes ``broadcast``
    (``new: tuple[bool, ...]``), ``expand`` (``shape``), ``squeeze`` (``axes``), ``permute`` (``dims``), ``reshape``
    (``shape``); ``set`` (a copy, and every change of sharding or layout); ``relabel`` (the same storage under other
    roots); ``window`` (a stored tensor read at other places, ``reads``: see ``ir/window.py``); ``full`` and ``iota``
    (``start``, ``step``: global index along the only axis); ``stream_slice`` and ``stream_cat`` (a chunk of a tensor, a
    tensor of its chunks, or of equal parts of one axis); and torch calls (``matmul``, ``linear``, ...).
    """

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[BoundTensor, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])

    @property
    def output(self) -> BoundTensor:
        return self.outputs[0]

    @cached_property
    def tensors(self) -> tuple[BoundTensor, ...]:
        """The inputs that are tensors, in order."""
        return tuple(v for v in self.inputs if isinstance(v, BoundTensor))


@dataclass(frozen=True, eq=False)
class HostExpr:
    """``output = op(*inputs)`` on numbers, worked out on the host in every call."""

    op: str
    inputs: tuple[Scalar, ...]
    output: Scalar


REDUCTIONS = ("sum", "prod", "max", "min", "any", "all")
STATISTICS = ("online_softmax", "welford")
"""Reductions that take the place of several inside of one kernel: of ``x`` over ``axes`` the (max, sum of exp(x - max),
and, where it is wanted, sum of x - max), and the (sum, sum of squared distances to the mean)."""
PICK = "pick"
"""Inside of one kernel: of each row of ``x`` the element at ``index``, and whether there is one."""
OF_RANK = "of_rank"
"""Inside of one kernel: what rank ``rank`` (its position along a mesh dimension) has of ``x``, which all ranks send."""
DRAWS = ("uniform", "normal")
FACTORIES = ("full", "iota", *DRAWS)
"""Ops that make a tensor from a shape and numbers; each element depends on its unsharded index alone."""
VIEWS = ("broadcast", "expand", "squeeze", "permute", "reshape")
"""Ops that compute nothing: the same elements under regrouped axes."""


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

    def producer_of(self) -> dict[BoundTensor, Expr]:
        return {out: expr for expr in self.exprs for out in expr.outputs}

    def tensors(self) -> list[BoundTensor]:
        """Every tensor once, inputs first, then in order of definition."""
        found: dict[BoundTensor, None] = dict.fromkeys(v for v in self.inputs if isinstance(v, BoundTensor))
        for expr in self.exprs:
            found.update(dict.fromkeys(expr.outputs))
        return list(found)
