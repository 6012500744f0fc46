"""What of a program ran when: one run with a mark before and behind every kernel, torch call and collective.

On a GPU marks are events on the stream that the work runs on, on a CPU the host's clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from .host_program import Program

Mark = Callable[[], float]
"""Reads microseconds, once all is done."""

KERNELS, COLLECTIVES, HOST = "kernels", "communication", "host"
_COLUMNS = 64


@dataclass(frozen=True)
class Span:
    """``stream``: "kernels" or "communication", on a CPU "host".

    ``start``, ``end``: microseconds from the beginning of the run.
    """

    name: str
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One run of a program on one rank; as text, a bar a stream and a line a span."""

    rank: int
    spans: tuple[Span, ...]

    @property
    def us(self) -> float:
        """Microseconds from the first start to the last end."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def overlapped(self) -> float:
        """Microseconds in which the communication stream and the stream of kernels were both at work."""
        ours, theirs = ([s for s in self.spans if s.stream == stream] for stream in (KERNELS, COLLECTIVES))
        return sum(max(min(a.end, b.end) - max(a.start, b.start), 0.0) for a in ours for b in theirs)

    def chrome_trace(self) -> str:
        """JSON for chrome://tracing and Perfetto: a process a rank, a thread a stream."""
        events = [
            {"name": s.name, "ph": "X", "ts": s.start, "dur": s.end - s.start, "pid": self.rank, "tid": s.stream}
            for s in self.spans
        ]
        return json.dumps({"traceEvents": events})

    def __str__(self) -> str:
        first = min((s.start for s in self.spans), default=0.0)
        lines = [f"rank {self.rank}: {self.us:.1f} us, {self.overlapped():.1f} us of them on both streams"]
        for stream in dict.fromkeys(s.stream for s in self.spans):
            cells = ["."] * _COLUMNS
            for s in self.spans:
                if s.stream == stream:
                    start, end = ((t - first) / max(self.us, 1e-9) * _COLUMNS for t in (s.start, s.end))
                    for k in range(int(start), min(max(int(end), int(start) + 1), _COLUMNS)):
                        cells[k] = "#"
            lines.append(f"{stream:<13} |{''.join(cells)}|")
        lines.append(f"{'start us':>10} {'us':>10}  stream")
        lines += [
            f"{s.start - first:>10.1f} {s.end - s.start:>10.1f}  {s.stream:<13}  {s.name}"
            for s in sorted(self.spans, key=lambda s: s.start)
        ]
        return "\n".join(lines)


def record(program: Program, arguments: Sequence[object], rank: int, device: torch.device) -> Timeline:
    """Run ``program`` twice, the second time with marks.  Collective: every rank of its meshes calls it."""
    program.run(*arguments)
    found: list[tuple[str, str, Mark, Mark]] = []
    mark, stream_now = _marks(device)

    def timed(label: str, function: Callable[..., object]) -> Callable[..., object]:
        def run(*given: object) -> object:
            stream, start = stream_now(), mark()
            result = function(*given)
            found.append((label, stream, start, mark()))
            return result

        return run

    marked = {name: timed(label, program.functions[name]) for name, label in program.labels.items()}
    program.bound_to({**program.functions, **marked})(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Timeline(rank, tuple(Span(label, stream, start(), end()) for label, stream, start, end in found))


def _marks(device: torch.device) -> tuple[Callable[[], Mark], Callable[[], str]]:
    """How to set a mark, and how to tell the stream that work goes to now."""
    if device.type != "cuda":
        began = perf_counter()

        def on_cpu() -> Mark:
            us = (perf_counter() - began) * 1e6
            return lambda: us

        return on_cpu, lambda: HOST
    torch.cuda.synchronize(device)
    kernels = torch.cuda.current_stream(device)
    origin = torch.cuda.Event(enable_timing=True)
    origin.record(kernels)

    def on_gpu() -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return lambda: origin.elapsed_time(event) * 1e3

    return on_gpu, lambda: KERNELS if torch.cuda.current_stream(device) == kernels else COLLECTIVES
