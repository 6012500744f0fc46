"""Rows that wait for sums of what their parts add up to: one kernel holds the rows, and makes both sums.

    A: T3[n, c] = sum(T2, pixels)                             reads T0, T1
    B: T5[n, g] = sum(T3 * weight, channels)                  reads T3;  T7[c] = sum(T3, n)
    C: T8 = T0 * T5 + T1                                      reads T0, T1 again

becomes, as ``sums_of_blocks.py`` makes sums of those of blocks::

    C: T3p[n, c, b] = sum(T2, a block); T5[n, g] = sum(T3p * weight, (channels, b)); T8 = T0 * T5 + T1
    A: T3[n, c] = sum(T3p, b)                                 reads T3p alone
    B: T7[c] = sum(T3, n)

So torch decomposes the gradient of a group norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..ir.expr import BoundTensor, Expr
from .recompute import moved_bytes, share_wide
from .segment import Segment, in_running_order, leading_to, segment_of
from .sums_of_blocks import adds_up, cut_sums, from_blocks, totals

Accepts = Callable[[list[Segment], list[Segment]], bool]
"""Are the second segments, of which the first holds rows and the second adds up, as good kernels as the first?"""


@dataclass(frozen=True)
class _Places:
    """Where the three are, in the order in which they run."""

    sums: int
    between: int
    rows: int


def hold_rows_behind_sums(
    segments: Sequence[Segment], outputs: Collection[BoundTensor], widest: int, accepts: Accepts
) -> tuple[list[Segment], dict[Expr, list[Expr]]]:
    """``segments``, in the order given, with rows held wherever that moves fewer bytes; and by each sum that is made
    otherwise what is in its place.

    outputs: of the fusion.  widest: bytes that a warp loads at once.
    """
    found: list[Segment] = list(segments)
    instead: dict[Expr, list[Expr]] = {}
    for sums in filter(adds_up, segments):
        for rows in segments:
            at = _places(found, sums, rows)
            made = None if at is None else _held(found, at, outputs, widest)
            if at is None or made is None:
                continue
            after, cut = made
            before = [found[k] for k in (at.sums, at.between, at.rows)]
            if moved_bytes(after) < moved_bytes(before) and accepts(before, after):
                kept = [s for k, s in enumerate(found) if k > at.sums and k not in (at.between, at.rows)]
                found = [*found[: at.sums], *after, *kept]
                instead |= cut
                break
    return found, instead


def _places(found: Sequence[Segment], sums: Segment, rows: Segment) -> _Places | None:
    """Where ``rows`` wait for ``sums`` through one segment between, and for nothing else that comes behind these."""
    if sums not in found or rows not in found or sums is rows or not share_wide(sums, rows):
        return None
    first, last = found.index(sums), found.index(rows)
    through = [
        k
        for k in range(first + 1, last)
        if not set(found[k].inputs).isdisjoint(sums.outputs) and not set(found[k].outputs).isdisjoint(rows.inputs)
    ]
    if len(through) != 1 or not set(rows.inputs).isdisjoint(sums.outputs):
        return None
    later = {t for k, s in enumerate(found[first:last], first) for t in s.outputs if k != through[0]}
    (between,) = through
    is_free = later.isdisjoint(rows.inputs) and (later - set(sums.outputs)).isdisjoint(found[between].inputs)
    return _Places(first, between, last) if is_free else None


def _held(
    found: Sequence[Segment], at: _Places, outputs: Collection[BoundTensor], widest: int
) -> tuple[list[Segment], dict[Expr, list[Expr]]] | None:
    """The rows with the sums of their blocks, the sums made of these, and what is left between, if anything; ``None``
    where the rows need a sum itself, or digits keep no blocks whole."""
    sums, between, rows = found[at.sums], found[at.between], found[at.rows]
    instead = cut_sums(sums, sums, widest)
    if instead is None:
        return None
    parts = {e.output: new[-2].output for e, new in instead.items()}
    chain = [*leading_to(sums.exprs, [e.tensors[0] for e in instead]), *(e for n in instead.values() for e in n[:-1])]
    behind = [e for e in (*sums.exprs, *between.exprs) if e not in instead]
    middle = leading_to(behind, [t for t in between.outputs if t in rows.inputs])
    maker = {t: e for e in (*chain, *middle) for t in e.outputs}
    of_rows = {e: new for e in middle for s, part in parts.items() if (new := from_blocks(e, s, part, maker))}
    everything = [*chain, *(new for e in middle for new in of_rows.get(e, [e])), *rows.exprs]
    held = segment_of(in_running_order(dict.fromkeys(everything)), (*rows.outputs, *parts.values()))
    if not set(held.inputs).isdisjoint((*parts, *sums.outputs, *between.outputs)):
        return None
    others = {t for k, s in enumerate(found) if k not in (at.between, at.rows) for t in s.inputs}
    left = segment_of(between.exprs, [t for t in between.outputs if t in outputs or t in others])
    if any(e in of_rows for e in left.exprs):
        return None
    return [s for s in (held, totals(sums, instead), left) if s.outputs], {**instead, **of_rows}
