"""Runs workloads on a GPU: every implementation of a case is compiled, checked, then timed with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from . import peers
from .accuracy import Verdict, judge
from .host import host_microseconds
from .peers.torch_peers import captured
from .report import Row
from .startup import measure as measure_startup
from .timing import Timed, count_kernels, measure, poison, synchronize
from .workload import OWN, Case, Compared, Draw, Run, vector_bytes

GPU = torch.device("cuda")
STARTED = ("add_rms_norm", "64x1024")
"""What ``compile`` measures: a fusion of about ten ops."""
_SAID = {
    "import": "import", "first": "first call, after the import", "both": "import and first call",
    "second": "second call", "plan": "plan for a new batch size", "new_size": "first call at a new batch size",
}  # fmt: skip
CHOICE = 0.03
"""Seconds of timing in which the fastest copy is found."""


def run_tables(
    work: Sequence[tuple[Compared, Case]],
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


def compile_tables(
    work: Sequence[tuple[Compared, Case]], chosen: Sequence[str], device: torch.device = GPU
) -> Iterator[str]:
    """Run every implementation of every case twice and keep nothing but the compilers' caches; tells the failures."""
    for workload, case in work:
        yield from (
            f"{workload.name} {case} {name}: {note}" for name, note in _failures(workload, case, chosen, device)
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _failures(workload: Compared, case: Case, chosen: Sequence[str], device: torch.device) -> Sequence[tuple[str, str]]:
    return list(_Measured(workload, case, [p for p in chosen if p != "copy"], device).failed.items())


class _Measured:
    """One case: what runs, what failed and why."""

    def __init__(self, workload: Compared, case: Case, chosen: Sequence[str], device: torch.device) -> None:
        peers.forget_compiled()
        self.workload, self.case, self.device = workload, case, device
        self.inputs = workload.arguments(case, Draw(device))
        self.runs: dict[str, Callable[[], object]] = {}
        self.results: dict[str, list[torch.Tensor]] = {}
        self.failed: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.own = workload.own(case, self.inputs)
        for name, make in self.own.runs.items():
            self.add(name, make)
        for peer in self.with_graphs(chosen):
            if peer != "copy":
                self.add(peer, lambda peer=peer: peers.prepare(peer, workload, case, self.inputs))
        if workload.returned is not None:
            for peer in (p for p in peers.FORMATS if p in chosen):
                self.add_as_returned(peer, replace(workload, eager=workload.returned))
        self.bytes = workload.moved(self.inputs, next(iter(self.results.values()), []))
        if "copy" in chosen and self.bytes:
            self.add_copies()

    def with_graphs(self, chosen: Sequence[str]) -> list[str]:
        """Inductor in a CUDA graph too, where shardfuse's launches may be one."""
        several = self.device.type == "cuda" and OWN in self.runs and (self.own.kernels or 0) > 1
        graphs = ["inductor_graphs"] if several and "inductor" in chosen and "inductor_graphs" not in chosen else []
        return [*chosen, *graphs]

    def add(self, name: str, make: Callable[[], Run | None]) -> None:
        """Compile, and keep the results of a run into poisoned memory."""
        try:
            run = make()
            if run is None:
                return
            poison(list(run()), self.inputs, self.device)
            self.results[name] = list(run())
            synchronize(self.device)
            self.runs[name] = run
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result at this case
            self.failed[name] = f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:90]}"

    def add_as_returned(self, peer: str, workload: Compared) -> None:
        """In the memory format that torch gives, where it is another one than the case's."""
        name = as_returned(peer)
        self.add(name, lambda: peers.prepare(peer, workload, self.case, self.inputs))
        if name in self.results and all(map(self.case.is_arranged, self.results[name])):
            del self.runs[name], self.results[name]

    def add_copies(self) -> None:
        """The fastest of several, by name."""
        ways = {c.name: c for c in peers.copy.copies(self.bytes, self.device)}
        taken = measure({name: c.run for name, c in ways.items()}, CHOICE, self.device)
        best = min(taken, key=lambda name: taken[name].us)
        self.runs["copy"] = ways[best].run
        self.notes["copy"] = f"by {best}"
        width = vector_bytes(self.case)
        if width < 16 and self.device.type == "cuda":
            self.runs[f"copy of {width} B words"] = peers.copy.narrow(self.bytes, width).run

    def verdicts(self) -> dict[str, list[Verdict]]:
        """Of all results, which are let go; what is wrong is not run again."""
        loose = [as_returned(peer) for peer in peers.FORMATS]
        found = judge(self.workload, self.case, self.inputs, self.results, loose)
        self.results.clear()
        for name, verdicts in found.items():
            said = [f"{v.note} (output {k})" if len(verdicts) > 1 else v.note for k, v in enumerate(verdicts) if v.note]
            self.notes[name] = "; ".join(sorted(said, reverse=True)[:1])  # WRONG before OTHER
            if any(v.wrong for v in verdicts):
                self.failed[name] = self.notes[name]
                del self.runs[name]
        return found

    def rows(self, seconds: float, *, kernels: bool) -> list[Row]:
        found = self.verdicts()
        timed = measure(self.runs, seconds, self.device) if self.runs else {}
        return [self.row(name, found.get(name, []), timed.get(name), kernels) for name in (*self.runs, *self.failed)]

    def row(self, name: str, verdicts: Sequence[Verdict], t: Timed | None, kernels: bool) -> Row:
        counted = kernels and t is not None and not name.startswith("copy")
        row = Row(
            workload=self.workload.name,
            case=str(self.case),
            impl=name,
            bytes=self.bytes,
            errors=tuple(v.error for v in verdicts),
            kernels=count_kernels(self.runs[name]) if counted else None,
            planned=self.own.kernels if name == OWN and t is not None else None,
            note=self.failed.get(name, self.notes.get(name, "")),
        )
        return row if t is None else replace(row, us=t.us, low=t.low, high=t.high)


def as_returned(peer: str) -> str:
    """The name of a peer that is not asked for the case's memory format."""
    return f"{peer}, NCHW out"


def run_host(
    work: Iterable[tuple[Compared, Case]], chosen: Sequence[str], device: torch.device = GPU, *, in_graphs: bool = True
) -> Iterator[list[Row]]:
    """Host time of a call; inputs of a few KB, so that the GPU keeps up.

    in_graphs: on a GPU, of captured CUDA graphs too, where Inductor is among those that are chosen.
    """
    graphs = ["inductor_graphs"] if in_graphs and "inductor" in chosen and device.type == "cuda" else []
    taken = [p for p in dict.fromkeys((*chosen, *graphs)) if p != "copy"]
    for workload, case in work:
        measured = _Measured(workload, case, taken, device)
        if graphs:
            measured.add(f"{OWN}_graphs", lambda measured=measured: captured(measured.own.runs[OWN]()))
        found = measured.verdicts()
        timed = {name: Timed(*host_microseconds(run), 0) for name, run in measured.runs.items()}
        rows = [measured.row(n, found.get(n, []), timed.get(n), False) for n in (*measured.runs, *measured.failed)]
        yield [replace(row, bytes=0) for row in rows]


def run_startup(chosen: Sequence[str]) -> Iterator[list[Row]]:
    """First calls in fresh processes, with empty caches and with filled ones; then plans for new batch sizes.

    What is imported before is a row of its own, and so is the sum of it and the first call.
    """
    workload, case = STARTED
    for impl in (OWN, *(p for p in chosen if p in ("inductor", "inductor_max_autotune"))):
        rows: list[Row] = []
        for start, seconds in measure_startup(workload, case, impl).items():
            rows += [Row(f"{_SAID[name]}, {start} caches", case, impl, 0, s * 1e6) for name, s in seconds.items()]
        yield rows
