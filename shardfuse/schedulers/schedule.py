"""A schedule: how a kernel walks its space.  Six parts, each frozen, each chosen on its own.

| part | choices |
|---|---|
| order | ``Tile``: a block of elements a program; ``Sides``: a tile with two sides; ``RowLoop``: rows in turn |
| residency | ``Registers``: reduced elements are read once and held; ``Loop``: they are read in every phase |
| group | ``None``: a program has rows of its own; ``Group``: programs share each row, and exchange partial results |
| split | ``None``; ``Split``: programs share a reduction, and what each has of it is finished later |
| access | ``Access.NATIVE``; ``Access.ALIGN_DOWN``: misaligned rows are read in the aligned words that contain them |
| launch | ``Launch``: warps, pipeline stages, a bound on registers |

How a group exchanges is part of the group, because no program without a group exchanges anything, and a row loop of a
group exchanges along rows while its column sums are split: two questions with an answer each.  What cannot be is
refused when a schedule is made (``ScheduleError``), so that what is proposed, tried by the tuner or read from a file
can be run.  What a device and the strides of a tensor allow beside is for ``KernelPlan`` and ``codegen/misaligned.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .schedule_parts import (
    Access,
    Exchange,
    Group,
    Immediate,
    Lagged,
    Launch,
    Order,
    Registers,
    Residency,
    RowLoop,
    Sides,
    Split,
    Tile,
    WithRanks,
    in_words,
    refuse,
)
from .schedule_parts import Loop as Loop
from .schedule_parts import ScheduleError as ScheduleError

WIDE = Registers()
"""Rows are held as they are computed with, the loads of each phase where it needs them."""
LAUNCH = Launch()


@dataclass(frozen=True)
class Schedule:
    """How a kernel walks its space; the parts are described where they are defined.

    Raises ScheduleError for parts that do not go together.
    """

    order: Order
    residency: Residency = WIDE
    group: Group | None = None
    split: Split | None = None
    access: Access = Access.NATIVE
    launch: Launch = LAUNCH

    def __post_init__(self) -> None:
        self._check_order()
        self._check_residency()
        self._check_group()
        self._check_split()
        if self.access is Access.ALIGN_DOWN:
            refuse(self.kept > 1 or self.split is not None, "misaligned rows are read one by one, and whole")
            is_alone = not self.is_held and self.group is None
            refuse(
                not (is_alone or self.is_packed or self.lag), "misaligned rows are packed, looped over or read ahead"
            )

    def _check_order(self) -> None:
        plain = (WIDE, None, None, Access.NATIVE)
        if isinstance(self.order, Sides):
            own = (self.residency, self.group, self.split, self.access)
            refuse(own != plain, "a tile with two sides reduces nothing")
        if isinstance(self.order, RowLoop):
            refuse(self.residency != WIDE, "a row loop holds its rows in registers, as they come")
            refuse(self.split is None and self.group is not None, "a row loop of a group splits its column sums")
            refuse(self.group is None and bool(self.order.rows & (self.order.rows - 1)), "rows side by side are lanes")

    def _check_residency(self) -> None:
        if self.is_packed:
            refuse(self.kept > 1 or self.group is not None, "a packed row is one program's, which has no other")
        refuse(self.is_eager and self.group is not None, "a group has its own order of loads")

    def _check_group(self) -> None:
        if self.group is None:
            return
        match self.group.exchange:
            case Immediate(prefetches=prefetches):
                refuse(isinstance(self.order, RowLoop), "a row loop of a group reads ahead")
                refuse(prefetches and not self.is_held, "a loop reads its row again and fetches no other")
            case Lagged(rows=rows):
                refuse(not self.is_held or self.kept > 1, "who reads ahead holds one row at a time")
                refuse(rows > 1 and isinstance(self.order, RowLoop), "a row loop reads one turn ahead")
            case WithRanks():
                refuse(not self.is_held or self.kept > 1, "a group whose ranks exchange holds one row at a time")

    def _check_split(self) -> None:
        if self.split is None or isinstance(self.order, RowLoop):
            refuse(self.split is not None and self.split.side_by_side > 1, "a row loop has its own rows")
            return
        refuse(self.split.parts < 2, "a reduction of one part is not split")
        refuse(self.is_held or self.group is not None, "a split reduction is a loop of programs that do not wait")

    def __str__(self) -> str:
        """``Tile(kept=1, reduced=4096), Registers(packed), 16 warps, at most 64 registers``"""
        reduces = not isinstance(self.order, Sides) and (self.reduced > 1 or self.residency != WIDE)
        parts = [self.order, self.residency if reduces and not isinstance(self.order, RowLoop) else None]
        told = [in_words(part) for part in (*parts, self.group, self.split) if part is not None]
        if self.is_aligned_down:
            told.append(self.access.name)
        told.append(_counted(self.launch.warps, "warp"))
        if isinstance(self.order, RowLoop) or not self.is_held or self.lag:
            told.append(_counted(self.launch.stages, "stage"))
        if self.launch.registers is not None:
            told.append(f"at most {self.launch.registers} registers")
        return ", ".join(told)

    # what its parts come to

    @property
    def kept(self) -> int:
        """Kept elements that a program has side by side."""
        match self.order:
            case Tile(kept=kept) | Sides(along=kept):
                return kept
            case RowLoop(rows=rows):
                return rows if self.group is None else 1

    @property
    def reduced(self) -> int:
        """Elements of a chunk, of a turn of a loop, or of the other side of a tile."""
        match self.order:
            case Tile(reduced=reduced) | Sides(across=reduced) | RowLoop(chunk=reduced):
                return reduced

    @property
    def columns(self) -> int:
        """How many of the kept lanes have an element, where that is no power of two; else 0."""
        return self.order.columns if isinstance(self.order, Tile) else 0

    @property
    def turn(self) -> int:
        """Rows that a row loop takes in one turn."""
        return self.order.rows if isinstance(self.order, RowLoop) else 1

    @property
    def is_held(self) -> bool:
        """Do reduced elements stay in registers?"""
        return isinstance(self.residency, Registers)

    @property
    def is_packed(self) -> bool:
        return isinstance(self.residency, Registers) and self.residency.packed

    @property
    def is_eager(self) -> bool:
        return isinstance(self.residency, Registers) and self.residency.eager

    @property
    def accumulated(self) -> int:
        """Elements that a thread merges into one lane of a running statistic."""
        return self.residency.accumulated

    @property
    def keeps(self) -> bool:
        """Does a row loop hold what is the same for all its rows?"""
        return isinstance(self.order, RowLoop) and self.order.keeps

    @property
    def is_aligned_down(self) -> bool:
        return self.access is Access.ALIGN_DOWN

    @property
    def members(self) -> int:
        """Programs that share a row; 0 where a program has rows of its own."""
        return self.group.members if self.group else 0

    @property
    def programs(self) -> int:
        """Of all groups, how many are resident at once; 0 where there are none."""
        return self.group.programs if self.group else 0

    @property
    def exchange(self) -> Exchange | None:
        """How the programs of a group exchange; ``None`` where there is none."""
        return self.group.exchange if self.group else None

    @property
    def lag(self) -> int:
        """Rows that a group reads before it waits for this one."""
        return self.exchange.rows if isinstance(self.exchange, Lagged) else 0

    @property
    def is_counted(self) -> bool:
        """Do the programs of a group count each other in?"""
        return isinstance(self.exchange, Immediate) and self.exchange.counted

    @property
    def prefetches(self) -> bool:
        """Do the programs of a group fetch their next row into L2 while they wait?"""
        return isinstance(self.exchange, Immediate) and self.exchange.prefetches

    @property
    def parts(self) -> int:
        """Programs, or groups of a row loop, that share a reduction; 1 where none do."""
        return self.split.parts if self.split else 1

    @property
    def is_one_launch(self) -> bool:
        """Are partial results finished in the launch that makes them?"""
        return self.split is not None and self.split.in_one_launch

    @property
    def form(self) -> tuple[str, ...]:
        """Which choice each part is: the tuner changes numbers, never the form."""
        parts = (self.order, self.residency, self.group, self.exchange, self.split)
        return tuple(type(part).__name__ for part in parts)

    def blocks(self, kept: int) -> int:
        """Programs, or groups, that so many kept elements take, one block each."""
        return -(-kept // (self.columns or self.kept))

    def grid(self, blocks: int) -> int:
        """Programs of a launch over so many blocks of kept elements; a group takes those that follow in turn."""
        return min(blocks, self.group.at_once) * self.group.members if self.group else blocks * self.parts

    # others like it

    def sized(self, *, kept: int | None = None, reduced: int | None = None) -> Schedule:
        """With another block."""
        kept, reduced = self.kept if kept is None else kept, self.reduced if reduced is None else reduced
        match self.order:
            case Tile():
                return replace(self, order=replace(self.order, kept=kept, reduced=reduced))
            case Sides():
                return replace(self, order=Sides(kept, reduced))
            case RowLoop():
                refuse(self.group is not None and kept != 1, "a group has no rows side by side")
                rows = self.order.rows if self.group else kept
                return replace(self, order=replace(self.order, rows=rows, chunk=reduced))

    def split_into(self, parts: int) -> Schedule:
        """In so many parts; not split at all where that is one of a tile."""
        if parts == 1 and not isinstance(self.order, RowLoop):
            return replace(self, split=None)
        return replace(self, split=replace(self.split or Split(parts), parts=parts))

    def finished_at_once(self, *, is_one_launch: bool = True) -> Schedule:
        """With what finishes its partial results in the same launch, or in a second one."""
        refuse(self.split is None, "nothing is left to be finished")
        return replace(self, split=self.split and replace(self.split, in_one_launch=is_one_launch))

    def with_warps(self, warps: int) -> Schedule:
        return replace(self, launch=replace(self.launch, warps=warps))

    def with_stages(self, stages: int) -> Schedule:
        return replace(self, launch=replace(self.launch, stages=stages))

    def with_registers(self, registers: int | None) -> Schedule:
        return replace(self, launch=replace(self.launch, registers=registers))

    def accumulating(self, elements: int) -> Schedule:
        """With so many elements that a thread merges into one lane."""
        return replace(self, residency=replace(self.residency, accumulated=elements))

    def shared_by(self, members: int, programs: int) -> Schedule:
        """By groups of so many programs, which exchange as they do already, or count each other in."""
        group = self.group or Group(members, programs)
        return replace(self, group=replace(group, members=members, programs=programs))


def _counted(n: int, what: str) -> str:
    return f"1 {what}" if n == 1 else f"{n} {what}s"
