"""Running statistics: (max, sum of exponentials) of a softmax, (sum, sum of squared distances) of a variance.

A loop takes elements in lane by lane.  Parts, lanes of a program and members of a team, are merged by one rule::

    M = max(m);  S = sum(s * exp(m - M));  D = sum(d + n (m - M))
    T = sum(t);  Q = sum(q + n (t / n - T / N)²)

What has taken nothing in is (the lowest number, 0) and (0, 0): no exp(-inf - -inf) comes up on the way, and -inf is put
back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir.dtype import DataType
from ..ir.expr import STATISTICS, Expr
from .arithmetic import TRITON_TYPE
from .emitter import Emitter
from .reduction import Accumulator, accumulators
from .source import MARGIN
from .tile import R_SHARE, R_SIZE, Chunk

LOWEST = {DataType.Float: "-3.4028234663852886e38", DataType.Double: "-1.7976931348623157e308"}

_EXP = '''@triton.jit
def exp(x):
    """For x of at most 0, in sums of 1 and more: what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
'''
_PLAIN_EXP = """@triton.jit
def exp(x):
    return tl.exp(x)
"""
_ADD_EXPONENTIALS = '''@triton.jit
def add_exponentials(top, total, x, axis: tl.constexpr):
    """(max, sum of exp(x - max)) of each lane, with its elements of ``x``, which lie along ``axis``, taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    return higher, total * exp(top - higher) + tl.sum(exp(x - tl.expand_dims(higher, axis)), axis)
'''
_ADD_DISTANCES = '''@triton.jit
def add_distances(n, total, top, x, axis: tl.constexpr):
    """(number, sum of x - max) of each lane, whose max was ``top``, with its elements of ``x`` taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    more = tl.sum(x - tl.expand_dims(higher, axis), axis)
    return n + x.shape[axis], total + (moved(n, top - higher) + more)
'''
_ADD_MASKED_DISTANCES = '''@triton.jit
def add_distances(n, total, top, x, mask, count, axis: tl.constexpr):
    """(number, sum of x - max) of each lane, whose max was ``top``, with its ``count`` elements of ``x`` taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    more = tl.sum(tl.where(mask, x - tl.expand_dims(higher, axis), 0.0), axis)
    return n + count, total + (moved(n, top - higher) + more)
'''
_MOVED = '''@triton.jit
def moved(n, by):
    """What n distances change by where what they are measured from does."""
    return tl.where(n > 0, n * by, 0.0)
'''
_ADD_MOMENTS = '''@triton.jit
def add_moments(n, total, squares, x, axis: tl.constexpr):
    """(number, sum, sum of squared distances to the mean) of each lane, with its elements of ``x`` taken in."""
    count = tl.full([], x.shape[axis], x.dtype)
    own = tl.sum(x, axis)
    apart = x - tl.expand_dims(own * (1.0 / count), axis)
    return merge_moments(n, total, squares, count, own, tl.sum(apart * apart, axis))
'''
_ADD_MASKED_MOMENTS = '''@triton.jit
def add_moments(n, total, squares, x, mask, count, axis: tl.constexpr):
    """(number, sum, sum of squared distances to the mean) of each lane, with its ``count`` elements taken in."""
    own = tl.sum(tl.where(mask, x, 0.0), axis)
    apart = tl.where(mask, x - tl.expand_dims(own / tl.maximum(count, 1.0), axis), 0.0)
    return merge_moments(n, total, squares, count, own, tl.sum(apart * apart, axis))
'''
_MERGE_MOMENTS = '''@triton.jit
def merge_moments(n, total, squares, count, own, within):
    """Those of n and of ``count`` elements as those of all of them."""
    apart = own * (1.0 / tl.maximum(count, 1.0)) - total * (1.0 / tl.maximum(n, 1.0))
    between = tl.where(n * count > 0, apart * apart * (n * count / (n + count)), 0.0)
    return n + count, total + own, squares + (within + between)
'''
_BETWEEN = '''@triton.jit
def between(n, total, mean):
    """Squared distances to ``mean`` of n elements, each where their own mean is."""
    apart = total / tl.maximum(n, 1) - mean
    return n * apart * apart
'''
_SQUARE = """@triton.jit
def square(x):
    return x * x
"""


def is_statistic(expr: Expr) -> bool:
    return expr.op in STATISTICS


# a loop


def write_start(e: Emitter, expr: Expr, chunk: Chunk) -> None:
    """Lanes that have taken nothing in."""
    shape = _lanes(e, chunk)
    first, *rest = accumulators(expr)
    start = first.start(shape)
    if expr.op == "online_softmax":
        start = f"tl.full({shape}, {LOWEST[first.dtype]}, {TRITON_TYPE[first.dtype]})"
    if _counts_lanes(expr):
        counts = str(_lanes_along_r(e, chunk)) if chunk.is_masked else "[]"
        e.out.line(f"{expr.output}_n = {rest[0].start(counts)}")
    e.out.line(f"{expr.output}_acc = {start}")
    for out, acc in zip(expr.outputs[1:], rest, strict=True):
        e.out.line(f"{out}_acc = {acc.start(shape)}")


def _counts_lanes(expr: Expr) -> bool:
    """Does the loop carry how many elements each lane has?"""
    return expr.op == "welford" or len(expr.outputs) == 3


def write_take_in(e: Emitter, expr: Expr, chunk: Chunk) -> None:
    """One turn of the loop."""
    a, b, *more = expr.outputs
    x = e.value(expr.tensors[0], chunk)
    axis = _sizes(e, chunk)[1]
    text = x.text if x.has_r and x.has_x == e.tile.x_lanes else f"tl.broadcast_to({x.text}, {e.tile.shape_of(chunk)})"
    if expr.op == "online_softmax":
        _require_exp(e, expr)
        e.require(accumulators(expr)[0])
        e.helpers["add_exponentials"] = _ADD_EXPONENTIALS
        text = f'tl.where({chunk.mask}, {text}, float("-inf"))' if chunk.is_masked else text
        folded = _folded(e, text, chunk)
        for c in more:
            e.helpers["moved"] = _MOVED
            e.helpers["add_distances"] = _ADD_MASKED_DISTANCES if chunk.is_masked else _ADD_DISTANCES
            e.out.line(f"{a}_lanes = {folded}")
            folded = f"{a}_lanes"
            masked = _masked_lanes(e, expr, chunk)
            e.out.line(f"{a}_n, {c}_acc = add_distances({a}_n, {c}_acc, {a}_acc, {folded}{masked}, {axis})")
        e.out.line(f"{a}_acc, {b}_acc = add_exponentials({a}_acc, {b}_acc, {folded}, {axis})")
        return
    e.helpers["merge_moments"] = _MERGE_MOMENTS
    e.helpers["add_moments"] = _ADD_MASKED_MOMENTS if chunk.is_masked else _ADD_MOMENTS
    state, folded = f"{a}_n, {a}_acc, {b}_acc", _folded(e, text, chunk)
    masked = _masked_lanes(e, expr, chunk)
    e.out.line(f"{state} = add_moments({state}, {folded}{masked}, {axis})")


def across_lanes(e: Emitter, expr: Expr) -> tuple[str, ...]:
    """The lanes of a loop merged: names of what this program has."""
    names = tuple(f"{t}_part" for t in expr.outputs) if e.params.team else _final(e, expr)

    def reduced(k: int, text: str) -> str:
        return e.across_lanes(names[k], accumulators(expr)[k], text)

    def spread(text: str) -> str:
        return e.tile.expanded(e.along_columns(names[0], accumulators(expr)[0], text))

    lanes = [f"{t}_acc" for t in expr.outputs]
    return _merged(e, expr, lanes, names, reduced, spread, f"{expr.output}_n", _own_count(e))


def _lanes(e: Emitter, chunk: Chunk) -> str:
    """Text of the shape of what a loop carries."""
    shape, axis = _sizes(e, chunk)
    return str([n for k, n in enumerate(shape) if k != axis])


def _folded(e: Emitter, text: str, chunk: Chunk) -> str:
    return f"tl.reshape({text}, {_sizes(e, chunk)[0]})"


def _masked_lanes(e: Emitter, expr: Expr, chunk: Chunk) -> str:
    """Arguments where the block is masked: the mask, and how many elements each lane has.

    A sum over the mask would give these too, across threads: the mask does not lie in them as what was loaded does.
    """
    if not chunk.is_masked:
        return ""
    shape, axis = _sizes(e, chunk)
    fold, lanes = shape[axis], max(_lanes_along_r(e, chunk))
    left = f"{R_SIZE} - start - {e.tile.lanes(lanes, reduced=True)}"
    count = f"{left} * {fold}" if _is_near(e) else f"({left} + {lanes - 1}) // {lanes}"
    name = f"{expr.output}_count"
    dtype = TRITON_TYPE[expr.outputs[1].dtype]
    e.out.line(f"{name} = tl.minimum(tl.maximum({count}, 0), {fold}).to({dtype})")
    mask = f"tl.broadcast_to({chunk.mask}, {e.tile.shape_of(chunk)})" if e.tile.x_lanes else chunk.mask
    return f", {_folded(e, mask, chunk)}, {name}"


def _lanes_along_r(e: Emitter, chunk: Chunk) -> list[int]:
    """The shape of what is the same for all of x."""
    block = chunk.block or e.params.r_block
    lanes = block // min(e.params.fold, block)
    return ([1, lanes] if e.tile.is_inner else [lanes, 1]) if e.tile.x_lanes else [lanes]


def _is_near(e: Emitter) -> bool:
    """Are the elements of a lane neighbours in a row, that one load brings?  Else each comes with another load."""
    return e.tile.is_inner and e.tile.r_total % e.params.fold == 0


def _sizes(e: Emitter, chunk: Chunk) -> tuple[list[int], int]:
    """The shape of a block whose lanes have an axis of their own, and that axis."""
    r = chunk.block or e.params.r_block
    fold = min(e.params.fold, r)
    cut = [r // fold, fold] if _is_near(e) else [fold, r // fold]
    x = [e.tile.x_block] if e.tile.x_lanes else []
    shape = [*x, *cut] if e.tile.is_inner else [*cut, *x]
    return shape, (len(x) if e.tile.is_inner else 0) + _is_near(e)


# a row in registers


def held(e: Emitter, expr: Expr, chunks: Sequence[Chunk]) -> tuple[str, ...]:
    """What this member of a team has of ``expr``, its part of the row being in registers."""
    names = tuple(f"{t}_part" for t in expr.outputs)
    a, (first, *rest) = names[0], accumulators(expr)
    e.require(first)
    x = expr.tensors[0]
    values = [e.value(x, chunk) for chunk in chunks]
    texts = [_masked(t.text, chunk, first.neutral) for t, chunk in zip(values, chunks, strict=True)]
    across = e.across_lanes(a, first, combined(e, first, f"{expr.output}_acc", texts))
    if expr.op == "online_softmax":
        _require_exp(e, expr)
        e.out.line(f"{a} = maximum({across}, {LOWEST[first.dtype]})")
        centre, forms = a, ("exp({} - {})", "({} - {})")
    else:
        e.helpers["square"] = _SQUARE
        e.out.line(f"{a} = {across}")
        e.out.line(f"{expr.output}_mean = {a} / {_own_count(e)}")
        centre, forms = f"{expr.output}_mean", ("square({} - {})",)
    centre = _named(e, f"{expr.output}_centre", e.tile.expanded(e.along_columns(a, first, centre)))
    for out, name, acc, form in zip(expr.outputs[1:], names[1:], rest, forms, strict=False):
        terms = [_masked(form.format(t.text, centre), chunk, "0.0") for t, chunk in zip(values, chunks, strict=True)]
        e.out.line(f"{name} = {e.across_lanes(name, acc, combined(e, acc, f'{out}_acc', terms))}")
    return names


def _masked(text: str, chunk: Chunk, neutral: str) -> str:
    return f"tl.where({chunk.mask}, {text}, {neutral})" if chunk.is_masked else text


def combined(e: Emitter, acc: Accumulator, name: str, texts: Sequence[str]) -> str:
    """Chunks combined lane by lane, in order: their text, or ``name``."""
    joined = " + ".join(texts)
    if len(texts) == 1 or (not acc.helper and len(joined) < MARGIN - 40):
        return joined
    e.out.line(f"{name} = {texts[0]}")
    for text in texts[1:] if acc.helper else _packed(texts[1:]):
        accumulate(e, acc, name, text)
    return name


def _packed(texts: Sequence[str]) -> list[str]:
    """Sums of ``texts`` that fit on a line each."""
    lines = [""]
    for text in texts:
        joined = f"{lines[-1]} + {text}" if lines[-1] else text
        if len(joined) < MARGIN - 40:
            lines[-1] = joined
        elif lines[-1]:
            lines.append(text)
        else:
            lines[-1] = text
    return lines


def accumulate(e: Emitter, acc: Accumulator, name: str, text: str) -> None:
    e.out.line(f"{name} = {acc.combined(name, text)}" if acc.helper else f"{name} += {text}")


# parts of a team, and the end


def across_members(e: Emitter, expr: Expr, texts: Sequence[str]) -> tuple[str, ...]:
    """``texts``: the results of all members.  Names of the merged ones."""
    parts = [f"{t}_parts" for t in expr.outputs]
    for name, text in zip(parts, texts, strict=True):
        e.out.line(f"{name} = {text}")
    names = _final(e, expr)
    spread = "{}" if e.tile.exchanged == 1 else "{}[None, :]"
    counts = ""
    if _counts_lanes(expr):
        counts = f"{expr.output}_counts"
        e.out.line(f"{counts} = {_counts(e)}")

    def reduced(k: int, text: str) -> str:
        return accumulators(expr)[k].reduced(text, 0)

    return _merged(e, expr, parts, names, reduced, spread.format, counts, _whole(e))


def _final(e: Emitter, expr: Expr) -> tuple[str, ...]:
    """Names of merged results, of which ``give`` makes values: the tensors' own where that changes nothing."""
    is_value = expr.op == "welford" and not e.tile.x_lanes
    return tuple(str(t) if is_value else f"{t}_all" for t in expr.outputs)


def give(e: Emitter, expr: Expr, names: Sequence[str]) -> None:
    """The values of the results."""
    texts = list(names)
    if expr.op == "online_softmax":  # of nothing but -inf: the distance of -inf to it is NaN
        a, b, *_ = names
        texts = [f'tl.where({b} == 0, float("-inf"), {a})']
        texts += [f'tl.where({b} == 0, float("nan"), {name})' for name in names[1:]]
    for out, acc, text in zip(expr.outputs, accumulators(expr), texts, strict=True):
        e.give(out, acc, text)


def _merged(
    e: Emitter,
    expr: Expr,
    parts: Sequence[str],
    names: tuple[str, ...],
    reduced: Callable[[int, str], str],
    spread: Callable[[str], str],
    counts: str,
    whole: str,
) -> tuple[str, ...]:
    """``parts``: their results.  ``counts``: elements of each, of ``whole`` in all.  Gives ``names``."""
    a, b, *more = parts
    e.require(accumulators(expr)[0])
    e.out.line(f"{names[0]} = {reduced(0, a)}")
    if expr.op == "online_softmax":
        _require_exp(e, expr)
        centre = _named(e, f"{names[0]}_centre", spread(names[0]))
        second = f"{b} * exp({a} - {centre})"
        for part, name in zip(more, names[2:], strict=True):
            e.helpers["moved"] = _MOVED
            e.out.line(f"{name} = {reduced(2, f'{part} + moved({counts}, {a} - {centre})')}")
    else:
        e.helpers["between"] = _BETWEEN
        e.out.line(f"{expr.output}_mean = {names[0]} / {whole}")
        centre = _named(e, f"{expr.output}_centre", spread(f"{expr.output}_mean"))
        second = f"{b} + between({counts}, {a}, {centre})"
    e.out.line(f"{names[1]} = {reduced(1, second)}")
    return names


def _named(e: Emitter, name: str, text: str) -> str:
    """``text``, or ``name`` for it where it is long."""
    if len(text) < MARGIN // 4:
        return text
    e.out.line(f"{name} = {text}")
    return name


def _require_exp(e: Emitter, expr: Expr) -> None:
    fast = expr.output.dtype is DataType.Float and not e.interpret
    e.helpers["exp"] = _EXP if fast else _PLAIN_EXP


def _own_count(e: Emitter) -> str:
    """How many elements this program reduces to one; 1 where it has none."""
    if e.params.unrolled:
        share = e.tile.share
        return _times(e, str(share) if e.tile.last_share == share else "tl.maximum(valid, 1)")
    return _times(e, "tl.maximum(last - first, 1)" if e.params.team else R_SIZE)


def _whole(e: Emitter) -> str:
    return _times(e, str(e.tile.r_total) if e.params.unrolled else R_SIZE)


def _counts(e: Emitter) -> str:
    """How many elements each member has."""
    size, share = (str(e.tile.r_total), str(e.tile.share)) if e.params.unrolled else (R_SIZE, R_SHARE)
    members = f"tl.arange(0, {e.params.team}){'' if e.tile.exchanged == 1 else '[:, None]'}"
    text = _times(e, f"tl.minimum(tl.maximum({size} - {members} * {share}, 0), {share})")
    return f"{text}.to(tl.float32)"


def _times(e: Emitter, count: str) -> str:
    """Of columns side by side, each of which has ``count``."""
    grouped = e.space.grouped
    return f"({count} * {grouped})" if grouped else count
