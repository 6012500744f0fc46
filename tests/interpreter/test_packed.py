"""Rows held as words, two 16-bit values each, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted import close, run, values
from segments import Builder, rms_norm

from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.schedulers import persistent
from shardfuse.schedulers.schedule import Access, Registers, Schedule, Tile
from shardfuse.segments.segment import Segment

Case = tuple[Segment, Callable[..., torch.Tensor]]


def of_rms_norm(columns: int, dtype: DataType) -> Case:
    def wanted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    return rms_norm(3, columns, dtype), wanted


def of_layer_norm(columns: int, dtype: DataType) -> Case:
    b = Builder()
    x = b.cast(b.input(dtype, b.axis(3), b.axis(columns)), DataType.Float)
    centred = b.op("sub", x, b.mean(x, [1]))
    variance = b.mean(b.op("mul", centred, centred), [1])
    unit = b.op("mul", centred, b.op("rsqrt", b.op("add", variance, 1e-5)))
    return b.segment(b.cast(unit, dtype)), lambda x: torch.nn.functional.layer_norm(x, [columns])


def of_softmax(columns: int, dtype: DataType) -> Case:
    b = Builder()
    x = b.cast(b.input(dtype, b.axis(3), b.axis(columns)), DataType.Float)
    e = b.op("exp", b.op("sub", x, b.reduce("max", x, [1])))
    return b.segment(b.cast(b.op("div", e, b.reduce("sum", e, [1])), dtype)), lambda x: torch.softmax(x, 1)


def of_softmax_backward(columns: int, dtype: DataType) -> Case:
    b = Builder()
    i, j = b.axis(3), b.axis(columns)
    dy, y = (b.cast(b.input(dtype, i, j), DataType.Float) for _ in range(2))
    along = b.reduce("sum", b.op("mul", dy, y), [1])
    return b.segment(
        b.cast(b.op("mul", y, b.op("sub", dy, along)), dtype)
    ), lambda dy, y: y * (dy - (dy * y).sum(1, keepdim=True))


def of_batch_norm_backward(columns: int, dtype: DataType) -> Case:
    """Rows in pieces, one of every sample."""
    b = Builder()
    i, j, k = b.axis(3), b.axis(2), b.axis(columns)
    x, dy = (b.cast(b.input(dtype, i, j, k), DataType.Float) for _ in range(2))
    along, mean = (b.mean(t, [0, 2]) for t in (b.op("mul", x, dy), dy))
    dx = b.op("sub", b.op("sub", dy, mean), b.op("mul", x, along))

    def wanted(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        along, mean = (t.mean([0, 2], keepdim=True) for t in (x * dy, dy))
        return dy - mean - x * along

    return b.segment(b.cast(dx, dtype)), wanted


@pytest.mark.parametrize("case", [of_rms_norm, of_layer_norm, of_softmax, of_softmax_backward, of_batch_norm_backward])
@pytest.mark.parametrize(("columns", "dtype"), [(1024, DataType.BFloat16), (1000, DataType.Half), (129, DataType.Half)])
def test_packed(tmp_path: Path, case: Callable[[int, DataType], Case], columns: int, dtype: DataType) -> None:
    segment, torchs = case(columns, dtype)
    data = [values(*t.domain.local_shape(0), dtype=dtype, seed=k) for k, t in enumerate(segment.inputs)]
    inputs = dict(zip(segment.inputs, data, strict=True))
    schedule = replace(persistent.propose(segment, H200).sized(kept=1, reduced=256), residency=Registers(packed=True))
    (out,) = run(segment, inputs, tmp_path, scheduler=persistent, schedule=schedule)
    close(out, torchs(*(t.double() for t in data)))
    if case not in (of_layer_norm, of_softmax):  # the same sums, chunk by chunk
        (plain,) = run(
            segment, inputs, tmp_path, scheduler=persistent, schedule=replace(schedule, residency=Registers())
        )
        assert torch.equal(out, plain)


@pytest.mark.parametrize("case", [of_rms_norm, of_layer_norm, of_softmax, of_softmax_backward])
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(1027, DataType.BFloat16), (509, DataType.Half), (769, DataType.BFloat16), (130, DataType.Half)],
)
def test_rows_that_begin_within_a_word(
    tmp_path: Path, case: Callable[[int, DataType], Case], columns: int, dtype: DataType
) -> None:
    """The second row is not a number anywhere: what is read of it beside the others is not used."""
    segment, torchs = case(columns, dtype)
    data = [values(*t.domain.local_shape(0), dtype=dtype, seed=k) for k, t in enumerate(segment.inputs)]
    data[0][1] = torch.nan
    schedule = Schedule(Tile(1, 256), Registers(packed=True), access=Access.ALIGN_DOWN)
    (out,) = run(
        segment, dict(zip(segment.inputs, data, strict=True)), tmp_path, scheduler=persistent, schedule=schedule
    )
    wanted = torchs(*(t.double() for t in data))
    close(out[::2], wanted[::2])
    assert out[1].isnan().all()


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("columns", [1000, 1027])
def test_one_element_for_all_of_a_row(tmp_path: Path, columns: int, aligned: bool) -> None:
    """Both inputs have rows of the same shape, of which one was expanded, as the gradient of a sum is."""
    segment, torchs = of_softmax_backward(columns, DataType.BFloat16)
    dy, y = (
        values(3, 1, dtype=DataType.BFloat16).expand(3, columns),
        values(3, columns, dtype=DataType.BFloat16, seed=1),
    )
    access = Access.ALIGN_DOWN if aligned else Access.NATIVE
    schedule = Schedule(Tile(1, 256), Registers(packed=True), access=access)
    (out,) = run(
        segment, dict(zip(segment.inputs, (dy, y), strict=True)), tmp_path, scheduler=persistent, schedule=schedule
    )
    close(out, torchs(dy.double(), y.double()))


def test_statistics_are_stored_too(tmp_path: Path) -> None:
    b = Builder()
    x = b.cast(b.input(DataType.Half, b.axis(5), b.axis(1030)), DataType.Float)
    mean = b.mean(x, [1])
    centred = b.op("sub", x, mean)
    scale = b.op("rsqrt", b.op("add", b.mean(b.op("mul", centred, centred), [1]), 1e-5))
    segment = b.segment(mean, scale, b.cast(b.op("mul", centred, scale), DataType.Half))
    data = values(5, 1030, dtype=DataType.Half)
    schedule = Schedule(Tile(1, 256), Registers(packed=True))
    found = run(segment, {segment.inputs[0]: data}, tmp_path, scheduler=persistent, schedule=schedule)
    wide = data.double()
    variance, wanted = torch.var_mean(wide, 1, correction=0, keepdim=True)
    factor = torch.rsqrt(variance + 1e-5)
    for got, exact in zip(found, (wanted, factor, (wide - wanted) * factor), strict=True):
        close(got, exact)


def test_rows_of_minus_infinity(tmp_path: Path) -> None:
    """Some elements, and all of a row: NaN, as of torch."""
    segment, torchs = of_softmax(1000, DataType.Half)
    data = values(3, 1000, dtype=DataType.Half)
    data[0, ::3] = data[1] = float("-inf")
    schedule = replace(persistent.propose(segment, H200).sized(kept=1, reduced=256), residency=Registers(packed=True))
    (out,) = run(segment, {segment.inputs[0]: data}, tmp_path, scheduler=persistent, schedule=schedule)
    wanted = torchs(data.double())
    assert torch.equal(out.isnan(), wanted.isnan())
    close(out.nan_to_num(), wanted.nan_to_num())


def test_what_is_packed() -> None:
    """Rows whose words 32 warps hold, where no vector is read for a reduction; wider ones are for teams."""
    held = {n: persistent.propose(of_softmax(n, DataType.BFloat16)[0], H200).is_packed for n in (8192, 8200)}
    assert held == {8192: False, 8200: True}
    schedule = persistent.propose(rms_norm(8192, 65536, DataType.BFloat16), H200)
    assert (schedule.is_packed, schedule.launch.warps, schedule.launch.registers) == (True, 32, 64)
    for other in (rms_norm(8192, 65544, DataType.BFloat16), rms_norm(64, 65536, DataType.BFloat16)):
        assert persistent.propose(other, H200).members > 1
