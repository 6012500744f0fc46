"""A walk over rows of odd length, whose loads are as wide as others': it begins with the word of the first element.

    base = offs // 8 * 8; shift = offs - base           offs: where the row begins, 8: elements of 128 bits
    for start in range(0, whole, block):
        r = start + c - shift                           a few elements of the row before: masked where they are used
        x = load(ptr + base + start + c)
    x = load(ptr + offs + r, r < columns)               the rest, element by element: no load leaves the tensor

Cross entropy of 8192 x 50257, bfloat16, took 219 us on an H200 so, element by element 265, a copy of 2-byte words 233.
"""

from __future__ import annotations

from ..ir.expr import BoundTensor
from .emitter import Emitter
from .tile import R_SIZE, Chunk


class Aligned(Emitter):
    """An emitter of such a loop over the one input that has rows."""

    is_whole = False
    """Is it writing the loop, and not the rest?"""

    @property
    def row(self) -> BoundTensor:
        """The input that has rows."""
        (walked,) = (t for t in self.plan.segment.loads if self.space.is_streamed(t))
        return walked

    def begin(self, chunk: Chunk) -> None:
        """Lines before the loop."""
        width = self.plan.device.access_bytes // self.row.dtype.itemsize
        offset = self.terms(self.tile.strides[self.row], chunk)[0][0]
        self.out.line(f"base = {offset} // {width} * {width}")
        self.out.line(f"shift = ({offset} - base).to(tl.int32)")
        self.out.line(f"whole = ({R_SIZE} + shift) // {self.schedule.reduced} * {self.schedule.reduced}")

    def pointer(self, tensor: BoundTensor, chunk: Chunk) -> tuple[str, bool, bool]:
        if self.is_whole and self.space.is_streamed(tensor):
            return f"{tensor}_ptr + base + start + c", True, True
        return super().pointer(tensor, chunk)

    def masks(self, in_x: bool, in_r: bool, chunk: Chunk) -> list[str]:
        return [] if self.is_whole and in_r else super().masks(in_x, in_r, chunk)

    def index_lines(self, start: str) -> list[str]:
        inside = "r >= 0" if self.is_whole else f"(r >= 0) & (r < {R_SIZE})"
        return [f"r = {start} + c - shift", f"r_mask = {inside}"]
