"""Blocks of rows that a kernel holds, beside statistics of the whole rows, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fusion_check import check

from shardfuse import DataType, FusionDefinition
from shardfuse.device import H200
from shardfuse.schedulers import candidates, persistent
from shardfuse.schedulers.plan import KernelPlan
from shardfuse.schedulers.schedule import Group, Lagged, Loop, Schedule, ScheduleError, Tile

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about lanes that are masked
DTYPES = {
    torch.bfloat16: DataType.BFloat16, torch.float16: DataType.Half, torch.float32: DataType.Float,
    torch.float64: DataType.Double,
}  # fmt: skip


def norm_in_blocks(columns: int, block: int, dtype: torch.dtype, *, reduction: str = "max") -> FusionDefinition:
    """Rows over their root mean square, each block over what ``reduction`` makes of its magnitudes; and that."""
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x, w = (fd.define_tensor(shape, contiguity=True, dtype=DTYPES[dtype]) for shape in ([-1, columns], [columns]))
        wide = x if dtype is torch.float64 else o.cast(x, DataType.Float)
        rstd = o.rsqrt(o.add(o.mean(o.mul(wide, wide), [-1], keepdim=True), 1e-6))
        blocks = o.reshape(o.mul(o.mul(wide, rstd), w), [-1, columns // block, block])
        scale = o.add(getattr(o, reduction)(o.abs(blocks), [-1]), 0.25)
        fd.add_output(o.reshape(o.div(blocks, o.broadcast(scale, [False, False, True])), [-1, columns]))
        fd.add_output(scale, stride_order=[0, 1])
    return fd


def drawn(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, columns), (columns,))]


def kernels(fd: FusionDefinition) -> list[KernelPlan]:
    plan = fd.fec.last_plan
    assert plan is not None
    return [kernel for segment in plan.segments for kernel in segment.kernels]


@pytest.mark.parametrize(
    ("rows", "columns", "block", "dtype"),
    [
        (5, 64, 2, torch.float32), (5, 96, 32, torch.float16), (3, 384, 128, torch.bfloat16),
        (3, 1000, 8, torch.float64), (9, 1024, 512, torch.float32), (2, 5120, 128, torch.bfloat16),
        (1, 6144, 2048, torch.float32),
    ],
)  # fmt: skip
def test_one_kernel_has_rows_and_their_blocks(rows: int, columns: int, block: int, dtype: torch.dtype) -> None:
    fd = norm_in_blocks(columns, block, dtype)
    check(fd, drawn(rows, columns, dtype))
    (kernel,) = kernels(fd)
    assert kernel.schedule.reduced >= block


@pytest.mark.parametrize("reduction", ["sum", "min", "mean"])
def test_any_reduction(reduction: str) -> None:
    fd = norm_in_blocks(640, 16, torch.bfloat16, reduction=reduction)
    check(fd, drawn(7, 640, torch.bfloat16))
    assert len(kernels(fd)) == 1


def test_rows_held_as_words() -> None:
    fd = norm_in_blocks(12288, 128, torch.bfloat16)
    check(fd, drawn(2, 12288, torch.bfloat16))
    (kernel,) = kernels(fd)
    assert kernel.schedule.is_packed


def test_every_schedule_of_a_row() -> None:
    """Those that the tuner tries, too; none cuts a row within a block."""
    fd = norm_in_blocks(1536, 256, torch.bfloat16)
    data = drawn(9, 1536, torch.bfloat16)
    check(fd, data)
    (kernel,) = kernels(fd)
    tried = candidates.candidates("persistent", kernel.segment, kernel.schedule, H200)
    assert tried
    assert all(s.reduced >= 256 and s.is_held and not s.group for s in tried)
    assert {s.kept for s in (*tried, kernel.schedule)} >= {1, 2}


@pytest.mark.parametrize(("columns", "dtype"), [(1 << 16, torch.float32), (50000, torch.bfloat16)])
def test_rows_that_a_group_holds(columns: int, dtype: torch.dtype) -> None:
    """Each member has whole blocks, the last one fewer."""
    fd = norm_in_blocks(columns, 16, dtype)
    check(fd, drawn(2, columns, dtype))
    (kernel,) = kernels(fd)
    assert kernel.schedule.group


def test_rows_that_nothing_holds_are_two_kernels() -> None:
    """Programs hand each other words of 32 bits; and a block of a group's row is one warp's."""
    for dtype, block in ((torch.float64, 128), (torch.float32, 256)):
        fd = norm_in_blocks(1 << 16, block, dtype)
        check(fd, drawn(1, 1 << 16, dtype))
        assert len(kernels(fd)) > 1


def test_blocks_that_no_tile_has_are_kernels_of_their_own() -> None:
    for columns, block in ((384, 48), (300, 20)):
        fd = norm_in_blocks(columns, block, torch.float32)
        check(fd, drawn(4, columns, torch.float32))
        assert len(kernels(fd)) > 1


def test_nan_stays_in_its_block() -> None:
    """But for the statistic, which is the same for all of the row: of one that is the largest alone."""
    columns = 512
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x = fd.define_tensor([-1, columns], contiguity=True)
        top = o.max(o.where(o.ne(x, x), 0.0, x), [-1], keepdim=True)
        blocks = o.reshape(o.sub(x, top), [-1, columns // 64, 64])
        scale = o.max(o.abs(blocks), [-1])
        fd.add_output(o.reshape(o.div(blocks, o.broadcast(scale, [False, False, True])), [-1, columns]))
        fd.add_output(scale)
    (data, _) = drawn(3, columns, torch.float32)
    data[1, 70] = float("nan")
    values, scales = check(fd, [data])
    assert values is not None
    assert scales is not None
    assert len(kernels(fd)) == 1
    assert values.isnan().sum() == 64
    assert scales.isnan().sum() == 1


def test_numbers_of_blocks_are_read_for_their_blocks() -> None:
    """What was quantised by blocks, normed again: scales are loaded once for each block."""
    columns, block = 768, 64
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        q = fd.define_tensor([-1, columns // block, block], contiguity=True, dtype=DataType.BFloat16)
        scales = fd.define_tensor([-1, columns // block], contiguity=True)
        x = o.mul(o.cast(q, DataType.Float), o.broadcast(scales, [False, False, True]))
        unit = o.mul(x, o.rsqrt(o.mean(o.mul(x, x), [-2, -1], keepdim=True)))
        top = o.add(o.max(o.abs(unit), [-1]), scales)
        fd.add_output(o.div(unit, o.broadcast(top, [False, False, True])))
        fd.add_output(top)
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(5, columns // block, block, generator=generator).bfloat16()
    check(fd, [data, torch.rand(5, columns // block, generator=generator) + 0.5])
    assert len(kernels(fd)) == 1


def test_schedules_that_have_no_blocks_are_refused() -> None:
    fd = norm_in_blocks(1024, 128, torch.bfloat16)
    check(fd, drawn(4, 1024, torch.bfloat16))
    (kernel,) = kernels(fd)

    def made(schedule: Schedule) -> object:
        return persistent.kernels(kernel.segment, schedule, H200)

    assert made(kernel.schedule)
    plain = Schedule(Tile(1, 512))
    assert made(plain)
    for wrong in (
        plain.sized(reduced=64),
        replace(plain, group=Group(2, 4, Lagged(2))),
        replace(plain, residency=Loop()),
    ):
        with pytest.raises(ScheduleError, match="no kernel can follow"):
            made(wrong)
