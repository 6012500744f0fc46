"""A contracted axis that two mesh dimensions cut unevenly, one of which the other operand has for its rows."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType

X, Y = ParallelType.mesh_x, ParallelType.mesh_y


@pytest.mark.parametrize("contracted", [5, 7, 8])
def test_what_is_left_of_an_uneven_part_is_not_added_twice(contracted: int) -> None:
    """The rows take mesh_y; half of a third of the contracted axis, which mesh_x would have, is then no part of it."""
    whole = torch.arange(8 * contracted).remainder(7).view(8, contracted)
    weight = torch.arange(5.0 * contracted, dtype=torch.float64).view(contracted, 5)
    chunk = -(-contracted // 2)
    part = -(-chunk // 2)

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh([[0, 1], [2, 3]])
        with FusionDefinition() as fd:
            x = fd.define_tensor([8, contracted], dtype=DataType.Int)
            w = fd.define_tensor([contracted, 5], dtype=DataType.Double)
            y = fd.ops.matmul(fd.ops.cast(x, DataType.Double), w)
            fd.add_output(y)
            for tensor in (x, w, y):
                tensor.set_device_mesh(mesh)
            for axis in (0, 1):
                w.outer_split(axis, 2, uneven=True)
                w.axis(axis).parallelize((Y, X)[axis])
            y.outer_split(0, 2)
            y.axis(0).parallelize(Y)
        row, column = divmod(rank, 2)
        own = weight[row * chunk : (row + 1) * chunk][column * part : (column + 1) * part]
        (found,) = fd.execute([whole, own.contiguous()])
        assert torch.equal(found, (whole.double() @ weight).chunk(2)[row])

    run_ranks(4, run)
