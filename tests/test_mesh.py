"""DeviceMesh: what it holds, what it refuses, and that it cuts as torch does."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardfuse.errors import (
    MeshDimensionError,
    MeshDimNamesError,
    MeshExceedsWorldError,
    MeshRanksError,
    NotInitializedError,
    RankNotInMeshError,
    ShardAxisError,
)
from shardfuse.mesh import DeviceMesh, ParallelType
from shardfuse.mesh.torch_mesh import torch_mesh_of

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z


def test_parallel_types_count_from_the_last_dimension() -> None:
    assert [kind.value for kind in ParallelType][:6] == ["serial", "stream", "mesh_x", "mesh_y", "mesh_z", "mesh_3"]
    assert [X.mesh_dim(3), Y.mesh_dim(3), Z.mesh_dim(3), ParallelType.mesh_7.mesh_dim(8)] == [2, 1, 0, 0]
    assert X.is_mesh
    assert ParallelType.mesh_7.is_mesh
    assert not ParallelType.serial.is_mesh
    assert not ParallelType.stream.is_mesh
    with pytest.raises(MeshDimensionError, match="a mesh of 1 dimensions has no dimension mesh_y: use one of mesh_x"):
        Y.mesh_dim(1)
    with pytest.raises(MeshDimensionError, match="no dimension stream"):
        ParallelType.stream.mesh_dim(2)


@pytest.mark.parametrize(
    "ranks",
    [[[0, 1, 2], [3, 4, 5]], ((0, 1, 2), (3, 4, 5)), np.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3)],
    ids=["list", "tuple", "numpy", "torch"],
)
def test_ranks_in_every_form(ranks: object) -> None:
    mesh = DeviceMesh(ranks, dim_names=("dp", "tp"))
    assert (mesh.size, mesh.shape, mesh.ndim, mesh.ranks) == (6, (2, 3), 2, (0, 1, 2, 3, 4, 5))
    assert mesh.dim_names == ("dp", "tp")
    assert mesh.parallel_types == (Y, X)
    assert (mesh.extent(X), mesh.extent(Y)) == (3, 2)
    assert all(type(rank) is int for rank in mesh.ranks)
    assert repr(mesh) == "DeviceMesh([[0, 1, 2], [3, 4, 5]], dim_names=('dp', 'tp'))"


def test_equal_by_ranks_shape_and_names() -> None:
    meshes = [
        DeviceMesh([0, 1, 2, 3]),
        DeviceMesh([[0, 1], [2, 3]]),
        DeviceMesh([[0, 1], [2, 3]], ("a", "b")),
        DeviceMesh([[2, 3], [0, 1]]),
        DeviceMesh([[[0], [1]], [[2], [3]]]),
    ]
    assert len(set(meshes)) == len(meshes)
    for mesh in meshes:
        again = eval(repr(mesh))
        assert again == mesh
        assert hash(again) == hash(mesh)
    assert DeviceMesh([0]) != [0]
    with pytest.raises(AttributeError):
        meshes[0].ranks = (1,)


def test_places_and_teams_against_numpy() -> None:
    box = np.array([7, 3, 11, 0, 5, 2, 8, 1, 9, 4, 6, 10, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31]).reshape(
        2, 3, 4
    )
    mesh = DeviceMesh(box)
    for place in np.ndindex(2, 3, 4):
        rank = int(box[place])
        assert mesh.coordinate(rank) == place
        for kind, dim in ((X, 2), (Y, 1), (Z, 0)):
            line = tuple(slice(None) if d == dim else p for d, p in enumerate(place))
            assert mesh.index(rank, kind) == place[dim]
            assert mesh.team(rank, kind) == tuple(box[line].tolist())
    assert mesh.coordinate(12) is None
    assert mesh.coordinate(torch.tensor(mesh.ranks[-1])) == mesh.coordinate(mesh.ranks[-1]), "any integer"
    with pytest.raises(RankNotInMeshError, match="rank 12 is not in DeviceMesh"):
        mesh.index(12, X)
    with pytest.raises(RankNotInMeshError, match="rank 12 is not in DeviceMesh"):
        mesh.team(12, X)
    with pytest.raises(MeshDimensionError, match="has no dimension mesh_3: use one of mesh_z, mesh_y, mesh_x"):
        mesh.extent(ParallelType.mesh_3)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "has no ranks, expected at least one"),
        ([[0, 1], []], r"has a list of 0 at \[1\], expected a list of 2 \(a box"),
        ([[0, 1], [2]], r"has a list of 1 at \[1\], expected a list of 2"),
        ([[0, 1], 2], r"has 2 at \[1\], expected a list of 2"),
        ([0, [1, 2]], r"has \[1, 2\] at \[1\], expected a rank"),
        ([0, 1, 0], "has rank 0 more than once, expected 3 distinct ranks"),
        ([0, -1], "has rank -1, expected ranks of 0 or more"),
        ([0.0, 1.0], r"has 0.0 at \[0\], expected a rank, a whole number"),
        (torch.arange(2.0), "expected a rank, a whole number"),
        ([True, False], "expected a rank, a whole number"),
        (["a"], "expected a rank, a whole number"),
        (3, "has 3, expected a list of ranks"),
        (np.zeros((1,) * 9, dtype=int), "has 9 dimensions, expected at most 8"),
    ],
)
def test_refused_ranks(ranks: object, message: str) -> None:
    with pytest.raises(MeshRanksError, match=message):
        DeviceMesh(ranks)


@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a", 1), "ab"])
def test_refused_names(names: object) -> None:
    with pytest.raises(MeshDimNamesError, match="does not fit 2 mesh dimensions: pass 2 distinct strings"):
        DeviceMesh([[0, 1], [2, 3]], dim_names=names)


def test_mesh_larger_than_the_world() -> None:
    DeviceMesh([1, 0]).validate_in_world(2)
    with pytest.raises(
        MeshExceedsWorldError, match=r"DeviceMesh\(\[0, 5\]\) of 2 ranks \(largest 5\).* a world of 4: .* 6 ranks"
    ):
        DeviceMesh([0, 5]).validate_in_world(4)


@pytest.mark.parametrize("extent", [0, 1, 3, 5, 7, 8])
def test_shards_are_those_of_torch_chunk(extent: int) -> None:
    mesh = DeviceMesh([[4, 5, 6, 7], [0, 1, 2, 3]])
    x = torch.arange(2 * extent * 3).reshape(2, extent, 3)
    chunks = [*x.chunk(4, 1), *[x[:, :0]] * 4]
    for rank in range(8):
        assert torch.equal(mesh.shard_tensor(x, 1, rank), chunks[rank % 4])
        assert torch.equal(mesh.shard_tensor(x, -3, rank, Y), x[1:] if rank < 4 else x[:1])
    assert torch.equal(torch.cat([mesh.shard_tensor(x, -2, rank) for rank in range(4)], 1), x)
    with pytest.raises(ShardAxisError, match="axis 3 is not an axis of a tensor of 3 dimensions"):
        mesh.shard_tensor(x, 3, 0)
    with pytest.raises(RankNotInMeshError):
        mesh.shard_tensor(x, 0, 8)


def test_shards_are_those_of_dtensor() -> None:
    """Over threads: this process's rank is the thread's, and every piece is DTensor's."""

    def piece_and_theirs(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(35.0).reshape(7, 5)
        theirs = distribute_tensor(x, init_device_mesh("cpu", (size,)), [Shard(0)]).to_local()
        return DeviceMesh(list(range(size))).shard_tensor(x, 0), theirs

    for ours, theirs in run_ranks(4, piece_and_theirs):
        assert torch.equal(ours, theirs)


def test_torchs_mesh_is_no_array_of_ranks() -> None:
    def refuse(rank: int, size: int) -> str:
        with pytest.raises(MeshRanksError) as refused:
            DeviceMesh(init_device_mesh("cpu", (size,)))
        return str(refused.value)

    (said,) = run_ranks(1, refuse)
    assert said.startswith("DeviceMesh(ranks=...) has torch's DeviceMesh(")
    assert ", expected a list of ranks (DeviceMesh.from_torch(mesh) takes torch's mesh): " in said


def test_to_and_from_torch() -> None:
    def there_and_back(rank: int, size: int) -> tuple[DeviceMesh, tuple[int, ...], bool]:
        mesh = DeviceMesh([[0, 2], [1, 3]], dim_names=("dp", "tp"))
        theirs = mesh.to_torch("cpu")
        assert theirs.mesh.tolist() == [[0, 2], [1, 3]]
        team = tuple(dist.get_process_group_ranks(theirs.get_group("tp")))
        return DeviceMesh.from_torch(theirs), team, tuple(sorted(mesh.team(rank, X))) == team

    results = run_ranks(4, there_and_back)
    assert all(mesh == DeviceMesh([[0, 2], [1, 3]], ("dp", "tp")) and same for mesh, _, same in results)
    assert [team for _, team, _ in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_to_torch_refuses_a_mesh_larger_than_the_world() -> None:
    with pytest.raises(MeshExceedsWorldError, match="a world of 2"):
        run_ranks(2, lambda rank, size: DeviceMesh([0, 1, 2]).to_torch("cpu"))


def test_text_is_the_same_for_every_hash_seed() -> None:
    code = (
        "from shardfuse.mesh import DeviceMesh, ParallelType; mesh = DeviceMesh([[3, 1], [2, 0]], ('a', 'b'));"
        "print(mesh, mesh.team(2, ParallelType.mesh_y))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert texts == {b"DeviceMesh([[3, 1], [2, 0]], dim_names=('a', 'b')) (3, 2)\n"}


def test_a_mesh_of_torch_keeps_its_origin_and_a_copy_is_itself() -> None:
    def run(rank: int, size: int) -> None:
        theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh = DeviceMesh.from_torch(theirs["b"])
        assert torch_mesh_of(mesh, "cpu") is mesh.origin
        assert mesh.origin == theirs["b"]
        assert copy.deepcopy(mesh) is mesh
        again = pickle.loads(pickle.dumps(mesh))
        assert again == mesh
        assert again.origin is None

    run_ranks(4, run)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2, 0, 3, 1], [[0, 1], [2, 3]], [[3, 1], [0, 2]]], ids=str)
def test_torchs_mesh_of_ours(ranks: list[object]) -> None:
    """Made by its ranks alone; of ascending ranks, what torch gathers on it is in order."""

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(ranks)
        theirs = torch_mesh_of(mesh, "cpu")
        assert theirs is torch_mesh_of(DeviceMesh(ranks), "cpu")
        assert theirs.mesh.tolist() == torch.tensor(ranks).tolist()
        assert tuple(theirs.get_coordinate() or ()) == mesh.coordinate(rank)
        for dim, parallel_type in enumerate(mesh.parallel_types):
            found = dist.get_process_group_ranks(theirs.get_group(dim))
            assert sorted(found) == sorted(mesh.team(rank, parallel_type))

    run_ranks(4, run)


def test_a_mesh_of_some_ranks_is_made_by_those_alone() -> None:
    def run(rank: int, size: int) -> None:
        if rank in (1, 3):
            assert torch_mesh_of(DeviceMesh([1, 3]), "cpu").mesh.tolist() == [1, 3]
        else:
            with pytest.raises(RankNotInMeshError):
                torch_mesh_of(DeviceMesh([1, 3]), "cpu")
        with pytest.raises(MeshExceedsWorldError):
            torch_mesh_of(DeviceMesh([1, 9]), "cpu")

    run_ranks(4, run)
    with pytest.raises(NotInitializedError):
        torch_mesh_of(DeviceMesh([0]), "cpu")


def test_dtensors_that_live_on_do_not_keep_connections_open() -> None:
    """gloo tells a rank that another has left by the connection that closes when nobody holds the group."""
    program = """
import torch, torch.distributed as dist, weakref
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.tensor import Shard
from shardfuse import DeviceMesh
from shardfuse.mesh.groups import destroy_groups
from shardfuse.nn import RMSNorm
norm = RMSNorm(8, mesh=DeviceMesh([0]), input=Shard(-1))
norm(torch.ones(2, 8)).sum().backward()
norm.weight.full_tensor()
group = weakref.ref(dist.group.WORLD)
destroy_groups()
assert group() is None
assert norm.weight.grad.shape == (8,)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
