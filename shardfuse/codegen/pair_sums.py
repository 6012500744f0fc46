"""Sums in pairs of a row that a program holds: an order that neither chunks nor threads nor ranks have a part in.

Element 2 k is added to element 2 k + 1, and so are these sums, until one is left.  A chunk, whose length is a power of
two, is a branch of that tree, and so are chunks side by side.  What lies in a warp is added up there; then the sums of
all warps and chunks are brought together once::

    T4_acc = branches_in_pairs(T3, 8)                 [4], of each of four warps
    T4_acc1 = branches_in_pairs(T3_1, 8)              of the second chunk
    T4_acc = behind(T4_acc, T4_acc1)                  [8]
    T4 = sum_in_pairs(T4_acc, 3)

Runs whose length is no power of two, such as eight of 640 elements, have lanes for one behind their end, in one chunk::

    c = lanes // 1024 * 640 + lanes % 1024
    r_mask = lanes % 1024 < 640
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir.expr import Expr
from ..segments.pair_runs import run_of_pairs, whole_run
from .accumulators import accumulator
from .emitter import Emitter
from .packed import Packed
from .tile import Chunk, Tile


def in_pairs(e: Emitter, expr: Expr, chunks: Sequence[Chunk]) -> str:
    """Emit the sum of the row in ``chunks``, or of the columns of a tile; its text."""
    warps = e.schedule.launch.warps
    held: list[str] = []
    for k, chunk in enumerate(chunks):
        name, n = f"{expr.output}_acc{k or ''}", chunk.block
        assert n & (n - 1) == 0, f"{n} elements are no branch of a tree of pairs"
        assert not (e.tile.x_lanes and e.space.is_inner), "a row is added up in pairs by itself"
        text = e.combine(expr, e.value(expr.tensors[0], chunk), chunk)
        if not e.tile.x_lanes:
            e.use("branches_in_pairs")
            text = f"branches_in_pairs({text}, {_levels(n // warps)})"
        else:
            e.use("sum_columns_in_pairs")
            text = f"sum_columns_in_pairs({text}, {_levels(n)})"
        e.out.line(f"{name} = {text}")
        held.append(name)
        if isinstance(e, Packed):
            e.forget()
    if e.tile.x_lanes:
        return _joined(e, held, accumulator(expr).combined)
    e.use("behind", "sum_in_pairs")
    ends = len(chunks) * min(chunks[0].block, warps)
    return f"sum_in_pairs({_joined(e, held, lambda a, b: f'behind({a}, {b})')}, {_levels(ends)})"


def run_lines(tile: Tile, lanes: str) -> list[str]:
    """The element of each of ``lanes``, and the mask of those that have one."""
    run = run_of_pairs(tile.plan.segment)
    whole = whole_run(run)
    return [
        f"lanes = {lanes}",
        f"c = lanes // {whole} * {run} + lanes % {whole}",
        f"r_mask = lanes % {whole} < {run}",
    ]


def _levels(n: int) -> int:
    """Of a tree of ``n`` elements."""
    return max(n, 1).bit_length() - 1


def _joined(e: Emitter, held: Sequence[str], text: Callable[[str, str], str]) -> str:
    """The name of ``text`` of neighbours, and of what that gives, until one is left."""
    while len(held) > 1:
        pairs = list(zip(held[::2], held[1::2], strict=True))
        for first, second in pairs:
            e.out.line(f"{first} = {text(first, second)}")
        held = [first for first, _ in pairs]
    return held[0]
