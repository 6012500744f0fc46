"""Sizes that only an exchange tells, of inputs on some of the ranks: all ranks of the program learn them."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import InputError

X = ParallelType.mesh_x
MESHES: dict[str, tuple[object, object]] = {
    "other ranks get the result": ([1, 2], [0, 1, 2, 3]),
    "other ranks alone get it": ([3, 1], [0, 2]),
    "lines of a larger mesh": ([[0, 1], [3, 2]], [0, 1, 2, 3]),
    "lines, and other ranks": ([[1, 3]], [0, 1]),
    "a rank has no part of the program": ([0, 1, 3], [3, 1, 0]),
}


@pytest.mark.parametrize("rows", [5, 7, 1])
@pytest.mark.parametrize("name", MESHES)
def test_ranks_outside_of_an_inputs_mesh_learn_its_size(name: str, rows: int) -> None:
    """The result's shape follows from the size, so that a rank with another one would get another shape."""
    source, target = (DeviceMesh(ranks) for ranks in MESHES[name])
    full = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    expected = torch.cat([full, -full]).cumsum(0)

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 4], contiguity=True, dtype=DataType.Double)
            y = fd.ops.cumsum(fd.ops.cat([x, fd.ops.neg(x)], 0), 0)
            fd.add_output(y)
            x.set_device_mesh(source)
            x.outer_split(0, source.extent(X), uneven=True)
            x.axis(0).parallelize(X)
            y.set_device_mesh(target)
        given = source.shard_tensor(full, 0, rank=rank if rank in source.ranks else source.ranks[0])
        for _ in range(2):
            (result,) = fd.execute([given])
            assert (result is None) == (rank not in target.ranks)
            if result is not None:
                torch.testing.assert_close(result, expected)

    run_ranks(4, run)


def test_a_plan_of_an_uneven_shard_asks_for_the_size() -> None:
    """`explain` exchanges nothing with other ranks."""

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 4], contiguity=True)
            fd.add_output(fd.ops.sum(x, [0]))
            x.set_device_mesh(mesh)
            x.outer_split(0, size, uneven=True)
            x.axis(0).parallelize(X)
        shard = [mesh.shard_tensor(torch.ones(5, 4), 0)]
        message = r"Expected input 0, T0, .* size of axis 0 but got an uneven one.*: declare it, or pass sizes=\{...\}"
        with pytest.raises(InputError, match=message):
            fd.explain(shard)
        assert len(fd.explain(shard, sizes={x: (5, 4)}).collectives) == 1

    run_ranks(2, run)


def test_a_rank_on_no_mesh_of_a_program_needs_no_size_of_it() -> None:
    """Of its own piece it would take the axis for 10 long, beside one of 9; it has nothing to run, and no result."""
    mesh = DeviceMesh([0, 3])
    full = torch.arange(9, dtype=torch.float64)

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            x, w = (fd.define_tensor([n], contiguity=True, dtype=DataType.Double) for n in (-1, 3))
            y = fd.ops.add(x, fd.ops.cat([w, w, w], 0))
            fd.add_output(y)
            fd.add_output(fd.ops.sum(y, [0]))
            x.set_device_mesh(mesh)
            x.outer_split(0, 2, uneven=True)
            x.axis(0).parallelize(X)
            w.set_device_mesh(mesh)
        given = [mesh.shard_tensor(full, 0, rank=rank if rank in mesh.ranks else 0), full[:3]]
        for _ in range(2):
            found = fd.execute(given)
            if rank not in mesh.ranks:
                assert found == [None, None]
                continue
            expected = full + full[:3].repeat(3)
            torch.testing.assert_close(found[0], mesh.shard_tensor(expected, 0, rank=rank))
            assert found[1] == expected.sum()
        steps = fd.timeline(given).spans
        assert bool(steps) == (rank in mesh.ranks)

    run_ranks(4, run)


def test_what_is_on_no_mesh_is_made_on_every_rank() -> None:
    mesh = DeviceMesh([0, 3])

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1], contiguity=True)
            fd.add_output(fd.ops.neg(x))
            fd.add_output(fd.ops.full([4], 2.0, DataType.Float))
            x.set_device_mesh(mesh)
            x.outer_split(0, 2, uneven=True)
            x.axis(0).parallelize(X)
        negated, twos = fd.execute([torch.ones(5 if rank == 0 else 4)])
        assert (negated is None) == (rank not in mesh.ranks)
        assert twos is not None
        assert twos.tolist() == [2.0] * 4

    run_ranks(4, run)
