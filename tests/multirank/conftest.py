"""pytest as every rank of a job: a fresh process group for each test, one verdict for all ranks, one rank that prints.

Works under mpirun, torchrun and srun, and by plain `pytest` as a world of one. Every rank runs the same tests in the
same order; a test that fails on one rank fails on all, and the next one starts with a clean group.
SHARDFUSE_TEST_DEVICE (cpu or cuda; cuda where every rank has a GPU of its own, if left out) says where tensors live,
SHARDFUSE_TEST_TIMEOUT (seconds, default 20) how long a collective waits.  A rank that hangs longer than that prints
where its threads are; where it hangs on a GPU, from which no timeout returns, the rank that misses it ends the job.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from shardfuse.config import read_launch, set_process_defaults
from shardfuse.executor import nccl_channels
from shardfuse.mesh import symmetric
from shardfuse.mesh.captured import reset_graphs
from shardfuse.mesh.rendezvous import JobStore, PrefixStore, open_job_store

LAUNCH = read_launch()
set_process_defaults(LAUNCH)
TIMEOUT = float(os.environ.get("SHARDFUSE_TEST_TIMEOUT", "60"))
"""Seconds that ranks wait for one another: more than a rank may get no core, beside others.  One that is
later is in another test than the others from then on."""
# A failing rank tells its verdict at once, the others when their collective gives up.
VERDICT_TIMEOUT = timedelta(seconds=TIMEOUT + 30)
SECONDS = 60.0
"""That a rank waits for another in a kernel: that one may have kernels to compile."""
ELSEWHERE = "passed here, failed on other ranks"
NO_VERDICT = "gave no verdict in time"
JOB = pytest.StashKey[JobStore]()
STDERR = pytest.StashKey[int]()
"""The launcher's, while a test's own is captured."""
FAILED = pytest.StashKey[bool]()
"""Of a test: did it fail on any rank?"""


@dataclass(frozen=True)
class ProcessGroup:
    """This rank in the test's world. device: where its tensors live. store: for what a test tells other ranks."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store


def test_device() -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = os.environ.get("SHARDFUSE_TEST_DEVICE") or ("cuda" if gpus >= LAUNCH.local_size else "cpu")
    if asked == "cpu":
        return torch.device("cpu")
    if gpus < LAUNCH.local_size:
        raise pytest.UsageError(f"SHARDFUSE_TEST_DEVICE={asked}: {LAUNCH.local_size} ranks here and {gpus} GPUs")
    return torch.device("cuda", LAUNCH.local_rank)


test_device.__test__ = False


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest) -> JobStore:
    """The store that all ranks share for the whole session."""
    return request.config.stash.setdefault(JOB, open_job_store(LAUNCH, 60.0))


@pytest.fixture
def pg(request: pytest.FixtureRequest, job: JobStore) -> Iterator[ProcessGroup]:
    """The default process group of one test, over a part of the store of its own.

    NCCL takes seconds to come up, so on GPUs tests share a group until one of them fails;
    those marked ``fresh_world`` have their own.
    """
    device = test_device()
    store = PrefixStore(f"{job.prefix}/{LAUNCH.attempt}/{request.node.nodeid}", job.store)
    fresh = device.type == "cpu" or request.node.get_closest_marker("fresh_world") is not None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if fresh:
        end_world(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=LAUNCH.rank,
            world_size=LAUNCH.world_size,
            timeout=timedelta(seconds=TIMEOUT),
        )
    nccl_channels.is_watched = lambda: True  # by pytest: NCCL's functions are tested, which torch does not watch
    yield ProcessGroup(LAUNCH.rank, LAUNCH.world_size, device, store)
    if fresh or request.node.stash.get(FAILED, False):
        end_world(device)


@pytest.fixture
def arena(pg: ProcessGroup) -> symmetric.Arena:
    """Memory that kernels exchange in: one for each process group, which tests share."""
    if pg.device.type != "cuda" or pg.size < 2:
        pytest.skip("needs a GPU for every rank")
    if isinstance(symmetric.arena(), str):
        symmetric.open_arena(pg.device, "symmetric", 64, SECONDS)
    found = symmetric.arena()
    assert isinstance(found, symmetric.Arena)
    return found


def end_world(device: torch.device) -> None:
    """NCCL would wait for graphs that tests have left."""
    if dist.is_initialized():
        if device.type == "cuda":
            reset_graphs(gc.get_objects())
        dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def end_of_group() -> Iterator[None]:
    """The group that the last test left goes when all are done."""
    yield
    end_world(test_device())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What more ranks than two run once more, and for long, is left to two; all ranks decide alike."""
    if LAUNCH.world_size <= 2:
        return
    left_out = [item for item in items if item.get_closest_marker("two_ranks_suffice")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """A rank that is still in a test when the others wait for its verdict tells on stderr where it is."""
    faulthandler.dump_traceback_later(TIMEOUT + 10, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test passes where it passes on every rank; the report of one that does not names the ranks that failed."""
    report = yield
    if LAUNCH.world_size > 1 and call.excinfo is not None and isinstance(call.excinfo.value, torch.AcceleratorError):
        end_job(item, [report.longreprtext])  # after which CUDA takes no more calls of this rank
    funcargs = getattr(item, "funcargs", {})
    if LAUNCH.world_size == 1 or report.when != "call" or "pg" not in funcargs:
        return report
    verdict = "" if report.passed or report.skipped else f"{call.excinfo.typename}: {str(call.excinfo.value)[:300]}"
    failed = [f"rank {rank}: {text}" for rank, text in exchange(funcargs["pg"].store, verdict).items() if text]
    if any(text.endswith(NO_VERDICT) for text in failed) and funcargs["pg"].device.type == "cuda":
        end_job(item, [*failed, *([] if report.passed else [report.longreprtext])])
    if failed:
        item.stash[FAILED] = True
        if report.passed:
            report.outcome = "failed"
            report.longrepr = ELSEWHERE
        report.sections.append(("ranks that failed", "\n".join(failed)))
    return report


def end_job(item: pytest.Item, said: list[str]) -> NoReturn:
    """The launcher ends the other ranks, one of which hangs, or would wait for this one in every test to come."""
    text = "\n".join([f"rank {LAUNCH.rank} ends the job in {item.nodeid}:", *said, ""])
    os.write(item.config.stash[STDERR], text.encode())
    os._exit(1)


def exchange(store: dist.Store, verdict: str) -> dict[int, str]:
    """Every rank's verdict, "" for one that has nothing to complain of."""
    ranks = range(LAUNCH.world_size)
    store.set(f"verdict/{LAUNCH.rank}", verdict)
    with suppress(dist.DistError):  # the ranks that are missing are named below
        store.wait([f"verdict/{rank}" for rank in ranks], VERDICT_TIMEOUT)
    return {
        rank: store.get(f"verdict/{rank}").decode() if store.check([f"verdict/{rank}"]) else NO_VERDICT
        for rank in ranks
    }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What goes wrong on a rank that prints nothing else; of a verdict the first rank has the beginning."""
    if LAUNCH.rank != 0 and report.failed and report.longrepr != ELSEWHERE:
        print(
            f"rank {LAUNCH.rank}: {report.nodeid} ({report.when}): {report.longreprtext[-2000:]}", file=sys.__stderr__
        )


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End after rank 0 has printed, since a launcher ends all ranks with the first that failed; rank 0, which may serve
    the store, ends last."""
    job = config.stash.get(JOB, None)
    if job is None or LAUNCH.world_size == 1:
        return
    store = PrefixStore("end", job.store)
    if LAUNCH.rank == 0:
        store.set("printed", "")
        with suppress(dist.DistError):
            store.wait([f"ended/{rank}" for rank in range(1, LAUNCH.world_size)], VERDICT_TIMEOUT)
    else:
        with suppress(dist.DistError):
            store.wait(["printed"], VERDICT_TIMEOUT)
            store.set(f"ended/{LAUNCH.rank}", "")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)
    if LAUNCH.rank != 0:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 open until the process ends


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """torch.compile has compiled nothing, and its report is empty."""
    from shardfuse.compile import report  # which imports Inductor

    torch._dynamo.reset()
    report(clear=True)
    yield
    torch._dynamo.reset()
