"""The benchmarks of calls and of ranks that exchange: tiny, right by their own rule, and what is not is reported."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import exchange, exchange_workloads, tails
from benchmarks.calls import run_calls
from benchmarks.exchange import WAIT, run_exchange, run_images
from benchmarks.exchange_images import IMAGES, SYNCHRONISED
from benchmarks.exchange_ranks import COLLECTIVES, NCCL, ONE_SHOT, TWO_SHOT, Ranks
from benchmarks.exchange_verdicts import Measured, judged, largest_error
from benchmarks.exchange_workloads import WORKLOADS
from benchmarks.peers.symmetric_memory import SymmetricBuffer
from benchmarks.report import Row
from benchmarks.workload import OWN, Case
from shardfuse import DeviceMesh

pytestmark = [pytest.mark.mpi, pytest.mark.two_ranks_suffice]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Inductor, and with few samples."""
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    monkeypatch.setattr(tails, "SAMPLES", (5, 5))


class Summed(SymmetricBuffer):
    """Memory of each rank's own, that gloo or NCCL sums up."""

    def one_shot(self, summand: torch.Tensor) -> torch.Tensor:
        total = summand.clone()
        dist.all_reduce(total)
        return total

    def two_shot(self, summand: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(summand)
        return summand


def case_of(pg) -> Case:
    return Case.parse(f"3x{64 * pg.size}")


def ranks_of(pg, buffer: SymmetricBuffer | None = None) -> Ranks:
    return Ranks(DeviceMesh(range(pg.size)), pg.device, buffer)


@pytest.mark.parametrize("name", IMAGES)
def test_every_peer_of_images_is_right(name: str, pg) -> None:
    (rows,) = run_images([Case.parse(f"{2 * pg.size}x4x{2 * pg.size}x8:groups=2")], pg.device, [name], rounds=1)
    in_step = [row for row in rows if row.workload == IMAGES[name][0]]
    theirs = [SYNCHRONISED] if "batch" in name and pg.device.type == "cuda" else []
    assert [row.impl for row in in_step] == [OWN, COLLECTIVES, NCCL, *theirs]
    assert not any(row.note for row in rows if row.impl != SYNCHRONISED), rows
    assert all(row.us and row.p99 for row in rows)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_peer_is_right(name: str, pg, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(pg)
    memory = torch.empty(case.shape[0] * case.columns * 2, dtype=torch.uint8, device=pg.device)
    monkeypatch.setattr(SymmetricBuffer, "made", lambda device, size: Summed(memory, "") if size else "")
    (rows,) = run_exchange([case], pg.device, [name], rounds=1)
    in_step = [row for row in rows if row.workload == WORKLOADS[name][0]]
    late = [row for row in rows if row.workload == f"{WORKLOADS[name][0]}, odd ranks late"]
    peers = {"softmax": [], "rms_norm_backward": [], "sequence": [], "rms_norm": [ONE_SHOT], "layer_norm": [ONE_SHOT]}
    impls = [OWN, COLLECTIVES, NCCL, *peers.get(name, [ONE_SHOT, TWO_SHOT])]
    assert [row.impl for row in in_step] == impls
    assert [row.impl for row in late] == [*impls, WAIT]
    assert not any(row.note for row in rows), rows
    assert all(row.us and row.p99 for row in rows)
    assert all(0 < row.roundings < 8 for row in in_step)


def test_a_peer_that_cannot_be_made_is_left_out(pg, capsys: pytest.CaptureFixture[str]) -> None:
    if pg.device.type == "cuda":
        pytest.skip("says what happens on a CPU")
    said: list[str] = []
    (rows,) = run_exchange([case_of(pg)], pg.device, ["add_rms_norm"], said, rounds=1)
    assert said == ["torch's symmetric-memory all-reduces are left out: tensors are on cpu"]
    assert {row.impl for row in rows} == {OWN, COLLECTIVES, NCCL, WAIT}
    assert capsys.readouterr().err == (said[0] + "\n" if pg.rank == 0 else "")


def measured(pg) -> Measured:
    return exchange_workloads.add_rms_norm(case_of(pg), ranks_of(pg))


def changed(of: Measured, change: Callable[[list[torch.Tensor]], None]) -> Measured:
    def run() -> list[torch.Tensor]:
        found = [t.clone() for t in of.runs[OWN]()]
        change(found)
        return found

    return replace(of, runs={OWN: run})


def test_a_result_that_is_off_on_one_rank_is_reported_on_all(pg) -> None:
    def off(found: list[torch.Tensor]) -> None:
        if pg.rank == pg.size - 1:
            found[1][0, 0] += 1

    assert judged(measured(pg), OWN, pg.device).note == ""
    assert judged(changed(measured(pg), off), OWN, pg.device).note.startswith("WRONG: ")


def next_up(x: torch.Tensor) -> None:
    """The first element's neighbour, which the rule allows."""
    x.view(torch.int16)[0, 0] += 1


def test_bits_that_differ_between_calls_are_reported(pg) -> None:
    calls: list[None] = []

    def every_other(found: list[torch.Tensor]) -> None:
        calls.append(None)
        if len(calls) % 2:
            next_up(found[1])

    verdict = judged(changed(measured(pg), every_other), OWN, pg.device)
    assert verdict.note == "DIFFERS: from one call to the next"
    assert verdict.roundings is not None


def test_bits_that_differ_between_ranks_are_reported(pg) -> None:
    def on_one(found: list[torch.Tensor]) -> None:
        if pg.rank == 1:
            next_up(found[1])

    note = judged(changed(measured(pg), on_one), OWN, pg.device).note
    assert note == ("DIFFERS: from rank to rank" if pg.size > 1 else "")


def test_errors_are_the_largest_of_all_ranks(pg) -> None:
    of = measured(pg)
    shift = 1 if pg.rank == pg.size - 1 else 0
    wide = tuple(t.to(torch.bfloat16).double() for t in of.eager)
    exact = Measured({OWN: lambda: [t.clone() for t in of.eager]}, wide, of.eager)
    assert judged(exact, OWN, pg.device).roundings == 0.0

    def up(found: list[torch.Tensor]) -> None:
        for _ in range(shift):
            at = found[0].abs().argmax()
            found[0].view(torch.int16).view(-1)[at] += 1

    assert judged(changed(exact, up), OWN, pg.device).roundings == 1.0


def test_an_element_near_zero_is_held_to_its_row() -> None:
    wide = torch.tensor([[1.0, 1.0, 2.0**-20, -1.0]], dtype=torch.float64)
    found = torch.tensor([[1.0, 1.0, 2.0**-9, -1.0]], dtype=torch.bfloat16)
    assert largest_error(found, wide) == pytest.approx((2.0**-9 - 2.0**-20) / 2.0**-8)


def test_odd_ranks_wait_before_each_call(pg, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(exchange, "_wait", lambda device, share: waits.append(share))
    made = dict[str, int]()
    runs = {"run": lambda: made.update(run=made.get("run", 0) + 1)}
    ways = {way: made for way, each, made in exchange._ways(runs, torch.device("cpu"))}
    assert list(ways) == ["", ", odd ranks late"]
    ways[""]["run"]()
    assert (waits, made) == ([], {"run": 1})
    ways[", odd ranks late"]["run"]()
    assert (waits, made) == ([1.0] * (pg.rank % 2), {"run": 2})


def test_gradients_are_recorded_only_where_they_are_measured(pg, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict[str, bool]()

    def noted(name: str) -> Callable[[Case, Ranks], Measured]:
        title, make = WORKLOADS[name]

        def made(case: Case, ranks: Ranks) -> Measured:
            of = make(case, ranks)

            def run() -> object:
                seen[name] = torch.is_grad_enabled()
                return of.runs[OWN]()

            return replace(of, runs={OWN: run})

        return title, made

    monkeypatch.setattr(exchange, "WORKLOADS", {name: noted(name) for name in ("rms_norm", "rms_norm_backward")})
    assert all(torch.is_grad_enabled() for _ in run_exchange([case_of(pg)], pg.device, rounds=1))
    assert seen == {"rms_norm": False, "rms_norm_backward": True}


def test_slow_calls_count_where_they_are_more_than_one_in_a_hundred(pg, monkeypatch: pytest.MonkeyPatch) -> None:
    """On whichever rank: the slowest of each call is taken."""
    monkeypatch.setattr(tails, "SAMPLES", (100, 100))
    seconds, calls = 0.2, dict.fromkeys(("none", "once", "twice"), 0)
    slow_in = {"none": (), "once": (50,), "twice": (30, 80)}

    def run(name: str) -> None:
        calls[name] += 1
        if calls[name] in slow_in[name] and pg.rank == pg.size - 1:
            time.sleep(seconds)

    found = tails.tails({name: partial(run, name) for name in calls}, dict.fromkeys(calls, 1.0), torch.device("cpu"))
    assert calls == dict.fromkeys(calls, 100 + tails.BURSTS * tails.FIRST)
    assert found["twice"] > seconds * 1e6 > max(found["none"], found["once"])
    assert tails.percentile([float(k) for k in range(300)]) == 296.0


def test_calls_are_right(pg) -> None:
    norm, added = run_calls([case_of(pg)], pg.device, rounds=1)
    eager: list[Row] = [row for row in (*norm, *added) if "graph" not in row.workload]
    alone = "dist.all_reduce alone"
    assert [row.impl for row in eager] == [OWN, NCCL, alone, OWN, NCCL, "shardfuse.nn.AddRMSNorm", alone]
    assert all(row.us and not row.note for row in eager), eager
