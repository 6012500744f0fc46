"""Numbers that were measured on a GPU and follow from none of its specifications: where one form of a kernel overtakes
another, how much a thread holds, how many warps are worth keeping resident.

Each field says what it bounds, in which unit, and what was timed.  Times are those of whole kernels on an H200, float16
or bfloat16 unless another type is named; "4 vectors" are weights, biases or the like beside the rows.  Pairs of
schedules that were timed are in ``benchmarks/timed_schedules.json``, by the field that decides.  A GPU without numbers
of its own takes the H200's.  Warps that stay resident on a multiprocessor bound registers by ``Device.bound``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .invariant_rows import InvariantRows
from .measured_collectives import Collectives
from .measured_reductions import Reductions


@dataclass(frozen=True)
class Rows:
    """Rows that one program holds as they are computed with."""

    long: int = 8192
    """Elements of a row that is read in one go, at the most."""
    chunks: int = 24
    """Chunks that a held row is unrolled into, at the most: beyond, the code outgrows the instruction cache."""
    short: int = 44
    """Values of a row for each lane of a warp that holds it with other rows (75 registers were counted for 41)."""
    held: int = 48
    """Values of a row that a thread holds before the row gets more warps: the fewer warps, the more rows are in
    flight. LayerNorm of 8192 x 12288 with 4 vectors took 104 us with 8 warps, 111 with 16."""
    held_resident: int = 24
    """Resident warps of threads that hold so much."""
    most_held: int = 56
    most_held_resident: int = 20
    """Values of each thread of four warps, where eight would hold half as much each, and resident warps then.
    LayerNorm of 8192 x 7168 with 4 vectors took 62.7 us so, with 8 warps 66.7; softmax 63.0 and 68.2."""
    narrow: int = 40
    """Values of 16 bits that a thread holds with ``narrow_resident`` warps, counted in compiled kernels."""
    narrow_resident: int = 32
    paired: int = 32
    paired_lanes: float = 0.875
    """Elements that a thread holds of a pair of rows, at most, and the part of lanes that have one, at least. A
    pair reads many vectors once: LayerNorm of 8192 x 2048 with 4 of them took 22.5 us so, with a row each 23.5; of
    8192 x 4096 37.9 and 39.9; of 8192 x 3072, a quarter of the lanes masked, 32.5 and 29.5."""
    drawn: int = 2
    """Values that a thread is taken to hold where random numbers are made, at least: softmax with dropout of rows
    of 12290 float32 elements, held as one value each, spilled 2404 bytes."""
    few_turns: int = 4
    """Rows of a multiprocessor, up to which all run at once: latency is what they take, and more warps with less
    each, and all loads at once, shorten it. LayerNorm of 333 x 777 with 4 vectors took 7.4 us with a warp for each
    row, with eight 5.4; RMSNorm of 64 x 4096 6.3 with four and 4.7 with sixteen."""
    few_each: int = 4
    """Elements that a thread has then, at least."""
    few_elements: int = 16384
    """Elements of all rows of a multiprocessor then, at most: 8192 of each of four took 9.5 us, with half as many
    warps 8.8."""


@dataclass(frozen=True)
class Chains:
    """Rows with many reductions that follow one another: in each, all warps of a row wait."""

    phases: int = 4
    """Reductions of a chain, from which on it is one."""
    warps: int = 4
    held: int = 64
    """Warps of a row, and the values of it that a thread holds before it gets more. Two layer norms in a row, 8 x
    1024 x 7168, took 84 us so, with 8 warps 96."""
    rows_held: int = 160
    """Values of all rows that a thread holds, in 255 registers: several rows wait at once. 8 x 4096 x 3072 took 115
    us with 4 rows, with 2 125, with one 141; 8 x 2048 x 5120 116, 121 and 127. At most two rows where chunks are
    masked: of 5000 columns 4 rows took 147, 2 127; of 13000 two 103, one 131."""


@dataclass(frozen=True)
class Packed:
    """Rows that one program holds as bits, two values of 16 bits in a register."""

    words: int = 32
    resident: int = 32
    """Registers of a thread that hold its row, and resident warps."""
    bytes: int = 16 * 1024
    """A longer row is held so: below, held as float32 is as fast."""
    odd_bytes: int = 4 * 1024
    """The same of a misaligned row: softmax of 4096 x 50257, 8192 x 32001, 16384 x 5139 took 240, 250 and 83 us in
    whole words, element by element 786, 520 and 133; RMSNorm 258, 295, 91 and 315, 454, 107. Masks, and weights
    that come element by element, take registers: twice as many for half as many threads."""
    odd_weighted_bytes: int = 32 * 1024
    """The same with several per-column operands: LayerNorm of 16384 x 5139, 16384 x 9001, 8192 x 32001 with 2 vectors
    took 131, 210 and 403 us so, element by element 110, 183 and 490."""
    turns: int = 4
    """Rows of a multiprocessor, at least, where a program of 32 warps has one for itself: fewer go to groups."""


@dataclass(frozen=True)
class Columns:
    """Short columns that one program holds."""

    tile: int = 4096
    """Elements of a tile: 32 of each thread of 4 warps."""
    short: int = 128
    """Reduced elements, at the most, that a tile reads without a loop, where it needs them once."""
    longest: int = 1024
    """Reduced elements of all inputs together that a tile holds in registers, at the most."""
    rows: int = 8
    """Rows, of all inputs, that a thread holds whole columns of, one load of each."""
    tall_tile: int = 24576
    """Elements of a tile of longer columns. Softmax over dim 0 of 1024 x 65536 took 106 us, in a loop 164; of 700 x
    65536 60, half as wide 71; of 256 x 262144 77, in a loop 112."""
    tall_lanes: int = 128
    """Lanes of such a tile that a thread has, some of them masked."""


@dataclass(frozen=True)
class Groups:
    """Programs that share a row and wait for each other."""

    held: int = 64
    """Elements of a row that a thread holds, of all inputs: the more, the fewer exchanges. Softmax of 4096 x 65536
    took 313 us so, with 32 in twice as many programs 322."""
    pair_held: int = 40
    """The same of each of two inputs of 16 bits. The gradient of a group norm of 2 x 640 x 64 x 64, 2 x 960 x 96 x
    96 took 18 and 56 us so, with 32 in twice as large groups 21 and 71."""
    of_blocks: tuple[tuple[int, int], ...] = ((40, 16), (64, 12))
    """Elements that a thread holds of each of two inputs of which blocks are summed too, and resident warps. That
    gradient of 32 x 128 x 256 x 256 took 547 us with 64, with 40 in twice as large groups more than 693; of 16 x 320 x
    64 x 64, 40 elements of a thread, 54 us with 16 resident warps and 57 with 12."""
    resident: int = 20
    wide_resident: int = 16
    """Resident warps of groups that hold 16-bit rows, and 32-bit ones, which spilled up to 300 bytes with 20."""
    loop_resident: int = 16
    roomy_resident: int = 12
    """The same of groups that loop, and where all of them are resident with fewer warps: group norm of 2 x 1280 x
    32 x 32, channels-last, took 13.5 us so, with 16 14.7."""
    few_held: int = 40
    few_resident: int = 32
    """Elements of a thread, and resident warps, where there is at most a row for each multiprocessor: what groups
    wait for is each other. Group norm of 2 x 320 x 128 x 128 took 20.7 us so, with 20 warps 24.5, in a loop 22.4;
    LayerNorm of 128 x 65536 18.7, with the next row fetched ahead 21.1."""
    few_members: int = 16
    """Programs of the largest group that holds a row on an under-occupied grid; others loop, and read it again from
    L2. 1 x 512 x 256 x 256 took 61 us so, held by 128 programs 68."""
    short_run: int = 1024
    """Bytes of a run, below which rows that no program holds, of an under-occupied grid, are iterated as columns.
    Group norm of 2 x 2560 x 64 x 64, 8 x 256 x 64 x 64 in 2 groups, channels-last, took 45 and 20 us so, in rows 101
    and 49; the gradient of 2 x 1280 x 32 x 32, float32, 21 and 50."""
    of_ranks: int = 16
    """Programs of all ranks that share a row which ranks exchange statistics of, at most: each asks for a word of every
    other. RMSNorm of 131072 elements over two ranks took 4.8 us for one row with eight programs of each rank, 7.5 for
    eight rows so, and 7.1 for 32 rows with two; more programs were not tried."""
    widest_columns: int = 512
    """Columns of whole channel groups that a program takes, at most."""
    cached: float = 0.7
    """The part of L2 that what is read twice may take, beside what is written."""
    exchanged: float = 0.5
    """Bytes that a member reads of the others, for one of its own, at most."""
    collected: int = 16
    """Words of each result that a thread takes from an exchange buffer, at most: with 32 registers spill."""
    turns: int = 4
    """Turns of its loop that a member has, at least."""
    short_turns: int = 10
    """Turns of a loop over columns in groups, up to which half as many threads take half as much at once. Group
    norm of 4 x 320 x 64 x 64, 8 x 320 x 32 x 32, channels-last, took 18.4 and 12.5 us so, else 22.1 and 17.4; its
    gradient 23.9 and 15.4, else 30.4 and 21.3."""
    full: float = 0.75
    """The part of resident programs that are used, from which on one warp is enough for each of fewest turns. Group
    norm of 2 x 640 x 64 x 64, channels-last, took 16.5 us so, with two 17.8; of 8 x 256 x 64 x 64 in 2 groups 18.4
    and 19.7."""
    planes: int = 16 << 20
    """Bytes that have to be spared where columns are summed first, by a kernel of their own, and groups of programs and
    another kernel would read them three times in all, with two launches less. The gradient of a group norm of 2 x 640 x
    64 x 64, 21 MB of float16, took 31 us so, else 35; of 32 x 128 x 256 x 256 658 and 955; of 2 x 1280 x 32 x 32 23.3
    and 23.1."""
    polled: tuple[float, float] = (0.5, 8)
    """Words of each result for a thread, the fewest and the most, where members poll them and do not count each
    other in. The gradient of a group norm of 2 x 320 x 128 x 128, channels-last, took 42.7 us so, else 47.5. Of
    fewer, many threads poll the same word; of more, each polls one after the other: a video's took 340 us, else
    303."""


@dataclass(frozen=True)
class Pairs:
    """Groups, and programs, that take two rows at a time, for which they read many vectors once."""

    many: int = 2
    """Vectors beside each input of a row, above which a kernel spends most of its time on them, and keeps the row's own
    elements out of the first-level cache. LayerNorm of 8192 x 4096 with 4 took 37.0 us with the row kept out, 38.3 with
    the row in; RMSNorm of 32768 x 4096, with one vector, 133.6 and 129.7."""
    cached: float = 0.75
    """The part of the first-level cache above which vectors do not stay in it. LayerNorm of 8192 x 20480 with 4 of
    them took 179 us with a program for each row, 201 in pairs; of 8192 x 24576 284 and 251."""
    held: int = 32
    """Elements of each row that a thread holds, at most, of 8 warps; 4 hold twice as many."""
    resident: tuple[tuple[int, int], ...] = ((24, 24), (40, 16), (56, 12))
    """Resident warps of threads that hold so many elements at most. LayerNorm of 4096 x 49152 with 4 vectors took
    254 us with 24 elements and 24 warps, with 20 warps 283; of 8192 x 28672 298 with 56, 307 with 28 and 20 warps.
    Those that hold more than the first line poll each other's words: 4096 x 65536, 1024 x 262144 took 334 and 379
    us so, counting each other in 351 and 409."""
    turns: int = 4
    """Pairs that a group takes one after the other, at least."""


@dataclass(frozen=True)
class Lagged:
    """Groups that read rows before they wait for those that they have."""

    bytes: int = 64
    resident: int = 24
    """Bytes of a row that a thread holds, and as many of the next one, and resident warps."""
    members: int = 16
    folded_members: int = 2
    """Members, at most, that hold so little; of a variance that is taken in load by load, where shared memory takes
    the copies of fewer warps: LayerNorm of 4096 x 65536 took 295 us with 8 members, 306 with 16; RMSNorm 289 and
    283."""
    most_resident: int = 16
    most_bytes: int = 160
    """Resident warps of larger groups, and the bytes of a row that a thread of the largest holds."""
    two_ahead_bytes: int = 128
    two_ahead_resident: int = 12
    """Of a thread that holds so much of each of three rows: loads are in flight while it takes exponentials and
    waits. Softmax of 2048 x 131072, 1024 x 262144 took 279 and 273 us so, with two rows of half as much 302 and
    316; RMSNorm, which the compiler copies ahead of time, 322 where that takes 286."""
    odd_warps: int = 8
    odd_held_bytes: int = 128
    """Of misaligned rows without vectors: fewer threads evaluate the predicates at their ends. Softmax's gradient
    of 4096 x 50257, 2048 x 128257 took 353 and 415 us so, with 4 warps 405 and 439; softmax of 2048 x 128257 324,
    two rows ahead 339; RMSNorm, with a vector, 387, with 4 warps 373. Pairs of elements are wide enough: softmax of
    2048 x 128258 took 300 us so, in whole words 313; RMSNorm 380 and 305."""
    odd_weighted_bytes: int = 128 * 1024
    """Of misaligned rows with vectors, from which on they are read in whole words: RMSNorm of 2048 x 128257 took
    371 us so, element by element 401; 300 x 50257 36.7 and 32.8."""
    single_bytes: int = 64
    single_resident: int = 20
    single_each: int = 4
    """Of rows of a variance whose loads are a few bytes, which nothing is gained from copying ahead: bytes of a
    thread, resident warps, and elements of a vector that are read at a time. LayerNorm of 4096 x 50257, 50258 and
    50260 with 4 vectors took 492, 416 and 375 us so, copied ahead 779, 760 and 658."""
    fold: int = 8
    """Elements of a load from which on a variance is taken in load by load, so that no row is unpacked at once."""
    turns: float = 1.5
    """Rows that a group takes one after the other, at least. RMSNorm of 128 x 65536, 64 x 131072, 16 x 1048576 took
    13.3, 13.5 and 24.5 us so, where programs wait for the row that they have just read 18.0, 17.7 and 35.3; the
    gradient of softmax of the first two 18.1 and 17.4, else 23.9 and 23.8."""
    more_turns: float = 4
    """The same of a variance with vectors, and where a small group holds each row of an under-occupied grid."""


@dataclass(frozen=True)
class RowLoops:
    """Rows that a persistent grid takes in turn while it adds up columns."""

    each: int = 32
    """Elements of its rows that a thread holds. RMSNorm's backward of 576000 x 384 took 326 us with 24, 334 with
    48."""
    resident: int = 8
    """Resident warps."""
    many_turns: int = 16
    """Turns of a program, from which on tiles of rows have two warps, not four, each and are twice as many: they
    take turns better, but leave twice as many partial results. LayerNorm's backward of 65536 x 768 took 86 us so,
    else 90; of 8192 x 768 21 and 20."""
    programs: int = 4
    """Programs of a multiprocessor, at most, where each has a row: LayerNorm's backward of 10000 x 1280 took 31 us
    so, with eight 36; of 100000 x 1280 204 and 206."""
    few_chunks: int = 6
    chunks: int = 12
    halvings: int = 5
    """Chunks of a row of half a load, and of a tile of rows, at most; a tile's are down to a sixteenth of a warp's
    load."""
    lagged_shapes: tuple[tuple[int, int, int], ...] = ((12, 2, 2), (16, 1, 2), (12, 1, 2), (8, 1, 2))
    lagged_pairs: tuple[int, int, int] = (8, 2, 3)
    """Of groups: resident warps, rows of a turn, and 16-byte loads of each row, the best first. RMSNorm's backward
    of 8192 x 32768 took 397 us with two rows of two loads, with one row 420, in larger programs 434. Of
    LayerNorm's, two rows spill: 2048 x 32768 took 166 us, with one 121. Three loads are better where members have
    them whole, LayerNorm's of 4096 x 12288 90 us and 98, RMSNorm's of 4096 x 24576 156 and 164, and worse where
    some lanes are masked, 2048 x 32768 141 us."""
    lagged_turns: int = 4
    """Rows of a group, at least: its sums of columns are as much memory as two rows."""


@dataclass(frozen=True)
class Splits:
    """Reductions that programs share."""

    turns: int = 2
    worth: int = 8
    """Turns of a program's loop, at least, and of a whole reduction, below which a second stage costs more than it
    saves."""
    most: int = 512
    """Parts, at most: of more, adding them up takes as long as what is saved."""
    resident: tuple[int, ...] = (8, 12, 16)
    """Resident warps that are tried, in this order, until all parts are resident."""
    last: int = 16384
    """Partial results that one program adds up, at most: of more, all programs have a part. The sum over dim 0 of
    65536 x 512, 264 parts, took 29 us so, by one program 51."""
    idle: float = 0.125
    """The part of the lanes of a program's turns that may have nothing to do. The weight gradients of a group norm
    of 2 x 1280 x 32 x 32, channels-last, took 11.4 us so, else 13.4."""


@dataclass(frozen=True)
class Loops:
    """Loops that read their input again in each phase."""

    row_each: int = 16
    """Elements of a row that a thread takes at once."""
    each: int = 32
    """Elements of columns that a thread takes at once, where more phases than one need registers."""
    grouped_bytes: int = 8192
    """Bytes of all inputs in a tile of columns in groups: group norm of 1 x 512 x 256 x 256, channels-last, took 63
    us so, with half of it 66; of 2 x 320 x 128 x 128, with 5 KB, 31, twice as much 38."""
    read_alone: float = 42e3
    """Bytes that a program of 16 warps, alone on its multiprocessor, reads in a microsecond of a row that it reads
    again in each phase. In a graph, over two ranks, RMSNorm of 8 x 131072, two phases of 128 KB, took 10.2 us, group
    norm of 2 x 320 x 128 x 128 by rows, three of 164 KB, 16.3, softmax of 8 x 131072, three of 128 KB, 17.9."""
    two_kernels: float = 12.0
    """Microseconds that two kernels and a collective of a number for each row take beside their rows: chosen between
    those three, which took 10.0, 19.5 and 15.2 us so, and batch norm of 32 x 64 x 56 x 56, 19.2, in one kernel 16.0. In
    calls one kernel gains more: those of 8 rows took 14 and 19 us, else 36 and 57."""


@dataclass(frozen=True)
class Maps:
    """Kernels that reduce nothing."""

    idle: int = 8
    odd_idle: int = 5
    """Of so many lanes of a walk in rows one may have nothing to do; the second of misaligned rows: a gradient of
    cross entropy of 16384 x 5139 took 103 us with one of 6 idle, in a flat walk 125."""
    fetched: int = 2
    """Values of each row from which on misaligned rows are walked so: a flat walk takes wide words, but fetches
    them for every element."""
    deep: int = 128
    """Rows that programs walk down from which on they do so: of fewer most of a tile's lanes may be behind the end."""
    lanes: int = 128
    walked: int = 2048
    programs: int = 32
    """Columns, and elements, of a tile that programs walk down, and programs for each multiprocessor. The gradient of a
    group norm's input behind its sums, channels-last, took 14.1 us of 2 x 320 x 128 x 128 so, 7.6 of 2 x 640 x 64 x
    64 and 28.6 of 16 x 320 x 64 x 64, in a flat walk 17.5, 8.2 and 35.9; of 2 x 1280 x 32 x 32, half a tile for each
    program, 4.7 and 4.2."""
    smallest: int = 1024
    """Elements of a transpose's tile below which multiprocessors are rather left idle."""


@dataclass(frozen=True, eq=False)  # compared by identity: a device is part of the key of each plan
class Measured:
    """All that was measured on one GPU, by the form of kernel that it decides about."""

    rows: Rows = Rows()
    invariant_rows: InvariantRows = field(default_factory=InvariantRows)
    chains: Chains = Chains()
    packed: Packed = Packed()
    columns: Columns = Columns()
    groups: Groups = Groups()
    pairs: Pairs = Pairs()
    lagged: Lagged = Lagged()
    row_loops: RowLoops = RowLoops()
    splits: Splits = Splits()
    reductions: Reductions = field(default_factory=Reductions)
    loops: Loops = Loops()
    maps: Maps = Maps()
    collectives: Collectives = field(default_factory=Collectives)


H200_MEASURED = Measured()
"""The only GPU that was measured."""
UNTIMED = Measured(
    rows=Rows(held_resident=20, narrow_resident=24),
    groups=Groups(resident=16, few_resident=20, loop_resident=12),
    pairs=Pairs(resident=((24, 20), (40, 12), (56, 8))),
    lagged=Lagged(most_resident=12, two_ahead_resident=8),
    row_loops=RowLoops(lagged_shapes=((8, 2, 2), (12, 1, 2), (8, 1, 2))),
    reductions=Reductions(stored_resident=12),
)
"""The H200's numbers with fewer resident warps where assemblers of other architectures spill what that of 9.0 holds:
of 287 kernels 10 did for 8.0, 22 for 10.0 and 19 for 12.0, up to 652 bytes (``benchmarks/compiled_kernels.py``)."""


def measured_for(capability: int) -> Measured:
    """What a GPU of this compute capability is planned with that has no numbers of its own."""
    return H200_MEASURED if capability == 90 else UNTIMED
