"""Collectives bound to a backend give what `communication.py` gives; here to gloo, NCCL's being the same calls."""

from __future__ import annotations

import pytest
import torch
from resharding_cases import pairs, run

from shardfuse import DataType, FusionDefinition
from shardfuse.executor import bound_collectives
from shardfuse.mesh import DeviceMesh, ParallelType

pytestmark = pytest.mark.mpi


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Binds on every device; the names of the backend's methods that ran."""
    ran: list[str] = []

    class Watched:
        def __init__(self, backend: object) -> None:
            self.backend = backend

        def __getattr__(self, name: str) -> object:
            if name == "supports_coalescing":
                return self.backend.supports_coalescing

            def call(*arguments: object) -> object:
                ran.append(name)
                return getattr(self.backend, name)(*arguments)

            return call

    monkeypatch.setattr(bound_collectives, "may_bind", lambda device: True)
    monkeypatch.setattr(bound_collectives, "stages_through_host", lambda group, device: False)
    monkeypatch.setattr(bound_collectives, "nccl_channel", lambda *of: None)
    monkeypatch.setattr(bound_collectives, "backend_of", lambda group, device: Watched(group._get_backend(device)))
    return ran


def test_changes_of_sharding(pg, bound: list[str]) -> None:
    for case in pairs((pg.size,), (4 * pg.size, 4 * pg.size, 4 * pg.size)):
        run(case, pg.rank, pg.device)
    assert {"_allgather_base", "alltoall_base"} <= set(bound)


def sum_of_rows(mesh: DeviceMesh, cut: bool) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 16], contiguity=True, dtype=DataType.Float)
        total = fd.ops.sum(x, [0])
        fd.add_output(total)
    x.set_device_mesh(mesh)
    x.outer_split(0, mesh.size)
    x.axis(0).parallelize(ParallelType.mesh_x)
    total.set_device_mesh(mesh)
    if cut:
        total.outer_split(0, mesh.size)
        total.axis(0).parallelize(ParallelType.mesh_x)
    return fd


@pytest.mark.parametrize(("cut", "method"), [(False, "allreduce"), (True, "_reduce_scatter_base")])
def test_sums(pg, bound: list[str], cut: bool, method: str) -> None:
    mesh = DeviceMesh(range(pg.size))
    fd = sum_of_rows(mesh, cut)
    whole = torch.arange(4 * pg.size * 16, dtype=torch.float32).reshape(-1, 16)
    here = mesh.shard_tensor(whole, 0).to(pg.device)
    for _ in range(2):
        (y,) = fd.execute([here])
        expected = whole.sum(0)
        assert torch.equal(y.cpu(), mesh.shard_tensor(expected, 0) if cut else expected)
    assert bound == [method] * 2


def test_an_input_is_not_written_over(pg, bound: list[str]) -> None:
    """Partial sums that the caller gives are summed beside them; those that a kernel makes, where they are."""
    mesh = DeviceMesh(range(pg.size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([mesh.size, 8], contiguity=True, dtype=DataType.Float)
        total = fd.ops.sum(x, [0])
        fd.add_output(total)
        fd.add_output(fd.ops.neg(x))
    x.set_device_mesh(mesh)
    x.axis(0).parallelize(ParallelType.mesh_x)
    total.set_device_mesh(mesh)
    given = torch.full((1, 8), float(pg.rank + 1), device=pg.device)
    y, z = fd.execute([given])
    assert torch.equal(given, torch.full_like(given, pg.rank + 1))
    assert torch.equal(z, -given)
    assert torch.equal(y, torch.full_like(y, pg.size * (pg.size + 1) / 2))
    assert bound == ["allreduce"]
