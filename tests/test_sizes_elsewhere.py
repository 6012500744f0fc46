"""Sizes that only an exchange tells, of inputs on some of the ranks: all ranks of the program learn them."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
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
