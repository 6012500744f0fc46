"""What was measured on an H200 of reductions whose input is read once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reductions:
    """Reductions whose input is read once."""

    row_bytes: int = 32
    """Bytes of a row that a thread takes, up to half more. The sum over rows of 16384 x 8192 took 67.6 us so, by
    half as many threads 69.5; of 8192 x 4096, float32, 35.8 and 37.3."""
    unrolled_bytes: int = 128 * 1024
    """Bytes of a row, up to which no loop walks it: the sum over rows of 8192 x 16384 took 66.9 us so, in a loop
    70.9; of 2048 x 32768 37.9 and 39.7."""
    few_turns: int = 8
    loop_block: int = 8192
    """Turns of a program that shares its rows, up to which 16 warps take so many elements at once: they hide their
    loads better than copies ahead of time. The sum of 4096 x 4096 took 15.5 us so, else 17.0; over rows of 300 x
    70000 18.3 and 20.2."""
    stored_resident: int = 16
    """Resident warps of threads that store what they add up: left alone the compiler takes fewer registers, and its
    loads wait. SwiGLU's backward of 32768 x 4096 took 337 us so, else 389."""
    each: int = 64
    """Elements of columns that a thread takes at once, where they are computed in 32 bits."""
    many_columns: int = 65536
    """Columns from which on, or where arithmetic is heavy, each warp has columns of its own. The sum over dim 0 of
    512 x 262144 took 72 us so, with rows in different warps 74; the bias gradient of GELU 288 and 393."""
    tall_lanes: int = 128
    """Lanes of a tile beside which statistics of a sample are read in each turn: the fewer columns, the more rows
    share them. The weight gradients of a group norm of 2 x 640 x 64 x 64 took 14 us so, else 23."""
    plane_lanes: int = 64
    """The same where columns of several tensors are summed of each sample by itself. Those of a group norm's gradient,
    channels-last, took 17.7 us of 2 x 320 x 128 x 128 so, 11.0 of 2 x 640 x 64 x 64 and 253 of 32 x 128 x 256 x 256;
    with 1024 lanes, which are of several samples or idle, 22.8, 14.7 and 280."""
    turned_tile: tuple[int, int] = (16, 64)
    turned_accumulated: int = 2
    turned_programs: int = 4
    """Columns and rows of a tile whose tensors are contiguous along different axes, elements that a thread merges, and
    programs of a multiprocessor. The gradients of a layer scale and of a bias behind it, 64 x 96 x 56 x 56, took 45
    us so, in tiles of 128 x 32 107, and 55 in twice as many programs; 64 x 384 x 14 x 14 19, of 512 x 8 59, and 21.
    Those of heads that become rows, 384 x 64 x 512 of 16 bits, and their sum, took 25 us, whole columns 94, and 23 in
    twice as many programs; of 12288 x 32 x 49 43, 137 before, 37 in half as many again and 45 in twice as many. 32 x
    64 is up to 8 % faster where most tensors are contiguous along columns, and takes 2.8 times as long where they are
    along rows."""
    full_lanes: tuple[int, int] = (128, 64)
    most_idle: float = 0.125
    """Lanes of narrower tiles for columns that arithmetic limits, and which share of them may be idle in wide ones.
    The gradients of a GELU and its bias, bfloat16, 200704 x 384, took 127 us in tiles of 128, of 512 166; 50176 x 768
    69 and 87, 12544 x 1536 40 and 54, 25216 x 1280 60 and 84, 16384 x 640 27 and 34. Where wide ones are full, narrow
    ones took 0.99 to 1.05 of their time."""
    few_rows: int = 32
    """Rows, of all inputs, that are read one by one by the thread that adds them up. The sum over dim 0 of 4 x
    33554432 took 97 us so, with the rows of a tile in different warps 1197."""
    wide_enough: int = 4096
    """Elements of rows side by side, of which tiles of columns are cut."""
    narrow_tile: tuple[int, int] = (64, 32)
    narrow_resident: int = 32
    narrow_programs: int = 8
    """Of loads of less than 4 bytes: the tile, resident warps, and programs of a multiprocessor."""
    few_columns: int = 128
    """Columns up to which half as many programs of twice as many warps share those. The sum over dim 0 of 300000 x
    33, float64, took 32 us so, in more programs 49; of 1000000 x 9 15 and 29."""
    short_lanes: int = 16
    short_rows: int = 16
    """Of short columns: loads of a warp side by side, and rows of a tile. The sum over the middle of 32 x 100 x
    4096 took 13.4 us so, in a loop 14.9; of 1000 x 33 x 70, float32, 8.3 and 11.8."""
    least_short_lanes: int = 4
    """Loads side by side to which such a tile is narrowed, in four warps, before multiprocessors idle. The weight
    gradient of an RMSNorm of 64 x 4096, bfloat16, took 1.84 us so, with 16 and a warp 4.96; of 64 x 16384 2.75 and
    5.39; the sum over dim 0 of 128 x 1024 1.59 and 3.26."""
    longest_whole: int = 1024
    """Elements of a column, of all inputs and for each sum of it, at the most, that the narrowest tile reads whole
    rather than in parts. The weight gradient of an RMSNorm of 512 x 4096, bfloat16, took 3.1 us so, in parts 6.3; of
    512 x 1024 2.6 and 4.9; the sum over dim 0 of 1024 x 4096 2.9 and 5.9."""
    narrow_short_tile: tuple[int, int] = (256, 4)
    """The same of loads of less than 4 bytes. The sum over the middle of 3000 x 77 x 333 took 62 us so, in a loop
    118."""
    least_lanes: int = 64
    """Lanes to which such a tile is narrowed before multiprocessors idle: over dim 0 of 120 x 3001 it took 6.4 us,
    256 wide 19."""
