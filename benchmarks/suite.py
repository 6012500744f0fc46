"""Runs workloads on a GPU: every implementation of a case is compiled, checked, then timed with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from . import peers
from .accuracy import errors, tolerance
from .host import CALLED, host_microseconds
from .report import Row
from .startup import measure as measure_startup
from .timing import count_kernels, measure
from .workload import Case, Draw, Workload, moved_bytes, vector_bytes

Run = Callable[[], Sequence[torch.Tensor]]
OWN = "shardfuse"
STARTED = ("add_rms_norm", "64x1024")
"""What ``compile`` measures: a fusion of about ten ops."""


def run_tables(work: Iterable[tuple[Workload, Case]], chosen: Sequence[str], seconds: float, kernels: bool) -> Iterator[list[Row]]:
    """Rows case by case.  seconds: of GPU time for all; kernels: count what the profiler sees."""
    cases = list(work)
    for workload, case in cases:
        yield _Measured(workload, case, chosen).rows(seconds / len(cases), kernels)
        torch.cuda.empty_cache()


class _Measured:
    """One case: what runs, what failed and why."""

    def __init__(self, workload: Workload, case: Case, chosen: Sequence[str]) -> None:
        self.workload, self.case = workload, case
        self.inputs = workload.arguments(case, Draw(torch.device("cuda")))
        self.runs: dict[str, Callable[[], object]] = {}
        self.results: dict[str, list[torch.Tensor]] = {}
        self.failed: dict[str, str] = {}
        self.fd = workload.fusion(case)
        self.shapes: list[torch.Tensor] = []
        self.add(OWN, self.own)
        for peer in chosen:
            if peer != "copy":
                self.add(peer, lambda peer=peer: peers.prepare(peer, workload, case, self.inputs))
        self.bytes = moved_bytes(self.inputs, next(iter(self.results.values()), []))
        if "copy" in chosen:
            self.add_copies()

    def own(self) -> Run:
        bound = self.workload.bind(self.inputs)
        return lambda: self.fd.execute(bound)

    def add(self, name: str, make: Callable[[], Run | None]) -> None:
        """Compile, and keep the results of a run into poisoned memory."""
        try:
            run = make()
            if run is None:
                return
            self.shapes = self.shapes or [torch.empty_like(t, device="meta") for t in run()]
            run()
            self.poison()
            made = list(run())
            self.results[name] = self.workload.join(made) if name == OWN else made
            torch.cuda.synchronize()
            self.runs[name] = run
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result at this case
            self.failed[name] = f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:90]}"

    def poison(self) -> None:
        """Leave NaN in the memory that the next outputs are likely to get, so that an element left out shows."""
        torch.cuda.synchronize()
        blocks = [torch.full(t.shape, -1, dtype=torch.int8, device="cuda") for t in self.shapes for _ in range(t.itemsize)]
        whole = [torch.empty(t.numel() * t.itemsize, dtype=torch.int8, device="cuda").fill_(-1) for t in self.shapes]
        del blocks, whole

    def add_copies(self) -> None:
        self.runs["copy"] = peers.copy.prepare(self.bytes)
        width = vector_bytes(self.case)
        if width < 16:
            self.runs[f"copy of {width} B words"] = peers.copy.prepare_narrow(self.bytes, width)

    def rows(self, seconds: float, kernels: bool) -> list[Row]:
        found = errors(self.workload, self.case, self.inputs, self.results)
        limits = {name: [tolerance(t) for t in outputs] for name, outputs in self.results.items()}
        self.results.clear()
        timed = measure(self.runs, seconds)
        planned = self.fd.explain().kernels if OWN in self.runs else None
        rows: list[Row] = []
        for name in (*self.runs, *self.failed):
            wrong = [f"{e:.1e}" for e, limit in zip(found.get(name, []), limits.get(name, []), strict=True) if not e <= limit]
            t = timed.get(name)
            rows.append(
                Row(
                    workload=self.workload.name,
                    case=str(self.case),
                    impl=name,
                    bytes=self.bytes,
                    us=t and t.us,
                    low=t and t.low,
                    high=t and t.high,
                    errors=tuple(found.get(name, ())),
                    kernels=count_kernels(self.runs[name]) if kernels and name in self.runs and "copy" not in name else None,
                    planned=planned if name == OWN else None,
                    note=self.failed.get(name, f"WRONG: {', '.join(wrong)}" if wrong else ""),
                )
            )
        return rows


def run_host(chosen: Sequence[str]) -> Iterator[list[Row]]:
    """Host time of a call; inputs of a few KB, so that the GPU keeps up."""
    for workload, text in CALLED:
        case = Case.parse(text)
        measured = _Measured(workload, case, [p for p in chosen if p != "copy"])
        rows = [Row(workload.name, text, name, 0, note=note) for name, note in measured.failed.items()]
        for name, run in measured.runs.items():
            us, low, high = host_microseconds(run)
            planned = measured.fd.explain().kernels if name == OWN else None
            rows.append(Row(workload.name, text, name, 0, us, low, high, kernels=planned))
        yield rows


def run_startup(chosen: Sequence[str]) -> Iterator[list[Row]]:
    """First calls in fresh processes, with empty caches and with filled ones; then plans for new batch sizes."""
    workload, case = STARTED
    for impl in (OWN, *(p for p in chosen if p == "inductor")):
        rows: list[Row] = []
        for start, seconds in measure_startup(workload, case, impl).items():
            rows += [Row(f"{name} call, {start} caches" if name in ("first", "second") else f"{name}, {start} caches", case, impl, 0, s * 1e6) for name, s in seconds.items()]
        yield rows
