"""DTensors whose dims several mesh dimensions cut: strided shards that reshapes give, and other orders of the cuts."""

from __future__ import annotations

import random
from itertools import combinations
from math import prod
from typing import Any, cast

import pytest
import torch
from dtensor_cases import make_mesh, numbers
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardfuse import DeviceMesh, FusionDefinition, ParallelType
from shardfuse.compat import nvfuser_direct
from shardfuse.errors import PlacementError
from shardfuse.nn import RMSNorm


def reshaped(shape: list[int], new: list[int]) -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.mul(fd.ops.reshape(fd.define_tensor(shape), new), 10.0))
    return fd


def random_reshape(draw: random.Random) -> tuple[list[int], list[int]]:
    """Flattens, unflattens, or puts neighbouring dims together anew."""
    shape = [draw.choice([1, 2, 2, 3, 4, 4, 6, 8]) for _ in range(draw.randint(2, 4))]
    flat = [prod(shape)]
    start, end = sorted(draw.sample(range(len(shape) + 1), 2))
    merged = [*shape[:start], prod(shape[start:end]), *shape[end:]]
    return draw.choice([(shape, flat), (shape, merged), (merged, shape), (flat, shape)])


def shards(shape: list[int], mesh: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """Two of the mesh dimensions shard the same dim or two, in all ways; the others replicate."""
    found: list[tuple[Placement, ...]] = []
    for pair in combinations(range(len(mesh)), 2):
        for dims in ((a, b) for a in range(len(shape)) for b in range(len(shape))):
            placements: list[Placement] = [Replicate()] * len(mesh)
            for k, dim in zip(pair, dims, strict=True):
                placements[k] = Shard(dim)
            found.append(tuple(placements))
    return [*found, (Shard(len(shape) - 1),) * len(mesh)]


@pytest.mark.parametrize(("mesh_shape", "seeds", "cases"), [((2, 2), (3, 21), 4), ((2, 2, 2), (3, 7), 3)], ids=str)
def test_reshapes_are_whole_again(mesh_shape: tuple[int, ...], seeds: tuple[int, ...], cases: int) -> None:
    """``full_tensor`` of a reshaped DTensor, and of one reshaped back by another fusion, is torch's, all bits."""

    def run(rank: int, size: int) -> set[str]:
        mesh, seen = make_mesh(mesh_shape), set[str]()
        draws = [random.Random(seed) for seed in seeds]
        for draw in draws * cases:
            shape, new = random_reshape(draw)
            full, there, back = numbers(shape), reshaped(shape, new), reshaped(new, shape)
            for placements in draw.sample(ways := shards(shape, mesh_shape), min(4, len(ways))):
                (y,) = there.execute([distribute_tensor(full, mesh, placements, src_data_rank=None)])
                assert isinstance(y, DTensor)
                case = f"{shape} of {placements} to {new} of {y.placements}"
                assert torch.equal(y.full_tensor(), (full * 10).reshape(new)), case
                (z,) = back.execute([y])
                assert isinstance(z, DTensor)
                assert torch.equal(z.full_tensor(), full * 10 * 10), f"{case}, and back to {z.placements}"
                strided = [p.split_factor for p in y.placements if isinstance(p, _StridedShard)]
                seen.add("one strided" if len(strided) == 1 else "several strided" if strided else "blocks")
        return seen

    assert run_ranks(prod(mesh_shape), run)[0] == {"blocks", "one strided", "several strided"}


CUTS: list[tuple[list[int], list[int], tuple[Placement, ...]]] = [
    ([2, 4, 2], [16], (Shard(1), Shard(1))),
    ([2, 2, 2], [8], (Shard(1), Shard(1))),
    ([2, 2, 2], [4, 2], (Shard(1), Shard(1))),
    ([4, 4], [16], (Shard(1), Shard(0))),
]


@pytest.mark.parametrize(("shape", "new", "placements"), CUTS, ids=str)
def test_a_reshaped_dtensor_has_the_spec_of_torchs_own(
    shape: list[int], new: list[int], placements: tuple[Placement, ...]
) -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2, 2))
        (y,) = reshaped(shape, new).execute([distribute_tensor(numbers(shape), mesh, placements, src_data_rank=None)])
        spec = cast(Any, y)._spec
        is_an_order = spec.placements == (_StridedShard(0, split_factor=2), Shard(0))
        assert spec.use_strided_shard_as_shard_order == is_an_order  # then as FSDP beside tensor parallelism has it
        assert torch.equal(cast(DTensor, y).full_tensor(), numbers(shape).reshape(new) * 10)

    run_ranks(4, run)


def test_what_torchs_own_reshape_gives_goes_through_fusions() -> None:
    """Skipped where torch's own refuses two dims that two mesh dimensions cut, as 2.11 does."""

    def run(rank: int, size: int) -> str | None:
        full = numbers([4, 4])
        x = distribute_tensor(full, make_mesh((2, 2)), [Shard(1), Shard(0)], src_data_rank=None)
        try:
            theirs = x.reshape(16)
        except RuntimeError as refusal:
            return str(refusal)
        ours = reshaped([4, 4], [16]).execute([x])[0]
        kept, back = (reshaped([16], new).execute([theirs])[0] for new in ([16], [4, 4]))
        for y in (ours, kept):
            assert cast(DTensor, y).placements == theirs.placements == (_StridedShard(0, split_factor=4), Shard(0))
            assert torch.equal(cast(DTensor, y).to_local(), theirs.to_local() * 10)
            assert torch.equal(cast(DTensor, y).full_tensor(), full.reshape(16) * 10)
        assert torch.equal(cast(DTensor, back).full_tensor(), full * 10)
        return None

    refusals = run_ranks(4, run)
    if all(refusals):
        pytest.skip(f"torch's reshape of a DTensor: {refusals[0]}")
    assert refusals == [None] * 4


def cut_in_order(full: torch.Tensor, mesh: TorchMesh, order: tuple[int, ...]) -> DTensor:
    """Dim 0, cut by the mesh dimensions of ``order``, as blocks of blocks."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = full
    for k in order:
        pieces = local.chunk(mesh.size(k))
        local = pieces[coordinate[k]] if coordinate[k] < len(pieces) else local[:0]
    whole = cast(Any, distribute_tensor(full, mesh, [Replicate()] * mesh.ndim, src_data_rank=None))._spec
    placements = tuple(Shard(0) if k in order else Replicate() for k in range(mesh.ndim))
    entries = (ShardOrderEntry(0, order),)
    spec = DTensorSpec(mesh, placements, whole.tensor_meta, shard_order=entries)
    return cast(Any, DTensor)(local.clone(), spec, requires_grad=False)


@pytest.mark.parametrize(
    ("mesh_shape", "order"), [((2, 3), (1, 0)), ((2, 2, 2), (2, 0, 1)), ((2, 1, 3), (2, 0))], ids=str
)
def test_a_dtensor_cut_in_another_order(mesh_shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    def run(rank: int, size: int) -> None:
        mesh, full = make_mesh(mesh_shape), numbers((24, 5))
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1])
            fd.add_output(fd.ops.mul(x, 10.0))
            fd.add_output(fd.ops.cumsum(x, 0))
        plain = distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        for x in (cut_in_order(full, mesh, order), plain, cut_in_order(full, mesh, order)):
            tenfold, running = cast("list[DTensor]", fd.execute([x]))
            assert torch.equal(tenfold.full_tensor(), full * 10)
            torch.testing.assert_close(running.full_tensor().double(), full.double().cumsum(0), rtol=1e-6, atol=1e-6)

    run_ranks(prod(mesh_shape), run)


def test_short_shards_cut_in_another_order_are_refused() -> None:
    """9 rows: blocks of 5 and 4, of those 3, 2 and 2, 2; strided shards of a fourth have 3, 3, 3 and none."""

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2, 2, 2))
        fd = reshaped([-1, 5], [-1, 5])
        with pytest.raises(PlacementError, match=r"input 0, T0=.*mesh dimensions \[2, 1, 0\].*redistribute"):
            fd.execute([cut_in_order(numbers((9, 5)), mesh, (2, 1, 0))])

    run_ranks(8, run)


def test_a_module_refuses_another_order() -> None:
    def run(rank: int, size: int) -> None:
        mesh, full = make_mesh((2, 2)), numbers((8, 6), dtype=torch.float64)
        module = RMSNorm(6, mesh=DeviceMesh.from_torch(mesh), input=(Shard(0), Shard(0)), dtype=torch.float64)
        module(distribute_tensor(full, mesh, [Shard(0), Shard(0)], src_data_rank=None))
        with pytest.raises(PlacementError, match="redistribute it"):
            module(cut_in_order(full, mesh, (1, 0)))

    run_ranks(4, run)


def test_a_module_loads_and_moves_parameters_cut_in_another_order() -> None:
    def run(rank: int, size: int) -> None:
        mesh, full = make_mesh((2, 2)), numbers((8,), dtype=torch.float64)
        by = (Shard(-1), Shard(-1))
        module = RMSNorm(8, mesh=DeviceMesh.from_torch(mesh), input=by, dtype=torch.float64)
        for named in (mesh, init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))):
            given = cut_in_order(full, named, (1, 0))
            torch.nn.init.zeros_(module.weight)
            module.load_state_dict({"weight": given})
            assert torch.equal(cast(DTensor, module.weight).full_tensor(), full)
        module.load_state_dict({"weight": given}, assign=True)
        assert torch.equal(cast(DTensor, module.weight).full_tensor(), full)
        assert torch.equal(cast(DTensor, module.float().weight).full_tensor(), full.float())

    run_ranks(4, run)


def test_compat_says_the_unsharded_shape_of_short_shards() -> None:
    def run(rank: int, size: int) -> None:
        full, mesh = numbers((5, 3)), make_mesh((2,))
        with nvfuser_direct.FusionDefinition() as fd:
            x = fd.define_tensor([5, 3], contiguity=True, dtype=nvfuser_direct.DataType.Float)
            y = fd.ops.mul(x, fd.define_scalar(10.0))
            fd.add_output(y)
        native = fd.fusion.native.inputs[0].val
        native.set_device_mesh(DeviceMesh(list(range(size))))
        native.outer_split(0, size, uneven=True)
        native.axis(0).parallelize(ParallelType.mesh_x)
        (found,) = nvfuser_direct.execute_with_dtensors(fd, [distribute_tensor(full, mesh, [Shard(0)])])
        assert found.shape == (5, 3)
        assert torch.equal(found.full_tensor(), full * 10)

    run_ranks(2, run)
