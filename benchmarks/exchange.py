"""Programs whose ranks exchange inside of a kernel, beside the same with collectives, and what torch takes.

Every rank runs this.  A workload has four tables: calls, and calls in CUDA graphs, of ranks in step and with every odd
rank 50 us late, which its GPU spends waiting before each call; how long that alone takes is a row of these tables.

Times are of one call among calls that follow one another, on the slowest rank, host and GPU, whichever is slower: the
median over rounds of the mean of a few milliseconds, and the 99th percentile of single calls (``tails.py``).  Graphs
hold ``EACH`` calls, and their times are a replay's divided by as many, so that their 99th percentile is of the mean of
ten calls.  What has no gradients is timed inside of one ``torch.no_grad()``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from shardfuse import DeviceMesh

from .exchange_images import IMAGES
from .exchange_ranks import Ranks
from .exchange_verdicts import Measured, Verdict, judged
from .exchange_workloads import WORKLOADS
from .graphs import EACH, captured
from .peers.symmetric_memory import SymmetricBuffer
from .report import Row
from .reshard import per_call
from .tails import tails
from .workload import Case

CASES = tuple(f"{rows}x8192" for rows in (1, 8, 64, 128, 512, 1024, 2048, 8192))
IMAGE_CASES = ("64x128x28x28", "32x64x56x56", "2x640x64x64", "2x320x128x128")
"""Of ResNet-50, of which a channel has 50 and 100 KB on each of two ranks, and of a UNet, of which a group has 82 and
164.  All are measured of both norms."""
ROUNDS = 11
LATE = 90_000
"""Cycles of a GPU: about 50 us."""
LATE_ON_CPU = 50e-6
WAIT = "the wait alone"

Runs = Mapping[str, Callable[[], object]]


def run_exchange(
    given: Sequence[Case],
    device: torch.device,
    only: Sequence[str] = (),
    left_out: list[str] | None = None,
    rounds: int = ROUNDS,
) -> Iterator[list[Row]]:
    """Rows workload by workload, case by case; the same on every rank.

    given: instead of the grid.  only: names of ``WORKLOADS``, instead of all.  left_out: gets a sentence on each peer
    that cannot be measured here, which the first rank prints.
    """
    cases = list(given) or [Case.parse(text) for text in CASES]
    size = max(case.shape[0] * case.columns * case.dtype.itemsize for case in cases)
    found = SymmetricBuffer.made(device, size)
    if isinstance(found, str):
        _leave_out(f"torch's symmetric-memory all-reduces are left out: {found}", left_out)
    buffer = None if isinstance(found, str) else found
    yield from _tables(cases, WORKLOADS, only, Ranks(_all_ranks(), device, buffer), rounds)


def run_images(
    given: Sequence[Case], device: torch.device, only: Sequence[str] = (), rounds: int = ROUNDS
) -> Iterator[list[Row]]:
    """The same of images, as ``run_exchange``.  only: names of ``IMAGES``, instead of all."""
    cases = list(given) or [Case.parse(text) for text in IMAGE_CASES]
    yield from _tables(cases, IMAGES, only, Ranks(_all_ranks(), device), rounds)


def _all_ranks() -> DeviceMesh:
    return DeviceMesh(range(dist.get_world_size()))


def _tables(
    cases: Sequence[Case],
    workloads: Mapping[str, tuple[str, Callable[[Case, Ranks], Measured]]],
    only: Sequence[str],
    ranks: Ranks,
    rounds: int,
) -> Iterator[list[Row]]:
    for case in cases:
        torch._dynamo.reset()  # what is compiled is so for the sizes of a case
        for name, (title, make) in workloads.items():
            if not only or name in only:
                yield _rows(title, case, make(case, ranks), ranks.device, rounds)


def _leave_out(said: str, left_out: list[str] | None) -> None:
    if left_out is not None:
        left_out.append(said)
    if dist.get_rank() == 0:
        print(said, file=sys.stderr, flush=True)


def _rows(title: str, case: Case, measured: Measured, device: torch.device, rounds: int) -> list[Row]:
    rows: list[Row] = []
    with torch.set_grad_enabled(measured.has_gradients):
        verdicts = {name: judged(measured, name, device) for name in measured.runs}
        for way, each, runs in _ways(measured.runs, device):
            times = per_call(runs, device, rounds)
            slow = tails(runs, {name: us for name, (us, _, _) in times.items()}, device)
            for name, found in times.items():
                us, low, high = (t / each for t in found)
                verdict = verdicts.get(name, Verdict(""))
                row = Row(f"{title}{way}", str(case), name, 0, us, low, high, note=verdict.note, p99=slow[name] / each)
                rows.append(row if way else replace(row, roundings=verdict.roundings))
    return rows


def _ways(runs: Runs, device: torch.device) -> Iterator[tuple[str, int, Runs]]:
    """What each table adds to the title, how many calls a run is, and the runs."""
    late = {name: partial(_begun_late, run, device) for name, run in runs.items()}
    late[WAIT] = partial(_begun_late, partial(_wait, device, 0.0), device)
    yield "", 1, runs
    yield ", odd ranks late", 1, late
    if device.type == "cuda":
        yield ", in a graph", EACH, {name: captured(run) for name, run in runs.items()}
        yield ", in a graph, odd ranks late", EACH, {name: captured(run) for name, run in late.items()}


def _begun_late(run: Callable[[], object], device: torch.device) -> object:
    if dist.get_rank() % 2:
        _wait(device, 1.0)
    return run()


def _wait(device: torch.device, share: float) -> None:
    """A part of what odd ranks wait; of a GPU, on its stream."""
    if device.type == "cuda":
        torch.cuda._sleep(max(int(LATE * share), 1))
    else:
        time.sleep(LATE_ON_CPU * share)
