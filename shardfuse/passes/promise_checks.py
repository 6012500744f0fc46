"""Which ops stand against what a fusion promises: one error, before anything is planned."""

from __future__ import annotations

from ..analysis.sharding import is_even, outermost, reduced_axes
from ..errors import PromiseError
from ..ir.call import Call
from ..ir.digits import extent
from ..ir.domain import Sharding, without
from ..ir.expr import BoundFusion, BoundTensor, Expr
from ..ir.op import Random, Reduce, Reshape, is_reduction
from ..ir.promises import SEGMENTS, Promises
from ..mesh import DeviceMesh
from ..segments.pair_runs import has_order

_BY_SIZE = {
    **dict.fromkeys(
        ("matmul", "linear", "grouped_mm", "scaled_grouped_mm", "block_scaled_mm"),
        "the library that multiplies matrices chooses the order of its additions by their sizes",
    ),
    **dict.fromkeys(("sdpfa_fwd", "sdpfa_bwd"), "attention chooses the order of its additions by its sizes"),
    **dict.fromkeys(("cumsum", "cumprod"), "torch's scans choose the order of their additions by their sizes"),
    "index_put_accumulate": "what meets at one index is added in whatever order it comes",
}
"""Ops of torch that add up in an order that is not theirs alone to say."""


def check_promises(fusion: BoundFusion) -> None:
    """Raise PromiseError for an op of ``fusion`` that cannot keep what ``fusion`` promises."""
    promises = fusion.promises
    if not promises.invariant:
        return
    for t in fusion.inputs:
        if isinstance(t, BoundTensor):
            _check_local_extents(t, promises)
    for expr in fusion.exprs:
        named = f"{expr.output} = {expr.op.name}"
        if has_order(expr) and expr.output.dtype.is_complex:
            found = f"torch adds complex numbers in an order that follows sizes ({named})"
            raise PromiseError(str(promises), found, "add up real and imaginary parts as two tensors")
        if isinstance(expr.op, Call) and expr.op.name in _BY_SIZE:
            found = f"{_BY_SIZE[expr.op.name]} ({named})"
            raise PromiseError(str(promises), found, "take it out of the fusion")
        if isinstance(expr.op, Random) and promises.batch:
            found = f"random numbers follow from the place of an element ({named})"
            raise PromiseError(str(promises), found, "pass them in as a tensor")


def _check_local_extents(t: BoundTensor, promises: Promises) -> None:
    """Raise PromiseError where each rank has a single element of a sharded axis: it is no axis of its kernels then."""
    for k, (whole, local) in enumerate(zip(t.domain.logical, t.domain.local_axes(), strict=True)):
        if extent(local) == 1 < extent(whole):
            found = f"each rank has a single element of axis {k} of {t}, of {extent(whole)} in all"
            remedy = (
                "have two or more on a rank: shard it over fewer ranks. Partial sums, of which each rank has one, add "
            )
            remedy += "up before (shardfuse.collectives.all_reduce): how many they are follows the number of ranks"
            raise PromiseError(str(promises), found, remedy)


def are_in_pairs(fusion: BoundFusion) -> bool:
    """Are all sums whose order shows in pairs, or of two ranks?  No form of a kernel changes their bits then."""
    sums = (e.op for e in fusion.exprs if isinstance(e.op, Reduce) and has_order(e))
    return all(op.in_pairs or op.mesh_dims for op in sums)


def check_order(expr: Expr, held: Sharding, mesh: DeviceMesh, promises: Promises, *, is_cut: bool) -> None:
    """Raise PromiseError for a reduction of which ranks have parts that nothing says how to add up.

    held: the parts, by the dimensions of ``mesh``.  is_cut: are collectives of one chunk of a stream at a time?
    """
    if not has_order(expr):
        return
    named = f"{expr.output} = {expr.op.name}({', '.join(map(str, expr.tensors))})"
    if promises.ranks and not (isinstance(expr.op, Reduce) and _are_branches(expr, expr.op, held, mesh)):
        raise _no_segments(named, promises)
    if is_reduction(expr.op, "prod") or is_cut:
        found = f"what ranks have of {named} is multiplied, or added up chunk by chunk"
        raise PromiseError(str(promises), found, "have the axis whole on each rank")


def _are_branches(expr: Expr, op: Reduce, held: Sharding, mesh: DeviceMesh) -> bool:
    """Has each rank a branch of the tree of pairs: of the axis, from the outside, equal parts of a power of two?"""
    if not op.in_pairs:
        return False
    (left,) = reduced_axes(expr)
    for p, digits in sorted(held, key=lambda entry: -entry[1][0].weight):
        ranks = mesh.extent(p)
        if ranks not in (2, 4, SEGMENTS) or outermost((left,), digits) is None or not is_even(digits, ranks):
            return False
        left = without(left, digits)
    n, run = extent(left), op.in_pairs
    is_tree = op.parts == 1 and run & (run - 1) == 0
    return n % run == 0 or (n > 1 and is_tree and run % n == 0)


def check_segments(expr: Expr, here: Sharding, promises: Promises) -> None:
    """Raise PromiseError where ``expr`` cuts a sharded axis into segments that are on several ranks each.

    here: the sharding in which it is computed: what is sharded otherwise would be gathered first.
    """
    if isinstance(expr.op, Reshape) and expr.op.segments:
        (x,) = expr.tensors
        if any(entry not in here for entry in x.domain.sharding):
            raise _no_segments(f"the sum of {x}", promises)


def _no_segments(named: str, promises: Promises) -> PromiseError:
    found = f"ranks have parts of what {named} adds up that are not whole segments, {SEGMENTS} of an axis"
    remedy = "shard the outermost axis that it reduces, evenly, over 2, 4 or 8 ranks that divide its length, or reduce "
    remedy += "one axis after another"
    return PromiseError(str(promises), found, remedy)
