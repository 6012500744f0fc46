"""Merged statistics as generated kernels, on simulated ranks: one rank runs at a time, which the interpreter needs."""

from __future__ import annotations

import pytest
import torch
from fusion_check import check
from test_statistics import DEFINITIONS, numbers

import shardfuse
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType


def run(name: str, x: torch.Tensor) -> int:
    size = shardfuse.initialize().world_size
    with FusionDefinition() as fd:
        t = fd.define_tensor(list(x.shape), contiguity=True, dtype=DataType.from_torch(x.dtype))
        for y in DEFINITIONS[name](fd, t):
            fd.add_output(y)
        t.set_device_mesh(DeviceMesh(list(range(size))))
        t.outer_split(1, size, uneven=x.shape[1] % size != 0)
        t.axis(1).parallelize(ParallelType.mesh_x)
    check(fd, [x])
    return len(fd.explain().collectives)


@pytest.mark.parametrize(("columns", "ranks"), [(16, 2), (5, 4)])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_one_exchange(name: str, columns: int, ranks: int) -> None:
    x = numbers(6, columns).to(torch.float16 if name == "half" else torch.float32)
    assert shardfuse.simulate(run, ranks, args=(name, x)) == [1] * ranks


def on_two_meshes(x: torch.Tensor, w: torch.Tensor) -> list[str]:
    """Both outputs read ``x``; only the last rank has what the second reads beside it."""
    size = shardfuse.initialize().world_size
    with FusionDefinition(backend="triton") as fd:
        a, b = (fd.define_tensor(list(t.shape), contiguity=True) for t in (x, w))
        doubled, chosen = fd.ops.add(a, a), fd.ops.where(fd.ops.gt(a, 0.0), b, 1.0)
        b.set_device_mesh(DeviceMesh(list(range(size))))
        b.outer_split(0, size)
        b.axis(0).parallelize(ParallelType.mesh_x)
        doubled.set_device_mesh(DeviceMesh(list(range(size))))
        chosen.set_device_mesh(DeviceMesh([size - 1]))
        fd.add_output(doubled)
        fd.add_output(chosen)
    check(fd, [x, w])
    return [s.scheduler for s in fd.explain().segments]


def test_outputs_of_different_ranks_are_different_kernels() -> None:
    x, w = numbers(3, 4, 6).float(), numbers(6).float()
    assert shardfuse.simulate(on_two_meshes, 3, args=(x, w)) == [["pointwise", "communication", "pointwise"]] * 3


def normalised(x: torch.Tensor) -> list[torch.Tensor | None]:
    """What every rank has of the statistics is replicated; some ranks have nothing of what is normalised."""
    size = shardfuse.initialize().world_size
    with FusionDefinition(backend="triton") as fd:
        t = fd.define_tensor(list(x.shape), contiguity=True)
        for y in DEFINITIONS["layer_norm"](fd, t):
            fd.add_output(y)
        t.set_device_mesh(DeviceMesh(list(range(size))))
        t.outer_split(1, size, uneven=True)
        t.axis(1).parallelize(ParallelType.mesh_x)
    return check(fd, [x])[1:]


@pytest.mark.parametrize("columns", [5, 17])
def test_statistics_are_bitwise_equal_where_shards_are_empty(columns: int) -> None:
    """A rank without elements evaluates by torch, which adds up in another order than a kernel."""
    found = shardfuse.simulate(normalised, 8, args=(numbers(37, columns),))
    for k in range(2):
        assert all(torch.equal(own[k], found[0][k]) for own in found)


def picked(x: torch.Tensor, target: torch.Tensor) -> list[str]:
    """The sum of one element of each row, which is another rank's, nobody's or this one's."""
    size, columns = shardfuse.initialize().world_size, x.shape[1]
    with FusionDefinition(backend="triton") as fd:
        t = fd.define_tensor(list(x.shape), contiguity=True)
        at = fd.define_tensor([-1, 1], contiguity=True, dtype=DataType.Int)
        total = fd.ops.sum(fd.ops.exp(fd.ops.sub(t, fd.ops.max(t, [-1], keepdim=True))), [-1], keepdim=True)
        hit = fd.ops.eq(fd.ops.iota(columns, 0, 1, DataType.Int), at)
        fd.add_output(total)
        fd.add_output(fd.ops.sum(fd.ops.where(hit, t, 0.0), [-1], keepdim=True))
        t.set_device_mesh(DeviceMesh(list(range(size))))
        t.outer_split(1, size, uneven=columns % size != 0)
        t.axis(1).parallelize(ParallelType.mesh_x)
    check(fd, [x, target])
    return [k for k in fd.last_trace().split("\n") if "_hit_index = " in k]


def test_one_element_of_a_sharded_row_is_read_alone() -> None:
    """Of rows that are walked in a loop and cut unevenly; at the ends of shards, and outside of all."""
    columns, ranks = 18001, 2
    piece = -(-columns // ranks)
    target = torch.tensor([0, piece - 1, piece, columns - 1, -1, columns, -100])[:, None]
    found = shardfuse.simulate(picked, ranks, args=(numbers(7, columns).float(), target))
    assert all(len(lines) == 1 for lines in found)


def softmax_of_columns(x: torch.Tensor) -> list[str]:
    """Along an axis that ranks share; of the other axis the last rank has a single column."""
    shardfuse.initialize()
    mesh = DeviceMesh([[0, 1], [2, 3]])
    with FusionDefinition(backend="triton") as fd:
        t = fd.define_tensor(list(x.shape), contiguity=True)
        for axis, parallel in ((1, ParallelType.mesh_y), (0, ParallelType.mesh_x)):
            t.outer_split(axis, 2, uneven=True)
            t.axis(axis).parallelize(parallel)
        t.set_device_mesh(mesh)
        e = fd.ops.exp(fd.ops.sub(t, fd.ops.max(t, [0], keepdim=True)))
        fd.add_output(fd.ops.div(e, fd.ops.sum(e, [0], keepdim=True)))
    check(fd, [x])
    return [s.scheduler for s in fd.explain().segments]


def test_a_rank_with_a_single_column() -> None:
    """Its kernels have no lanes: what is reduced is one number for each row."""
    schedulers = shardfuse.simulate(softmax_of_columns, 4, args=(numbers(4, 3).float(),))
    assert "persistent" in schedulers[0]


def statistics_of_short_runs(shape: list[int], axes: list[int], cut: int) -> list[str]:
    size = shardfuse.initialize().world_size
    with FusionDefinition(backend="triton") as fd:
        t = fd.define_tensor([-1] * len(shape), contiguity=True)
        for y in fd.ops.var_mean(t, axes, correction=0):
            fd.add_output(y)
        t.set_device_mesh(DeviceMesh(list(range(size))))
        t.outer_split(cut, size, uneven=True)
        t.axis(cut).parallelize(ParallelType.mesh_x)
    check(fd, [numbers(*shape).float()], sizes={t: shape})
    return [s.scheduler for s in fd.explain().segments]


@pytest.mark.parametrize(
    ("shape", "axes", "cut", "ranks"),
    [
        ([3, 2, 5], [0, 2], 2, 2),
        ([64, 2, 33], [0, 2], 2, 2),
        ([3, 6, 5, 2], [0, 2, 3], 2, 2),
        ([3, 6, 2, 7], [0, 2, 3], 3, 3),
        ([3, 6, 2, 6], [0, 2, 3], 3, 2),
    ],
    ids=str,
)
def test_runs_of_memory_that_are_shorter_on_one_rank(shape: list[int], axes: list[int], cut: int, ranks: int) -> None:
    """Groups of columns had the longest rank's length on all ranks, and the short rank's sums were of other columns."""
    found = shardfuse.simulate(statistics_of_short_runs, ranks, args=(shape, axes, cut))
    assert all(schedulers.count("communication") == 1 for schedulers in found)
