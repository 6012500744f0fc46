"""exchange: partial sums that ranks add up in parts, the kernel that reads a part, and the gather of its result, as one.

before (T0 has a summand for each rank of mesh_x; rows of all else are cut over mesh_x)::

    communication:  T2 = sum(T0)            # reduce_scatter over mesh_x
    persistent:     T17 = ...               a norm of the rows of T2
    communication:  T18 = set(T17)          # all_gather over mesh_x

after: the kernel sends each rank what this one has of its rows, and every rank the rows that it makes::

    exchange:       T0own0 = of_rank(T0own, rank=0)     T0own1 = of_rank(T0own, rank=1)
                    T2 = cast(add(T0own0, T0own1))
                    T17 = ...

``T0own`` stands for this rank's rows of T0, and T17 for those of T18: the kernel is given T0 and T18 themselves, in
which the rows of each rank are one piece behind that of the rank before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..analysis.communication_table import Collective, Communication, communication_of
from ..analysis.sharding import is_even
from ..ir.digits import extent, split
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Cast, OfRank, Op, Pointwise, Reduce
from ..segments.segment import Segment
from .limits import TWO_IN_A_WORD
from .plan import RankExchange
from .rank_exchange import MOST_RANKS, Exchanged

_ADD = Pointwise("add")


@dataclass(frozen=True)
class Scattered:
    """``found``: what its kernel does.  given: the tensors of the program that the kernel takes for two of its own."""

    found: Exchanged
    given: dict[BoundTensor, BoundTensor]


def scattered(call: Segment, own: Segment, after: Segment, needed: Iterable[BoundTensor]) -> Scattered | str:
    """``call``, ``own`` and ``after`` as one segment, or why they are none.  needed: what is read outside of them."""
    if len(call.exprs) != 1 or len(after.exprs) != 1:
        return "several tensors are sent at once"
    (added,), (spread,) = call.exprs, after.exprs
    source, total, made, whole = added.tensors[0], added.output, spread.tensors[0], spread.output
    first, last, mesh = communication_of(added), communication_of(spread), total.domain.mesh
    if first is None or first.mesh_dim is None or mesh is None or not isinstance(added.op, Reduce):
        return "it is no reduction over one mesh dimension"
    refusal = _why_not_both(first, last, made in own.outputs) or _why_not_pieces(source, total, made, whole, first)
    if refusal is not None:
        return refusal
    if {total, made} & {*needed}:
        return f"{total if total in {*needed} else made} itself is read"
    ranks = mesh.extent(first.mesh_dim)
    if ranks > MOST_RANKS:
        return f"{ranks} ranks are more than {MOST_RANKS}"
    piece = BoundTensor(f"{source.name}own", source.dtype, total.domain)
    exprs = [*_added_up(piece, total, ranks), *own.exprs]
    segment = Segment.of(exprs, own.outputs)
    exchange = RankExchange(mesh, first.mesh_dim, (), piece, gathered=made)
    return Scattered(Exchanged(segment, exchange), {piece: source, made: whole})


def _why_not_both(first: Communication, last: Communication | None, is_made: bool) -> str | None:
    if first.kind is not Collective.REDUCE_SCATTER:
        return "it is no reduce-scatter"
    if last is None or last.kind is not Collective.ALL_GATHER or last.mesh_dim is not first.mesh_dim or not is_made:
        return "what its reader makes is not gathered over the same mesh dimension"
    return None


def _why_not_pieces(
    source: BoundTensor, total: BoundTensor, made: BoundTensor, whole: BoundTensor, call: Communication
) -> str | None:
    """Are the rows of a rank one piece of ``source`` and of ``whole``, as many as of every other rank?"""
    assert call.mesh_dim is not None, "it was looked at"
    if source.dtype not in TWO_IN_A_WORD or made.dtype is not source.dtype:
        return f"{source} and {made} are not of the same type of 16 bits"
    if made.domain.logical != total.domain.logical or made.domain.sharding != total.domain.sharding:
        return f"{made} has not the rows of {total}"
    digits, mesh = total.domain.digits_on(call.mesh_dim), total.domain.mesh
    assert mesh is not None, "it is cut over one"
    if len(total.domain.sharding) != 1 or not is_even(digits, mesh.extent(call.mesh_dim)):
        return f"{total} is not cut into as many rows for each rank, or over more than one mesh dimension"
    if any(t.domain.allocation is not None for t in (source, total, made, whole)):
        return "a tensor is allocated in another order than its axes"
    if not _is_cut_first(total.domain, mesh.extent(call.mesh_dim)) or _local(source.domain) != _local(whole.domain):
        return f"the rows of a rank are not one piece of {source}"
    return None


def _is_cut_first(domain: BoundDomain, ranks: int) -> bool:
    """Is what is cut the outermost part of the first axis that has more than one element?"""
    axis = next((axis for axis in domain.logical if extent(axis) > 1), ())
    ((_, digits),) = domain.sharding
    return bool(axis) and extent(axis) % ranks == 0 and split(axis, extent(axis) // ranks)[0] == digits


def _local(domain: BoundDomain) -> list[object]:
    """What a rank has of each axis, but for axes of which it has one element."""
    return [axis for axis in domain.local_axes() if extent(axis) > 1]


def _added_up(piece: BoundTensor, total: BoundTensor, ranks: int) -> list[Expr]:
    """The sum in float32, in the order of the ranks, rounded once."""
    exprs: list[Expr] = []

    def made(name: str, op: Op, *inputs: BoundTensor) -> BoundTensor:
        out = BoundTensor(f"{piece.name}{name}", DataType.Float, total.domain)
        exprs.append(Expr(op, inputs, (out,)))
        return out

    whole = None
    for k in range(ranks):
        summand = made(str(k), OfRank(k), piece)
        whole = summand if whole is None else made(f"to{k}", _ADD, whole, summand)
    assert whole is not None, "a mesh dimension has ranks"
    return [*exprs, Expr(Cast(), (whole,), (total,))]
