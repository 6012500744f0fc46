"""The body of a mix-order kernel: a loop over rows, sums of columns carried through it in registers.

The loop holds no other loop and no branch: only then does the compiler issue the loads of later rows ahead of time.
What is the same for all rows is loaded before it; sums of columns leave behind it.  Rows of a single turn need no loop:
all that they are made of is loaded first, and their sums are whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.paired_reductions import first_of
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce, is_reduction
from ..schedulers.limits import WARP, chunk_widths, least_chunk
from .accumulators import Accumulator, accumulator
from .bodies import load_and_compute
from .combining import accumulate
from .emitter import Emitter
from .indexing import Strides, dynamic_terms, integer, plus, promise, runs
from .pair_sums import in_pairs, run_lines
from .source import Text
from .statements import Loop, Statement, Writer
from .tile import X_SIZE, Chunk


class RowLoopSums(Emitter):
    """An emitter whose x is a row, or a few, of the walk, and whose y tells groups of programs apart."""

    def columns(self) -> list[Expr]:
        """The reductions down columns: they store partial results."""
        return [e for e in self.plan.segment.exprs if isinstance(e.op, Reduce) and self.is_partial(e.output)]

    def is_partial(self, tensor: BoundTensor) -> bool:
        return self.plan.split in self.space.atoms[tensor]

    def compute(self, expr: Expr, tensor: BoundTensor, chunk: Chunk) -> Text:
        is_of_rows = isinstance(expr.op, Reduce) and self.moves_to(expr)
        return self._of_all_rows(expr, chunk) if is_of_rows else super().compute(expr, tensor, chunk)

    def moves_to(self, expr: Expr) -> bool:
        """Is it made of several rows of the tile, and the same for all of them?"""
        return self.tile.x_lanes and self.space.is_walked(expr.tensors[0]) and not self.space.is_walked(expr.output)

    def _of_all_rows(self, expr: Expr, chunk: Chunk) -> Text:
        """A reduction down the columns of the tile, which has all rows; a chunk of one column has no lanes along it."""
        acc, out = accumulator(expr), expr.output
        self.use(acc.helper)
        value = self.value(expr.tensors[0], chunk)
        text = acc.prepared(value.text, value.dtype)
        if not value.has_x:
            text = f"tl.broadcast_to({text}, {self.tile.shape_of(chunk) if value.has_r else [self.tile.x_block, 1]})"
        if self.tile.x_masked:
            text = f"tl.where(x_mask, {text}, {acc.neutral})"
        text = f"{acc.reduced(text, 0)}[None, :]" if value.has_r else acc.reduced(acc.reduced(text, 1), 0)
        return self.assign(self.name(out, chunk), self.finished(out, acc, text), out.dtype.compute, False, value.has_r)

    def row_outputs(self) -> list[BoundTensor]:
        """What is stored of each row."""
        return [t for t in self.plan.segment.outputs if not self.is_partial(t)]

    def terms(self, strides: Strides, chunk: Chunk) -> tuple[list[str], bool, bool]:
        terms, has_x, has_r = super().terms(strides, chunk)
        return terms, has_x and self.moves(strides), has_r

    def moves(self, strides: Strides) -> bool:
        return any(strides.get(a) for a in self.space.walked)

    def x_terms(self, strides: Strides, chunk: Chunk) -> list[str]:
        if self.moves(strides):
            return super().x_terms(strides, chunk)
        kept = [(a, n) for a, n in zip(self.space.x, self.tile.x_extents, strict=True) if a not in self.space.walked]
        return dynamic_terms("y", runs([n for _, n in kept], [strides.get(a, 0) for a, _ in kept]))

    @property
    def y_total(self) -> int:
        return self.tile.x_total // self.tile.walk_total

    def chunks(self) -> list[Chunk]:
        """The row in blocks, the rest of it in smaller ones: lanes that are masked cost as much as others.

        Rows side by side are cut into equal ones: blocks of two widths would lie differently in the threads, and what
        is one for a row would have to be handed round.
        """
        if self.tile.is_in_parts:
            return self.tile.chunks()
        total, block = self.tile.r_total, self.schedule.reduced
        equal = [block] * -(-total // block)
        widths = equal if self.tile.x_lanes else chunk_widths(total, block, self.least())
        found: list[Chunk] = []
        start = 0
        for k, width in enumerate(widths):
            valid = min(width, total - start)
            lane = "c" if width == widths[0] else f"c_{width}"
            suffix = f"_{k}" if len(widths) > 1 else ""
            found.append(Chunk(suffix, start, valid, valid < width, width, lane=lane))
            start += valid
        return found

    def least(self) -> int:
        """Elements of the smallest chunk."""
        return least_chunk(self.space.narrowest, self.schedule.launch.warps, self.schedule.reduced)


def write_row_loop(e: RowLoopSums) -> None:
    """Loads of what stays, the walk, and stores of the sums of columns; of a single turn no walk."""
    if e.schedule.split is None:
        _write_only_turn(e)
        return
    chunks, columns, stored = e.chunks(), e.columns(), e.row_outputs()
    summed = [*columns, *(x for k in range(e.space.phases) for x in e.reductions(k))]
    wanted = [*stored, *(x.tensors[0] for x in summed)]
    if e.schedule.keeps:
        for chunk in chunks:
            write_invariant(e, wanted, chunk)
    e.out.paragraph()
    write_sums(e, columns, chunks)
    e.out.paragraph()
    e.out.add([_walked(e, chunks, columns, stored)])
    e.out.paragraph()
    store_sums(e, columns, chunks, "program")


def _write_only_turn(e: RowLoopSums) -> None:
    """Loads come first: no other turn hides what a later one would wait for."""
    chunks, outputs = e.chunks(), e.plan.segment.outputs
    for chunk in chunks:
        e.load_needed(outputs, chunk)
    e.out.paragraph()
    _write_row(e, chunks, [], outputs)


def write_invariant(e: RowLoopSums, wanted: Sequence[BoundTensor], chunk: Chunk) -> None:
    """Values that are the same for all rows of the walk."""
    e.make([t for t in e.needed(wanted, chunk) if not e.space.is_walked(t)], chunk)


def _walked(e: RowLoopSums, chunks: Sequence[Chunk], columns: Sequence[Expr], stored: Sequence[BoundTensor]) -> Loop:
    """The loop, with the offsets that change from row to row at its head.

    Programs take rows in turn, so that those of one moment lie side by side in memory.
    """
    before = e.out, e.head
    e.out, e.head = Writer(), Writer()
    _write_row(e, chunks, columns, stored)
    body = [*_row_lines(e), *e.body]
    e.out, e.head = before
    schedule, block = e.schedule, e.tile.x_block
    several = f"program % {schedule.parts}" if schedule.parts > 1 else "0"
    split = "program" if e.y_total == 1 else several
    first = split if block == 1 else f"{split} * {block}"
    name = "x" if block == 1 and e.y_total == 1 else "start"
    return Loop(name, first, X_SIZE, schedule.parts * block, schedule.launch.stages, body)


def _write_row(e: RowLoopSums, chunks: Sequence[Chunk], columns: Sequence[Expr], stored: Sequence[BoundTensor]) -> None:
    """One turn of the walk: phase by phase, each sum of columns as soon as its summands are there."""
    last = e.space.phases - 1
    moments = _pairs(e, chunks)
    for phase in range(e.space.phases):
        reductions = [x for x in e.reductions(phase) if x not in moments.values()]
        due = [x for x in columns if e.space.phase[x.tensors[0]] == phase]
        wanted = [x.tensors[0] for x in (*reductions, *due)] + (list(stored) if phase == last else [])
        load_and_compute(e, wanted, chunks)
        for expr in due:
            for chunk in chunks:
                add_up(e, expr, chunk, sums_of(expr, chunk), "x_mask" if e.tile.x_masked else "")
        for expr in reductions:
            if expr in moments:
                _write_pair(e, expr, moments[expr], chunks)
            else:
                _reduce(e, expr, chunks)
        e.out.paragraph()
    for tensor in stored:
        for chunk in chunks if e.space.has_r(tensor) else chunks[:1]:
            e.store(tensor, chunk)


def sums_of(expr: Expr, chunk: Chunk) -> str:
    """The name of what a program has of ``expr`` in ``chunk``."""
    return f"{expr.output}_acc{chunk.suffix}"


def add_up(e: RowLoopSums, expr: Expr, chunk: Chunk, name: str, mask: str) -> None:
    """A row's summands to the sums ``name``.  ``mask``: is it a row at all?  "" where it is."""
    acc = accumulator(expr)
    value = e.value(expr.tensors[0], chunk)
    text = acc.prepared(value.text, value.dtype)
    if mask:
        text = f"tl.where({mask}, {text}, {acc.neutral})"
    e.use(acc.helper)
    accumulate(e, acc, name, text)


def _reduce(e: RowLoopSums, expr: Expr, chunks: Sequence[Chunk]) -> None:
    """Chunks of one width are combined lane by lane, each width reduced across its lanes."""
    acc = accumulator(expr)
    if isinstance(expr.op, Reduce) and expr.op.in_pairs:
        e.give(expr.output, acc, in_pairs(e, expr, chunks))
        return
    e.use(acc.helper)
    parts: list[str] = []
    for width in dict.fromkeys(c.block for c in chunks):
        texts = [e.combine(expr, e.value(expr.tensors[0], c), c) for c in chunks if c.block == width]
        name = texts[0]
        if len(texts) > 1:
            name = f"{expr.output}_lanes{'' if not parts else f'_{width}'}"
            _combine(e, acc, name, texts)
        parts.append(acc.reduced(name, e.tile.r_axis))
    whole = parts[0]
    for part in parts[1:]:
        whole = acc.combined(whole, part)
    e.give(expr.output, acc, f"({whole})" if e.tile.x_lanes and len(parts) > 1 and not acc.helper else whole)


def _pairs(e: Emitter, chunks: Sequence[Chunk]) -> dict[Expr, Expr]:
    """By the sum that a mean is made of: that of the squares around it, both of which take one wait of all warps.

    Two sums, the second of what lies apart from the mean, take two.  Here each lane has the mean of its own elements
    and the squares around that, and those of all lanes are merged (Chan, Golub & LeVeque 1979)::

        N = n1 + n2;  M = m1 + (m2 - m1) n2 / N;  Q = q1 + q2 + (m2 - m1)² n1 n2 / N

    The gradient of two modulated norms in a row, 8 x 4096 x 3072 of bfloat16, took 259 us so on an H200, 269 where sums
    are merged as a loop merges them (``merge_moments``), and 277 with two reductions.  Of rows one by one, in whole
    chunks of one width, of which each thread has some.
    """
    blocks = dict.fromkeys(c.block for c in chunks)
    is_shared = len(blocks) == 1 and chunks[0].block >= e.schedule.launch.warps * WARP
    is_ordered = e.space.adds_in_pairs or e.schedule.launch.warps == 1
    if e.tile.x_lanes or not is_shared or is_ordered or any(c.is_masked for c in chunks):
        return {}
    found: dict[Expr, Expr] = {}
    for second in filter(e.is_reduction, e.plan.segment.exprs):
        first = first_of(second, e.plan.segment.maker)
        if first is not None and is_reduction(first.op, "sum") and e.is_reduction(first):
            types = {first.tensors[0].dtype, first.output.dtype, second.output.dtype}
            if types == {DataType.Float} and first not in found:
                found[first] = second
    return found


def _write_pair(e: Emitter, first: Expr, second: Expr, chunks: Sequence[Chunk]) -> None:
    """``chunks``: of the row, as ``_pairs`` takes them."""
    e.use("merged_moments", "squares_around")
    lanes, block = e.schedule.launch.warps * WARP, chunks[0].block
    shape, count = f"[{lanes}, {block // lanes}]", block // lanes * len(chunks)
    a, b = str(first.output), str(second.output)
    texts = [e.value(first.tensors[0], c).text for c in chunks]
    _combine(e, accumulator(first), f"{a}_lanes", texts)
    e.out.line(f"{a}_mean = tl.sum(tl.reshape({a}_lanes, {shape}), axis=1) / {count}")
    _combine(e, accumulator(second), f"{b}_lanes", [f"squares_around({a}_mean, {text}, {shape})" for text in texts])
    e.out.line(f"{b}_around = tl.sum({b}_lanes, axis=1)")
    e.out.line(f"{a}_count = tl.full([{lanes}], {count}, tl.float32)")
    parts = f"{a}_count, {a}_mean, {b}_around"
    e.out.line(f"{parts} = tl.reduce(({parts}), 0, merged_moments)")
    e.give(first.output, accumulator(first), f"{a}_mean * {e.tile.r_total}")
    e.give(second.output, accumulator(second), f"{b}_around")


def _combine(e: Emitter, acc: Accumulator, name: str, texts: Sequence[str]) -> None:
    e.out.line(f"{name} = {texts[0]}")
    for text in texts[1:]:
        e.out.line(f"{name} = {acc.combined(name, text)}")


def _row_lines(e: RowLoopSums) -> list[str]:
    """The row or rows of this turn."""
    lines: list[str] = []
    rows = "start" if e.tile.x_block == 1 else "start + rows"
    if e.tile.x_masked:
        lines.append(f"x_mask = {rows} < {X_SIZE}")
    if e.y_total > 1:
        lines.append(f"x = y * {X_SIZE} + {rows}")
    elif e.tile.x_block > 1:
        lines.append(f"x = {rows}")
    return lines


def _only_turn_lines(e: RowLoopSums) -> list[str]:
    """The row or rows of the only turn.

    A single row's number is the program's, so that the compiler knows no more of its place than of one in a loop.
    """
    rows = [f"rows{'.to(tl.int64)' if e.tile.x_wide else ''}"] if e.tile.x_lanes else []
    lines = [f"x_mask = rows < {X_SIZE}"] if e.tile.x_masked else []
    if e.y_total > 1:
        return [*lines, f"x = {' + '.join([f'y * {X_SIZE}', *rows])}"]
    return [*lines, *([] if e.tile.is_alone else [f"x = {' '.join(rows) or 'program'}"])]


def write_sums(e: RowLoopSums, columns: Sequence[Expr], chunks: Sequence[Chunk]) -> None:
    """Sums of no rows."""
    for expr in columns:
        for chunk in chunks:
            e.out.line(f"{sums_of(expr, chunk)} = {accumulator(expr).start(e.tile.shape_of(chunk))}")


def store_sums(
    e: RowLoopSums, columns: Sequence[Expr], chunks: Sequence[Chunk], row: str, *, is_neutral: bool = False
) -> None:
    """The sums, or neutral ones, as ``row`` of the partial results."""
    first = " + first" if e.schedule.members else ""
    e.out.line(f"partial = {row} * {e.tile.r_total}{first}")
    for expr in columns:
        acc = accumulator(expr)
        for chunk in chunks:
            text = acc.start(e.tile.shape_of(chunk)) if is_neutral else sums_of(expr, chunk)
            if e.tile.x_lanes:
                text = f"{acc.reduced(text, 0)}[None, :]"
            if acc.is_logical:
                text = f"{text} != 0"
            pointer = f"{plus(f'{expr.output}_ptr + partial', chunk.start or 0)} + {chunk.lane}"
            e.out.line(e.store_line(expr.output, pointer, text, f", mask={chunk.mask}" if chunk.is_masked else ""))


def row_loop_index(e: RowLoopSums) -> tuple[dict[str, tuple[int, str]], list[Statement]]:
    """Extent arguments with their values and types, and the statements before everything else."""
    tile = e.tile
    rows = tile.walk_total
    lines: list[Statement] = []
    lines += promise(X_SIZE, rows) if tile.x_masked and not e.space.is_invariant else []
    chunks = e.chunks()
    blocks = {c.lane: c.block for c in chunks}
    for lane, block in blocks.items():
        lanes = tile.lanes(block, reduced=True)
        lines += run_lines(tile, lanes) if tile.is_apart else [f"{lane} = {lanes}"]
    if e.schedule.split or not (tile.x_lanes or tile.is_alone) or e.y_total > 1:
        lines.append(f"program = {e.program}.to(tl.int64)")
    if e.y_total > 1:
        lines.append(f"y = program // {e.schedule.parts}" if e.schedule.parts > 1 else "y = program")
    if tile.x_lanes:
        # the loop's counter is an int64 on a GPU, and an integer of Python's, which widens nothing, when interpreted
        wide = ".to(tl.int64)" if e.interpret else ""
        lines.append(f"rows = {tile.lanes(tile.x_block, reduced=False)}{wide}")
    lines += [f"{c.mask} = {c.lane} < {c.valid}" for c in chunks if c.is_masked and not tile.is_apart]
    if e.schedule.split:
        return {X_SIZE: integer(rows)}, lines
    return {X_SIZE: integer(rows)} if tile.x_masked or e.y_total > 1 else {}, [*lines, *_only_turn_lines(e)]
