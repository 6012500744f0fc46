"""Short last shards in the interface of nvFuser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardfuse
import shardfuse.compat.nvfuser_direct as nv
from benchmarks.roundings import assert_near

Split = Callable[[nv.TensorView], object]
SPLITS: dict[str, Split] = {
    "outer_split": lambda tv: tv.outer_split(1, 2, uneven=True),
    "split": lambda tv: tv.split(1, 2, False, uneven=True),
}


def _sharded(columns: int, split: Split, declared: int = -1) -> tuple[nv.FusionDefinition, nv.TensorView]:
    """exp of [4, columns] whose second axis two ranks share."""
    with nv.FusionDefinition() as fd:
        x = fd.define_tensor([4, declared], contiguity=True, dtype=nv.DataType.Float)
        y = fd.ops.exp(x)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(nv.multidevice.DeviceMesh([0, 1]))
            split(tv)
            tv.axis(1).parallelize(nv.ParallelType.mesh_x)
    return fd, x


@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("columns", "pieces"), [(5, [3, 2]), (2, [1, 1]), (1, [1, 0])])
def test_the_last_shard_may_be_short(columns: int, pieces: list[int], split: Split, is_static: bool) -> None:
    full = torch.linspace(-2, 2, 4 * columns).reshape(4, columns)

    def main() -> torch.Tensor:
        fd, x = _sharded(columns, split, columns if is_static else -1)
        (found,) = fd.execute([nv.shard_tensor(full, x)])
        return found

    found = shardfuse.simulate(main, world_size=2)
    assert [piece.shape[1] for piece in found] == pieces
    assert_near(torch.cat(found, 1), full.double().exp(), n=2, relative=True)


def test_an_inner_split_may_be_uneven() -> None:
    with nv.FusionDefinition() as fd:
        x = fd.define_tensor([4, 5], contiguity=True, dtype=nv.DataType.Float)
        fd.add_output(fd.ops.exp(x))
        assert x.inner_split(1, 2, uneven=True) is x
    assert len(x.get_loop_domain()) == 3


@pytest.mark.parametrize("shape", [(4, 5), (4,), (4, 5, 2), (8, 4)])
def test_what_cannot_be_sharded_is_refused_as_nvfuser_refuses(shape: tuple[int, ...]) -> None:
    def main() -> None:
        _, x = _sharded(5, lambda tv: tv.outer_split(1, 2))
        nv.shard_tensor(torch.ones(shape), x)

    sentence = "uneven=True" if shape == (4, 5) else r"shard_tensor: found a tensor of shape .*, expected \[4, -1\]"
    with pytest.raises(RuntimeError, match=sentence):
        shardfuse.simulate(main, world_size=2)
