"""Where a kernel's elements are: offsets of tensors from the indices of a program, and masks, as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.expr import BoundTensor
from ..schedulers.plan import KernelPlan
from .indexing import Strides, address, chunk_terms, dynamic_terms, loop_terms, member_terms
from .source import MemoryAccess
from .statements import Writer
from .tile import Chunk, Tile
from .window_loads import Window


class Addresses:
    """Offsets and masks of one kernel.

    ``is_before_ends``: for programs all of whose elements are there, of rows and of windows.
    """

    is_before_ends = False
    offset_name = "offs"
    """With what the names of offsets begin."""

    def __init__(self, plan: KernelPlan, tile: Tile) -> None:
        self.plan = plan
        self.space = plan.space
        self.schedule = plan.schedule
        self.tile = tile
        self.head = Writer()
        """Indices and offsets, before everything else: a name that is made inside a loop is not seen after it."""
        self.offsets: dict[str, str] = {}
        self.accesses: list[MemoryAccess] = []

    def terms(self, strides: Strides, chunk: Chunk) -> tuple[list[str], bool, bool]:
        """Terms of an offset, and whether it has any in x and in r."""
        x_terms, r = self.x_terms(strides, chunk), self.tile.r_runs(strides)
        has_x = bool(x_terms) and (not self.schedule.columns or self.tile.has_x_lanes(strides))
        constant, scalars = 0, list[str]()
        if chunk.start is None:
            scalars, r_terms = loop_terms(chunk.index, self.schedule.reduced, r)
        elif self.schedule.members:
            # A chunk that some member has nothing of is never read without its mask.
            size = chunk.valid if chunk.start < self.tile.last_share else 0
            constant, first, r_terms = member_terms("first", chunk.lane, chunk.start, size, self.tile.share, r)
            x_terms += first
        else:
            constant, r_terms = chunk_terms(chunk.lane, chunk.start, chunk.valid, r)
        if len(x_terms) > 1 or (x_terms and " " in x_terms[0] and self.space.r):
            x_terms = [self.offset(" + ".join(x_terms))]
        return [*x_terms, *scalars, *([str(constant)] if constant else []), *r_terms], has_x, bool(r_terms)

    def x_terms(self, strides: Strides, chunk: Chunk) -> list[str]:
        parts, columns = self.tile.x_runs(strides), self.tile.columns
        if not self.schedule.columns:
            return dynamic_terms("x", parts)
        _, scalars, terms = member_terms("x0", chunk.piece.lane, 0, columns, columns, parts)
        return [*scalars, *terms]

    def place(self, tensor: BoundTensor, chunk: Chunk) -> tuple[list[str], bool, bool]:
        """Terms of how far ``chunk`` is behind the beginning of ``tensor``, and whether it has any in x and in r."""
        strides = self.tile.strides[tensor]
        terms, has_x, has_r = self.terms(strides, chunk)
        if (split := self.plan.split) is not None and split in strides:
            terms.insert(0, "split * i0" if self.tile.x_total > 1 else "split")
        return terms, has_x, has_r

    def pointer(self, tensor: BoundTensor, chunk: Chunk) -> tuple[str, bool, bool]:
        terms, has_x, has_r = self.place(tensor, chunk)
        return " + ".join([f"{tensor}_ptr", *terms]), has_x, has_r

    def source_of(self, tensor: BoundTensor) -> BoundTensor:
        """What ``tensor`` is read from: itself, but for a window."""
        window = self.plan.segment.windows.get(tensor)
        return window.tensors[0] if window else tensor

    def load_text(self, tensor: BoundTensor, pointer: str, options: str) -> str:
        """Text of a load of the memory of ``tensor``."""
        self.accesses.append(MemoryAccess("load", tensor, pointer))
        return f"tl.load({pointer}{options})"

    def store_line(self, tensor: BoundTensor, pointer: str, text: str, options: str) -> str:
        """The statement that stores ``text`` in the memory of ``tensor``."""
        self.accesses.append(MemoryAccess("store", tensor, pointer))
        return f"tl.store({pointer}, {text}{options})"

    def elsewhere(self, tensor: BoundTensor, window: Window, chunk: Chunk) -> tuple[str, bool, bool]:
        """The pointer of a window; it has the lanes of its bounds too."""
        terms, has_x, has_r = self.terms(window.strides, chunk)
        for bound in window.bounds:
            own, in_x, in_r = self.terms(bound.strides, chunk)
            if (in_x and not has_x) or (in_r and not has_r):
                terms.append(f"({' + '.join(own)}) * 0")
                has_x, has_r = has_x or in_x, has_r or in_r
        terms += [str(window.first)] if window.first else []
        return address([f"{self.source_of(tensor)}_ptr", *terms]), has_x, has_r

    def index_text(self, chunk: Chunk, strides: Strides) -> str:
        return " + ".join(self.terms(strides, chunk)[0]) or "0"

    def offset(self, text: str) -> str:
        """One name for each distinct offset along x."""
        if text not in self.offsets:
            self.offsets[text] = f"{self.offset_name}_{len(self.offsets)}"
            self.head.line(f"{self.offsets[text]} = {text}")
        return self.offsets[text]

    def mask(self, in_x: bool, in_r: bool, chunk: Chunk, inside: Sequence[str] = ()) -> str:
        """The options of a load or store; where it is not ``inside`` a load gives 0."""
        masks = [*self.masks(in_x, in_r, chunk), *inside]
        text = f", mask={' & '.join(masks)}" if masks else ""
        return f"{text}, other=0" if inside else text

    def masks(self, in_x: bool, in_r: bool, chunk: Chunk) -> list[str]:
        return ["x_mask"] * (in_x and self.tile.x_masked) + [chunk.mask] * (in_r and chunk.is_masked)
