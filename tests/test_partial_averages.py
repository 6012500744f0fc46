"""DTensors of partial values: each mesh dimension is reduced by the op that its placement names."""

from __future__ import annotations

import pytest
import torch
from dtensor_cases import make_mesh, numbers
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardfuse import DataType, FusionDefinition
from shardfuse.errors import PlacementError

AVG, SUM = Partial("avg"), Partial("sum")
CASES: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((3,), (AVG,)),
    ((4,), (AVG,)),
    ((2, 3), (SUM, AVG)),
    ((2, 3), (AVG, SUM)),
    ((2, 3), (AVG, AVG)),
    ((2, 3), (AVG, Shard(0))),
    ((2, 3), (AVG, Replicate())),
    ((2, 2, 2), (AVG, Shard(1), SUM)),
    ((3,), (Partial("max"),)),
    ((2, 2), (Partial("min"), Partial("min"))),
    ((3,), (Partial("product"),)),
]


def reduced(values: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    """The unsharded tensor of each rank's ``values``, [*mesh, 6, 4], by torch; replicas and shards cut it alike."""
    reduce = {
        "sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod,
    }  # fmt: skip
    for k in reversed(range(len(placements))):
        placement = placements[k]
        op = placement.reduce_op if isinstance(placement, Partial) else None
        values = values.select(k, 0) if op is None else reduce[op](values, k)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mesh", "placements"), CASES, ids=str)
def test_reduced_as_named(mesh: tuple[int, ...], placements: tuple[Placement, ...], dtype: torch.dtype) -> None:
    """An affine function of the input, which a factor changes."""
    size = torch.Size(mesh).numel()
    partial = [n if isinstance(p, Partial) else 1 for n, p in zip(mesh, placements, strict=True)]
    values = numbers([*partial, 6, 4]).to(dtype).expand(*mesh, 6, 4)
    want = reduced(values.double(), placements) * 2 + 1

    def run(rank: int, _: int) -> torch.Tensor:
        device_mesh = make_mesh(mesh)
        place = device_mesh.get_coordinate()
        assert place is not None
        local = values[tuple(place)]
        for k, p in enumerate(placements):
            if isinstance(p, Shard):
                local = local.chunk(mesh[k], p.dim)[place[k]]
        x = DTensor.from_local(local.contiguous(), device_mesh, placements, run_check=False)
        with FusionDefinition(backend="torch") as fd:
            t = fd.define_tensor([-1, -1], dtype=DataType.from_torch(dtype))
            fd.add_output(fd.ops.add(fd.ops.mul(fd.ops.cast(t, DataType.Float), 2.0), 1.0))
        (y,) = fd.execute([x])
        assert isinstance(y, DTensor)
        assert not any(isinstance(p, Partial) for p in y.placements)
        return y.full_tensor()

    of_one = 2 * reduced(values.double().abs(), placements).max().item() * torch.finfo(dtype).eps
    for found in run_ranks(size, run):
        assert found.dtype == torch.float32
        # Two roundings of the reduced value in its own type, doubled, and one of float32 for each rank.
        torch.testing.assert_close(found.double(), want, rtol=0, atol=2 * of_one + size * 2**-22)


def test_integers_have_no_average() -> None:
    """As torch has it; half of an odd sum is no integer."""

    def run(rank: int, _: int) -> None:
        x = DTensor.from_local(torch.full((4,), rank + 1), make_mesh((2,)), [AVG], run_check=False)
        with FusionDefinition() as fd:
            t = fd.define_tensor([4], dtype=DataType.Int)
            fd.add_output(fd.ops.mul(t, 1))
        with pytest.raises(PlacementError, match=r"avg\) of Int.*integers have no average"):
            fd.execute([x])

    run_ranks(2, run)
