"""The tile that one program walks on one rank: local extents, the shape of a block, and where each tensor lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from math import prod

from ..ir.digits import Axis, Digit
from ..ir.expr import BoundTensor, Expr
from ..ir.layout import Coordinates, Layout, local_extent
from ..ir.op import Pick, Random
from ..schedulers.limits import INT32_LIMIT, in_powers_of_two, power_of_two
from ..schedulers.plan import KernelPlan
from ..segments.pair_runs import PairRuns, pair_runs
from ..segments.segment import Segment
from .indexing import Run, Strides, moved_by, row_major, runs
from .window_loads import window_of

Layouts = Mapping[BoundTensor, Layout]
"""One rank's storage of what a kernel reads and writes."""

X_SIZE = "i0"
"""Argument: kept elements of this rank, or the rows that one group of programs walks."""
R_SIZE = "i1"
"""Argument: reduced elements of this rank."""
R_SHARE = "i2"
"""Argument: reduced elements of one program of a split reduction."""
_SHARE_STEP = 16
"""Elements that a member's part of a row is a multiple of: 128 bits of the narrowest type keep it aligned."""


@dataclass(frozen=True)
class Piece:
    """Columns ``start`` to ``start + width`` of a program's; ``suffix`` ends the names of its lanes and values.

    Lanes come in powers of two: 80 columns are 64 and 16, which is less work than 128 of which some are masked.
    """

    suffix: str
    start: int
    width: int

    @property
    def lane(self) -> str:
        return f"k{self.suffix[2:]}"

    @property
    def groups(self) -> str:
        """The name of its mask of groups."""
        return f"groups{self.suffix}"


_ALL_COLUMNS = Piece("", 0, 0)
"""The one piece of a block of columns that is not cut."""


@dataclass(frozen=True)
class Chunk:
    """Reduced indices ``start`` to ``start + valid``, a block of them wide; ``suffix`` ends the names of its values.

    ``start`` is ``None`` where the index is a variable (``index``), as in a loop; in a group it counts from ``first``.
    ``block``: how many lanes it has, named ``lane``.  ``mask``: the name of its mask.
    ``piece``: which of the program's columns.  ``turn``: the index that this turn of a loop begins with.
    ``of_blocks``: are its lanes the first of each block of a row?
    """

    suffix: str
    start: int | None
    valid: int
    is_masked: bool
    block: int
    mask: str = "r_mask"
    lane: str = "c"
    index: str = "r"
    piece: Piece = _ALL_COLUMNS
    turn: str = "start"
    of_blocks: bool = False

    def where(self, text: str, neutral: str) -> str:
        """``text`` in the lanes that are within the mask."""
        return f"tl.where({self.mask}, {text}, {neutral})" if self.is_masked else text

    def few(self, lanes: str) -> Chunk:
        """The same with a few ``lanes`` alone."""
        return replace(self, lane=lanes, index=f"({self.turn} + {lanes})")


def coordinates_on(segment: Segment, rank: int) -> Coordinates:
    """Where ``rank`` is among those that hold the tensors of ``segment``.

    What is made and read inside of the kernel is among them: an iota may be all that is sharded.
    """
    found: dict[Digit, int] = {}
    for tensor in segment.tensors:
        found.update(tensor.domain.coordinates(rank))
    return found


class Tile:
    """Extents and offsets of ``plan`` on the rank at ``coordinates``.

    Inner reductions have tiles ``[x, r]``, outer ones ``[r, x]``; a side of one element is no dimension.
    """

    def __init__(self, plan: KernelPlan, layouts: Layouts, coordinates: Coordinates) -> None:
        self.plan = plan
        self.space = space = plan.space
        self.schedule = schedule = plan.schedule
        self.coordinates = coordinates
        self.x_extents = [local_extent(a, coordinates) for a in space.x]
        self.r_extents = [local_extent(a, coordinates) for a in space.r]
        self.x_total = prod(self.x_extents)
        self.walk_total = prod(local_extent(a, coordinates) for a in space.walked)
        """Rows that one group of programs walks; 1 where none are."""
        self.r_total = prod(self.r_extents)
        rows = self.walk_total if space.walked else self.x_total
        self.x_block = schedule.kept if space.is_invariant else min(schedule.kept, power_of_two(rows))
        self.x_lanes = self.x_block > 1
        self.r_lanes = bool(space.r)
        self.windows = {t: window_of(e, layouts[e.tensors[0]], space) for t, e in plan.segment.windows.items()}
        own = (*plan.segment.loads, *plan.segment.outputs)
        self.strides = {t: self._strides_of(t, layout) for t, layout in layouts.items() if t in own}
        drawn = [self.index_strides(e)[0] for e in plan.segment.exprs if isinstance(e.op, Random)]
        self.walked_over = [*self.strides.values(), *(window.strides for window in self.windows.values()), *drawn]
        """Strides of all that is indexed."""
        self.pieces = self._cut_columns()
        """The columns of a program, those of whole groups side by side."""
        is_padded = rows % self.x_block != 0 or 0 < schedule.columns < self.x_block
        is_any = space.is_invariant and self.x_lanes and not schedule.columns  # one text for any number of rows
        self.x_masked = (is_padded or is_any) and len(self.pieces) == 1
        self.x_wide = self._x_is_wide()
        self.r_wide = any(self._span(space.r, self.r_extents, s, schedule.reduced) for s in self.walked_over)

    # blocks

    @property
    def is_alone(self) -> bool:
        """Is there one kept element, which then needs no index?  One of a batch is indexed as if there were others."""
        return self.x_total == 1 and not self.space.is_invariant

    @cached_property
    def pair_runs(self) -> PairRuns:
        """The runs of a row whose sums are in pairs (``pair_sums.py``)."""
        return pair_runs(self.plan.segment)

    @property
    def parts(self) -> int:
        """Elements of such a row that a lane adds up one after another."""
        return self.pair_runs.parts_of_row(self.r_total)

    @cached_property
    def is_apart(self) -> bool:
        """Do lanes without an element, or elements of other chunks, stand between the runs of such a row?

        Then lane and element differ: what has a lane for several neighbours does not know which they are.
        """
        return self.r_total > self.pair_runs.run > 0 and self.is_in_parts

    @property
    def is_in_parts(self) -> bool:
        """Is such a row cut into chunks as its runs are into parts, or has a run fewer elements than lanes?"""
        runs = self.pair_runs
        return 0 < runs.run <= self.r_total and (runs.parts > 1 or runs.is_padded)

    def shape_of(self, chunk: Chunk) -> str:
        """Text of the shape of ``chunk``'s block, which may differ from the others'."""
        x, r = chunk.piece.width or self.x_block, chunk.block
        sizes = [n for n, there in ((x, self.x_lanes), (r, self.r_lanes)) if there]
        return str(sizes if self.space.is_inner else sizes[::-1])

    @property
    def is_row_wide(self) -> bool:
        """Has each thread the same part of both rows of the tile?"""
        return self.x_lanes and self.plan.is_pair

    @property
    def r_axis(self) -> int:
        return 1 if self.x_lanes and self.space.is_inner else 0

    def lanes(self, size: int, *, reduced: bool) -> str:
        """``tl.arange`` along one side of the block."""
        text = f"tl.arange(0, {size})"
        if not (self.x_lanes and self.r_lanes):
            return text
        return text + ("[None, :]" if reduced == self.space.is_inner else "[:, None]")

    @property
    def part_start(self) -> str:
        """Text of where a program's part of a row begins, with a plus behind it; "" where it has all of the row."""
        exchange = self.plan.exchange
        if exchange is None or exchange.members == 1 or self.schedule.members:
            return ""
        return f"member * {self.r_total // exchange.members} + "

    def expanded(self, text: str) -> str:
        """A reduced value, broadcast along r again."""
        if not self.x_lanes:
            return text
        return text + ("[:, None]" if self.space.is_inner else "[None, :]")

    def chunks(self) -> list[Chunk]:
        """r cut into blocks; without r one chunk that has no lanes."""
        block = self.schedule.reduced
        if not self.r_lanes:
            return [Chunk("", 0, 1, False, block)]
        if self.is_in_parts:
            return self._chunks_of_parts()
        exchange, members = self.plan.exchange, self.schedule.members
        span = self.share if members else self.span // exchange.members if exchange is not None else self.span
        is_cut = exchange is not None and exchange.members > 1 and not members
        assert not is_cut or span % block == 0, "words of a block have no mask"
        is_aligned, starts = self.schedule.is_aligned_down, range(0, span, block)
        found: list[Chunk] = []
        for k, start in enumerate(starts):
            suffix = f"_{k}" if len(starts) > 1 else ""
            chunk = Chunk(suffix, start, min(block, span - start), start + block > span, block)
            if members or is_aligned:  # a mask each
                is_masked = start + block > self.least_share or (is_aligned and start == 0)
                chunk = replace(chunk, is_masked=is_masked, mask=f"r_mask{suffix}")
            found.append(chunk)
        return found

    def _chunks_of_parts(self) -> list[Chunk]:
        """Of the same lanes one for each part of a run, one after another (``pair_runs.py``)."""
        runs, block = self.pair_runs, self.schedule.reduced
        run, part, last = runs.run, runs.lanes, runs.last
        before = (block // part - 1) * run if block > part else 0
        found: list[Chunk] = []
        for first in range(0, runs.lanes_of_row(self.r_total), block):
            for k in range(self.parts):
                width = min(last if k == self.parts - 1 else part, block)
                start, suffix = first // part * run + first % part + k * part, f"_{len(found)}"
                found.append(Chunk(suffix, start, before + width, width < min(part, block), block))
        return found if len(found) > 1 else [replace(found[0], suffix="")]

    # columns that stand for kept elements together, and groups

    def _cut_columns(self) -> tuple[Piece, ...]:
        """Columns of whole groups, side by side, in powers of two."""
        columns = self.schedule.columns
        is_exact = self.space.grouped and columns and self.x_total % columns == 0
        widths = in_powers_of_two(columns) if is_exact else ()
        if len(widths) < 2 or any(isinstance(e.op, Pick) for e in self.plan.segment.exprs):
            return (_ALL_COLUMNS,)
        return tuple(Piece(f"_k{k}", sum(widths[:k]), n) for k, n in enumerate(widths))

    def in_pieces(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Each of ``chunks`` for each piece of the columns."""
        if len(self.pieces) == 1:
            return list(chunks)
        return [replace(c, suffix=c.suffix + p.suffix, piece=p) for c in chunks for p in self.pieces]

    @property
    def columns(self) -> int:
        """Kept elements of one program."""
        return self.schedule.columns or self.x_block

    @property
    def group_lanes(self) -> int:
        """Lanes for the groups of a program's columns; two for a single one, whose results are a tensor as well."""
        return max(power_of_two(-(-self.columns // self.space.grouped)), 2)

    @property
    def exchanged(self) -> int:
        """Lanes of what a reduction gives."""
        if not self.x_lanes:
            return 1
        return self.group_lanes if self.space.grouped else self.x_block

    def has_x_lanes(self, strides: Strides) -> bool:
        """Does the offset differ between the columns of a program?"""
        return self.x_lanes and any(g.below < self.columns for g in self.x_runs(strides))

    @property
    def share(self) -> int:
        """Reduced elements of one member of a team, whole blocks, or a multiple of what a thread loads at once."""
        members, block = self.schedule.members, self.schedule.reduced
        is_even = self.r_total % (members * block) == 0 or not self.schedule.is_held
        step = block if is_even else max(_SHARE_STEP, self.space.block_size)
        return -(-self.span // (members * step)) * step

    @property
    def span(self) -> int:
        """Elements that are walked for a row; more than it has where it is read from the beginning of a word."""
        is_held = self.schedule.is_aligned_down and self.schedule.is_held
        return self.r_total + self.word - 1 if is_held else self.r_total

    @property
    def word(self) -> int:
        """Elements of the widest load of the narrowest input that has rows."""
        return max(self.plan.device.access_bytes // self.space.narrowest, 1)

    @property
    def least_share(self) -> int:
        """Elements that every member has, wherever its row begins."""
        return min(self.share, self.last_share) if self.schedule.members else self.r_total

    @property
    def last_share(self) -> int:
        """Of the last member, which may have fewer, or none."""
        return max(self.r_total - (self.schedule.members - 1) * self.share, 0)

    @property
    def own_share(self) -> str:
        """Text of how many reduced elements this member has; less than 1 where it has none."""
        return str(self.share) if self.last_share == self.share else "valid"

    # offsets

    def x_runs(self, strides: Strides) -> list[Run]:
        steps = [strides.get(a, 0) for a in self.space.x]
        if not steps and not self.is_alone:
            return [Run(1, 1, 1, True)]  # a row outside of any batch is the first of one: no other lane is stored
        if self.x_total == 1 and not self.is_alone and any(steps):
            return [Run(1, 1, [s for s in steps if s][-1], True)]
        extents = list(self.x_extents)
        for k in takewhile(lambda k: extents[k] == 1, range(len(extents) if self.space.is_invariant else 0)):
            extents[k] = 2  # outermost, of which nothing but that there are several is in the text
        return runs(extents, steps)

    def r_runs(self, strides: Strides) -> list[Run]:
        return runs(self.r_extents, [strides.get(a, 0) for a in self.space.r])

    def lane_runs(self, tensor: BoundTensor) -> list[Run]:
        """The runs of ``tensor`` along the lanes of the tile; none where it has not an element for each lane, or has
        those of neighbouring lanes apart in memory."""
        if not self.space.is_streamed(tensor) or tensor not in self.strides or self.space.sides[0]:
            return []
        strides = self.strides[tensor]
        found = self.r_runs(strides) if self.is_along_r else self.x_runs(strides)
        return found if found and (found[-1].below, found[-1].stride) == (1, 1) else []

    @property
    def is_along_r(self) -> bool:
        """Are neighbouring lanes neighbours along a row that is reduced?"""
        return bool(self.space.r) and self.space.is_inner

    def _strides_of(self, tensor: BoundTensor, layout: Layout) -> Strides:
        """Elements that one step of each atom moves."""
        steps = dict(zip(layout.digits, layout.strides, strict=True))
        return {atom: moved_by(atom, steps) for atom in self.space.atoms[tensor]}

    def part(self, chunk: Chunk, strides: Strides) -> range | None:
        """The values in ``chunk`` of an index that walks r, and nothing else, in order; ``None`` of any other."""
        if chunk.start is None or self.schedule.members or set(strides) != set(self.space.r):
            return None
        if self.r_runs(strides) != [Run(1, self.r_total, 1, True)]:
            return None
        return range(chunk.start, chunk.start + chunk.valid)

    def index_strides(self, expr: Expr) -> tuple[Strides, int]:
        """Of a factory: how far each atom moves the row-major index of the whole, and where this rank starts."""
        domain = expr.output.domain
        steps = row_major(d for axis in domain.logical for d in axis)
        strides = {a: moved_by(a, steps) for a in self.space.atoms[expr.output]}
        return strides, sum(k * moved_by(d, steps) for d, k in self.coordinates.items() if d in domain.mesh_digits)

    def _span(self, atoms: Axis, extents: list[int], strides: Strides, block: int) -> bool:
        """Can the offset along ``atoms`` pass 32 bits?  In masked lanes too, where the outermost index runs on."""
        steps = [strides.get(a, 0) for a in atoms]
        total = prod(extents)
        ends = [(n - 1) * s for n, s in zip(extents, steps, strict=True)]
        if steps and total % block:
            ends[0] += -(-block * extents[0] // total) * steps[0]
        # the largest offset, and the most negative one, as of what is flipped: neither makes the other smaller
        ways = (sum(max(end, 0) for end in ends), sum(max(-end, 0) for end in ends))
        return max(*ways, total + block) >= INT32_LIMIT

    def _x_is_wide(self) -> bool:
        """Program ids times strides: 64-bit wherever that is free, which it is for whole rows."""
        space = self.space
        if space.r and (self.space.is_inner or not self.x_lanes):
            return True
        return any(self._span(space.x, self.x_extents, s, self.x_block) for s in self.walked_over)
