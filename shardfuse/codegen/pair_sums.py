"""Sums in pairs of a row that a program holds: an order that neither chunks nor threads nor ranks have a part in.

Element 2 k is added to element 2 k + 1, and so are these sums, until one is left.  A chunk, whose length is a power of
two, is a branch of that tree, and so are chunks side by side.  What lies in a warp is added up there; then the sums of
all warps and chunks are brought together once::

    T4_acc = branches_in_pairs(T3, 8)                 [4], of each of four warps
    T4_acc1 = branches_in_pairs(T3_1, 8)              of the second chunk
    T4_acc = behind(T4_acc, T4_acc1)                  [8]
    T4 = sum_in_pairs(T4_acc, 3)

Of eight runs of 4000 elements, which are 7 x 512 + 416, eight chunks of 4096 lanes are added up before that
(``segments/pair_runs.py``)::

    c = lanes // 512 * 4000 + lanes % 512
    r_mask = lanes % 512 < 416                        of the last chunk
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir.expr import Expr
from .accumulators import accumulator
from .emitter import Emitter
from .packed import Packed
from .tile import Chunk, Tile


def in_pairs(e: Emitter, expr: Expr, chunks: Sequence[Chunk]) -> str:
    """Emit the sum of the row in ``chunks``, or of the rows or columns of a tile; its text."""
    warps, parts = e.schedule.launch.warps, e.tile.parts
    is_of_rows = e.tile.x_lanes and e.space.is_inner
    assert not is_of_rows or len(chunks) == parts, "rows of a tile are one chunk, of each part"
    held: list[str] = []
    for k in range(0, len(chunks), parts):
        name, n = f"{expr.output}_acc{k // parts or ''}", chunks[k].block
        assert n & (n - 1) == 0, f"{n} elements are no branch of a tree of pairs"
        text = _of_parts(e, expr, chunks[k : k + parts], name)
        if not e.tile.x_lanes:
            e.use("branches_in_pairs")
            text = f"branches_in_pairs({text}, {_levels(n // warps)})"
        else:
            function = "sum_rows_in_pairs" if is_of_rows else "sum_columns_in_pairs"
            e.use(*(["either"] if is_of_rows else []), function)
            text = f"{function}({text}, {_levels(n)})"
        e.out.line(f"{name} = {text}")
        held.append(name)
    if e.tile.x_lanes:
        return _joined(e, held, accumulator(expr).combined)
    ends = min(chunks[0].block, warps)
    if isinstance(e, Packed) and len(held) == 2:
        e.use("both", "sum_both_in_pairs")
        return f"sum_both_in_pairs({', '.join(held)}, {_levels(ends)})"
    e.use("behind", "sum_in_pairs")
    ends *= len(held)
    return f"sum_in_pairs({_joined(e, held, lambda a, b: f'behind({a}, {b})')}, {_levels(ends)})"


def _of_parts(e: Emitter, expr: Expr, chunks: Sequence[Chunk], name: str) -> str:
    """The elements of each lane added up, a line for each chunk: brackets would be another order."""
    for k, chunk in enumerate(chunks):
        text = e.combine(expr, e.value(expr.tensors[0], chunk), chunk)
        if len(chunks) == 1 and not isinstance(e, Packed):
            return text
        e.out.line(f"{name} = {text}" if k == 0 else f"{name} += {text}")
        if isinstance(e, Packed):
            e.forget()
    return name


def run_lines(tile: Tile, lanes: str) -> list[str]:
    """The element of each of ``lanes``, and the mask of those that have one."""
    runs, width = tile.pair_runs, tile.pair_runs.lanes
    is_masked = [f"r_mask = lanes % {width} < {runs.last}"] if runs.is_padded else []
    return [f"lanes = {lanes}", f"c = lanes // {width} * {runs.run} + lanes % {width}", *is_masked]


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
