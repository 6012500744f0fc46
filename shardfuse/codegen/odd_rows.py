"""Rows too odd for wide loads and stores, held by a program or a team: read and written in whole words all the same.

    base = offs // 8 * 8; shift = offs - base           offs: where the row begins, 8: elements of 128 bits
    x = load(ptr + base + start + c)                    element start + c - shift of the row
    store(ptr + base + start + c, x, k >= head)         k = start + c: words that are of this row alone
    store(ptr + base + start + c, x, k >= shift, k < head)     the rest, element by element, as at the end of the row

What stands before and behind the row in its first and its last chunk is masked where it is used; no load leaves the
tensor.  Softmax of 4096 x 50257, bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.expr import BoundTensor
from . import narrow
from .hints import EVICT_LAST
from .indexing import dynamic_terms
from .late import Late
from .packed import Packed
from .tile import Chunk, Strides
from .words import Words


class OddRows(Words):
    """An emitter whose chunks count from the word that the first element of the row lies in."""

    def is_row(self, tensor: BoundTensor) -> bool:
        return self.space.is_streamed(tensor)

    def begin_row(self) -> None:
        """Where the row lies, and the masks of its first and last chunks."""
        width, size = self.tile.word, self.tile.r_total
        row = next(t for t in self.plan.segment.inputs if self.is_row(t))
        offset = self.offset(" + ".join(self.x_terms(self.tile.strides[row], self.tile.chunks()[0])))
        at = f"{offset} // {width} * {width}"
        stop = f"shift + {size}"
        if self.schedule.members:
            at, stop = f"{at} + first", f"tl.minimum({stop}, {self.tile.share})"
        self.head.line(f"base = {at}")
        self.head.line(f"shift = ({offset} - base).to(tl.int32)")
        self.head.line(f"stop = {stop}")
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
        x_terms, r = self.x_terms(strides, chunk), self.tile.r_groups(strides)
        r_terms = dynamic_terms(f"({_place(chunk)} - shift)", r)
        return [*x_terms, *r_terms], bool(x_terms), bool(r_terms)

    def pointer(self, tensor: BoundTensor, chunk: Chunk) -> tuple[str, bool, bool]:
        if chunk.start is None or not self.is_row(tensor):
            return super().pointer(tensor, chunk)
        start = f" + {chunk.start}" if chunk.start else ""
        return f"{tensor}_ptr + base{start} + {chunk.lane}", True, True

    def whole_words(self, tensor: BoundTensor, chunk: Chunk, name: str) -> str:
        """Text of what is loaded of ``tensor``, as it is."""
        pointer, _, _ = self.pointer(tensor, chunk)
        if not (chunk.is_masked and self.is_last(chunk)):
            return f"tl.load({pointer}{EVICT_LAST})"
        place = _place(chunk)
        self.out.line(f"{name} = tl.load({pointer}, mask={place} < whole{EVICT_LAST})")
        rest = f"({place} >= whole) & ({place} < stop)"
        return f"tl.load({pointer}, mask={rest}, other={name}{EVICT_LAST})"

    def store(self, tensor: BoundTensor, chunk: Chunk) -> None:
        if not (self.is_row(tensor) and chunk.is_masked):
            super().store(tensor, chunk)
            return
        value = self.value(tensor, chunk)
        pointer, _, _ = self.pointer(tensor, chunk)
        self.helpers |= narrow.helpers(tensor.dtype, interpret=self.interpret)
        text = narrow.stored(value.text, tensor.dtype, interpret=self.interpret)
        place = _place(chunk)
        inner = [f"({place} >= head)"] * self.is_first(chunk) + [f"({place} < whole)"] * self.is_last(chunk)
        outer = [f"({place} < head)"] * self.is_first(chunk) + [f"({place} >= whole)"] * self.is_last(chunk)
        self.out.line(f"tl.store({pointer}, {text}, mask={' & '.join(inner)})")
        self.out.line(f"tl.store({pointer}, {text}, mask={chunk.mask} & ({' | '.join(outer)}))")


def _place(chunk: Chunk) -> str:
    return f"{chunk.start} + {chunk.lane}" if chunk.start else chunk.lane


class OddPacked(OddRows, Packed):
    """Of one program for each row."""

    def begin(self) -> None:
        super().begin()
        self.begin_row()

    def read_ahead(self, wanted: Sequence[BoundTensor], chunks: Sequence[Chunk]) -> None:
        """Weights come element by element: two chunks of them would not stand in registers."""


class OddLate(OddRows, Late):
    """Of teams."""

    def begin(self) -> None:
        self.begin_row()
