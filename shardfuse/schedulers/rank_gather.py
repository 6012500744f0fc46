"""exchange: partial sums that all ranks are given by a collective, and the kernel that adds them up, as one kernel.

before (T0 has a summand for each rank of mesh_x)::

    communication:  T1x = set(T0)               # all_gather over mesh_x
    persistent:     T1r0 = squeeze(window(T1x))     T1r1 = squeeze(window(T1x))
                    T1 = add(T1r0, T1r1)
                    ...                         a norm of T1

after: the kernel sends what this rank has of T0 to the others, and reads what they sent::

    exchange:       T1r0 = of_rank(T0, rank=0)  T1r1 = of_rank(T0, rank=1)
                    T1 = add(T1r0, T1r1)
                    ...
"""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.communication_table import Collective, communication_of
from ..ir.expr import BoundTensor, Expr
from ..ir.op import OfRank, Reshard, Squeeze, Window
from ..ir.window import Read
from ..segments.segment import Segment
from .limits import TWO_IN_A_WORD
from .plan import RankExchange
from .rank_exchange import MOST_RANKS, Exchanged


def gathered(call: Segment, after: Segment, needed: Iterable[BoundTensor]) -> Exchanged | str:
    """``call`` and ``after`` as one segment, or why they are none.  needed: what is read outside of the two."""
    if len(call.exprs) != 1:
        return "several tensors are gathered at once"
    (expr,) = call.exprs
    found, source, whole = communication_of(expr), call.exprs[0].tensors[0], call.exprs[0].output
    mesh = whole.domain.mesh
    if (
        found is None
        or found.kind is not Collective.ALL_GATHER
        or found.mesh_dim is None
        or mesh is None
        or not isinstance(expr.op, Reshard)
    ):
        return "it is no gather over one mesh dimension"
    ranks = mesh.extent(found.mesh_dim)
    if source.dtype not in TWO_IN_A_WORD or source.domain.logical[0] != source.domain.digits_on(found.mesh_dim):
        return "what is gathered are no 16-bit summands of the ranks"
    if whole in frozenset(needed) or ranks > MOST_RANKS:
        return "something else reads what is gathered"
    pieces = pieces_of_ranks(after, whole, ranks)
    if pieces is None:
        return "its reader does not read the summands one by one"
    replaced = {e: Expr(OfRank(k), (source,), e.outputs) for e, k in pieces.items()}
    exprs = [replaced.get(e, e) for e in after.exprs if not isinstance(e.op, Window) or e.tensors[0] is not whole]
    exchange = RankExchange(mesh, found.mesh_dim, (), source)
    return Exchanged(Segment.of(exprs, after.outputs), exchange)


def pieces_of_ranks(after: Segment, whole: BoundTensor, ranks: int) -> dict[Expr, int] | None:
    """The Exprs that make a rank's summand of a window of ``whole``, and which rank's."""
    windows = {e.output: e for e in after.exprs if whole in e.tensors}
    found: dict[Expr, int] = {}
    for e in after.exprs:
        of = [t for t in e.tensors if t in windows]
        if not of:
            continue
        window = windows[of[0]].op
        reads = window.reads if isinstance(window, Window) else ()
        if not isinstance(e.op, Squeeze) or len(reads) != 1:
            return None
        (read,) = reads
        if read != Read(0, read.offset, 1, 0, 1) or not 0 <= read.offset < ranks:
            return None
        found[e] = read.offset
    return found or None
