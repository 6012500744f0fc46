"""Two threads of each rank come to fusions of several ranks at once: refused on every rank, and nothing is wrong."""

from __future__ import annotations

import threading

import pytest
import torch
from torch_answers import assert_beside

from shardfuse import DeviceMesh, FusionDefinition, ParallelType, ShardfuseError, run_in_this_thread
from shardfuse.rank_errors import ThreadsError

pytestmark = pytest.mark.mpi


def normalised(mesh: DeviceMesh, added: float) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 64], contiguity=True)
        total = fd.ops.add(fd.ops.sum(fd.ops.mul(x, x), [-1], keepdim=True), added)
        fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(total)))
        x.set_device_mesh(mesh)
        x.outer_split(1, mesh.size, uneven=True)
        x.axis(1).parallelize(ParallelType.mesh_x)
    return fd


class Runs:
    """One fusion on numbers of its own, compared each time with torch on the unsharded tensor in float64."""

    def __init__(self, pg, seed: int, added: float) -> None:
        self.mesh = DeviceMesh(list(range(pg.size)))
        self.fd = normalised(self.mesh, added)
        whole = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        expected = (whole / (whole.square().sum(-1, keepdim=True) + added).sqrt()).float()
        self.local = self.mesh.shard_tensor(whole.float().to(pg.device), 1)
        self.expected = self.mesh.shard_tensor(expected.to(pg.device), 1)
        self.error: Exception | None = None

    def __call__(self, count: int = 20) -> None:
        for _ in range(count):
            (y,) = self.fd.execute([self.local])
            assert_beside(y, self.expected)

    def caught(self, start: threading.Barrier) -> None:
        start.wait()
        try:
            self()
        except Exception as error:  # noqa: BLE001 looked at in the main thread
            self.error = error


@pytest.mark.fresh_world  # whose threads were refused runs nothing more
@pytest.mark.parametrize("added", [0.0, 1.0], ids=["one fusion", "two fusions"])
def test_two_threads_at_once(added: float, pg) -> None:
    if pg.size < 2:
        pytest.skip("one rank")
    runs = [Runs(pg, 0, 0.0), Runs(pg, 1, added)]
    start = threading.Barrier(2)
    threads = [threading.Thread(target=run.caught, args=(start,), name=f"t{k}") for k, run in enumerate(runs)]
    for thread in threads if pg.rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [run.error for run in runs]
    assert all(isinstance(error, ShardfuseError | None) for error in errors), errors  # none is an AssertionError
    assert any(isinstance(error, ThreadsError) for error in errors), errors


def test_a_thread_that_is_refused_holds_nobody_up(pg) -> None:
    """The main thread of every rank has had the turn: it goes on, and so it does where ranks are not refused alike."""
    if pg.size < 2:
        pytest.skip("one rank")
    run, start = Runs(pg, 0, 0.0), threading.Barrier(1)
    run(2)
    for refused in (range(pg.size), [pg.size - 1]):
        if pg.rank in refused:
            thread = threading.Thread(target=run.caught, args=(start,))
            thread.start()
            thread.join()
            assert isinstance(run.error, ThreadsError)
        run(2)


def test_a_thread_takes_over(pg) -> None:
    run = Runs(pg, 0, 0.0)
    run(2)
    errors: list[Exception] = []

    def goes_on() -> None:
        try:
            run_in_this_thread()
            run(2)
        except Exception as error:  # noqa: BLE001 looked at in the main thread
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=goes_on)
        thread.start()
        thread.join()
        assert errors == []
        run(1)  # the other one has ended
