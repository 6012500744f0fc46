"""Short last shards in the interface of nvFuser."""

from __future__ import annotations

import pytest
import torch

import shardfuse
import shardfuse.compat.nvfuser_direct as nv
from benchmarks.roundings import assert_near


def _sharded(*, uneven: bool) -> tuple[nv.FusionDefinition, nv.TensorView]:
    """exp of [4, 5] whose second axis two ranks share."""
    with nv.FusionDefinition() as fd:
        x = fd.define_tensor([4, 5], contiguity=True, dtype=nv.DataType.Float)
        y = fd.ops.exp(x)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(nv.multidevice.DeviceMesh([0, 1]))
            if uneven:
                tv.outer_split(1, 2, uneven=True)
            else:
                tv.outer_split(1, 2)
            tv.axis(1).parallelize(nv.ParallelType.mesh_x)
    return fd, x


def test_an_outer_split_may_leave_a_short_shard() -> None:
    full = torch.linspace(-2, 2, 20).reshape(4, 5)

    def main() -> torch.Tensor:
        fd, x = _sharded(uneven=True)
        (found,) = fd.execute([nv.shard_tensor(full, x)])
        return found

    pieces = shardfuse.simulate(main, world_size=2)
    assert [piece.shape[1] for piece in pieces] == [3, 2]
    assert_near(torch.cat(pieces, 1), full.double().exp(), n=2, relative=True)


def test_an_axis_that_no_shards_divide_is_refused_as_nvfuser_refuses() -> None:
    def main() -> None:
        _, x = _sharded(uneven=False)
        nv.shard_tensor(torch.ones(4, 5), x)

    with pytest.raises(RuntimeError, match="uneven=True"):
        shardfuse.simulate(main, world_size=2)
