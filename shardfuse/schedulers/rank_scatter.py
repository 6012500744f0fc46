"""exchange: partial sums that ranks add up in parts, the kernel that reads a part, and the gather of what it makes.

before (T0 has a summand for each rank of mesh_x; rows of all else are cut over mesh_x)::

    communication:  T2 = sum(T0)            # reduce_scatter over mesh_x
    persistent:     T17 = ...               a norm of the rows of T2
    communication:  T18 = set(T17)          # all_gather over mesh_x

after: the kernel sends each rank what this one has of its rows, and every rank the rows that it makes::

    exchange:       T0_shard0 = of_rank(T0_shard, rank=0)     T0_shard1 = of_rank(T0_shard, rank=1)
                    T2 = cast(add(T0_shard0, T0_shard1))
                    T17 = ...

Of more than two ranks the first call is an all-to-all, and the kernel adds up what comes.  ``T0_shard`` stands for this
rank's rows of T0, and T17 for those of T18: the kernel is given T0 and T18 themselves, in which each row of a rank is
as many elements behind that of the rank before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ..analysis.communication_table import Collective, Communication, communication_of
from ..analysis.sharding import is_even
from ..ir.digits import Axis, CutError, extent, split
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Cast, OfRank, Op, Pointwise, Reduce, Reshard, Window
from ..mesh import ParallelType
from ..segments.segment import Segment
from .limits import TWO_IN_A_WORD
from .plan import RankExchange
from .rank_exchange import MOST_RANKS, Exchanged
from .rank_gather import pieces_of_ranks

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
    (cut,), (spread,) = call.exprs, after.exprs
    first, made, whole = communication_of(cut), spread.tensors[0], spread.output
    mesh = cut.output.domain.mesh
    if first is None or first.mesh_dim is None or mesh is None or not isinstance(cut.op, Reduce | Reshard):
        return "it is not over one mesh dimension"
    refusal = _why_not_gathered(communication_of(spread), first.mesh_dim, is_made=made in own.outputs)
    if refusal is not None:
        return refusal
    read = next((t for t in (cut.output, made) if t in {*needed}), None)
    if read is not None:
        return f"{read} itself is read"
    ranks = mesh.extent(first.mesh_dim)
    if ranks > MOST_RANKS:
        return f"{ranks} ranks are more than {MOST_RANKS}"
    found = _summands(cut, own, ranks)
    if isinstance(found, str):
        return found
    piece, exprs = found
    refusal = _why_not_pieces(cut.tensors[0], piece, made, whole, first.mesh_dim)
    if refusal is not None:
        return refusal
    exchange = RankExchange(mesh, first.mesh_dim, (), piece, gathered=made, shift=_shift(made.domain, ranks))
    return Scattered(Exchanged(Segment.of(exprs, own.outputs), exchange), {piece: cut.tensors[0], made: whole})


def made_and_gathered(own: Segment, after: Segment, needed: Iterable[BoundTensor]) -> Scattered | str:
    """``own`` and ``after`` as one segment, whose ranks give one another what they make, or why they are none."""
    if len(after.exprs) != 1:
        return "several tensors are sent at once"
    (spread,) = after.exprs
    last, made, whole = communication_of(spread), spread.tensors[0], spread.output
    if last is None or last.mesh_dim is None or made.domain.mesh is None:
        return "it is not over one mesh dimension"
    refusal = _why_not_gathered(last, last.mesh_dim, is_made=made in own.outputs)
    refusal = refusal or _why_not_pieces(whole, made, made, whole, last.mesh_dim)
    if refusal is None and made in {*needed}:
        refusal = f"{made} itself is read"
    if refusal is None and made.domain.mesh.extent(last.mesh_dim) > MOST_RANKS:
        refusal = f"{made.domain.mesh.extent(last.mesh_dim)} ranks are more than {MOST_RANKS}"
    if refusal is not None:
        return refusal
    shift = _shift(made.domain, made.domain.mesh.extent(last.mesh_dim))
    exchange = RankExchange(made.domain.mesh, last.mesh_dim, (), gathered=made, shift=shift)
    return Scattered(Exchanged(own, exchange), {made: whole})


def _summands(cut: Expr, own: Segment, ranks: int) -> tuple[BoundTensor, list[Expr]] | str:
    """This rank's rows of what ``cut`` sends, and what a kernel makes of those of all ranks."""
    source = cut.tensors[0]
    if isinstance(cut.op, Reduce):
        if cut.op.kind != "sum":
            return f"{cut.output} is no sum of the ranks"
        piece = BoundTensor(f"{source.name}_shard", source.dtype, cut.output.domain)
        return piece, [*_added_up(piece, cut.output, ranks), *own.exprs]
    pieces = pieces_of_ranks(own, cut.output, ranks)
    if pieces is None or len({*pieces.values()}) != ranks:
        return "its reader does not read the summands one by one"
    piece = BoundTensor(f"{source.name}_shard", source.dtype, next(iter(pieces)).output.domain)
    replaced = {e: Expr(OfRank(k), (piece,), e.outputs) for e, k in pieces.items()}
    kept = [e for e in own.exprs if not isinstance(e.op, Window) or e.tensors[0] is not cut.output]
    return piece, [replaced.get(e, e) for e in kept]


def _why_not_gathered(last: Communication | None, over: ParallelType, *, is_made: bool) -> str | None:
    is_gathered = last is not None and last.kind is Collective.ALL_GATHER and last.mesh_dim is over and is_made
    return None if is_gathered else "what its reader makes is not gathered over the same mesh dimension"


def _why_not_pieces(
    source: BoundTensor, piece: BoundTensor, made: BoundTensor, whole: BoundTensor, over: ParallelType
) -> str | None:
    """Are the rows of a rank the outermost part of an axis of ``source`` and ``whole``, as many as of every other?"""
    domain, mesh = piece.domain, piece.domain.mesh
    if source.dtype not in TWO_IN_A_WORD or made.dtype is not source.dtype:
        return f"{source} and {made} are not of the same type of 16 bits"
    if (made.domain.logical, made.domain.sharding) != (domain.logical, domain.sharding):
        return f"{made} has not the rows that are added up"
    if mesh is None or len(domain.sharding) != 1 or not is_even(domain.digits_on(over), mesh.extent(over)):
        return f"{source} is not cut into as many rows for each rank, or over more than one mesh dimension"
    if any(t.domain.allocation is not None for t in (source, piece, made, whole)):
        return "a tensor is allocated in another order than its axes"
    is_alike = whole.domain.logical == domain.logical and _local(source.domain) == _local(whole.domain)
    if not is_alike or _cut_axis(domain, mesh.extent(over)) is None:
        return f"the rows of a rank do not follow one another along an axis of {source}"
    return None


def _cut_axis(domain: BoundDomain, ranks: int) -> int | None:
    """The axis of which each rank has a part, those of all ranks one behind the other; ``None`` for no such axis."""
    ((_, digits),) = domain.sharding
    return next((k for k, axis in enumerate(domain.logical) if _is_outermost(digits, axis, ranks)), None)


def _is_outermost(digits: Axis, axis: Axis, ranks: int) -> bool:
    if extent(axis) == 1 or extent(axis) % ranks:
        return False
    try:
        return split(axis, extent(axis) // ranks)[0] == digits
    except CutError:
        return False


def _shift(domain: BoundDomain, ranks: int) -> int:
    axis = _cut_axis(domain, ranks)
    assert axis is not None, "it was looked at"
    return prod(map(extent, domain.logical[axis:])) // ranks


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
