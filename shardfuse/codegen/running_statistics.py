"""Reductions of a body, running statistics among them: what a loop carries, what registers hold, what members merge.

Running statistics are (max, sum of exponentials) of a softmax and (sum, sum of squared distances) of a variance.  A
loop takes elements in lane by lane.  Parts, lanes of a program and members of a team, are merged by one rule::

    M = max(m);  S = sum(s * exp(m - M));  D = sum(d + n (m - M));  W = sum((w + s (m - M)) * exp(m - M))
    T = sum(t);  Q = sum(q + n (t / n - T / N)²)

What has taken nothing in is (the lowest number, 0) and (0, 0): no exp(-inf - -inf) comes up on the way, and -inf is put
back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce, Statistic, is_statistic
from ..kernel_functions import texts_of
from ..schedulers.limits import power_of_two
from ..segments.online_reductions import counts_lanes
from .accumulators import Accumulator, accumulator, accumulators
from .arithmetic import TRITON_TYPE
from .combining import accumulate, across_blocks, combined
from .emitter import Emitter
from .packed import Packed
from .pair_sums import in_pairs
from .source import Text
from .statements import MARGIN
from .tile import R_SHARE, R_SIZE, Chunk, Piece
from .words import largest_of_words

LOWEST = {DataType.Float: "-3.4028234663852886e38", DataType.Double: "-1.7976931348623157e308"}


# a loop


def write_start(e: Emitter, expr: Expr, chunk: Chunk) -> None:
    """Lanes that have taken nothing in."""
    first, *rest = accumulators(expr)
    suffix = chunk.piece.suffix
    if counts_lanes(expr):
        counts = str(_lanes_along_r(e, chunk)) if chunk.is_masked else "[]"
        e.out.line(f"{expr.output}_n{suffix} = {rest[0].start(counts)}")
    shape = _lanes(e, chunk) if isinstance(expr.op, Statistic) else e.tile.shape_of(chunk)
    starts = [first.start(shape), *(acc.start(shape) for acc in rest)]
    if is_statistic(expr.op, "online_softmax"):
        starts[0] = f"tl.full({shape}, {LOWEST[first.dtype]}, {TRITON_TYPE[first.dtype]})"
    for out, start in zip(expr.outputs, starts, strict=True):
        e.out.line(f"{out}_acc{suffix} = {start}")


def write_take_in(e: Emitter, expr: Expr, chunk: Chunk, start: str = "start") -> None:
    """One turn of the loop, whose block begins at ``start``."""
    if isinstance(expr.op, Reduce):
        acc, name = accumulator(expr), f"{expr.output}_acc{chunk.piece.suffix}"
        e.use(acc.helper)
        accumulate(e, acc, name, e.combine(expr, e.value(expr.tensors[0], chunk), chunk))
        return
    n = f"{expr.output}_n{chunk.piece.suffix}"
    a, b, *more = (f"{t}_acc{chunk.piece.suffix}" for t in expr.outputs)
    x = e.value(expr.tensors[0], chunk)
    axis = _sizes(e, chunk)[1]
    text = x.text if x.has_r and x.has_x == e.tile.x_lanes else f"tl.broadcast_to({x.text}, {e.tile.shape_of(chunk)})"
    if is_statistic(expr.op, "online_softmax"):
        _require_exp(e, expr)
        e.use(accumulators(expr)[0].helper)
        take_in = "add_weighted" if expr.op.is_weighted else "add_exponentials"
        e.use(take_in)
        folded, names = _folded(e, chunk.where(text, 'float("-inf")'), chunk), [a, b, *more]
        if counts_lanes(expr):
            c = names.pop()
            add = "add_masked_distances" if chunk.is_masked else "add_distances"
            e.use(add)
            e.out.line(f"{expr.output}_lanes = {folded}")
            folded = f"{expr.output}_lanes"
            masked = _masked_lanes(e, expr, chunk, start)
            e.out.line(f"{n}, {c} = {add}({n}, {c}, {a}, {folded}{masked}, {axis})")
        carried = ", ".join(names)
        e.out.line(f"{carried} = {take_in}({carried}, {folded}, {axis})")
        return
    add = "add_masked_moments" if chunk.is_masked else "add_moments"
    e.use(add)
    folded, masked = _folded(e, text, chunk), _masked_lanes(e, expr, chunk, start)
    if chunk.piece.suffix:
        e.out.line(f"{expr.output}_lanes = {folded}")
        folded = f"{expr.output}_lanes"
    e.out.line(f"{n}, {a}, {b} = {add}({n}, {a}, {b}, {folded}{masked}, {axis})")


def across_lanes(e: Emitter, expr: Expr) -> tuple[str, ...]:
    """The lanes of a loop merged: names of what this program has."""
    suffixes = [piece.suffix for piece in e.tile.pieces]
    lanes = [[f"{t}_acc{suffix}" for suffix in suffixes] for t in expr.outputs]
    if isinstance(expr.op, Reduce):
        return (across_blocks(e, str(expr.output), accumulator(expr), lanes[0]),)
    names = tuple(f"{t}_part" for t in expr.outputs) if e.schedule.members else _final(e, expr)

    def reduced(k: int, texts: Sequence[str]) -> str:
        return across_blocks(e, names[k], accumulators(expr)[k], texts)

    def spread(text: str) -> list[str]:
        return [e.tile.expanded(t) for t in e.along_columns(names[0], accumulators(expr)[0], text)]

    counts = [f"{expr.output}_n{suffix}" for suffix in suffixes]
    return _merged(e, expr, lanes, names, reduced, spread, counts, _own_count(e))


def _lanes(e: Emitter, chunk: Chunk) -> str:
    """Text of the shape of what a loop carries."""
    shape, axis = _sizes(e, chunk)
    return str([n for k, n in enumerate(shape) if k != axis])


def _folded(e: Emitter, text: str, chunk: Chunk) -> str:
    return f"tl.reshape({text}, {_sizes(e, chunk)[0]})"


def _masked_lanes(e: Emitter, expr: Expr, chunk: Chunk, start: str) -> str:
    """Arguments where the block is masked: the mask, and how many elements each lane has.

    A sum over the mask would give these too, across threads: the mask does not lie in them as what was loaded does.
    """
    if not chunk.is_masked:
        return ""
    shape, axis = _sizes(e, chunk)
    fold, lanes = shape[axis], max(_lanes_along_r(e, chunk))
    end = f"{R_SIZE} - {start}" if chunk.start is None else f"{e.tile.own_share} - {chunk.start}"
    lane = e.tile.lanes(lanes, reduced=True)
    count = f"{end} - {lane} * {fold}" if _is_near(e) else f"({end} - {lane} + {lanes - 1}) // {lanes}"
    name = f"{expr.output}_count"
    dtype = TRITON_TYPE[expr.outputs[1].dtype]
    e.out.line(f"{name} = tl.minimum(tl.maximum({count}, 0), {fold}).to({dtype})")
    mask = f"tl.broadcast_to({chunk.mask}, {e.tile.shape_of(chunk)})" if e.tile.x_lanes else chunk.mask
    return f", {_folded(e, mask, chunk)}, {name}"


def _lanes_along_r(e: Emitter, chunk: Chunk) -> list[int]:
    """The shape of what is the same for all of x."""
    lanes = chunk.block // _fold(e, chunk)
    return ([1, lanes] if e.space.is_inner else [lanes, 1]) if e.tile.x_lanes else [lanes]


def _fold(e: Emitter, chunk: Chunk) -> int:
    """Elements that a lane takes in at once: as many as a thread has of them, fewer of narrow pieces."""
    widest = e.tile.pieces[0].width or 1
    fold = max(e.schedule.accumulated * (chunk.piece.width or 1) // widest, 1)
    return min(fold, chunk.block)


def _is_near(e: Emitter) -> bool:
    """Are the elements of a lane neighbours in a row, that one load brings?  Else each comes with another load."""
    return e.space.is_inner and (e.schedule.is_aligned_down or e.tile.r_total % e.schedule.accumulated == 0)


def _sizes(e: Emitter, chunk: Chunk) -> tuple[list[int], int]:
    """The shape of a block whose lanes have an axis of their own, and that axis."""
    r = chunk.block
    fold = _fold(e, chunk)
    cut = [r // fold, fold] if _is_near(e) else [fold, r // fold]
    x = [chunk.piece.width or e.tile.x_block] if e.tile.x_lanes else []
    shape = [*x, *cut] if e.space.is_inner else [*cut, *x]
    return shape, (len(x) if e.space.is_inner else 0) + _is_near(e)


# a row in registers


def held(e: Emitter, expr: Expr, chunks: Sequence[Chunk]) -> tuple[str, ...]:
    """What this program has of ``expr``, its row, or its part of a group's, being in registers.

    Chunks are combined lane by lane: one reduction across the lanes is left, which does not grow with the row.
    """
    x = expr.tensors[0]
    if isinstance(expr.op, Reduce) and expr.op.in_pairs:
        return (in_pairs(e, expr, chunks),)
    if isinstance(expr.op, Reduce):
        out, acc = expr.output, accumulator(expr)
        return (_across_chunks(e, str(out), acc, out, chunks, lambda c: e.combine(expr, e.value(x, c), c)),)
    if is_statistic(expr.op, "welford") and e.schedule.accumulated > 1:
        # chunk after chunk, as a loop does: nothing of a row stays in registers for the sake of its mean
        write_start(e, expr, chunks[0])
        for chunk in chunks:
            write_take_in(e, expr, chunk)
        return across_lanes(e, expr)
    is_whole = _is_whole(e)
    names = tuple(str(t) if is_whole else f"{t}_part" for t in expr.outputs)
    a, (first, *rest) = names[0], accumulators(expr)
    e.use(first.helper)

    def across_chunks(name: str, acc: Accumulator, out: BoundTensor, form: str, neutral: str) -> str:
        """``form`` of each element and of the centre of its columns, reduced."""

        def text(c: Chunk) -> str:
            value = e.value(x, c)
            return c.where(_lane(e, value, form.format(value.text, centres.get(c.piece)), c), neutral)

        return _across_chunks(e, name, acc, out, chunks, text)

    centres: dict[Piece, str] = {}
    largest = largest_of_words(e, x, chunks, first.neutral) if is_statistic(expr.op, "online_softmax") else None
    if largest is None:
        across = across_chunks(a, first, expr.output, "{0}", first.neutral)
    else:
        across = across_blocks(e, a, first, [combined(e, first, f"{expr.output}_acc", largest)])
    if is_statistic(expr.op, "online_softmax"):
        _require_exp(e, expr)
        if expr.op.is_weighted:
            e.use("weighted")
        e.out.line(f"{a} = {across}" if is_whole else f"{a} = maximum({across}, {LOWEST[first.dtype]})")
        third = "weighted({0} - {1}, exp({0} - {1}))" if expr.op.is_weighted else "({0} - {1})"
        centre, forms = a, ("exp({0} - {1})", third)
    else:
        e.use("square")
        e.out.line(f"{a} = {across}")
        e.out.line(f"{expr.output}_mean = {a} / {_own_count(e)}")
        centre, forms = f"{expr.output}_mean", ("square({0} - {1})",)
    spread = [e.tile.expanded(text) for text in e.along_columns(a, first, centre)]
    centres |= zip(e.tile.pieces, _all_named(e, f"{expr.output}_centre", spread), strict=True)
    for out, name, acc, form in zip(expr.outputs[1:], names[1:], rest, forms, strict=False):
        if isinstance(e, Packed):
            e.renew()
        e.out.line(f"{name} = {across_chunks(name, acc, out, form, '0.0')}")
    return names


def _lane(e: Emitter, value: Text, text: str, chunk: Chunk) -> str:
    """``text``, made of ``value``, which has no lanes where a rank has a single column, as a lane to be reduced."""
    is_lane = value.has_x or value.has_r or chunk.is_masked
    return text if is_lane else f"tl.broadcast_to({text}, {e.tile.shape_of(chunk)})"


def _across_chunks(
    e: Emitter, name: str, acc: Accumulator, out: BoundTensor, chunks: Sequence[Chunk], text: Callable[[Chunk], str]
) -> str:
    """``text`` of each chunk combined lane by lane, for each piece of the columns, and reduced across the lanes."""
    blocks: list[str] = []
    for piece in e.tile.pieces:
        texts = (text(chunk) for chunk in chunks if chunk.piece == piece)
        blocks.append(combined(e, acc, f"{out}_acc{piece.suffix}", texts))
    return across_blocks(e, name, acc, blocks)


# parts of a team, and the end


def across_members(e: Emitter, expr: Expr, texts: Sequence[str]) -> tuple[str, ...]:
    """``texts``: the results of all members.  Names of the merged ones."""
    if isinstance(expr.op, Reduce):
        return (accumulator(expr).reduced(texts[0], 0),)
    parts = [f"{t}_parts" for t in expr.outputs]
    for name, text in zip(parts, texts, strict=True):
        e.out.line(f"{name} = {text}")
    names = _final(e, expr)
    counts = f"{expr.output}_counts"
    if counts_lanes(expr):
        e.out.line(f"{counts} = {_counts(e)}")

    def reduced(k: int, texts: Sequence[str]) -> str:
        return accumulators(expr)[k].reduced(texts[0], 0)

    def spread(text: str) -> list[str]:
        return [text if e.tile.exchanged == 1 else f"{text}[None, :]"]

    return _merged(e, expr, [[part] for part in parts], names, reduced, spread, [counts], _whole(e))


def _final(e: Emitter, expr: Expr) -> tuple[str, ...]:
    """Names of merged results, of which ``give`` makes values: the tensors' own where that changes nothing."""
    is_value = is_statistic(expr.op, "welford") and not e.tile.x_lanes
    return tuple(str(t) if is_value else f"{t}_all" for t in expr.outputs)


def _is_whole(e: Emitter) -> bool:
    """Does one program hold the row?  No part of it is nothing but -inf where the row is not."""
    return e.schedule.is_held and not e.schedule.members


def give(e: Emitter, expr: Expr, names: Sequence[str]) -> None:
    """The values of the results."""
    texts = list(names)
    if is_statistic(expr.op, "online_softmax") and not _is_whole(e):
        # of nothing but -inf: the distance of -inf to it is NaN
        a, b, *_ = names
        texts = [f'tl.where({b} == 0, float("-inf"), {a})']
        texts += [f'tl.where({b} == 0, float("nan"), {name})' for name in names[1:]]
    for out, acc, text in zip(expr.outputs, accumulators(expr), texts, strict=True):
        e.use(acc.helper)
        e.give(out, acc, text)


def _merged(
    e: Emitter,
    expr: Expr,
    parts: Sequence[Sequence[str]],
    names: tuple[str, ...],
    reduced: Callable[[int, Sequence[str]], str],
    spread: Callable[[str], Sequence[str]],
    counts: Sequence[str],
    whole: str,
) -> tuple[str, ...]:
    """``parts``: their results, each in one or more blocks.  ``counts``: elements of each, of ``whole`` in all.

    Gives ``names``.
    """
    a, b, *more = parts
    e.use(accumulators(expr)[0].helper)
    e.out.line(f"{names[0]} = {reduced(0, a)}")
    if is_statistic(expr.op, "online_softmax"):
        _require_exp(e, expr)
        centres = _all_named(e, f"{names[0]}_centre", spread(names[0]))
        second = [f"{y} * exp({x} - {c})" for x, y, c in zip(a, b, centres, strict=True)]
        for part, name in zip(more, names[2:], strict=True):
            if expr.op.is_weighted:
                e.use("weighted_from")
                third = [f"weighted_from({x} - {c}, {y}, {z})" for x, y, z, c in zip(a, b, part, centres, strict=True)]
            else:
                e.use("moved")
                third = [f"{y} + moved({n}, {x} - {c})" for n, x, y, c in zip(counts, a, part, centres, strict=True)]
            e.out.line(f"{name} = {reduced(2, third)}")
    else:
        e.use("between")
        e.out.line(f"{expr.output}_mean = {names[0]} / {whole}")
        centres = _all_named(e, f"{expr.output}_centre", spread(f"{expr.output}_mean"))
        second = [f"{y} + between({n}, {x}, {c})" for n, x, y, c in zip(counts, a, b, centres, strict=True)]
    e.out.line(f"{names[1]} = {reduced(1, second)}")
    return names


def _all_named(e: Emitter, name: str, texts: Sequence[str]) -> list[str]:
    """``_named`` of what there is for each piece."""
    suffixes = [p.suffix for p in e.tile.pieces] if len(texts) > 1 else [""]
    return [_named(e, f"{name}{suffix}", text) for suffix, text in zip(suffixes, texts, strict=True)]


def _named(e: Emitter, name: str, text: str) -> str:
    """``text``, or ``name`` for it where it is long."""
    if len(text) < MARGIN // 4:
        return text
    e.out.line(f"{name} = {text}")
    return name


def _require_exp(e: Emitter, expr: Expr) -> None:
    """The interpreter's takes any type."""
    if expr.output.dtype is DataType.Float:
        e.use("exp")
    else:
        e.helpers |= texts_of("exp", interpret=True)


def _own_count(e: Emitter) -> str:
    """How many elements this program reduces to one; 1 where it has none."""
    if _is_whole(e):
        return str(e.tile.r_total)
    if e.schedule.is_held:
        own = e.tile.own_share
        return _times(e, own if own.isdigit() else f"tl.maximum({own}, 1)")
    return _times(e, "tl.maximum(last - first, 1)" if e.schedule.members else R_SIZE)


def _whole(e: Emitter) -> str:
    return _times(e, str(e.tile.r_total) if e.schedule.is_held else R_SIZE)


def _counts(e: Emitter) -> str:
    """How many elements each member has."""
    size, share = (str(e.tile.r_total), str(e.tile.share)) if e.schedule.is_held else (R_SIZE, R_SHARE)
    members = f"tl.arange(0, {power_of_two(e.schedule.members)}){'' if e.tile.exchanged == 1 else '[:, None]'}"
    return _times(e, f"tl.minimum(tl.maximum({size} - {members} * {share}, 0), {share})") + ".to(tl.float32)"


def _times(e: Emitter, count: str) -> str:
    """Of columns side by side, each of which has ``count``."""
    grouped = e.space.grouped
    return f"({count} * {grouped})" if grouped else count
