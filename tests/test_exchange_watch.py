"""Who notices that a kernel has waited for another rank in vain, or waits for one that leaves, without another call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from exchange_cases import NotedKernel, define, kernel_of, plan_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfuse import DataType
from shardfuse.executor import symmetric_slots
from shardfuse.executor.kernel import Launch
from shardfuse.mesh import process, symmetric, watchdog
from shardfuse.mesh.board import Record
from shardfuse.mesh.gpu_waits import StreamProbe
from shardfuse.mesh.groups import EXCHANGES, count_exchanges
from shardfuse.mesh.rendezvous import ProcessIdentity
from shardfuse.mesh.symmetric import Arena
from shardfuse.mesh.watchdog import Watchdog
from shardfuse.rank_errors import ExchangeTimeoutError

CPU = torch.device("cpu")
TOLD = 3 << 32 | 37 << 10 | 2
"""Launch 3 has waited for row 37 of rank 1."""


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """Of a world of two ranks, with the region of one program, and counted as a real one is."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    hosts = {0: "here", 1: "here"}
    made = Arena(CPU, 0, {0: 1 << 20, 1: 1 << 21}, 1 << 20, 5.0, torch.zeros(1, dtype=torch.int64), hosts)
    count_exchanges(group, made.order.launches)
    monkeypatch.setitem(symmetric._worlds, group, symmetric._World(made))
    yield made
    dist.destroy_process_group()


@pytest.fixture
def launch(arena: Arena) -> Launch:
    """What launches a kernel in its slots."""
    plan = kernel_of(plan_of(define("rms_norm", 8192, 2, DataType.BFloat16), 8))
    return symmetric_slots.region_of(plan).launcher(NotedKernel(plan), plan.rank_exchange)  # type: ignore[arg-type]


@pytest.fixture
def guard(arena: Arena) -> Watchdog:
    """Of rank 0, whose thread does not run."""
    return Watchdog(dist.HashStore(), 0, 2, None, 30.0)


def test_a_report_that_no_call_raises_ends_the_rank_within_seconds(
    arena: Arena, launch: Launch, guard: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the last call of a job, or of one that replays graphs alone."""
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    assert guard._lost_exchange() is None
    arena.report[0] = TOLD
    assert guard._lost_exchange() is None
    now[0] += 10
    found = guard._lost_exchange()
    assert found is not None
    assert found.line(1).startswith("rank 1 did not send its part of row 37 within 5 s, in launch 3")
    with pytest.raises(ExchangeTimeoutError):
        launch(None)
    assert guard._lost_exchange() is None  # the caller knows, and decides


def test_the_end_of_a_world_raises_a_report_once(arena: Arena, launch: Launch) -> None:
    symmetric.raise_lost_exchange(CPU)
    arena.report[0] = TOLD
    with pytest.raises(ExchangeTimeoutError, match="rank 1 did not send its part of row 37"):
        symmetric.raise_lost_exchange(CPU)
    symmetric.raise_lost_exchange(CPU)


def test_the_end_at_exit_is_an_end_by_failure(arena: Arena, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """There an exception would be printed, and the exit status 0."""
    ended = list[str]()

    def end(life: object, guard: object, line: str, fault: watchdog.Fault) -> None:
        ended.append(line)
        raise SystemExit(1)

    monkeypatch.setattr(process, "_end", end)
    arena.report[0] = TOLD
    context = process.ProcessContext(0, 2, 0, CPU, "gloo", 5.0)
    life = process._Life(context, None, None, lambda *given: None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        life.end()
    assert ended[0].startswith("rank 1 did not send its part of row 37")


def test_the_watch_goes_on_before_any_program_exchanges(arena: Arena, guard: Watchdog) -> None:
    """Whatever is raised there ends the watchdog's thread, and nobody notices a rank that is gone."""
    arena.report[0] = TOLD
    assert guard._lost_exchange() is None
    symmetric.raise_lost_exchange(CPU)


@pytest.mark.parametrize(("launched", "is_missed"), [(0, True), (1, True), (2, False)])
def test_a_rank_that_leaves_before_a_launch_that_waits_for_it_is_missed(
    launched: int, is_missed: bool, launch: Launch, guard: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.ProcessGroup, "_get_sequence_number_for_group", lambda group: 5)  # the fake one has none
    for _ in range(2):
        launch(None)
    guard._probe = StreamProbe(CPU)
    sequences = {f"{EXCHANGES} of (0, 1)": launched} if launched else {}
    guard._board.records[1] = Record(ProcessIdentity.of_this_process(), "leaving", sequences=sequences)
    found = guard._needed_leaver()
    assert (found is not None) == is_missed
    assert found is None or found.reason == "left before exchange in a kernel, number 2 of ranks [0, 1]"
