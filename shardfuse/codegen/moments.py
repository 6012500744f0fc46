"""The mean of a row in registers and the squares around it, for one wait of all warps.

Two sums, the second of what lies apart from the mean, have all warps wait for one another twice.  Here each lane has
the mean of its own elements and the squares around that, and those of all lanes are merged (Chan, Golub & LeVeque
1979)::

    N = n1 + n2;  M = m1 + (m2 - m1) n2 / N;  Q = q1 + q2 + (m2 - m1)² n1 n2 / N

The gradient of two modulated norms in a row, 8 x 4096 x 3072 of bfloat16, took 259 us so on an H200, 269 where sums are
merged as a loop merges them (``MERGE_MOMENTS``), and 277 with two reductions.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.paired_reductions import first_of
from ..ir.dtype import DataType
from ..ir.expr import Expr
from ..ir.op import is_reduction
from ..schedulers.limits import WARP
from .accumulators import accumulator
from .emitter import Emitter
from .tile import Chunk


def pairs(e: Emitter, chunks: Sequence[Chunk]) -> dict[Expr, Expr]:
    """By the sum that a mean is made of: that of the squares around it.

    Of rows one by one, in whole chunks of one width, of which each thread has some.
    """
    blocks = dict.fromkeys(c.block for c in chunks)
    is_shared = len(blocks) == 1 and (chunks[0].block or e.schedule.reduced) >= e.schedule.launch.warps * WARP
    if e.tile.x_lanes or not is_shared or e.schedule.launch.warps == 1 or any(c.is_masked for c in chunks):
        return {}
    maker = {t: expr for expr in e.plan.segment.exprs for t in expr.outputs}
    found: dict[Expr, Expr] = {}
    for second in filter(e.is_reduction, e.plan.segment.exprs):
        first = first_of(second, maker)
        if first is not None and is_reduction(first.op, "sum") and e.is_reduction(first):
            types = {first.tensors[0].dtype, first.output.dtype, second.output.dtype}
            if types == {DataType.Float} and first not in found:
                found[first] = second
    return found


def write_pair(e: Emitter, first: Expr, second: Expr, chunks: Sequence[Chunk]) -> None:
    """``chunks``: of the row, as ``pairs`` takes them."""
    e.use("merged_moments", "squares_around")
    lanes, block = e.schedule.launch.warps * WARP, chunks[0].block or e.schedule.reduced
    shape, count = f"[{lanes}, {block // lanes}]", block // lanes * len(chunks)
    a, b = str(first.output), str(second.output)
    texts = [e.value(first.tensors[0], c).text for c in chunks]
    _add_up(e, f"{a}_lanes", texts)
    e.out.line(f"{a}_mean = tl.sum(tl.reshape({a}_lanes, {shape}), axis=1) / {count}")
    _add_up(e, f"{b}_lanes", [f"squares_around({a}_mean, {text}, {shape})" for text in texts])
    e.out.line(f"{b}_around = tl.sum({b}_lanes, axis=1)")
    e.out.line(f"{a}_count = tl.full([{lanes}], {count}, tl.float32)")
    parts = f"{a}_count, {a}_mean, {b}_around"
    e.out.line(f"{parts} = tl.reduce(({parts}), 0, merged_moments)")
    e.give(first.output, accumulator(first), f"{a}_mean * {e.tile.r_total}")
    e.give(second.output, accumulator(second), f"{b}_around")


def _add_up(e: Emitter, name: str, texts: Sequence[str]) -> None:
    e.out.line(f"{name} = {texts[0]}")
    for text in texts[1:]:
        e.out.line(f"{name} = {name} + {text}")
