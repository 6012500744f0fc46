"""The parts of a schedule, each a few choices with numbers; a number that cannot be is refused (``ScheduleError``)."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum

from ..device import MAX_REGISTERS
from .limits import WIDEST_WARPS

MAX_PARTS = 1024
"""Programs that share a reduction at the most: each leaves a row of partial results, which a later stage reads."""
MAX_MEMBERS = 128
"""Programs of a group at the most, where each waits for a word of every other before it goes on."""
MAX_LAGGED_MEMBERS = 256
"""Programs of a group that reads ahead at the most: two for each multiprocessor of an H200.  Group norm of
1 x 128 x 20 x 256 x 256, bfloat16, took 223 us so, in a loop 263."""
REGISTERS_OF_A_THREAD = (32, MAX_REGISTERS)
"""The least that a bound is worth, and the most that a thread has.  Source: CUDA C++ programming guide."""


class ScheduleError(ValueError):
    """A schedule that no kernel can follow."""

    def __init__(self, what: str) -> None:
        super().__init__(f"no kernel can follow this schedule: {what}")


def refuse(is_wrong: bool, what: str) -> None:
    """Raises ScheduleError where ``is_wrong``."""
    if is_wrong:
        raise ScheduleError(what)


def in_words(part: object) -> str:
    """``Tile(kept=4, reduced=256)``, ``Registers(packed)``: the flags that are set, and numbers that are no default."""
    told: list[str] = []
    for field in fields(part):  # pyright: ignore[reportArgumentType]
        value: object = vars(part)[field.name]
        if isinstance(value, Exchange):
            told.append(in_words(value))
        elif isinstance(value, bool):
            told += [field.name] if value else []
        elif field.default is MISSING or value != field.default:
            told.append(f"{field.name}={value}")
    return f"{type(part).__name__}({', '.join(told)})" if told else type(part).__name__


# order


@dataclass(frozen=True)
class Tile:
    """Each program has one block of kept elements and takes reduced ones in chunks; both are powers of two.

    kept: kept elements of one program.
    reduced: reduced elements of a chunk, or of one turn of a loop; 1 where nothing is reduced.
    columns: how many of the ``kept`` lanes have an element, where that is no power of two; 0 for all of them.
    """

    kept: int
    reduced: int = 1
    columns: int = 0

    def __post_init__(self) -> None:
        _check_block(self.kept, self.reduced)
        refuse(not 0 <= self.columns <= self.kept, f"{self.columns} columns in {self.kept} lanes")


@dataclass(frozen=True)
class Sides:
    """Each program has a tile whose sides are each contiguous in some tensor; both are powers of two.

    along: elements along the axis that is fastest in the output.  across: along the one that is fastest in an input.
    """

    along: int
    across: int

    def __post_init__(self) -> None:
        _check_block(self.along, self.across)


@dataclass(frozen=True)
class RowLoop:
    """A persistent grid takes rows in turn, and carries sums of columns from row to row.

    rows: of one turn; a power of two where one program has them side by side, any number where a group does.
    chunk: elements of a row that are taken together, a power of two.
    keeps: what is the same for all rows stays in registers; else it is loaded with every row.
    """

    rows: int
    chunk: int
    keeps: bool = True

    def __post_init__(self) -> None:
        _check_block(self.chunk)
        refuse(self.rows < 1, f"{self.rows} rows in a turn")


Order = Tile | Sides | RowLoop


def _check_block(*sides: int) -> None:
    wrong = next((n for n in sides if n < 1 or n & (n - 1)), None)
    refuse(wrong is not None, f"a side of {wrong} elements is no power of two")


# residency


@dataclass(frozen=True)
class Registers:
    """Reduced elements are read once, and stay in registers for all phases.

    packed: 16-bit inputs stay as they are loaded, two in a register, and are widened at each use.
    eager: all loads come before the first reduction, because nothing else hides what later ones would wait for.
    accumulated: elements of a load that a thread merges into one lane of a running variance; 1: chunks are reduced one
    after the other.
    """

    packed: bool = False
    eager: bool = False
    accumulated: int = 1

    def __post_init__(self) -> None:
        refuse(self.accumulated < 1, f"{self.accumulated} elements are accumulated")
        refuse(self.packed and self.eager, "packed rows are all loaded first anyway")


@dataclass(frozen=True)
class Loop:
    """Reduced elements are read by a loop, once for each phase.

    accumulated: elements of a block that a thread merges into one lane of a running statistic, all of them its own.
    """

    accumulated: int = 1

    def __post_init__(self) -> None:
        refuse(self.accumulated < 1, f"{self.accumulated} elements are accumulated")


Residency = Registers | Loop


# groups of programs


@dataclass(frozen=True)
class Immediate:
    """Programs of a group wait for the partial results of the row that they have just read.

    counted: they count each other in, and one thread polls the count; else each thread polls the words that it takes.
    prefetches: the next row is fetched into L2 meanwhile.
    """

    counted: bool = True
    prefetches: bool = False


@dataclass(frozen=True)
class Lagged:
    """Programs of a group read ``rows`` more rows, 1 or 2, before they wait for the partial results of this one."""

    rows: int = 1

    def __post_init__(self) -> None:
        refuse(self.rows not in (1, 2), f"{self.rows} rows are read ahead")


@dataclass(frozen=True)
class WithRanks:
    """Programs of a group give their partial results to one another and to the groups of other ranks that have the same
    row, in words of ``RankExchange``."""


Exchange = Immediate | Lagged | WithRanks


@dataclass(frozen=True)
class Group:
    """Programs that share each row, or each block of columns, and exchange their partial results.

    members: how many they are.  programs: of all groups, how many are resident at once; the grid is no larger.
    """

    members: int
    programs: int
    exchange: Exchange = Immediate()

    def __post_init__(self) -> None:
        is_lagged = isinstance(self.exchange, Lagged)
        most = MAX_LAGGED_MEMBERS if is_lagged else MAX_MEMBERS
        refuse(not 1 <= self.members <= most, f"{self.members} programs share a row, at most {most} can")
        is_power = not self.members & (self.members - 1)
        refuse(not (is_lagged or is_power), f"{self.members} programs wait for each other, which is no power of two")
        refuse(
            self.programs < self.members, f"{self.members} programs wait for each other, {self.programs} run at once"
        )

    @property
    def at_once(self) -> int:
        """How many groups are resident at once."""
        return self.programs // self.members


# split reductions


@dataclass(frozen=True)
class Split:
    """A reduction that programs share without waiting for each other: each stores what it has of it.

    parts: how many programs, or groups of a row loop, share it.
    in_one_launch: what finishes the partial results is a stage of the same launch; else it is a second kernel.
    side_by_side: reduced rows that are kept apart as if they were one, so that what is read is aligned; added up last.
    """

    parts: int
    in_one_launch: bool = False
    side_by_side: int = 1

    def __post_init__(self) -> None:
        refuse(not 1 <= self.parts <= MAX_PARTS, f"a reduction is split into {self.parts}, at most {MAX_PARTS}")
        refuse(self.side_by_side < 1, f"{self.side_by_side} rows side by side")


class Access(Enum):
    """How rows are loaded."""

    NATIVE = "native"
    ALIGN_DOWN = "align down"
    """From the word that a row begins in, with predicates at its ends: loads are wide whatever the row's length."""


@dataclass(frozen=True)
class Launch:
    """Options of a launch.

    warps: of a program, a power of two.  stages: turns of a loop whose loads are in flight, this one included.
    registers: a bound for the compiler, where one more program a multiprocessor is worth recomputing for.
    """

    warps: int = 4
    stages: int = 3
    registers: int | None = None

    def __post_init__(self) -> None:
        is_right = 1 <= self.warps <= WIDEST_WARPS and not self.warps & (self.warps - 1)
        refuse(not is_right, f"{self.warps} warps, not a power of two up to {WIDEST_WARPS}")
        refuse(self.stages < 1, f"{self.stages} pipeline stages")
        least, most = REGISTERS_OF_A_THREAD
        refuse(self.registers is not None and not least <= self.registers <= most, f"{self.registers} registers")
