"""DTensors in and out, on meshes of 1 to 3 dimensions whose ranks are threads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from dtensor_cases import check_norm, check_sum, distribute, make_mesh, numbers, rms_norm
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch_answers import assert_like, compare
from torch_gradients import with_gradients

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import (
    DefinitionError,
    InputCountError,
    InputError,
    PeerLostError,
    PlacementError,
    RankNotInMeshError,
    ShapeError,
    ValidationError,
)
from shardfuse.nn import AddRMSNorm, CrossEntropyLoss, RMSNorm, SwiGLU, redistribute

R = Replicate()


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


NORMS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (8, 6, 12), (Shard(0),)),
    ((4,), (8, 6, 12), (Shard(2),)),
    ((4,), (8, 6, 12), (R,)),
    ((4,), (8, 6, 12), (Partial(),)),
    ((4,), (8, 6, 12), (Partial("avg"),)),
    ((4,), (8, 6, 12), (Partial("max"),)),
    ((4,), (8, 6, 12), (Partial("min"),)),
    ((4,), (7, 12), (Shard(0),)),
    ((4,), (5, 12), (Shard(0),)),
    ((4,), (3, 10), (Shard(1),)),
    ((4,), (2, 3), (Shard(0),)),
    ((4,), (1, 12), (Shard(0),)),
    ((3,), (1, 1, 6), (Shard(1),)),
    ((2, 2), (1, 12), (Shard(0), Shard(1))),
    ((2, 2), (3, 1, 8), (Shard(1), Shard(0))),
    ((4,), (8, 12), (strided(1, 3),)),
    ((4,), (16, 12), (strided(0, 2),)),
    ((2, 2), (8, 12), (Shard(0), Shard(1))),
    ((2, 2), (8, 12), (Shard(1), Shard(0))),
    ((2, 2), (8, 12), (Shard(0), Shard(0))),
    ((2, 2), (8, 12), (Shard(1), Shard(1))),
    ((2, 2), (10, 12), (Shard(0), Shard(0))),
    ((3, 2), (5, 3), (Shard(0), Shard(0))),
    ((2, 2), (7, 4), (strided(0, 2), Shard(0))),
    ((2, 2), (8, 12), (strided(0, 2), Shard(0))),
    ((2, 2), (8, 12), (strided(1, 2), Shard(1))),
    ((2, 2), (8, 12), (R, Shard(1))),
    ((2, 2), (8, 12), (Partial(), Shard(1))),
    ((2, 2), (7, 11), (Shard(1), Shard(0))),
    ((2, 2), (8, 12), (Partial(), Partial())),
    ((2, 3), (8, 12), (Partial(), Partial("avg"))),
    ((2, 3), (12, 12), (strided(0, 3), Shard(0))),
    ((2, 2, 2), (8, 4, 16), (Shard(0), Shard(2), Shard(1))),
    ((2, 2, 2), (8, 4, 16), (strided(2, 4), Shard(2), Shard(2))),
    ((2, 2, 2), (8, 4, 16), (Shard(0), R, Shard(2))),
    ((2, 2, 2), (8, 16), (Shard(0), Partial(), Shard(1))),
]


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)


@pytest.mark.parametrize(("mesh", "shape", "placements"), NORMS, ids=str)
def test_norm(mesh: tuple[int, ...], shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    run_ranks(torch.Size(mesh).numel(), lambda rank, size: check_norm(mesh, shape, placements).placements)


def test_one_definition_for_all_placements_and_sizes() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2, 2))
        with FusionDefinition() as fd:
            rms_norm(fd, [-1, -1], -1)
        for shape in ((8, 12), (6, 8), (8, 12), (5, 7)):
            for placements in ((Shard(0), R), (R, Shard(1)), (Shard(0), Shard(1)), (R, R), (Shard(0), R)):
                x, w = numbers(shape), numbers(shape[1:], 1)
                on_w = [Shard(0) if p == Shard(1) else R for p in placements]
                (y,) = fd.execute([distribute(x, mesh, placements), distribute(w, mesh, on_w)])
                assert isinstance(y, DTensor)
                assert y.placements == placements
                assert_like(y.full_tensor(), normed, x, w)
        plain = fd.execute([numbers((3, 4)), numbers((4,), 1)])[0]
        assert type(plain) is torch.Tensor
        assert_like(plain, normed, numbers((3, 4)), numbers((4,), 1))

    run_ranks(4, run)


def test_outputs_of_reductions() -> None:
    x = numbers((8, 12))

    def define(fd: FusionDefinition) -> None:
        t = fd.define_tensor([-1, -1], contiguity=True)
        for axes in ([0], [1], [0, 1]):
            fd.add_output(fd.ops.sum(t, axes))
        fd.add_output(fd.ops.permute(t, [1, 0]))
        fd.add_output(fd.ops.cast(fd.ops.gt(t, 0.0), dtype=DataType.Int))

    def run(rank: int, size: int) -> list[tuple[Placement, ...]]:
        def expected(x: torch.Tensor) -> list[torch.Tensor]:
            return [x.sum(0), x.sum(1), x.sum(), x.t(), (x > 0).long()]

        outputs = check_sum(define, [(x, (Shard(0), Shard(1)))], make_mesh((2, 2)), expected)
        return [y.placements for y in outputs]

    placements = run_ranks(4, run)[0]
    assert placements == [(R, Shard(0)), (Shard(0), R), (R, R), (Shard(1), Shard(0)), (Shard(0), Shard(1))]


def test_output_that_the_definition_places() -> None:
    """Partial in, reduce-scattered out; rows in, columns out."""
    x = numbers((8, 12))

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((4,))

        def define(fd: FusionDefinition) -> None:
            t = fd.define_tensor([-1, -1], contiguity=True)
            y = fd.ops.mul(t, 2.0)
            fd.add_output(y)
            y.set_device_mesh(DeviceMesh([0, 1, 2, 3]))
            y.outer_split(1, 4)
            y.axis(1).parallelize(ParallelType.mesh_x)

        for source in (Partial(), Shard(0), Shard(1), R):
            (y,) = check_sum(define, [(x, (source,))], mesh, lambda x: [2 * x])
            assert y.placements == (Shard(1),)
            assert y.device_mesh is mesh

    run_ranks(4, run)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_partial_values_of_every_reduction(op: str, mesh: tuple[int, ...]) -> None:
    """Whole, in rows, and read by a function that no factor leaves alone."""
    x = numbers((8, 12))

    def define(fd: FusionDefinition) -> None:
        t = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.add(fd.ops.mul(t, t), 1.0))
        fd.add_output(fd.ops.sum(t, [1]))

    def run(rank: int, size: int) -> None:
        at = [*[R] * (len(mesh) - 1), Partial(op)]
        check_sum(define, [(x, at)], make_mesh(mesh), lambda x: [x * x + 1, x.sum(1)])

    run_ranks(4, run)


def test_visible_axis_of_partial_sums() -> None:
    x = numbers((8, 12))

    def run(rank: int, size: int) -> None:
        def define(fd: FusionDefinition) -> None:
            t = fd.define_tensor([2, -1, -1], contiguity=True)
            fd.add_output(fd.ops.sum(t, [0]))
            t.set_device_mesh(DeviceMesh([0, 1]))
            t.axis(0).parallelize(ParallelType.mesh_x)

        (y,) = check_sum(define, [(x, (Partial(),))], make_mesh((2,)), lambda x: [x])
        assert y.placements == (R,)

    run_ranks(2, run)


def test_plain_tensors_beside_dtensors() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        x, w = numbers((4, 12)), numbers((12,), 1)
        with FusionDefinition() as fd:
            rms_norm(fd, [-1, 12], 12)
        (y,) = fd.execute([distribute(x, mesh, [Shard(1)]), w[6 * rank : 6 * rank + 6]])
        assert isinstance(y, DTensor)
        assert_like(y.full_tensor(), normed, x, w)

    run_ranks(2, run)


def test_a_whole_piece_is_put_beside_a_single_element_of_the_first_rank() -> None:
    """An axis of 1 that the plain tensor has on each rank, and the DTensor on the first one alone."""
    x = numbers((1, 1, 1))

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            t, u = fd.define_tensor([1, 1, 1]), fd.define_tensor([1, 1, 1])
            a, b = fd.ops.neg(t), fd.ops.mul(u, 3.0)
            fd.add_output(fd.ops.cat([a, b, a], 2))
            fd.add_output(b)
        both, own = fd.execute([distribute(x, make_mesh((2,)), [Shard(1)]), x.clone()])
        assert both.placements == (Shard(1),)
        assert torch.equal(both.full_tensor(), torch.cat([-x, x * 3, -x], 2))
        assert torch.equal(own.full_tensor(), x * 3)

    run_ranks(2, run)


def test_a_whole_tensor_that_is_taken_for_a_piece_is_named() -> None:
    x = numbers((4, 6))

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.add(fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])))
        mesh = make_mesh((2,))
        with pytest.raises(ShapeError, match="extent 4 in axis 0 of T0 and 8 in axis 0 of T1") as raised:
            fd.execute([distribute(x, mesh, [Shard(0)]), x])
        (note,) = raised.value.__notes__
        assert note.startswith("input 1, T1, is a plain tensor beside DTensors, and taken for this rank's piece")
        (y,) = fd.execute([distribute(x, mesh, [Shard(0)]), distribute(x, mesh, [R])])
        assert torch.equal(y.full_tensor(), x + x)

    run_ranks(2, run)


def test_channels_last() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        x = numbers((2, 4, 3, 3)).to(memory_format=torch.channels_last)
        local = x.chunk(2, 0)[rank]
        d = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, 4, -1, -1], stride_order=[3, 0, 2, 1], contiguity=True)
            fd.add_output(fd.ops.relu(t), stride_order=[3, 0, 2, 1])
        (y,) = fd.execute([d])
        assert isinstance(y, DTensor)
        assert y.stride() == x.stride()
        assert torch.equal(y.full_tensor(), x.relu())

    run_ranks(2, run)


def said_rows() -> FusionDefinition:
    with FusionDefinition() as fd:
        t = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.neg(t))
        t.set_device_mesh(DeviceMesh([0, 1]))
        t.outer_split(0, 2)
        t.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def test_a_dtensor_that_contradicts_the_definition() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        x = numbers((8, 12))
        fd = said_rows()
        (y,) = fd.execute([distribute(x, mesh, [Shard(0)])])
        assert isinstance(y, DTensor)
        assert y.placements == (Shard(0),)
        for placement in (Shard(1), R, strided(0, 2)):
            with pytest.raises(InputError, match=r"input 0, T0, to be sharded as T0\[i0o\{2\}@mesh_x.*redistribute it"):
                fd.execute([distribute(x, mesh, [placement])])

    run_ranks(2, run)


def test_refusals() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        with pytest.raises(InputError, match="a DTensor"):
            said_rows().execute_with_dtensors([torch.ones(4, 4)])
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.neg(fd.define_tensor([-1, -1, -1])))
        with pytest.raises(InputError, match="3 dims"):
            fd.execute([distribute(numbers((4, 4)), mesh, [Shard(0)])])
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.mul(fd.define_tensor([-1, -1]), fd.define_scalar(dtype=DataType.Double)))
        with pytest.raises(InputError, match="scalar"):
            fd.execute([distribute(numbers((4, 4)), mesh, [Shard(0)])] * 2)

    run_ranks(2, run)


ELSEWHERE: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((3, 2), (10, 4), (Shard(0), Shard(0))),
    ((3, 2), (4, 10), (Shard(1), Shard(1))),
    ((3, 2), (4, 10, 3), (Shard(1), Shard(1))),
    ((2,), (6, 4), (strided(0, 2),)),
    ((4,), (10, 4), (strided(0, 2),)),
    ((4,), (3, 4), (strided(0, 2),)),
    ((2, 2), (5, 4), (strided(0, 2), Shard(0))),
    ((2, 2), (12, 4), (strided(0, 3), Shard(0))),
    ((2, 2), (7, 5), (strided(0, 3), Shard(0))),
    ((2, 3), (10, 4), (strided(0, 3), Shard(0))),
    ((3, 2, 2), (10, 3), (Shard(0), Partial(), Shard(0))),
    ((3, 2), (2, 3), (strided(0, 4), strided(0, 2))),
    ((2, 2, 2), (11, 7), (Shard(0), Shard(0), Shard(0))),
]
"""Meshes, shapes and placements of which torch cuts short shards where no digits do, or which are no digits."""


@pytest.mark.parametrize(("mesh", "shape", "placements"), ELSEWHERE, ids=str)
def test_what_torch_cuts_elsewhere(
    mesh: tuple[int, ...], shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    x = numbers(shape)

    def run(rank: int, size: int) -> list[str]:
        torch_mesh = make_mesh(mesh)
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1] * len(shape))
            fd.add_output(fd.ops.exp(t))
            fd.add_output(fd.ops.sum(t, [0]))
        for _ in range(2):
            outputs = fd.execute([distribute(x, torch_mesh, placements)])
            for y, function in zip(outputs, (torch.exp, lambda x: x.sum(0)), strict=True):
                assert isinstance(y, DTensor)
                at = y.placements
                assert_like(y.to_local(), function, x, place=lambda t, at=at: distribute(t, torch_mesh, at).to_local())
        assert outputs[0].placements == tuple(R if p.is_partial() else p for p in placements)
        return [c.kind for c in fd.explain().collectives]

    kinds = run_ranks(torch.Size(mesh).numel(), run)
    assert kinds.count(kinds[0]) == len(kinds)
    assert kinds[0].count("all_to_all") >= (1 if any(p.is_partial() for p in placements) else 2)


def test_outputs_that_no_placement_says() -> None:
    """A rank has 2 of 3 rows, 6 of 9 elements, where torch cuts 5; and two of six pairs of a row and a column."""
    x = numbers((3, 3))

    def flattened(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, -1])
            fd.add_output(fd.ops.reshape(t, [fd.ops.mul(fd.ops.size(t, 0), fd.ops.size(t, 1))]))
        (y,) = fd.execute([distribute(x, make_mesh((2,)), [Shard(0)])])
        assert y.placements == (Shard(0),)
        assert torch.equal(y.to_local(), x.flatten().chunk(2)[rank])
        assert [c.kind for c in fd.explain().collectives] == ["all_to_all"]

    run_ranks(2, flattened)

    def across(rank: int, size: int) -> None:
        z = numbers((2, 6))
        with FusionDefinition() as fd:
            t = fd.define_tensor([2, 6])
            y = fd.ops.neg(t)
            fd.add_output(y)
        y.set_device_mesh(DeviceMesh([0, 1, 2, 3]))
        y.outer_split(1, 2)
        y.merge(0, 1)
        y.axis(0).parallelize(ParallelType.mesh_x)
        (found,) = fd.execute([distribute(z, make_mesh((4,)), [R])])
        assert torch.equal(found.to_local(), distribute(-z, make_mesh((4,)), found.placements).to_local())
        assert [c.kind for c in fd.explain().collectives] == ["all_to_all"]

    run_ranks(4, across)


def test_a_flattened_dim_of_no_elements() -> None:
    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.reshape(fd.define_tensor([0, 4]), [0]))
        (flat,) = fd.execute([distribute(numbers((0, 4)), make_mesh((2,)), [Shard(1)])])
        assert (flat.placements, flat.shape, flat.to_local().shape) == ((Shard(0),), (0,), (0,))

    run_ranks(2, run)


@pytest.mark.parametrize("kind", ["sum", "avg", "max"])
def test_no_output_is_written_over_partial_values(kind: str) -> None:
    """No rank's part can hold the whole value: refused on every rank, as torch refuses `x.add_(1)`."""

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, -1])
            fd.add_output(fd.ops.add(t, 1.0), alias_input=t)
        for mesh, placements in (((2,), [Partial(kind)]), ((2, 1), [Partial(kind), Shard(0)])):
            local = numbers((4, 6)) + rank
            x = DTensor.from_local(local.clone(), make_mesh(mesh), placements, run_check=False)
            with pytest.raises(InputError, match=r"input 0, T0, to be one without partial values.*redistribute it"):
                fd.execute([x])
            assert torch.equal(x.to_local(), local)
        x = DTensor.from_local(numbers((4, 6)) + rank, make_mesh((2,)), [Shard(0)], run_check=False)
        fd.execute([x])
        assert torch.equal(x.to_local(), numbers((4, 6)) + rank + 1)

    run_ranks(2, run)


def test_partial_values_that_an_output_is_written_over_as_they_are() -> None:
    """Where the definition gives them an axis of their own, each rank's part is written."""

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, -1, -1])
            fd.add_output(fd.ops.mul(t, 2.0), alias_input=t)
        x = DTensor.from_local(numbers((4, 6)) + rank, make_mesh((2,)), [Partial()], run_check=False)
        fd.execute([x])
        assert torch.equal(x.to_local(), (numbers((4, 6)) + rank) * 2)

    run_ranks(2, run)


def test_what_else_takes_dtensors() -> None:
    """Pieces that torch cuts elsewhere among them: 5, 4 | 5, 3 of rows in a fusion, 5, 4 | 4, 4 outside."""
    x = numbers((17, 6))

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2, 2))
        given = distribute(x, mesh, [Shard(0), Shard(0)])
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, -1], contiguity=True)
            total = fd.ops.sum(t, [0])
            fd.add_output(fd.ops.mul(t, total))
            fd.add_output(fd.ops.mul(t, 2.0), alias_input=t)
        kinds = [c.kind for c in fd.explain([given]).collectives]
        assert kinds == ["all_to_all", "all_to_all", "all_reduce"]
        assert [s.name.split()[0] for s in fd.timeline([given]).spans].count("all_reduce") == 1
        given = distribute(x, mesh, [Shard(0), Shard(0)])
        (y,) = fd.validate([given], [x * x.sum(0)])
        assert kinds == [c.kind for c in fd.explain().collectives]
        cut = [Shard(0)] * 2
        assert_like(y.to_local(), lambda x: x * x.sum(0), x, place=lambda t: distribute(t, mesh, cut).to_local())
        assert torch.equal(given.to_local(), distribute(x * 2, mesh, [Shard(0)] * 2).to_local())
        with pytest.raises(ValidationError, match="output 0, off by"):
            fd.validate([distribute(x, mesh, [Shard(0)] * 2)], [x])

    run_ranks(4, run)


def test_a_local_tensor_that_is_not_its_dtensors() -> None:
    def run(rank: int, size: int) -> None:
        x = numbers((2, 4))
        d = DTensor.from_local(x, make_mesh((3, 2)), [Shard(0)] * 2, run_check=False, shape=(10, 4), stride=(4, 1))
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.neg(fd.define_tensor([-1, -1])))
        if rank > 3:
            with pytest.raises(InputError, match=r"to be \[1, 4\] on this rank.*local tensor is \[2, 4\]"):
                fd.execute([d])
        else:
            with pytest.raises(PeerLostError, match="local tensor is"):
                fd.execute([d])

    run_ranks(6, run)


@pytest.mark.parametrize("wrong", ["number", "rank", "reduction"])
def test_what_is_wrong_on_one_rank_is_told_to_the_others(wrong: str) -> None:
    def run(rank: int, size: int) -> None:
        x, mesh = numbers((4, 6)), make_mesh((2,))
        bad = {
            "number": lambda: [distribute(x, mesh, [Shard(0)])] * 2,
            "rank": lambda: [distribute(x[0], mesh, [Shard(0)])],
            "reduction": lambda: [DTensor.from_local(x, mesh, [Partial("band")], run_check=False)],
        }
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.sum(fd.define_tensor([-1, -1]), [0]))
        error = {"number": InputCountError, "rank": InputError, "reduction": PlacementError}[wrong]
        with pytest.raises(error if rank else PeerLostError):
            fd.execute(bad[wrong]() if rank else [distribute(x, mesh, [Shard(0)])])

    run_ranks(2, run)


def test_a_mesh_that_is_a_part_of_the_world_in_another_order() -> None:
    """Ranks outside of it take part in nothing, and get DTensors that are empty there, as from torch's own ops."""

    def run(rank: int, size: int) -> None:
        mesh = TorchMesh("cpu", torch.tensor([3, 1]))
        x = numbers((5, 4))
        local = x.chunk(2)[[3, 1].index(rank)] if rank in (3, 1) else x.new_empty(0)
        d = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, -1])
            fd.add_output(fd.ops.mul(t, 2.0))
            fd.add_output(fd.ops.sum(t, [0]))
            fd.add_output(fd.ops.sum(t))
        for _ in range(2):
            doubled, total, number = fd.execute([d])
            assert (number.placements, number.shape, number.to_local().shape) == ((R,), (), ())
            assert (doubled.placements, doubled.shape) == ((Shard(0),), x.shape)
            assert (total.placements, total.shape) == ((R,), (4,))
            if rank in (3, 1):
                assert torch.equal(doubled.to_local(), local * 2)
                assert_like(total.to_local(), lambda x: x.sum(0), x)
            else:
                assert doubled.to_local().numel() == total.to_local().numel() == 0
        if rank not in (3, 1):
            with pytest.raises(PlacementError, match="call the module on the ranks of its mesh alone"):
                RMSNorm(4, mesh=DeviceMesh([3, 1]), input=Shard(0), parameters="local")(d)
            with pytest.raises(RankNotInMeshError):
                RMSNorm(4, mesh=DeviceMesh([3, 1]), input=Shard(0))

    run_ranks(4, run)


def test_no_import_of_dtensor_without_dtensors() -> None:
    text = (
        "import sys, torch, shardfuse\n"
        "with shardfuse.FusionDefinition() as fd:\n"
        "    fd.add_output(fd.ops.neg(fd.define_tensor([-1])))\n"
        "assert fd.execute([torch.ones(2)])[0].tolist() == [-1.0, -1.0]\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def gradients_of(
    outputs: tuple[torch.Tensor, ...], weights: list[torch.Tensor], leaves: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of a sum of the outputs with these weights."""
    total = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
    total = total.redistribute(placements=[R] * total.device_mesh.ndim) if isinstance(total, DTensor) else total
    total.backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    ("source", "output", "output_grad"),
    [
        (Shard(0), None, None),
        (Shard(1), None, None),
        (R, None, None),
        (Partial(), R, None),
        (Partial(), Shard(0), None),
        (R, R, Partial()),
    ],
    ids=str,
)
def test_modules(source: Placement, output: Placement | None, output_grad: Placement | None) -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((4,))
        x, w = numbers((8, 12)), numbers((8, 12), 3)
        at = Shard(-1) if source == Shard(1) else source
        norm = RMSNorm(12, mesh=DeviceMesh([0, 1, 2, 3]), input=at, output=output, output_grad=output_grad)
        d = distribute(x, mesh, [source]).requires_grad_()
        y = norm(d)
        assert isinstance(y, DTensor)
        assert y.placements == (source if output is None else output,)
        (dx,) = gradients_of((y,), [distribute(w, mesh, y.placements)], [d])
        want, want_dx, want_dw = with_gradients(lambda x, w: (normed(x, w),), [x, torch.ones(12)], [w])
        compare("result", y.full_tensor().detach(), want)
        assert isinstance(dx, DTensor)
        compare("gradient of x", dx.full_tensor(), want_dx)
        dw = norm.weight.grad
        assert isinstance(dw, DTensor)
        compare(
            "gradient of the weight",
            dw.to_local(),
            want_dw,
            lambda t: t.chunk(4)[rank] if source == Shard(1) else t,
        )

    run_ranks(4, run)


def test_modules_of_two_tensors() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        x, r, w = numbers((4, 6)), numbers((4, 6), 1), numbers((4, 6), 2)
        ours = DeviceMesh([0, 1])
        add_norm = AddRMSNorm(6, mesh=ours, input=Partial(), residual=Shard(0), output=R, output_grad=Partial())
        normed_, residual = add_norm(distribute(x, mesh, [Partial()]), distribute(r, mesh, [Shard(0)]))
        assert (normed_.placements, residual.placements) == ((R,), (Shard(0),))
        assert_like(
            normed_.full_tensor().detach(), lambda x, r: torch.nn.functional.rms_norm(x + r, (6,), eps=1e-6), x, r
        )
        assert_like(residual.full_tensor().detach(), torch.add, x, r)
        gate, up = distribute(x, mesh, [Shard(1)]), distribute(r, mesh, [Shard(1)])
        gated = SwiGLU(mesh=ours, input=Shard(1))(gate, up).full_tensor().detach()
        assert_like(gated, lambda x, r: torch.nn.functional.silu(x) * r, x, r)
        logits = distribute(w, mesh, [Shard(1)]).requires_grad_()
        target = torch.tensor([0, 5, 2, 3])
        loss = CrossEntropyLoss(mesh=ours, logits=Shard(-1))(logits, distribute(target, mesh, [R]))
        loss.backward()

        def entropy(x: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.nn.functional.cross_entropy(x, target),)

        want_loss, want_grad = with_gradients(entropy, [w], [torch.tensor(1.0)])
        compare("loss", loss.full_tensor().detach(), want_loss)
        compare("gradient", logits.grad.full_tensor(), want_grad)
        moved = redistribute(distribute(x, mesh, [Shard(0)]), ours, Shard(0), Shard(1))
        assert moved.placements == (Shard(1),)
        assert torch.equal(moved.full_tensor(), x)

    run_ranks(2, run)


def test_a_module_for_another_placement() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        norm = RMSNorm(6, mesh=DeviceMesh([0, 1]), input=Shard(0))
        with pytest.raises(PlacementError, match="redistribute it"):
            norm(distribute(numbers((4, 6)), mesh, [Shard(1)]))
        with pytest.raises(PlacementError, match="make the module with mesh"):
            RMSNorm(6)(distribute(numbers((4, 6)), mesh, [R]))

    run_ranks(2, run)


def test_parameters_that_are_dtensors() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        norm = RMSNorm(6, mesh=DeviceMesh([0, 1]), input=Shard(-1))
        norm.weight = torch.nn.Parameter(distribute(numbers((6,), 5), mesh, [Shard(0)]))
        x = numbers((4, 6))
        y = norm(distribute(x, mesh, [Shard(1)]))
        assert_like(y.full_tensor().detach(), normed, x, numbers((6,), 5))
        y.sum().redistribute(placements=[R]).backward()
        assert isinstance(norm.weight.grad, DTensor)
        assert norm.weight.grad.placements == (Shard(0),)

    run_ranks(2, run)


def test_an_output_of_a_mesh_of_no_dtensor_is_none_outside_of_it() -> None:
    """The definition puts an output on rank 0 alone; the DTensors are on ranks 0 and 1."""
    x = numbers((4, 6))

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            t = fd.define_tensor([4, 6])
            y = fd.ops.mul(t, 2.0)
            z = fd.ops.set(y)
            fd.add_output(y)
            fd.add_output(z)
        z.set_device_mesh(DeviceMesh([0]))
        whole, alone = fd.execute([distribute(x, make_mesh((2,)), [Shard(0)])])
        assert torch.equal(whole.to_local(), (2 * x).chunk(2)[rank])
        if rank == 0:
            assert torch.equal(alone.to_local(), 2 * x)
        else:
            assert alone is None or alone.to_local().numel() == 0

    run_ranks(2, run)


def test_validate_of_local_tensors_names_what_it_takes() -> None:
    """Each rank's ops on its own piece would be other numbers than the fusion's, which are right."""
    full = numbers((4, 8))

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 8])
            x.set_device_mesh(mesh)
            x.outer_split(1, size)
            x.axis(1).parallelize(ParallelType.mesh_x)
            fd.add_output(fd.ops.sum(x, [1]))
        local = mesh.shard_tensor(full, 1)
        with pytest.raises(DefinitionError, match=r"validate.*DTensors.*reference_outputs"):
            fd.validate([local])
        fd.validate([local], [full.sum(1)])
        fd.validate([distribute(full, make_mesh((size,)), [Shard(1)])])

    run_ranks(2, run)
