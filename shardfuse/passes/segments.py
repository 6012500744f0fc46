"""Sums in an order that is their own, for fusions that promise the same bits on any number of ranks.

What a kernel adds up, and in which order, follows from what it reads: on one rank it reads other tensors, of other
types, than on two, and each thread has other elements of a row.  So such a sum says its order itself.

*Pairs.*  Element 2 k is added to element 2 k + 1, and so are these sums, until one is left.  A row of up to 32768
elements is cut into 8 runs, or as many as the largest such power of two that divides its length, each of which is a
branch of that tree.  A run may be cut into parts, of which elements in the same place are added up first, one after
another (``segments/pair_runs.py``).  What a rank has is some of the runs, or a part of one of a power of two.  What
ranks have is added up in pairs too: one number of each row, as without a promise::

    T1[i0] = sum(T0[i0, i1], axes=(1,), in_pairs=640, parts=5)        of 5120 columns

*Segments.*  Longer rows, and columns of more than 64 elements, are cut into as many segments.  Ranks hand each other
their sums, which whoever needs the whole adds up in pairs::

    T1v[i0, i1/16032, i1%16032] = reshape(T0)                         of 128256 columns
    T1g[i0, i1/16032] = sum(T1v, axes=(2,), in_pairs=16032, parts=16) of a rank its own segments
    T1[i0] = ((T1g[:, 0] + T1g[:, 1]) + (T1g[:, 2] + T1g[:, 3])) + ...    read by all ranks: an all-gather

*Partial sums.*  Segments of columns are cut once more.  Rows that are as many apart as there are partial sums are added
up one after another, as a program does that walks rows, and the partial sums in pairs::

    T1v[i0/1024, i0%1024/32, i0%32, i1] = reshape(T0)                 of 8192 rows
    T1h[i0/1024, i0%32, i1] = sum(T1v, axes=(1,))
    T1g[i0/1024, i1] = sum(T1h, axes=(1,), in_pairs=32, parts=8)

Where no divisor gives as many, they are runs of 4 to 64 rows, each of which is added up in pairs.  Without such a
divisor either a thread adds up a long segment row by row.

Several axes are one after another, the last first; short ones that follow one another are one axis.  Integers, maxima
and truth values are the same in any order, and are left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..errors import PromiseError
from ..ir.call import Select
from ..ir.digits import Axis, CutError, extent, merge, root_of, split, varies
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundFusion, BoundTensor, Expr
from ..ir.op import Cast, Op, Pointwise, Reduce, Reshape
from ..ir.promises import LONGEST_SEGMENT, MOST_IN_PAIRS, SEGMENTS
from ..ir.scalar import Scalar
from ..segments.pair_runs import has_order

_PARTIALS = 32, 128, 256, 1024
"""Partial sums of a column, at the least, at the most of long rows, of others and of short ones, each of the rows that
are as many apart: a program that walks rows, beside sums along them, makes one of each column."""
_LONG_ROWS = 1 << 14
"""Elements of a row that a program has at once, of all sums over the same rows and of two tensors, beyond which a
multiprocessor has room for one program.  With 256 partial sums gradients of LayerNorm, 512 x 5120 and 2048 x 8192, took
1.25 and 1.12 x their time without a promise on an H200, with 128 1.01 and 0.96; of RMSNorm, 512 x 8192, 1.27 and 0.99.
Shorter rows want 256: of RMSNorm, 8192 x 5120, 1.02 x and 1.14 with 128, of LayerNorm, 8192 x 4096, 1.00 and 1.24."""
_SHORT_ROWS = 1 << 20
"""Elements of the partial sums of all these columns, up to which there are more of them: gradients of LayerNorm, 2048 x
768, took 1.20 x with 1024 of them, with 512 1.10; of RMSNorm, 8192 x 768, 1.13 and 1.28."""
_SHORT_RUN, _LONG_RUN = 4, 64
"""Rows of a column that a program adds up, at the least and at the most, where their number can be divided so."""
_LONGEST_COLUMN = 512
"""Rows of a column without such a divisor, up to which they are added up in pairs; of more one thread does, one by one.
None of these numbers may follow the GPU or the number of ranks: they say the order of the additions."""
_LONG_ROW = 512
"""Elements of an axis that is added up by itself, before the axis in front of it, so that either may be sharded."""
_PARTS, _PARTS_OF_COLUMN, _MOST_PARTS = 4, 8, 16
"""Of a run: parts of a long one of a power of two in a row, of any of a power of two in columns, at the most; and parts
of any other length at the most."""
_LEAST_PART, _LONGEST_PART, _IDLE = 16, 512, 16
"""Elements of a part of a row's run, which are neighbours in memory, at the least and, where there are not too many, at
the most; and idle lanes, as which part of a run they are still fewer than more parts are worth."""
_COMBINED = {"sum": Pointwise("add"), "prod": Pointwise("mul")}


def sum_in_segments(fusion: BoundFusion) -> None:
    """Cut the sums of floats of a fusion that promises the same bits on any number of ranks.

    Raises PromiseError for an axis of which ranks may have parts, and which its digits do not let be cut so.
    """
    if not fusion.promises.ranks:
        return
    exprs: list[Expr] = []
    is_whole = all(not isinstance(t, BoundTensor) or t.domain.mesh is None for t in fusion.inputs)
    ordered = [e for e in fusion.exprs if isinstance(e.op, Reduce) and has_order(e)]
    alike = Counter(map(_reduced, ordered))
    for expr in fusion.exprs:
        if isinstance(expr.op, Reduce) and has_order(expr):
            exprs += _ordered(expr, expr.op, _SumContext(str(fusion.promises), is_whole, alike[_reduced(expr)]))
        else:
            exprs.append(expr)
    fusion.exprs = exprs


@dataclass(frozen=True)
class _SumContext:
    """What decides the order of a sum, apart from its own axes.

    promise: its text.  is_whole: have all ranks all of it, so that another number of ranks is another definition?
    alike: how many sums of the fusion are over the same axes of tensors of the same shape, itself among them.
    """

    promise: str
    is_whole: bool
    alike: int


def _reduced(expr: Expr) -> Hashable:
    """What sums have in common that a program makes of the same rows."""
    assert isinstance(expr.op, Reduce), expr
    return expr.op.axes, tuple(map(extent, expr.tensors[0].domain.logical))


def _ordered(expr: Expr, op: Reduce, given: _SumContext) -> list[Expr]:
    """The sum in an order that is its own: over the last axes first, as one axis."""
    (x,), out = expr.tensors, expr.output
    last = _last_neighbours(op.axes)
    before = tuple(a for a in op.axes if a not in last)
    if before:
        steps = _one_after_another(out, op, x, last, before)
    elif len(last) > 1:
        steps = _joined(expr, op, last)
    else:
        return _along(expr, op, given, max(last))
    found: list[Expr] = []
    for step in steps:
        found += _ordered(step, step.op, given) if isinstance(step.op, Reduce) else [step]
    return found


def _last_neighbours(axes: Sequence[int]) -> tuple[int, ...]:
    """The last of ``axes`` that follow one another."""
    first = last = max(axes)
    while first - 1 in axes:
        first -= 1
    return tuple(range(first, last + 1))


def _one_after_another(
    out: BoundTensor, op: Reduce, x: BoundTensor, last: tuple[int, ...], before: tuple[int, ...]
) -> list[Expr]:
    """The sum over ``last``, then over ``before``."""
    build = _Builder(out, _accumulator(out))
    kept = [axis for k, axis in enumerate(x.domain.logical) if k not in last]
    part = build.make(Reduce(op.kind, last), (x,), f"t{last[0]}", kept)
    return [*build.exprs, Expr(Reduce(op.kind, before), (part,), (out,))]


def _joined(expr: Expr, op: Reduce, last: tuple[int, ...]) -> list[Expr]:
    """Neighbouring axes as one; where the last is long, or all of them are, the sum over that before.

    Whether it is sharded must not say so: on one rank it is not.
    """
    (x,), out, logical = expr.tensors, expr.output, expr.tensors[0].domain.logical
    whole = extent(a for k in last for a in logical[k])
    if extent(logical[last[-1]]) >= _LONG_ROW or whole > SEGMENTS * LONGEST_SEGMENT:
        return _one_after_another(out, op, x, last[-1:], last[:-1])
    build = _Builder(out, _accumulator(out))
    joined = [*logical[: last[0]], merge(*(logical[a] for a in last)), *logical[last[-1] + 1 :]]
    row = build.make(Reshape(tuple(map(extent, joined)), 1), (x,), "f", joined, x.dtype)
    return [*build.exprs, Expr(replace(op, axes=last[:1]), (row,), (out,))]


def _along(expr: Expr, op: Reduce, given: _SumContext, at: int) -> list[Expr]:
    """The sum over one axis."""
    (x,), out = expr.tensors, expr.output
    n, is_row = extent(x.domain.logical[at]), all(extent(a) == 1 for a in x.domain.logical[at + 1 :])
    if n == 1 and op.kind == "sum":  # whether a kernel begins with a zero or not: -0 + 0 is 0
        build, zero = _Builder(out, x.dtype), Scalar("0.0", DataType.Double, 0.0, is_literal=True)
        added = build.make(_COMBINED["sum"], (x, zero), "z", x.domain.logical)
        return [*build.exprs, replace(expr, inputs=(added,))]
    if n <= 1:
        return [expr]
    if op.kind == "prod" and is_row:
        found = f"the factors of {out} = prod({x}) are side by side in a row, where their order follows the kernel"
        raise PromiseError(given.promise, found, "add up logarithms instead")
    if op.kind == "sum" and n <= (MOST_IN_PAIRS if is_row else _LONG_RUN):
        return [replace(expr, op=_in_pairs(op, n // gcd(n, SEGMENTS), is_row=is_row))]
    return _in_segments(expr, op, given, at, is_row=is_row)


def _accumulator(out: BoundTensor) -> DataType:
    return DataType.Float if out.dtype.is_low_precision else out.dtype


def _cut(axis: Axis, count: int, *, is_whole: bool) -> tuple[Axis, Axis]:
    """``axis`` as segments, ``count`` of them, or as many fewer as its digits allow where a rank has all of it."""
    while True:
        try:
            return split(axis, extent(axis) // count)
        except CutError:
            if not is_whole or count == 1:
                raise
            count //= 2


def _in_segments(expr: Expr, op: Reduce, given: _SumContext, at: int, *, is_row: bool) -> list[Expr]:
    (x,), out = expr.tensors, expr.output
    axis = x.domain.logical[at]
    try:
        outer, inner = _cut(axis, gcd(extent(axis), SEGMENTS), is_whole=given.is_whole) if extent(axis) else ((), axis)
    except CutError as error:
        found = f"{extent(axis)} elements along axis {at} of {x}, which {out} = {op.name} reduces, come from axes "
        found += f"or shards that {SEGMENTS} segments do not keep whole"
        raise PromiseError(
            given.promise, found, f"pad it to a multiple of {SEGMENTS} elements for each rank"
        ) from error
    count = extent(outer)
    columns = _columns_of_sample(x, at)
    partials = 0 if is_row or op.kind != "sum" else _partials(inner, count, columns, given.alike)
    if partials:
        return _in_partials(expr, op, at, (outer, inner), partials, is_whole=given.is_whole)
    runs = _in_runs(inner, LONGEST_SEGMENT if is_row else _LONG_RUN)
    if is_row and extent(runs[-1]) > LONGEST_SEGMENT:
        found = f"a segment of {extent(inner)} elements of {out} = {op.name}({x}) is not divided into parts"
        raise PromiseError(given.promise, found, f"pad it to a multiple of {SEGMENTS * _LONG_RUN} elements")
    if count == len(runs) == 1:
        return [replace(expr, op=_paired(op, extent(runs[0]), is_row=is_row))]
    build = _Builder(out, _accumulator(out))
    pieces = (*((outer,) if count > 1 else ()), *runs)
    logical = (*x.domain.logical[:at], *pieces, *x.domain.logical[at + 1 :])
    parts = build.make(Reshape(tuple(map(extent, logical)), count), (x,), "v", logical, x.dtype)
    for k in reversed(range(len(runs))):
        axis = at + len(pieces) - len(runs) + k
        kept = tuple(a for n, a in enumerate(parts.domain.logical) if n != axis)
        added = _paired(Reduce(op.kind, (axis,), segments=count), extent(runs[k]), is_row=is_row)
        parts = build.make(added, (parts,), "h" if k else "g", kept)
    if count == 1:
        build.finish(parts)
        return build.exprs
    build.combine(_COMBINED[op.kind], parts, at, count)
    return build.exprs


def _columns_of_sample(x: BoundTensor, at: int) -> int:
    """Columns along axis ``at``; where a batch is promised its bits, those of one sample of it."""
    beside = (a for k, axis in enumerate(x.domain.logical) if k != at for a in axis)
    return extent(a for a in beside if not (varies((a,)) and "batch" in root_of(a).invariant))


def _partials(segment: Axis, count: int, columns: int, alike: int) -> int:
    """Into how many partial sums each of ``count`` segments of a column is cut; 0 where its length has no divisor.

    alike: sums over the same rows, each of so many columns.
    """
    n, (fewest, of_long, of_others, most) = extent(segment), _PARTIALS
    many = of_long if columns * (alike + 2) > _LONG_ROWS else of_others
    least, most = -(-fewest // count), min(max(_SHORT_ROWS // max(columns * alike, 1), many), most) // count
    for partials in range(min(most, n // 2), max(least, 2) - 1, -1):
        if n % partials == 0:
            try:
                split(segment, partials)
            except CutError:
                continue
            return partials
    return 0


def _in_partials(
    expr: Expr, op: Reduce, at: int, cut: tuple[Axis, Axis], partials: int, *, is_whole: bool
) -> list[Expr]:
    """The sum over a column, ``cut`` into segments: of each the rows that are ``partials`` apart, one after another,
    then those sums in pairs.

    Where a rank has all of it, the sums of all segments are one axis, of which they are the runs.
    """
    (x,), out = expr.tensors, expr.output
    outer, inner = cut
    count, (turns, own) = extent(outer), split(inner, partials)
    build = _Builder(out, _accumulator(out))
    before, after = x.domain.logical[:at], x.domain.logical[at + 1 :]
    outers = (outer,) if count > 1 else ()
    logical = (*before, *outers, turns, own, *after)
    cut_up = build.make(Reshape(tuple(map(extent, logical)), count), (x,), "v", logical, x.dtype)
    added = Reduce(op.kind, (at + len(outers),), segments=count)
    parts = build.make(added, (cut_up,), "h", (*before, *outers, own, *after))
    if is_whole or count == 1:
        joined = (*before, merge(*outers, own), *after)
        rows = build.make(Reshape(tuple(map(extent, joined)), 1), (parts,), "p", joined) if outers else parts
        added = _in_pairs(Reduce(op.kind, (at,)), partials, is_row=False)
        total = build.make(added, (rows,), "g", (*before, *after))
        build.finish(total)
        return build.exprs
    added = _in_pairs(Reduce(op.kind, (at + 1,), segments=count), partials, is_row=False)
    build.combine(_COMBINED[op.kind], build.make(added, (parts,), "g", (*before, outer, *after)), at, count)
    return build.exprs


def _paired(op: Reduce, n: int, *, is_row: bool) -> Reduce:
    """``op`` of one run that is added up in pairs, but for long columns: a thread adds those up row by row."""
    return _in_pairs(op, n, is_row=is_row) if op.kind == "sum" and n > 1 and (is_row or n <= _LONGEST_COLUMN) else op


def _in_pairs(op: Reduce, run: int, *, is_row: bool) -> Reduce:
    """``op`` in pairs of the elements of each ``run``, in as many parts as a thread may add up first."""
    return replace(op, in_pairs=run, parts=_parts_of_row(run) if is_row else _parts_of_column(run))


def _parts_of_column(run: int) -> int:
    part = run & -run
    return min(run, _PARTS_OF_COLUMN) if part == run else run // part if run // part <= _MOST_PARTS else 1


def _parts_of_row(run: int) -> int:
    """Of a power of two four, so that rows of 4096 are four chunks of four warps, and those of 16384 of 16 warps.

    Of any other length as many as divide it; else the fewest, of at most ``_LONGEST_PART`` elements where these are not
    too many, behind whose end no more than a sixteenth of a run is idle, or the most parts that there may be.
    """
    part = run & -run
    if part == run:
        return _PARTS if run >= _LONGEST_PART else 1
    if part >= _LEAST_PART and run // part <= _MOST_PARTS:
        return run // part
    least = max(1 << (-(-run // _MOST_PARTS) - 1).bit_length(), _LEAST_PART)
    part = max(_LONGEST_PART, least)
    while part > least and _IDLE * (-run % part) > run:
        part //= 2
    return -(-run // part)


def _in_runs(segment: Axis, longest: int) -> tuple[Axis, ...]:
    """A segment in runs of equal length, the longest up to ``longest``, that different programs add up."""
    n = extent(segment)
    for run in range(longest, _SHORT_RUN - 1, -1) if n > longest else ():
        if n % run == 0:
            try:
                return split(segment, run)
            except CutError:
                continue
    return (segment,)


class _Builder:
    """Exprs on the way to ``out``; what is added up is of type ``accumulator``."""

    def __init__(self, out: BoundTensor, accumulator: DataType) -> None:
        self.out = out
        self.accumulator = accumulator
        self.exprs: list[Expr] = []

    def make(
        self, op: Op, inputs: Sequence[BoundTensor | Scalar], name: str, logical: Sequence[Axis],
        dtype: DataType | None = None,
    ) -> BoundTensor:  # fmt: skip
        domain = BoundDomain(tuple(logical), self.out.domain.mesh)
        made = BoundTensor(f"{self.out.name}{name}", dtype or self.accumulator, domain)
        self.exprs.append(Expr(op, tuple(inputs), (made,)))
        return made

    def combine(self, op: Pointwise, parts: BoundTensor, at: int, count: int) -> None:
        """The ``count`` segments along axis ``at``, two and two, then twos and twos."""
        logical = tuple(a for k, a in enumerate(parts.domain.logical) if k != at)
        held: list[BoundTensor] = []
        for k in range(count):
            index = Scalar(f"{self.out.name}k{k}", DataType.Int, k, is_literal=True)
            held.append(self.make(Select(at), (parts, index), f"s{k}", logical))
        while len(held) > 1:
            pairs = list(zip(held[::2], held[1::2], strict=True))
            held = [self.make(op, pair, f"a{len(held)}_{k}", logical) for k, pair in enumerate(pairs)]
        self.finish(held[0])

    def finish(self, total: BoundTensor) -> None:
        """``total``, which the last Expr has made, as ``out``."""
        if self.accumulator is self.out.dtype:
            self.exprs.append(replace(self.exprs.pop(), outputs=(self.out,)))
        else:
            self.exprs.append(Expr(Cast(), (total,), (self.out,)))
