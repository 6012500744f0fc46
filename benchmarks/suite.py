"""Runs workloads on a GPU: every implementation of a case is compiled, checked, then timed with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from . import peers
from .accuracy import errors, tolerance
from .host import CALLED, host_microseconds
from .report import Row
from .startup import measure as measure_startup
from .timing import count_kernels, measure, synchronize
from .workload import Case, Draw, Workload, moved_bytes, vector_bytes

Run = Callable[[], Sequence[torch.Tensor]]
OWN = "shardfuse"
GPU = torch.device("cuda")
STARTED = ("add_rms_norm", "64x1024")
"""What ``compile`` measures: a fusion of about ten ops."""
_SAID = {
    "first": "first call", "second": "second call",
    "plan": "plan for a new batch size", "new_size": "first call at a new batch size",
}  # fmt: skip


def run_tables(
    work: Sequence[tuple[Workload, Case]],
    chosen: Sequence[str],
    seconds: float,
    device: torch.device = GPU,
) -> Iterator[list[Row]]:
    """Rows case by case, in about ``seconds`` of timing.  Kernels are counted at the first case of each workload."""
    counted: list[str] = []
    for workload, case in work:
        kernels = device.type == "cuda" and workload.name not in counted
        counted.append(workload.name)
        yield _Measured(workload, case, chosen, device).rows(seconds / len(work), kernels=kernels)
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Measured:
    """One case: what runs, what failed and why."""

    def __init__(self, workload: Workload, case: Case, chosen: Sequence[str], device: torch.device) -> None:
        self.workload, self.case, self.device = workload, case, device
        self.inputs = workload.arguments(case, Draw(device))
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
            self.poison()
            made = list(run())
            self.results[name] = self.workload.join(made) if name == OWN else made
            synchronize(self.device)
            self.runs[name] = run
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result at this case
            self.failed[name] = f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:90]}"

    def poison(self) -> None:
        """Leave NaN in the memory that the next outputs are likely to get, so that an element left out shows."""
        synchronize(self.device)
        taken = [torch.full((t.numel() * t.itemsize,), -1, dtype=torch.int8, device=self.device) for t in self.shapes]
        del taken

    def add_copies(self) -> None:
        self.runs["copy"] = peers.copy.prepare(self.bytes, self.device)
        width = vector_bytes(self.case)
        if width < 16 and self.device.type == "cuda":
            self.runs[f"copy of {width} B words"] = peers.copy.prepare_narrow(self.bytes, width)

    def rows(self, seconds: float, *, kernels: bool) -> list[Row]:
        found = errors(self.workload, self.case, self.inputs, self.results)
        limits = {name: [tolerance(t) for t in outputs] for name, outputs in self.results.items()}
        self.results.clear()
        timed = measure(self.runs, seconds, self.device)
        planned = self.fd.explain().kernels if OWN in self.runs else None
        rows: list[Row] = []
        for name in (*self.runs, *self.failed):
            pairs = zip(found.get(name, []), limits.get(name, []), strict=True)
            wrong = [f"{e:.1e}" for e, limit in pairs if not e <= limit]
            t = timed.get(name)
            counted = kernels and t is not None and not name.startswith("copy")
            row = Row(
                workload=self.workload.name,
                case=str(self.case),
                impl=name,
                bytes=self.bytes,
                errors=tuple(found.get(name, ())),
                kernels=count_kernels(self.runs[name]) if counted else None,
                planned=planned if name == OWN else None,
                note=self.failed.get(name, f"WRONG: {', '.join(wrong)}" if wrong else ""),
            )
            rows.append(row if t is None else replace(row, us=t.us, low=t.low, high=t.high))
        return rows


def run_host(chosen: Sequence[str], device: torch.device = GPU) -> Iterator[list[Row]]:
    """Host time of a call; inputs of a few KB, so that the GPU keeps up."""
    for workload, text in CALLED:
        case = Case.parse(text)
        measured = _Measured(workload, case, [p for p in chosen if p != "copy"], device)
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
            rows += [Row(f"{_SAID[name]}, {start} caches", case, impl, 0, s * 1e6) for name, s in seconds.items()]
        yield rows
