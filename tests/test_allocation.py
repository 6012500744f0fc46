"""Allocation domains: how a rank stores what it holds, of inputs and of outputs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from fusion_check import check
from ranks import run_ranks
from thread_check import Case, X, check_on_threads, shard, world_mesh
from torch_answers import assert_like

from shardfuse import DataType, FusionDefinition
from shardfuse.allocation.global_sizes import global_sizes
from shardfuse.errors import InputError, ScheduleError
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops


def interleave(tv: TensorView) -> TensorView:
    """Store [6] as merge(i % 3, i / 3)."""
    tv.inner_split(0, 3).reorder({0: 1}).merge(0)
    tv.set_allocation_domain(tv.get_loop_domain())
    return tv


def test_an_interleaved_layout_by_allocation_rank() -> None:
    data = torch.arange(6.0)
    with FusionDefinition() as fd:
        x = fd.define_tensor([6], allocation_rank=True)
        y = fd.ops.set(x)
        z = fd.ops.mul(x, 10.0)
        fd.add_output(y)
        fd.add_output(z, allocation_rank=True)
    interleave(x)
    interleave(z)
    stored = torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0])
    y_found, z_found = fd.execute([stored])
    assert y_found.tolist() == data.tolist()
    assert z_found.tolist() == (stored * 10).tolist()
    check_on_threads(1, [Case(fd, [data])])


def test_by_allocation_rank_a_mesh_axis_is_one() -> None:
    """[4, 6] with the columns over 2 ranks: each hands over [1, 4, 3] or [4, 1, 3], as its loop axes stand."""

    def run(rank: int, world: int) -> tuple[int, ...]:
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 6], allocation_rank=True)
            y = fd.ops.mul(x, 2.0)
            fd.add_output(y, allocation_rank=True)
            fd.add_output(fd.ops.sum(x, [1]))
        shard(x, world_mesh(world), (X, (1, "outer")))
        shard(y, world_mesh(world), (X, (1, "outer"))).reorder({1: 0})
        data = torch.arange(24.0).reshape(4, 6)
        (out, total) = fd.execute([data[:, rank * 3 : rank * 3 + 3].reshape(4, 1, 3)])
        assert torch.equal(out, data[:, rank * 3 : rank * 3 + 3].reshape(1, 4, 3) * 2)
        assert torch.equal(total, data.sum(1))
        check(fd, [data], reference=lambda x: (x * 2, x.sum(1)))
        return tuple(out.shape)

    assert run_ranks(2, run) == [(1, 4, 3)] * 2


@pytest.mark.parametrize("rows", [8, 7, 3])
def test_uneven_shards_by_allocation_rank(rows: int) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 2], allocation_rank=True)
        y = fd.ops.add(x, 1.0)
        fd.add_output(y, allocation_rank=True)
    shard(x, world_mesh(4), (X, (0, "outer")))
    shard(y, world_mesh(4), (X, (0, "outer")))
    check_on_threads(4, [Case(fd, [torch.arange(rows * 2.0).reshape(rows, 2)])])


def test_the_rank_of_what_is_handed_over_is_checked() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([6], allocation_rank=True)
        x.inner_split(0, 3)
        fd.add_output(fd.ops.exp(x))
    with pytest.raises(
        InputError, match=r"a tensor of 2 dims but got 1 dims.*one for each allocation axis, a mesh axis being 1"
    ):
        fd.execute([torch.zeros(6)])


@pytest.mark.parametrize("which", ["T0", "T1"])
def test_a_layout_that_no_strides_say_takes_the_allocation_rank(which: str) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([6])
        y = fd.ops.set(x)
        fd.add_output(y)
    interleave(x if which == "T0" else y)
    with pytest.raises(ScheduleError, match=f"parts of logical axis 0 are; hand {which} over by allocation rank"):
        fd.execute([torch.zeros(6)])


def test_the_way_out_of_a_layout_that_is_not_the_declared_one() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 6, 3, 5], contiguity=True, stride_order=[3, 0, 2, 1])
        fd.add_output(fd.ops.relu(x))
    given = torch.randn(2, 6, 3, 5)
    with pytest.raises(InputError, match=re.escape("call .permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])")):
        fd.execute([given])
    (found,) = fd.execute([given.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])])
    assert torch.equal(found, given.relu())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_channels_last_sharded_on_channels(world: int) -> None:
    """[N, C, H, W] with C innermost, in and out; each rank's output has its own C innermost."""

    def run(rank: int, _: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([2, 6, 3, 5], contiguity=True, stride_order=[3, 0, 2, 1])
            y = fd.ops.relu(x)
            fd.add_output(y, stride_order=[3, 0, 2, 1])
            fd.add_output(fd.ops.mean(x, [0, 2, 3]))
        shard(x, world_mesh(world), (X, (1, "outer")))
        shard(y, world_mesh(world), (X, (1, "outer")))
        data = torch.randn(2, 6, 3, 5, generator=torch.Generator().manual_seed(0))
        mine = data[:, rank * 6 // world : (rank + 1) * 6 // world].contiguous(memory_format=torch.channels_last)
        found, mean = fd.execute([mine])
        assert torch.equal(found, mine.relu())
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert_like(mean, lambda x: x.mean((0, 2, 3)), mine)

    run_ranks(world, run)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]])
def test_an_output_has_the_strides_that_were_asked_for(order: list[int]) -> None:
    data = torch.arange(24.0).reshape(2, 3, 4)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1])
        y = fd.ops.mul(x, 2.0)
        fd.add_output(y, stride_order=order)
    (out,) = fd.execute([data])
    assert torch.equal(out, data * 2)
    inside = [d for _, d in sorted((place, d) for d, place in enumerate(order))]
    expected = 1
    for d in inside:
        assert out.stride(d) == expected
        expected *= out.shape[d]


def test_a_gathered_output_has_the_strides_that_were_asked_for() -> None:
    def run(rank: int, world: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 6])
            y = fd.ops.set(fd.ops.mul(x, 2.0))
            fd.add_output(y, stride_order=[0, 1])
        shard(x, world_mesh(world), (X, (0, "outer")))
        y.set_device_mesh(world_mesh(world))
        data = torch.arange(24.0).reshape(4, 6)
        (out,) = check(fd, [data], reference=lambda x: x * 2)
        assert out is not None
        assert out.stride() == (1, 4)

    run_ranks(2, run)


def test_a_stride_order_under_an_inherited_sharding() -> None:
    """Nothing is said about the output's mesh: its storage is one rank's piece, in the order that was asked for."""
    data = torch.arange(48.0).reshape(2, 6, 4) - 20

    def run(rank: int, world: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1, 4])
            y = fd.ops.abs(x)
            fd.add_output(y, stride_order=[0, 1, 2])
        shard(x, world_mesh(world), (X, (1, "outer")))
        found = check(fd, [data], sizes={x: data.shape})[0]
        assert found is not None
        assert found.stride() == (1, 2, 6)
        assert found.untyped_storage().nbytes() == 4 * found.numel()

    run_ranks(2, run)


@pytest.mark.parametrize("shape", [(1, 3, 1), (1, 1, 4), (3, 1, 1), (1, 2, 3)], ids=str)
def test_dims_of_one_element_have_torchs_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1, -1, -1])))
        fd.add_output(fd.ops.neg(fd.define_tensor(list(shape))))
    for found in fd.execute([x, x]):
        assert torch.equal(found, -x)
        assert found.stride() == torch.neg(x).stride()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_merged_dims_have_the_strides_that_were_asked_for(order: list[int]) -> None:
    """[2, 3, 4] as [6, 4]: an axis of two parts, the outer of which may have one element."""
    for rows in (2, 1):
        x = torch.randn(rows, 3, 4)
        with FusionDefinition() as fd:
            t = fd.define_tensor([rows, 3, 4])
            fd.add_output(fd.ops.mul(fd.ops.reshape(t, [3 * rows, 4]), 2.0), stride_order=order)
        (found,) = fd.execute([x])
        assert torch.equal(found, 2 * x.reshape(-1, 4))
        assert found.stride() == ((1, 3 * rows) if order == [0, 1] else (4, 1))


VIEWS: dict[str, Callable[[Ops, TensorView], TensorView]] = {
    "an input": lambda ops, t: t,
    "reshape": lambda ops, t: ops.reshape(t, [6, 4]),
    "reshape of a product": lambda ops, t: ops.reshape(ops.mul(t, 2.0), [6, 4]),
    "another cut": lambda ops, t: ops.reshape(t, [3, 8]),
    "permute": lambda ops, t: ops.permute(t, [1, 0, 2]),
    "permute of a product": lambda ops, t: ops.permute(ops.mul(t, 2.0), [2, 0, 1]),
    "slice": lambda ops, t: ops.slice(t, [0, 0, 0], [2, 2, 4], [1, 1, 2]),
    "unsqueeze": lambda ops, t: ops.unsqueeze(t, 0),
    "squeeze": lambda ops, t: ops.squeeze(ops.sum(t, [0], keepdim=True), [0]),
    "expand": lambda ops, t: ops.expand(ops.unsqueeze(t, 0), [3, 2, 3, 4]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_the_strides_that_were_asked_for(view: str) -> None:
    """In the reverse order, the first dim innermost, and in torch's."""
    x = torch.randn(2, 3, 4)
    with FusionDefinition() as fd:
        t = fd.define_tensor([2, 3, 4])
        y, z = VIEWS[view](fd.ops, t), VIEWS[view](fd.ops, t)
        fd.add_output(y, stride_order=list(range(y.ndim)))
        fd.add_output(z, stride_order=list(range(z.ndim))[::-1])
    turned, plain = fd.execute([x])
    assert torch.equal(turned, plain)
    assert plain.is_contiguous()
    assert turned.permute(*range(turned.ndim)[::-1]).is_contiguous()


LINKS: dict[str, Callable[[Ops, TensorView, TensorView], TensorView]] = {
    "the same op": lambda ops, x, y: ops.add(x, y),
    "another dtype": lambda ops, x, y: ops.add(ops.cast(x, DataType.Double), ops.set(y)),
    "a permuted axis": lambda ops, x, y: ops.add(ops.permute(x, [1, 0]), ops.permute(y, [1, 0])),
    "a new axis": lambda ops, x, y: ops.add(ops.unsqueeze(x, 0), ops.unsqueeze(y, 0)),
    "a reduced axis": lambda ops, x, y: ops.add(ops.sum(x, [1]), ops.sum(y, [1])),
    "where": lambda ops, x, y: ops.where(ops.gt(x, 0.0), y, 1.0),
}


def linked(link: str) -> tuple[FusionDefinition, TensorView, TensorView]:
    """x, whose rows are cut unevenly, and y, which every rank has whole."""
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, 4]) for _ in range(2))
        fd.add_output(LINKS[link](fd.ops, x, y))
    x.set_device_mesh(world_mesh(2))
    x.outer_split(0, 2, uneven=True).axis(0).parallelize(X)
    y.set_device_mesh(world_mesh(2))
    return fd, x, y


@pytest.mark.parametrize("link", LINKS)
def test_an_uneven_size_that_another_input_tells_is_not_asked_for(link: str) -> None:
    fd, x, y = linked(link)
    assert global_sizes(fd.fusion, {x: (3, 4), y: (5, 4)}, {}) == ({x: [5, 4], y: [5, 4]}, [])


def test_a_broadcast_input_tells_no_size() -> None:
    fd, x, y = linked("the same op")
    sizes, left = global_sizes(fd.fusion, {x: (3, 4), y: (1, 4)}, {})
    assert [(u.tv, u.axis, u.local) for u in left] == [(x, 0, 3)]
    assert sizes[y] == [1, 4]


@pytest.mark.parametrize("part", ["outer", "inner"])
def test_a_part_of_merged_axes_is_of_the_one_that_it_cuts(part: str) -> None:
    """A rank's [3, 5] of two axes that were merged: the outer part cuts the first, the inner part the second."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.neg(x))
    x.set_device_mesh(world_mesh(2))
    x.merge(0)
    if part == "outer":
        x.outer_split(0, 2).axis(0).parallelize(X)
    else:
        x.inner_split(0, 2).axis(1).parallelize(X)
    assert global_sizes(fd.fusion, {x: (3, 5)}, {})[0] == {x: [6, 5] if part == "outer" else [3, 10]}
