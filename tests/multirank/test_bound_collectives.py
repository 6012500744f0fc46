"""Collectives bound to a backend give what `collective_calls.py` gives; here to gloo, NCCL's being the same calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from resharding_cases import pairs, run

from shardfuse import DataType, FusionDefinition
from shardfuse.codegen.collective_moves import Moves
from shardfuse.executor import bound_collectives
from shardfuse.executor.nccl_channels import Pieces
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
    monkeypatch.setattr(bound_collectives, "symmetric_channel", lambda team, device, dtype, otherwise: otherwise)
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


@pytest.mark.parametrize("rows", [4, 40])
def test_pieces_of_an_inner_dim(pg, bound: list[str], rows: int) -> None:
    """A few are sent from where they lie; more are put in order by a copy, on all ranks alike."""
    mesh = DeviceMesh(range(pg.size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([mesh.size, -1, 4 * mesh.size, 8], contiguity=True, dtype=DataType.Float)
        piece = fd.ops.sum(x, [0])
        whole = fd.ops.set(piece)
        fd.add_output(piece)
        fd.add_output(whole)
    x.set_device_mesh(mesh)
    x.axis(0).parallelize(ParallelType.mesh_x)
    piece.set_device_mesh(mesh)
    piece.outer_split(1, mesh.size)
    piece.axis(1).parallelize(ParallelType.mesh_x)
    whole.set_device_mesh(mesh)
    summands = torch.arange(pg.size * rows * 4 * pg.size * 8, dtype=torch.float32).reshape(pg.size, rows, -1, 8)
    total = summands.sum(0)
    given = summands[pg.rank : pg.rank + 1].to(pg.device)
    for _ in range(2):
        bound.clear()
        mine, everything = fd.execute([given])
        assert torch.equal(mine.cpu(), mesh.shard_tensor(total, 1))
        assert torch.equal(everything.cpu(), total)
        pieces = rows if rows <= bound_collectives.MAX_PIECES else 1
        calls = [name for name in bound if name not in ("_start_coalescing", "_end_coalescing")]  # NCCL's groups
        assert calls == ["_reduce_scatter_base"] * pieces + ["_allgather_base"] * pieces


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_reductions_that_nccl_does_otherwise(pg, bound: list[str], op: str) -> None:
    """Largest and smallest keep NaN: every rank gathers what all have."""
    mesh = DeviceMesh(range(pg.size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([mesh.size, 6], contiguity=True, dtype=DataType.Float)
        found = getattr(fd.ops, op)(x, [0])
        fd.add_output(found)
    x.set_device_mesh(mesh)
    x.axis(0).parallelize(ParallelType.mesh_x)
    found.set_device_mesh(mesh)
    whole = torch.linspace(-2, 2, pg.size * 6).reshape(pg.size, 6)
    whole[0, 3] = torch.nan
    expected = {"max": whole.amax(0), "min": whole.amin(0), "prod": whole.prod(0)}[op]
    for _ in range(2):
        (y,) = fd.execute([whole[pg.rank : pg.rank + 1].to(pg.device)])
        torch.testing.assert_close(y.cpu(), expected, equal_nan=True, rtol=1e-6, atol=0)
    assert bound == [{"prod": "allreduce"}.get(op, "_allgather_base")] * 2


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


def test_two_sums_of_one_tensor(pg, bound: list[str]) -> None:
    """In one group of calls, none of which may write its result over what the other reads."""
    mesh = DeviceMesh(range(pg.size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([mesh.size, 8], contiguity=True, dtype=DataType.Float)
        doubled = fd.ops.mul(x, 2.0)
        once, again = fd.ops.sum(doubled, [0]), fd.ops.sum(doubled, [0], keepdim=True)
        fd.add_output(once)
        fd.add_output(fd.ops.mul(again, 3.0))
    x.set_device_mesh(mesh)
    x.axis(0).parallelize(ParallelType.mesh_x)
    summands = torch.arange(pg.size * 8, dtype=torch.float32).reshape(pg.size, 8)
    total = 2 * summands.sum(0)
    for _ in range(2):
        first, second = fd.execute([summands[pg.rank : pg.rank + 1].to(pg.device)])
        assert torch.equal(first.cpu(), total)
        assert torch.equal(second.cpu(), 3 * total[None])


class Kernels:
    """In place of kernels over NVLink: they have those kinds, note them, and gloo does the work."""

    def __init__(self, kinds: tuple[str, ...], asked: list[str], otherwise: object) -> None:
        self.kinds, self.asked, self.otherwise = kinds, asked, otherwise

    def __getattr__(self, name: str) -> object:
        return getattr(self.otherwise, name)

    def by_kernel(self, kind: str, moves: Moves) -> Callable[..., None] | None:
        self.asked.append(kind)
        if kind not in self.kinds:
            return None
        pieces = Pieces(moves.run, moves.outer, moves.given.outer, moves.taken.outer)
        if kind == "all_reduce":
            return self.otherwise.all_reduce("sum", moves.count)
        return (
            self.otherwise.all_gather(pieces) if kind == "all_gather" else self.otherwise.reduce_scatter("sum", pieces)
        )


@pytest.mark.parametrize("kinds", [(), ("all_gather", "reduce_scatter", "all_reduce")])
def test_kernels_are_asked_first(pg, bound: list[str], monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]) -> None:
    """In the first call and in later ones, of every kind; what they do not do, the backend does."""
    asked: list[str] = []
    monkeypatch.setattr(
        bound_collectives, "symmetric_channel", lambda team, device, dtype, otherwise: Kernels(kinds, asked, otherwise)
    )
    mesh = DeviceMesh(range(pg.size))
    whole = torch.arange(4 * pg.size * 16, dtype=torch.float32).reshape(-1, 16)
    here, expected = mesh.shard_tensor(whole, 0).to(pg.device), whole.sum(0)
    for cut, kind in ((False, "all_reduce"), (True, "reduce_scatter")):
        fd = sum_of_rows(mesh, cut)
        asked.clear()
        for _ in range(3):
            (y,) = fd.execute([here])
            assert torch.equal(y.cpu(), mesh.shard_tensor(expected, 0) if cut else expected)
        assert asked == [kind] * 2, "for the first call, and for all that follow"


def test_no_kernel_is_asked_where_nccl_is_asked_for(pg, bound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*of: object) -> object:
        raise AssertionError("kernels are asked")

    monkeypatch.setattr(bound_collectives, "symmetric_channel", refuse)
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", "nccl")
    mesh = DeviceMesh(range(pg.size))
    whole = torch.arange(4 * pg.size * 16, dtype=torch.float32).reshape(-1, 16)
    (y,) = sum_of_rows(mesh, cut=False).execute([mesh.shard_tensor(whole, 0).to(pg.device)])
    assert torch.equal(y.cpu(), whole.sum(0))
    assert bound == ["allreduce"]
