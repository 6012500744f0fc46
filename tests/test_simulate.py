"""Simulated ranks: real values, one set of random numbers a rank, and an error instead of a hang."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.multi_threaded_pg as multi_threaded_pg
from ranks import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch_answers import assert_like, compare
from torch_gradients import with_gradients

import shardfuse
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, simulate
from shardfuse.errors import ModuleInputError, ProgramMismatchError
from shardfuse.frontend.executor_cache import FusionExecutorCache
from shardfuse.nn import RMSNorm
from shardfuse.rank_errors import SimulationError, SimulationStuckError, SimulationTimeoutError
from shardfuse.tools import simulation

SCRIPT = Path(__file__).with_name("simulate_script.py")


def sharded_norm(rows: int, hidden: int) -> tuple[int, torch.Tensor]:
    context = shardfuse.initialize()
    mesh = DeviceMesh(list(range(context.world_size)))
    torch.manual_seed(7)
    x, w = torch.randn(rows, hidden), torch.randn(hidden)
    with FusionDefinition() as fd:
        tx, tw = fd.define_tensor([-1, hidden], contiguity=True), fd.define_tensor([hidden], contiguity=True)
        mean = fd.ops.mean(fd.ops.mul(tx, tx), [-1], keepdim=True)
        fd.add_output(fd.ops.mul(fd.ops.mul(tx, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))), tw))
        tx.set_device_mesh(mesh)
        tx.outer_split(1, mesh.size)
        tx.axis(1).parallelize(ParallelType.mesh_x)
    (y,) = fd.execute([mesh.shard_tensor(x, 1), mesh.shard_tensor(w, 0)])
    return context.rank, y


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_values(size: int) -> None:
    hidden = 2 * size
    results = simulate(sharded_norm, size, args=(3, hidden))
    torch.manual_seed(7)
    x, w = torch.randn(3, hidden), torch.randn(hidden)
    assert [rank for rank, _ in results] == list(range(size))
    found = torch.cat([y for _, y in results], 1)
    assert_like(found, lambda x, w: torch.nn.functional.rms_norm(x, (hidden,), w, 1e-6), x, w)
    assert not dist.is_initialized()


def test_eight_ranks_by_default() -> None:
    assert simulate(lambda: shardfuse.initialize().world_size) == [8] * 8


def test_fake_tensors_after_those_of_ranks() -> None:
    """A CUDA build without a GPU keeps what the first thread that made one set up, and crashed after that thread."""

    def shape() -> list[int]:
        with FakeTensorMode():
            return list(torch.ones(3).shape)

    for _ in range(2):
        assert simulate(shape, 2) == [[3]] * 2
        assert shape() == [3]


def test_initialize_again_and_finalize() -> None:
    def run() -> bool:
        same = shardfuse.initialize() is shardfuse.initialize(timeout=5)
        shardfuse.finalize()
        return same and dist.is_initialized() and shardfuse.initialize().device.type == "cpu"

    assert simulate(run, 2) == [True, True]


def test_each_rank_has_random_numbers_of_its_own() -> None:
    """As in processes: equal seeds, equal numbers, however the ranks meet in between."""

    def draw() -> list[float]:
        rank = shardfuse.initialize().rank
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        found: list[float] = []
        for k in range(6):
            found += [float(torch.randn(())), random.random(), float(np.random.rand())]
            if k % 2 == 0:
                dist.barrier()
            elif rank == 1:
                time.sleep(0.001)
        dropped = torch.nn.functional.dropout(torch.ones(64), 0.5)
        dist.all_reduce(torch.ones(1))
        return [*found, *dropped.tolist()]

    first, *rest = simulate(draw, 4)
    assert rest == [first] * 3
    assert len(dict.fromkeys(first[:18])) == 18


def test_modules_and_their_gradients() -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        rank = shardfuse.initialize().rank
        from torch.distributed.tensor import Shard

        mesh = DeviceMesh([0, 1, 2, 3])
        norm = RMSNorm(16, 1e-6, mesh=mesh, input=Shard(0))
        x = torch.arange(128.0).reshape(8, 16).sin()
        mine = mesh.shard_tensor(x, 0, rank).requires_grad_()
        norm(mine).square().sum().backward()
        assert mine.grad is not None
        return mine.grad, norm.weight.grad.to_local()

    results = simulate(run, 4)
    x, w = torch.arange(128.0).reshape(8, 16).sin(), torch.ones(16)

    def total(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.rms_norm(x, (16,), w, 1e-6).square().sum(),)

    _, want_dx, want_dw = with_gradients(total, [x, w], [torch.tensor(1.0)])
    compare("dx", torch.cat([dx for dx, _ in results]), want_dx)
    for _, dw in results:
        compare("dw", dw, want_dw)


def test_an_exception_ends_all() -> None:
    def run() -> None:
        if shardfuse.initialize().rank == 1:
            raise ModuleInputError("M", "x", "nothing", "a tensor", "pass one")
        dist.barrier()

    with pytest.raises(ModuleInputError, match="pass one") as caught:
        simulate(run, 4)
    assert caught.value.__notes__ == ["raised on rank 1 of 4; ranks that raised: [1]"]
    assert simulate(lambda: shardfuse.initialize().rank, 2) == [0, 1]


def test_fail_raises() -> None:
    def run() -> None:
        shardfuse.initialize()
        dist.barrier()
        shardfuse.mesh.fail("cannot go on")

    with pytest.raises(shardfuse.ShardfuseError, match="failed: cannot go on"):
        simulate(run, 2)


def test_ranks_that_wait_for_each_other_are_told_where() -> None:
    def run() -> None:
        if shardfuse.initialize().rank != 2:
            dist.all_reduce(torch.ones(2))
        if shardfuse.initialize().rank == 0:
            dist.barrier()

    with pytest.raises(SimulationStuckError, match=r"ranks \[2\] have ended") as caught:
        simulate(run, 3)
    assert sorted(caught.value.places) == [0, 1]
    assert all("test_simulate.py" in place and "all_reduce" in place for place in caught.value.places.values())


def test_a_rank_that_does_not_come_to_a_program_is_noticed() -> None:
    def run() -> None:
        if shardfuse.initialize().rank != 1:
            sharded_norm(3, 9)

    with pytest.raises(SimulationStuckError, match=r"ranks \[1\] have ended") as caught:
        simulate(run, 3)
    assert all("test_simulate.py" in p and "comparing its program" in p for p in caught.value.places.values())


@pytest.mark.parametrize("waits", ["new_group", "get", "wait"])
def test_a_rank_that_waits_in_the_store_is_noticed(waits: str) -> None:
    def run() -> None:
        if shardfuse.initialize().rank == 0:
            sharded_norm(3, 8)
        elif waits == "new_group":
            dist.new_group([0, 1])
        else:
            store = dist.distributed_c10d._get_default_store()
            store.get("of another rank") if waits == "get" else store.wait(["of another rank"])

    with pytest.raises(SimulationStuckError, match=r"rank 1 in .*test_simulate\.py"):
        simulate(run, 2, timeout=30)


def test_a_wait_in_the_store_ends_with_what_another_rank_sets_or_in_time() -> None:
    def run() -> bytes:
        rank = shardfuse.initialize().rank
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            time.sleep(0.1)
            store.set("late", "there")
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"], timedelta(seconds=0.05))
        return store.get("late")

    assert simulate(run, 3, timeout=30) == [b"there"] * 3


def test_programs_that_differ() -> None:
    def run() -> None:
        rank = shardfuse.initialize().rank
        sharded_norm(3, 8 if rank else 16)

    with pytest.raises(ProgramMismatchError, match="rank 0 has"):
        simulate(run, 4)


def test_a_sleeping_rank_is_not_stuck() -> None:
    def run() -> float:
        rank = shardfuse.initialize().rank
        if rank == 0:
            time.sleep(1.5)
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    assert simulate(run, 3) == [3.0] * 3


def test_a_collective_that_all_have_come_to_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes, as on a machine that is slow to wake the ranks."""
    work = multi_threaded_pg.AllReduce.work

    def slow_work(self: object, data: object) -> None:
        threading.Event().wait(0.3)  # as time.sleep, of which the simulation does not know
        work(self, data)

    monkeypatch.setattr(multi_threaded_pg.AllReduce, "work", slow_work)
    monkeypatch.setattr(simulation, "_STANDSTILL", 0.02)

    def run() -> float:
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    assert simulate(run, 3) == [3.0] * 3


def test_ranks_that_share_a_group_object_are_told_of_the_standstill() -> None:
    """As where one keeps its group in a global variable: both are the same rank to torch, and none is the other."""
    kept: dict[int, dist.ProcessGroup] = {}

    def run() -> None:
        kept[dist.get_rank()] = dist.distributed_c10d._get_default_group()
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=kept[1])

    with pytest.raises(SimulationStuckError, match=r"rank 0 in .*all_reduce.*rank 1 in"):
        simulate(run, 2, timeout=20)


def test_refusals() -> None:
    with pytest.raises(SimulationError, match="world_size=0"):
        simulate(lambda: None, 0)
    for timeout in (0, -1.0, float("nan"), "1", True):
        with pytest.raises(SimulationError, match=rf"timeout={timeout!r}: pass seconds, more than 0"):
            simulate(lambda: None, 1, timeout=cast("Any", timeout))
    with pytest.raises(SimulationError, match="already"):
        simulate(lambda: simulate(lambda: None, 2), 2)
    with pytest.raises(SimulationTimeoutError, match=r"not ended within timeout=0\.2 s: rank 0 in"):
        simulate(lambda: time.sleep(3), 1, timeout=0.2)


def test_worlds_that_follow_one_another_give_what_the_first_gives() -> None:
    """Ranks are threads, whose numbers those of the next world have again, in another order: torch takes the number
    for a part of a mesh that it knows.  And no world leaves a hook that writes its ranks."""
    whole, hook = torch.arange(5.0), sys.excepthook

    def run() -> torch.Tensor:
        shardfuse.initialize()
        mesh = init_device_mesh("cpu", (2, 2))
        return distribute_tensor(whole, mesh, [Shard(0), Shard(0)], src_data_rank=None).full_tensor()

    for _ in range(10):
        assert all(torch.equal(found, whole) for found in simulate(run, 4))
    assert sys.excepthook is hook


def test_the_module_does_not_hide_the_function() -> None:
    importlib.import_module("shardfuse.simulate")
    assert callable(shardfuse.simulate)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "shardfuse.simulate", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_command() -> None:
    done = command("-n", "4", str(SCRIPT), "6")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 4: (6, 4)" for rank in range(4)]
    assert "shardfuse" not in done.stderr, done.stderr


def test_command_shows_what_a_rank_raises() -> None:
    done = command("-n", "2", str(SCRIPT), "2", "boom")
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
    assert "raised on rank 1 of 2" in done.stderr


def test_ranks_that_bind_one_fusion_at_a_time_have_each_their_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is done with making its program before any of them asks which it is."""
    mesh = DeviceMesh([1, 0])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.Float)
        y = fd.ops.set(x)
        x.set_device_mesh(mesh)
        y.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        y.outer_split(0, 2)
        y.axis(0).parallelize(ParallelType.mesh_x)
        fd.add_output(y)
    made, bind = threading.Barrier(2), FusionExecutorCache._bind

    def bind_together(*arguments: Any) -> Any:
        found = bind(*arguments)
        made.wait(timeout=60)
        return found

    monkeypatch.setattr(FusionExecutorCache, "_bind", bind_together)
    unsharded = torch.arange(4.0)

    def run(rank: int, _: int) -> list[float]:
        (found,) = fd.execute([mesh.shard_tensor(unsharded, 0)])
        return found.tolist()

    assert run_ranks(2, run) == [[0.0, 1.0], [2.0, 3.0]]
