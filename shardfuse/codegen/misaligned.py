"""Rows that begin or end within a word of the widest access, and are read and written in whole words all the same.

Rows that a program or a group holds, or loops over, begin with the word that their first element is in::

    base = offs // 8 * 8; shift = offs - base           offs: where the row begins, 8: elements of 128 bits
    x = load(ptr + base + start + c)                    element start + c - shift of the row
    store(ptr + base + start + c, x, k >= head)         k = start + c: words that are of this row alone
    store(ptr + base + start + c, x, k >= shift, k < head)     the rest, element by element, as at the end of the row

What is before and behind the row in its first and its last chunk is masked where it is used; no load leaves the tensor.
A loop over rows reads its last turn element by element.  Cross entropy of 8192 x 50257, bfloat16, took 219 us on an
H200 so, element by element 265, a copy of 2-byte words 233.

A plan is made for all ranks and knows no strides.  Rows are read so only where each row is one run of memory, and
begins at the same place in every tensor that has rows.  ``with_access`` decides so, before any text is written;
``KernelSource.schedule`` says what was decided.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import BoundTensor
from ..ir.layout import Coordinates
from ..schedulers.plan import KernelPlan
from ..schedulers.schedule import Access
from .emitter import Emitter
from .indexing import Run, Strides, dynamic_terms
from .loads import EVICT_LAST
from .tile import R_SIZE, Chunk, Layouts, Tile
from .words import Words


def with_access(plan: KernelPlan, layouts: Layouts, coordinates: Coordinates) -> KernelPlan:
    """``plan`` with rows read element by element where ``layouts`` do not let their aligned words be read."""
    if not plan.schedule.is_aligned_down or _begin_alike(Tile(plan, layouts, coordinates)):
        return plan
    return replace(plan, schedule=replace(plan.schedule, access=Access.NATIVE))


def _begin_alike(tile: Tile) -> bool:
    """Is each row one run of memory, and does it begin at one place in all tensors that have rows?"""
    plan = tile.plan
    rows = [tile.strides[t] for t in (*plan.segment.inputs, *plan.segment.outputs) if plan.space.is_streamed(t)]
    along = [Run(1, tile.r_total, 1, True)]
    places = [tile.x_runs(strides) for strides in rows]
    is_run = all(tile.r_runs(strides) == along for strides in rows)
    return is_run and bool(places[0]) and all(place == places[0] for place in places)


def _word_lines(offset: str, width: int, first: str = "") -> list[str]:
    """Where the word begins that the element at ``offset`` is in, and how far that element is behind it."""
    return [f"base = {offset} // {width} * {width}{first}", f"shift = ({offset} - base).to(tl.int32)"]


# rows in a loop


class MisalignedLoop(Emitter):
    """An emitter of a loop over the one input that has rows."""

    is_whole = False
    """Is it writing the loop, and not the rest?"""

    def begin(self, chunk: Chunk) -> None:
        """Lines before the loop."""
        (row,) = self.space.streamed
        width = self.plan.device.access_bytes // row.dtype.itemsize
        for line in _word_lines(self.terms(self.tile.strides[row], chunk)[0][0], width):
            self.out.line(line)
        self.out.line(f"whole = ({R_SIZE} + shift) // {self.schedule.reduced} * {self.schedule.reduced}")

    def place(self, tensor: BoundTensor, chunk: Chunk) -> tuple[list[str], bool, bool]:
        if self.is_whole and self.space.is_streamed(tensor):
            return ["base", "start", "c"], True, True
        return super().place(tensor, chunk)

    def masks(self, in_x: bool, in_r: bool, chunk: Chunk) -> list[str]:
        return [] if self.is_whole and in_r else super().masks(in_x, in_r, chunk)

    def index_lines(self, start: str) -> list[str]:
        inside = "r >= 0" if self.is_whole else f"(r >= 0) & (r < {R_SIZE})"
        return [f"r = {start} + c - shift", f"r_mask = {inside}"]


# rows in registers


class MisalignedRows(Words):
    """An emitter whose chunks count from the word that the first element of the row lies in."""

    def begin(self) -> None:
        """Where the row lies, and the masks of its first and last chunks."""
        super().begin()
        width, size = self.tile.word, self.tile.r_total
        row = next(t for t in self.plan.segment.inputs if self.space.is_streamed(t))
        offset = self.offset(" + ".join(self.x_terms(self.tile.strides[row], self.tile.chunks()[0])))
        for line in _word_lines(offset, width, " + first" if self.schedule.members else ""):
            self.head.line(line)
        stop = f"shift + {size}"
        self.head.line(f"stop = {f'tl.minimum({stop}, {self.tile.share})' if self.schedule.members else stop}")
        self.head.line(f"head = (shift + {width - 1}) // {width} * {width}")
        self.head.line(f"whole = stop // {width} * {width}")
        for chunk in self.tile.chunks():
            if chunk.is_masked:
                sides = [f"({_place(chunk)} >= shift)"] * self.is_first(chunk)
                sides += [f"({_place(chunk)} < stop)"] * self.is_last(chunk)
                self.head.line(f"{chunk.mask} = {' & '.join(sides)}")

    def is_first(self, chunk: Chunk) -> bool:
        return chunk.start == 0

    def is_last(self, chunk: Chunk) -> bool:
        """May the row end in ``chunk``?"""
        assert chunk.start is not None
        return chunk.start + self.schedule.reduced > self.tile.least_share

    def terms(self, strides: Strides, chunk: Chunk) -> tuple[list[str], bool, bool]:
        if chunk.start is None:
            return super().terms(strides, chunk)
        x_terms, r = self.x_terms(strides, chunk), self.tile.r_runs(strides)
        r_terms = dynamic_terms(f"({_place(chunk)} - shift)", r)
        return [*x_terms, *r_terms], bool(x_terms), bool(r_terms)

    def place(self, tensor: BoundTensor, chunk: Chunk) -> tuple[list[str], bool, bool]:
        if chunk.start is None or not self.space.is_streamed(tensor):
            return super().place(tensor, chunk)
        return ["base", _place(chunk)], True, True

    def whole_words(self, tensor: BoundTensor, chunk: Chunk, name: str) -> str:
        """Text of what is loaded of ``tensor``, as it is."""
        pointer, _, _ = self.pointer(tensor, chunk)
        if not (chunk.is_masked and self.is_last(chunk)):
            return self.load_text(tensor, pointer, EVICT_LAST)
        place = _place(chunk)
        self.out.line(f"{name} = {self.load_text(tensor, pointer, f', mask={place} < whole{EVICT_LAST}')}")
        rest = f"({place} >= whole) & ({place} < stop)"
        return self.load_text(tensor, pointer, f", mask={rest}, other={name}{EVICT_LAST}")

    def store(self, tensor: BoundTensor, chunk: Chunk) -> None:
        if not (self.space.is_streamed(tensor) and chunk.is_masked):
            super().store(tensor, chunk)
            return
        value = self.value(tensor, chunk)
        pointer, _, _ = self.pointer(tensor, chunk)
        text = self.stored_text(value.text, tensor)
        place = _place(chunk)
        inner = [f"({place} >= head)"] * self.is_first(chunk) + [f"({place} < whole)"] * self.is_last(chunk)
        outer = [f"({place} < head)"] * self.is_first(chunk) + [f"({place} >= whole)"] * self.is_last(chunk)
        self.out.line(self.store_line(tensor, pointer, text, f", mask={' & '.join(inner)}"))
        self.out.line(self.store_line(tensor, pointer, text, f", mask={chunk.mask} & ({' | '.join(outer)})"))


def _place(chunk: Chunk) -> str:
    return f"{chunk.start} + {chunk.lane}" if chunk.start else chunk.lane
