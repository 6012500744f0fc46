"""Columns that are added up for their groups and by themselves, and kernels that walk down columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from block_cases import arranged, channels_last_gradients, drawn
from fusion_check import check

from benchmarks.roundings import assert_near
from shardfuse import DataType, FusionDefinition
from shardfuse.device import H200
from shardfuse.schedulers.candidates import candidates
from shardfuse.schedulers.plan import KernelPlan
from shardfuse.schedulers.pointwise import down_the_columns
from shardfuse.schedulers.schedule import Loop

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about lanes that are masked


def kernels(fd: FusionDefinition) -> list[KernelPlan]:
    return [kernel for segment in fd.fec.last_plan.segments for kernel in segment.kernels]


def forms(found: Sequence[KernelPlan]) -> list[str]:
    return [kernel.name.split("_")[0] for kernel in found]


@pytest.fixture
def _as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of few bytes are as those of many: no group holds them, and programs walk down their columns."""
    own = H200.measured
    groups, maps = (
        replace(own.groups, planes=0, held=1, pair_held=1),
        replace(own.maps, deep=32, lanes=16, walked=64, programs=2),
    )
    like = replace(H200, multiprocessors=4, measured=replace(own, groups=groups, maps=maps))
    monkeypatch.setattr("shardfuse.device.here.H200", like)


@pytest.mark.usefixtures("_as_large")
@pytest.mark.parametrize(
    ("shape", "groups", "dtype"),
    [
        ((2, 8, 8, 9), 2, DataType.BFloat16),
        ((3, 24, 5, 7), 4, DataType.Half),
        ((2, 16, 12, 12), 2, DataType.Half),
        ((4, 40, 4, 6), 4, DataType.Half),
    ],
)
def test_gradients_read_their_inputs_twice(shape: Sequence[int], groups: int, dtype: DataType) -> None:
    fd = channels_last_gradients(shape, groups, dtype, is_last=True)
    given = drawn(shape, dtype)
    results = check(fd, arranged(given, is_last=True))
    n, c = shape[:2]
    planes, _, rows, total = kernels(fd)
    assert forms(kernels(fd))[:3] == ["reduction", "reduction", "pointwise"]
    images = [t for t in planes.segment.inputs if t.ndim == 4]
    assert images == [t for t in rows.segment.inputs if t in images]
    assert len(images) == 2
    assert [t.domain.local_shape(0) for t in planes.segment.outputs] == [(n, c)] * 2
    assert {t.domain.local_elements for t in total.segment.inputs} == {n * c}
    in_order = channels_last_gradients(shape, groups, dtype, is_last=False)
    found = in_order.execute(arranged(given, is_last=False))
    assert forms(kernels(in_order)) == forms(kernels(fd))
    for x, y in zip(found, results, strict=True):
        y = y.permute(0, 3, 1, 2) if y.ndim == 4 else y
        assert x.stride() == y.stride()
        assert_near(x, y.double(), y, n=2)


@pytest.mark.usefixtures("_as_large")
def test_columns_are_walked_where_what_is_beside_them_is_the_same() -> None:
    """What every pixel has of its sample's groups is loaded once for all that a program walks."""
    for shape, lanes in (((2, 16, 16, 16), 16), ((2, 8, 24, 24), 16), ((3, 8, 12, 12), 8)):
        fd = channels_last_gradients(shape, 2, DataType.Half, is_last=True)
        check(fd, arranged(drawn(shape, DataType.Half), is_last=True))
        rows = kernels(fd)[2]
        assert isinstance(rows.schedule.residency, Loop)
        assert (rows.schedule.kept, rows.space.kept) == (lanes, shape[0] * shape[1])
        assert rows.space.reduced == shape[2] * shape[3]
        assert rows.schedule.parts > 1


@pytest.mark.usefixtures("_as_large")
@pytest.mark.parametrize("shape", [(2, 8, 8, 8), (1, 16, 12, 12)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_one_image_and_rows_without_a_weight(shape: Sequence[int], *, has_weight: bool) -> None:
    """Of one there is nothing more to add up; without a weight sums are of nothing but what columns are summed of."""
    fd = channels_last_gradients(shape, 2, DataType.BFloat16, is_last=True, has_weight=has_weight)
    check(fd, arranged(drawn(shape, DataType.BFloat16)[: 2 + has_weight], is_last=True))


def test_few_bytes_are_read_again() -> None:
    """By groups that loop, with fewer launches."""
    shape = (2, 1280, 32, 32)
    fd = channels_last_gradients(shape, 32, DataType.Half, is_last=True)
    few = [k for s in fd.fec.plan_for(None, None).segments for k in s.kernels]
    assert forms(few) == ["looped", "reduction"]
    many = channels_last_gradients((2, 640, 64, 64), 32, DataType.Half, is_last=True)
    assert len(many.fec.plan_for(None, None).segments) == 4


def test_a_promise_keeps_its_order() -> None:
    fd = channels_last_gradients((2, 640, 64, 64), 32, DataType.Half, is_last=True, invariant="batch")
    planned = [k for s in fd.fec.plan_for(None, None).segments for k in s.kernels]
    assert all("p" not in t.name for k in planned for t in k.segment.outputs)


def test_columns_beside_whole_tensors_alone_are_read_flat() -> None:
    """Of vectors that lie along the columns a flat walk loads as many as fit into one access."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([64, 128, 256], contiguity=True, dtype=DataType.Half)
        w = fd.define_tensor([256], contiguity=True, dtype=DataType.Half)
        fd.add_output(fd.ops.mul(x, w))
    (segment,) = fd.fec.plan_for(None, None).segments
    (kernel,) = segment.kernels
    assert down_the_columns(kernel.space) is None
    assert not isinstance(kernel.schedule.residency, Loop)
    check(fd, [torch.randn(64, 128, 256).half(), torch.randn(256).half()])


def planned(fd: FusionDefinition) -> list[KernelPlan]:
    return [k for s in fd.fec.plan_for(None, None).segments for k in s.kernels]


def test_rows_of_which_sums_alone_are_wanted() -> None:
    for shape, rows, columns in (((8, 4096, 512), [1, 2], [0, 1]), ((8, 512, 64, 64), [1, 2, 3], [0, 2, 3])):
        with FusionDefinition() as fd:
            x = fd.define_tensor(list(shape), contiguity=True)
            fd.add_output(fd.ops.sum(x, rows))
            fd.add_output(fd.ops.sum(x, columns))
        assert planned(fd)


def test_a_sum_of_rows_that_is_a_factor_of_another() -> None:
    with FusionDefinition() as fd:
        o = fd.ops
        x = fd.define_tensor([2, 64, 64, 32, 20], contiguity=True)
        first = o.mean(x, [1, 2, 4], keepdim=True)
        second = o.mean(o.mul(x, first), [1, 2, 4], keepdim=True)
        fd.add_output(o.add(o.sub(x, first), second))
        fd.add_output(o.sum(x, [0, 1, 2]))
    assert planned(fd)


@pytest.mark.usefixtures("_as_large")
def test_a_sum_of_rows_that_is_a_factor_of_another_is_right() -> None:
    shape = (2, 4, 5, 4, 6)
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x = fd.define_tensor(list(shape), contiguity=True)
        first = o.mean(x, [1, 2, 4], keepdim=True)
        second = o.mean(o.mul(x, first), [1, 2, 4], keepdim=True)
        fd.add_output(o.add(o.sub(x, first), second))
        fd.add_output(o.sum(x, [0, 1, 2]))
    check(fd, [torch.randn(shape, generator=torch.Generator().manual_seed(0))])


def test_planes_that_are_as_large_as_what_they_are_of_are_not_made() -> None:
    """Of two pixels each: their sums would be written, and read by two kernels."""
    with FusionDefinition() as fd:
        o = fd.ops
        x = fd.define_tensor([8, 640, 8192, 2], contiguity=True, dtype=DataType.Half, stride_order=[3, 0, 2, 1])
        wide = o.cast(x, DataType.Float)
        grouped = o.reshape(wide, [8, 32, 20, 8192, 2])
        centred = o.sub(grouped, o.mean(grouped, [2, 3, 4], keepdim=True))
        fd.add_output(o.cast(o.reshape(centred, [8, 640, 8192, 2]), DataType.Half), stride_order=[3, 0, 2, 1])
        fd.add_output(o.cast(o.sum(wide, [0, 3]), DataType.Half))
    assert forms(planned(fd)) == ["looped", "reduction"]


@pytest.mark.parametrize("shape", [(2, 4096, 4096), (17, 1024, 4096)])
def test_few_rows_are_walked_flat(shape: Sequence[int]) -> None:
    """Most lanes of a tile would be behind their end."""
    (kernel,) = planned(scaled_by_two(shape))
    assert not isinstance(kernel.schedule.residency, Loop)


def scaled_by_two(shape: Sequence[int]) -> FusionDefinition:
    """By a number for each row of the dim before the last, and by one for each column."""
    with FusionDefinition() as fd:
        o = fd.ops
        x = fd.define_tensor(list(shape), contiguity=True, dtype=DataType.Half)
        of_rows, of_columns = (fd.define_tensor([n], contiguity=True) for n in shape[1:])
        scaled = o.mul(o.cast(x, DataType.Float), o.broadcast(of_rows, [True, False, True]))
        fd.add_output(o.cast(o.add(scaled, of_columns), DataType.Half))
    return fd


def test_the_tuner_has_both_walks() -> None:
    fd = scaled_by_two((1024, 32, 512))
    (segment,) = fd.fec.plan_for(None, None).segments
    (kernel,) = segment.kernels
    assert isinstance(kernel.schedule.residency, Loop)
    found = candidates("pointwise", segment.segment, kernel.schedule, H200)
    assert {isinstance(s.residency, Loop) for s in found} == {True, False}
