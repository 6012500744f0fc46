"""A software-pipelined loop over rows that adds up columns too: a program has its columns of all rows of its group.

    sums of this program's columns = 0
    for row of the group's rows, a few in a turn:        as ``pipelined_row_loop.py`` makes it
        whole = collect()                               of these rows: posted a turn ago
        sums += ...;  store what is made of the rows and whole
    store the sums: a row of partial results for each group

Rows of one turn share the sums and what is the same for all rows, and their group waits for them together.  RMSNorm's
backward of 8192 x 32768, bfloat16, took 397 us on an H200 so, a row in a turn 420, a copy 380.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from .accumulators import Accumulator, accumulator
from .bodies import of_members
from .combining import combined
from .indexing import Strides, dynamic_terms
from .lagged_rows import LaggedRows, end_begin, taken, write_begin, write_collect
from .row_loop import RowLoopSums, add_up, store_sums, sums_of, write_invariant, write_sums
from .statements import Writer
from .tile import Chunk, Piece


class LaggedRowLoop(LaggedRows, RowLoopSums):
    """The emitter of an exchange with a lag that carries sums of columns from row to row.

    It holds what is the same for all rows.

    A row of a turn is a piece of the program's kept elements: its values have names of their own.
    """

    def chunks(self) -> list[Chunk]:
        return self.tile.chunks()

    @property
    def rows(self) -> list[Piece]:
        """Those of one turn."""
        count = self.schedule.turn
        return [Piece(f"_x{k}" if count > 1 else "", k, 1) for k in range(count)]

    def of(self, row: Piece) -> list[Chunk]:
        """The chunks of a row."""
        return [replace(c, suffix=c.suffix + row.suffix, piece=row) for c in self.chunks()]

    def key(self, tensor: BoundTensor, chunk: Chunk) -> tuple[BoundTensor, str]:
        found, suffix = super().key(tensor, chunk)
        return found, suffix if self.space.is_walked(tensor) else suffix.removesuffix(chunk.piece.suffix)

    def x_terms(self, strides: Strides, chunk: Chunk) -> list[str]:
        if not self.moves(strides):
            return []
        return dynamic_terms(chunk.piece.suffix[1:] or "x", self.tile.x_runs(strides))

    def turn_lines(self) -> list[str]:
        if len(self.rows) == 1:
            return []
        texts = [f"x + {row.start}" if row.start else "x" for row in self.rows]
        if self.is_cut:
            texts = [f"tl.minimum({text}, {self.row_count} - 1)" if k else text for k, text in enumerate(texts)]
        return [f"{row.suffix[1:]} = {text}" for row, text in zip(self.rows, texts, strict=True)]


def write_lagged_loop(e: LaggedRowLoop) -> None:
    """What stands before the walk, both parts of a turn, and the stores of the sums."""
    chunks, columns, stored = e.chunks(), e.columns(), e.row_outputs()
    for chunk in chunks:
        write_invariant(e, [*stored, *(x.tensors[0] for x in (*columns, *e.reductions(0)))], chunk)
    write_sums(e, columns, chunks)
    e.invariant, invariant = taken(e), dict(e.values)
    write_begin(e, [chunk for row in e.rows for chunk in e.of(row)])
    end_begin(e, _parts(e))
    e.values = invariant
    for row in e.rows:  # what a row has one of is read while its words are on their way, rather than handed on
        numbers = (t for t in e.plan.segment.inputs if e.space.is_walked(t) and not e.space.has_r(t))
        e.load_needed(numbers, e.of(row)[0])
    whole = iter(write_collect(e))
    for row in e.rows:
        for expr in e.reductions(0):
            acc = accumulator(expr)
            e.give(expr.output, acc, acc.reduced(of_members(e, acc, next(whole)), 0), [row])
    for row in e.rows:
        for own, chunk in zip(e.of(row), chunks, strict=True):
            _write_last(e, columns, stored, own, chunk)
    turn = e.head, e.out
    e.head, e.out = Writer(), Writer()
    _store_all(e, columns, chunks)
    e.stored = e.out.statements
    e.head, e.out = turn


def _parts(e: LaggedRowLoop) -> list[tuple[DataType, str]]:
    """This member's part of each reduction of each row: all at once, so that its warps meet once."""
    found: list[tuple[Accumulator, str, str]] = []
    for row in e.rows:
        for expr in e.reductions(0):
            acc = accumulator(expr)
            e.use(acc.helper)
            texts = [e.combine(expr, e.value(expr.tensors[0], c), c) for c in e.of(row)]
            lanes = combined(e, acc, f"{expr.output}_acc{row.suffix}", texts)
            found.append((acc, f"{expr.output}_part{row.suffix}", lanes))
    names = [name for _, name, _ in found]
    if len(found) == 1:
        e.out.line(f"{names[0]} = {found[0][0].reduced(found[0][2], 0)}")
    else:
        e.helpers["together"] = _together([acc for acc, _, _ in found])
        e.out.line(f"{', '.join(names)} = tl.reduce(({', '.join(lanes for _, _, lanes in found)}), 0, together)")
    return [(acc.dtype, name) for acc, name, _ in found]


def _together(kinds: Sequence[Accumulator]) -> str:
    numbers = range(len(kinds))
    arguments = ", ".join([*(f"a{k}" for k in numbers), *(f"b{k}" for k in numbers)])
    texts = ", ".join(acc.combined(f"a{k}", f"b{k}") for k, acc in enumerate(kinds))
    return f'@triton.jit\ndef together({arguments}):\n    """Several reductions at once."""\n    return {texts}\n'


def _write_last(
    e: LaggedRowLoop, columns: Sequence[Expr], stored: Sequence[BoundTensor], own: Chunk, chunk: Chunk
) -> None:
    """All that is made of a chunk once the row's statistics are there.  ``own``: ``chunk`` of this row."""
    outputs = [t for t in stored if e.space.has_r(t) or chunk.start == 0]
    wanted = [*(x.tensors[0] for x in columns), *outputs]
    e.out.paragraph()
    e.make(wanted, own)
    mask = f"x + {own.piece.start} < {e.row_count}" if e.is_cut and own.piece.start else ""
    for expr in columns:
        add_up(e, expr, own, sums_of(expr, chunk), mask)
    for tensor in outputs:
        e.store(tensor, own)


def _store_all(e: LaggedRowLoop, columns: Sequence[Expr], chunks: Sequence[Chunk]) -> None:
    """A row of partial results; those of groups that are not there, where fewer fit, are neutral."""
    store_sums(e, columns, chunks, "team")
    if groups_of(e) == e.schedule.parts:
        return
    with e.out.loop("spare", "team + teams", str(e.schedule.parts), "teams"):
        store_sums(e, columns, chunks, "spare", is_neutral=True)


def groups_of(e: LaggedRowLoop) -> int:
    """Groups at once: no more than have rows, than partial results of a column, and than programs that fit."""
    schedule = e.schedule
    assert schedule.group is not None, e.plan.name
    return min(-(-e.tile.x_total // schedule.turn), schedule.parts, schedule.group.at_once)
