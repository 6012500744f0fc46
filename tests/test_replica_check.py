"""SHARDFUSE_CHECK=replicas: replicated inputs that differ between ranks are an error on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Shard
from torch_answers import assert_beside

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import InputError
from shardfuse.executor.replicas import digest
from shardfuse.nn import RMSNorm


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_CHECK", "replicas")


def scaled_rows(mesh: DeviceMesh) -> FusionDefinition:
    """x * w * s: rows of x are cut over the last mesh dimension, w is whole on every rank."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 4], contiguity=True, dtype=DataType.Float)
        w = fd.define_tensor([4], contiguity=True, dtype=DataType.Float)
        s = fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.mul(fd.ops.mul(x, w), s))
        x.set_device_mesh(mesh)
        x.outer_split(0, mesh.shape[-1])
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def refusals(size: int, ranks: object, change: Callable[[int, Tensor, Tensor], float]) -> set[str | None]:
    """What the second call says on the ranks, of which ``change`` alters some; the first is of like replicas."""
    full = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def run(rank: int, size: int) -> str | None:
        mesh = DeviceMesh(ranks)
        fd = scaled_rows(mesh)
        x, w = mesh.shard_tensor(full, 0).clone(), torch.tensor([1.0, math.nan, 0.0, 2.0])
        assert_beside(fd.execute([x, w, 2.0])[0], x * w * 2.0)
        scale = change(rank, x, w)
        try:
            fd.execute([x, w, scale])
        except InputError as error:
            return str(error)
        return None

    return set(run_ranks(size, run))


def test_like_replicas_pass() -> None:
    assert refusals(4, range(4), lambda rank, x, w: 3.0) == {None}


def test_one_that_differs_is_named_on_every_rank() -> None:
    def change(rank: int, x: Tensor, w: Tensor) -> float:
        w[3] += 2.0**-20 if rank == 2 else 0.0
        return 2.0

    (said,) = refusals(4, range(4), change)
    assert said is not None
    assert "input 1, T1, to be the same on ranks 0, 1, 2, 3" in said
    assert "other values on rank 2 than on rank 0" in said


def test_a_sign_of_zero_counts() -> None:
    (said,) = refusals(2, range(2), lambda rank, x, w: w.mul_(-1.0 if rank else 1.0) is w and 2.0)
    assert "input 1, T1" in str(said)


def test_numbers_are_replicas() -> None:
    (said,) = refusals(4, range(4), lambda rank, x, w: 2.0 + (rank == 1))
    assert "input 2" in str(said)
    assert "other values on rank 1 than on rank 0" in str(said)


def test_shards_are_compared_over_the_other_mesh_dimension() -> None:
    """On [[0, 1], [2, 3]] ranks 1 and 3 hold the second half of x."""

    def change(rank: int, x: Tensor, w: Tensor) -> float:
        x[0] += 1.0 if rank == 3 else 0.0
        return 2.0

    (said,) = refusals(4, [[0, 1], [2, 3]], change)
    assert "input 0, T0, to be the same on ranks 1, 3" in str(said)
    assert "other values on rank 3 than on rank 1" in str(said)


@pytest.mark.parametrize("parameters", ["dtensor", "local"])
def test_a_module_whose_weights_were_not_seeded_alike(parameters: str) -> None:
    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        norm = RMSNorm(6, mesh=mesh, input=Shard(0), parameters=parameters)
        norm(torch.ones(2, 6))
        with torch.no_grad():
            local = norm.weight if parameters == "local" else norm.weight.to_local()
            local += rank
        with pytest.raises(InputError, match="other values on rank 1 than on rank 0"):
            norm(torch.ones(2, 6))

    run_ranks(2, run)


def test_nothing_is_asked_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDFUSE_CHECK")
    assert refusals(2, range(2), lambda rank, x, w: 2.0 + rank) == {None}


def test_digests_are_of_every_byte_in_order() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert digest(x) == digest(x.T.contiguous().T)
    assert digest(x) != digest(x.view(3, 2).T.reshape(2, 3))
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.tensor([math.nan])) == digest(torch.tensor([math.nan]))
    assert digest(torch._neg_view(x)) == digest(-x)
    for dtype in (torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64):
        assert digest(x.to(dtype)) == digest(x.to(dtype).clone())
    assert digest(torch.empty(0)) == digest(torch.empty(0))
