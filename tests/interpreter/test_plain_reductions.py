"""Reductions whose input is not used again: how rows and columns are cut, and what their loads tell the caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted import close, run, values
from segments import Builder, kernels_of

from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.schedulers import reduction
from shardfuse.schedulers.resources import resident
from shardfuse.segments.segment import Segment

BF16, FLOAT = DataType.BFloat16, DataType.Float
FIRST, LAST, L2_ONLY = 'eviction_policy="evict_first"', 'eviction_policy="evict_last"', 'cache_modifier=".cg"'


def summed(shape: tuple[int, ...], dtype: DataType, *axes: int, stored: bool = False) -> tuple[Segment, BoundTensor]:
    """A sum, of numbers that are ``stored`` as well."""
    b = Builder()
    x = b.input(dtype, *map(b.axis, shape))
    wide = b.op("mul", b.cast(x, FLOAT), 2.0) if stored else b.cast(x, FLOAT)
    total = b.reduce("sum", wide, list(axes), keepdim=False)
    return b.segment(*([b.cast(wide, dtype)] if stored else []), total), x


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "cut"),
    [
        (1048576, 128, BF16, (16, 4)),  # several rows of a warp
        (500000, 51, BF16, (32, 4)),
        (1000, 102, BF16, (16, 4)),
        (100000, 1000, BF16, (2, 4)),  # two warps of a row
        (50000, 777, BF16, (2, 4)),
        (20000, 5139, BF16, (1, 8)),
        (16384, 8192, BF16, (1, 16)),
        (8192, 4096, FLOAT, (1, 16)),
        (8192, 16384, BF16, (1, 32)),
        (1000, 20000, FLOAT, (1, 32)),
    ],
)
def test_rows_are_cut_by_their_bytes(rows: int, columns: int, dtype: DataType, cut: tuple[int, int]) -> None:
    """16 elements of 2 bytes a thread, or 8 of 4, up to half more; all of a row unrolled."""
    schedule = reduction.propose(summed((rows, columns), dtype, 1)[0], H200)
    assert (schedule.kept, schedule.launch.warps) == cut
    assert schedule.is_held


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "cut"),
    [
        (48, 1024, BF16, (32, 64, 4)),
        (70, 4096, BF16, (32, 64, 4)),
        (1000, 512, BF16, (32, 64, 4)),
        (100, 520, FLOAT, (16, 64, 4)),
        (40, 20000, BF16, (64, 32, 4)),
        (100, 32, BF16, (32, 64, 4)),
        (100, 34000, BF16, (128, 16, 1)),  # enough for all multiprocessors
    ],
)
def test_few_columns_are_read_whole_in_narrow_tiles(
    rows: int, columns: int, dtype: DataType, cut: tuple[int, int, int], tmp_path: Path
) -> None:
    """Loads of 64 bytes of a row side by side, so that as many multiprocessors as there are have something to do."""
    segment, x = summed((rows, columns), dtype, 0)
    schedule = reduction.propose(segment, H200)
    assert (schedule.kept, schedule.reduced, schedule.launch.warps) == cut
    assert schedule.is_held
    assert schedule.split is None
    given = values(rows, columns, dtype=dtype)
    (total,) = run(segment, {x: given}, tmp_path)
    close(total, given.double().sum(0))


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "is_whole"),
    [
        (1024, 4096, BF16, True),
        (1025, 4096, BF16, False),  # more than a program reads whole
        (1024, 16888, BF16, True),
        (1024, 16896, BF16, False),  # enough columns for tiles that are twice as wide
        (1000, 1001, BF16, False),  # loads of 2 bytes
        (1024, 8440, FLOAT, True),
        (1024, 8448, FLOAT, False),
        (1024, 1024, DataType.Int8, False),
    ],
)
def test_longer_columns_are_read_whole_where_they_are_few(
    rows: int, columns: int, dtype: DataType, is_whole: bool
) -> None:
    schedule = reduction.propose(summed((rows, columns), dtype, 0)[0], H200)
    assert (schedule.split is None) == is_whole


@pytest.mark.parametrize(("rows", "reduced"), [(20, 32), (512, 64), (513, 4)])
def test_rows_of_two_inputs_count_twice(rows: int, reduced: int) -> None:
    b = Builder()
    axes = b.axis(rows), b.axis(1024)
    x, y = (b.input(BF16, *axes) for _ in range(2))
    product = b.op("mul", b.cast(x, FLOAT), b.cast(y, FLOAT))
    schedule = reduction.propose(b.segment(b.reduce("sum", product, [0], keepdim=False)), H200)
    assert schedule.reduced == reduced
    assert (schedule.split is None) == (rows <= 512)


def test_two_sums_of_the_same_columns_count_twice() -> None:
    b = Builder()
    x = b.input(BF16, b.axis(600), b.axis(1024))
    wide = b.cast(x, FLOAT)
    sums = [b.reduce("sum", t, [0], keepdim=False) for t in (wide, b.op("mul", wide, wide))]
    assert reduction.propose(b.segment(*sums), H200).split is not None


def test_columns_of_costly_numbers_are_no_short_ones() -> None:
    b = Builder()
    x = b.input(BF16, b.axis(100), b.axis(1024))
    segment = b.segment(b.reduce("sum", b.op("tanh", b.cast(x, FLOAT)), [0], keepdim=False))
    assert not reduction.propose(segment, H200).is_held


@pytest.mark.parametrize(
    ("op", "columns", "dtype", "is_unrolled"),
    [
        ("neg", 65536, BF16, True),
        ("neg", 65536, FLOAT, False),  # 256 bytes of a thread
        ("tanh", 65536, BF16, False),
        ("tanh", 8192, BF16, True),
    ],
)
def test_long_rows_are_unrolled_where_registers_hold_them(
    op: str, columns: int, dtype: DataType, is_unrolled: bool
) -> None:
    b = Builder()
    x = b.input(dtype, b.axis(2000), b.axis(columns))
    segment = b.segment(b.reduce("sum", b.op(op, b.cast(x, FLOAT)), [1], keepdim=False))
    assert reduction.propose(segment, H200).is_held == is_unrolled


@pytest.mark.parametrize(
    ("shape", "axes", "is_pipelined"),
    [((300, 70000), [1], False), ((4096, 4096), [0, 1], False), ((16384, 8192), [0, 1], True), ((2, 2**25), [1], True)],
)
def test_loops_of_few_turns_copy_nothing_ahead(shape: tuple[int, int], axes: list[int], is_pipelined: bool) -> None:
    schedule = reduction.propose(summed(shape, BF16, *axes)[0], H200)
    assert not schedule.is_held
    assert (schedule.launch.stages > 1) == is_pipelined
    assert schedule.launch.warps == (8 if is_pipelined else 16)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((9, 51), [1]),
        ((5, 102), [1]),
        ((5, 777), [1]),
        ((2, 5139), [1]),
        ((2, 12290), [1]),
        ((20, 70001), [0, 1]),
        ((33, 70), [0]),
        ((3, 100, 77), [1]),
        ((2, 128, 40), [1]),
        ((7, 5, 64, 3), [0, 2]),
        ((3, 300, 101), [1]),
        ((2, 272, 2049), [1]),
        ((3000, 33), [0]),
    ],
)
@pytest.mark.parametrize("dtype", [FLOAT, DataType.Half])
def test_sums_of_every_cut(tmp_path: Path, shape: tuple[int, ...], axes: list[int], dtype: DataType) -> None:
    segment, x = summed(shape, dtype, *axes)
    data = values(*shape, dtype=dtype)
    (out,) = run(segment, {x: data}, tmp_path, scheduler=reduction)
    close(out, data.double().sum(axes))


def test_a_loop_that_copies_nothing_ahead(tmp_path: Path) -> None:
    schedule = reduction.propose(summed((300, 70001), FLOAT, 1)[0], H200)
    assert (schedule.parts, schedule.launch.stages) == (1, 1)
    segment, x = summed((2, 70001), FLOAT, 1)
    data = values(2, 70001)
    (out,) = run(segment, {x: data}, tmp_path, scheduler=reduction, schedule=schedule)
    close(out, data.double().sum(1))


@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "cut"),
    [
        ((32, 100, 4096), 1, BF16, (128, 16, 1)),
        ((1000, 33, 70), 1, FLOAT, (64, 16, 1)),
        ((64, 100000), 0, FLOAT, (64, 16, 1)),
        ((3000, 77, 333), 1, BF16, (256, 4, 4)),  # an element a load
        ((100, 777777), 0, BF16, (256, 4, 4)),
        ((120, 3001), 0, BF16, (64, 16, 4)),  # all of it in few programs
    ],
)
def test_short_columns_are_unrolled(
    shape: tuple[int, ...], axis: int, dtype: DataType, cut: tuple[int, int, int]
) -> None:
    schedule = reduction.propose(summed(shape, dtype, axis)[0], H200)
    assert (schedule.kept, schedule.reduced, schedule.launch.warps) == cut
    assert schedule.is_held


@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "rows"),
    [
        ((8192, 4095), 0, FLOAT, 4),
        ((64, 304, 1001), 1, BF16, 8),
        ((64, 300, 1001), 1, BF16, 1),  # 300 rows are no eights
        ((1000000, 33), 0, FLOAT, 1),  # too short to be cut into tiles together
    ],
)
def test_columns_of_single_elements(shape: tuple[int, ...], axis: int, dtype: DataType, rows: int) -> None:
    """Rows side by side are read in words, and copied ahead of time; others by many programs that copy nothing."""
    schedule = reduction.propose(summed(shape, dtype, axis)[0], H200)
    assert (schedule.split.side_by_side if schedule.split else 1) == rows
    assert (schedule.launch.stages > 1) == (rows > 1)
    assert schedule.launch.warps == (8 if shape[-1] == 33 else 4)
    assert not schedule.is_held


def test_programs_that_meet_fit_the_shared_memory_of_their_copies() -> None:
    """469 of them, 64 KB ahead of time each, would not all run at once."""
    segment, _ = summed((1000000, 36), FLOAT, 0)
    schedule = reduction.propose(segment, H200)
    ahead = (schedule.launch.stages - 1) * schedule.kept * schedule.reduced * 4
    assert schedule.is_one_launch
    assert schedule.parts <= H200.multiprocessors * (H200.shared_bytes // ahead)


def test_fewer_parts_keep_their_bound_of_registers() -> None:
    """Of 64: twice as many would have half of the programs wait for ever."""
    schedule = reduction.propose(summed((50000, 77), BF16, 0)[0], H200)
    assert schedule.is_one_launch
    assert schedule.launch.registers == 64
    assert 2 * schedule.parts <= resident(H200, schedule.launch.warps, 64)


def test_columns_that_do_not_fit_twice_are_cut_wider() -> None:
    """Rows of odd length side by side: two parts of 393 blocks would not run at once, of 197 they do."""
    segment, _ = summed((4096, 50257), BF16, 0)
    schedule = reduction.propose(segment, H200)
    assert (schedule.kept, schedule.reduced, schedule.parts) == (2048, 4, 2)
    assert schedule.is_one_launch
    assert len(reduction.kernels(segment, schedule, H200)) == 1


@pytest.mark.parametrize("shape", [(8192, 4096), (300, 70000)])
def test_what_is_read_once_leaves_the_cache_first(shape: tuple[int, int]) -> None:
    (source,) = kernels_of(summed(shape, BF16, 1)[0])
    assert FIRST in source.text
    assert LAST not in source.text


def test_what_is_stored_as_well_is_kept() -> None:
    (source,) = kernels_of(summed((8192, 4096), BF16, 1, stored=True)[0])
    assert LAST in source.text
    assert FIRST not in source.text


def test_what_other_programs_stored_is_read_past_the_cache() -> None:
    """The stage that finishes partial results loads nothing from this multiprocessor's own."""
    (source,) = kernels_of(summed((4096, 4096), BF16, 0, 1)[0])
    stage = source.text.split("def finish_")[1].split("@triton.jit")[0]
    assert stage.count("tl.load(") == stage.count(L2_ONLY) > 0
    assert FIRST in source.text.split("@triton.jit")[-1]


def test_copies_ahead_of_time_are_kept() -> None:
    (source,) = kernels_of(summed((16384, 8192), BF16, 0)[0])
    assert LAST in source.text
    assert FIRST not in source.text


def test_running_statistics_keep_what_they_walk() -> None:
    b = Builder()
    x = b.input(BF16, b.axis(2048), b.axis(131072))
    wide = b.cast(x, FLOAT)
    centred = b.op("sub", wide, b.mean(wide, [1]))
    (source,) = kernels_of(b.segment(b.mean(b.op("mul", centred, centred), [1])))
    assert LAST in source.text
    assert FIRST not in source.text


def test_short_columns_of_two_inputs(tmp_path: Path) -> None:
    b = Builder()
    i, j = b.axis(60), b.axis(130)
    x, y = (b.input(DataType.Half, i, j) for _ in range(2))
    segment = b.segment(b.reduce("sum", b.op("mul", b.cast(x, FLOAT), b.cast(y, FLOAT)), [0], keepdim=False))
    data = [values(60, 130, dtype=DataType.Half, seed=k) for k in range(2)]
    (out,) = run(segment, dict(zip((x, y), data, strict=True)), tmp_path, scheduler=reduction)
    wanted = (data[0].double() * data[1].double()).sum(0)
    close(out, wanted)


def test_many_parts_are_added_up_in_a_loop(tmp_path: Path) -> None:
    """1792 of 64 bits, more than registers hold; here of fewer columns and rows."""
    schedule = reduction.propose(sums_of_int8(20000, 301)[0], H200)
    assert schedule.split.side_by_side * schedule.parts > 1024
    segment, x = sums_of_int8(3600, 31)
    (plan,) = reduction.kernels(segment, schedule, H200)
    assert [stage.schedule.is_held for stage in plan.stages] == [False, False]
    data = values(3600, 31, dtype=DataType.Int8)
    (out,) = run(segment, {x: data}, tmp_path, scheduler=reduction, schedule=schedule)
    close(out, data.sum(0))


def sums_of_int8(rows: int, columns: int) -> tuple[Segment, BoundTensor]:
    b = Builder()
    x = b.input(DataType.Int8, b.axis(rows), b.axis(columns))
    return b.segment(b.reduce("sum", b.cast(x, DataType.Int), [0], keepdim=False)), x
