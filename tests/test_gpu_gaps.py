"""What is read off a trace: times in which a GPU did nothing, and who kept it waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_gaps import WAITING, Span, innermost, main, timelines


def test_a_gap_is_the_hosts_where_what_ends_it_was_launched_in_it(tmp_path: Path, capsys: Any) -> None:
    (found,) = timelines(_EVENTS)
    assert (found.work, found.span, found.busy) == (4, 100.0, 50.0)
    first, second = found.gaps
    # 30 to 60: the host was 20 us in a node, of which 15 in an op within it, then launched for 5.
    assert (first.length, first.after, first.before, first.culprit) == (30.0, "matmul", "norm", "aten::view")
    assert dict(first.host) == {"aten::view": 15.0, "NormBackward": 5.0, "cuLaunchKernel": 5.0, _BEFORE: 2.0}
    # 70 to 90: launched at 56, before the gap began.
    assert (second.length, second.culprit) == (20.0, WAITING)
    assert found.by_function[WAITING] == 20.0
    assert sum(found.by_function.values()) == 50.0, "gaps are shared out among functions"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": _EVENTS}))
    assert main([str(path), "--gaps", "2"]) == 0
    told = capsys.readouterr().out
    assert "GPU 0: busy 0.05 of 0.10 ms (50%), 4 kernels and copies" in told
    assert "waited for the host 0.03 ms in 1 gaps, and otherwise 0.02 ms in 1" in told


def test_nested_spans_are_cut_into_the_innermost_ones() -> None:
    spans = [Span("a", 0, 10), Span("b", 2, 5), Span("c", 3, 4), Span("d", 5, 6), Span("e", 12, 13)]
    found = [(s.name, s.start, s.end) for s in innermost(spans)]
    assert found == [
        ("a", 0, 2), ("b", 2, 3), ("c", 3, 4), ("b", 4, 5), ("d", 5, 6), ("a", 6, 10),
        ("Python before e", 10, 12), ("e", 12, 13),
    ]  # fmt: skip


def test_a_trace_without_a_gpu_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [e for e in _EVENTS if e["cat"] == "cpu_op"]}))
    assert main([str(path)]) == 2
    assert "nothing ran on a GPU" in capsys.readouterr().err


def _event(cat: str, name: str, start: float, end: float, correlation: int | None = None) -> dict[str, Any]:
    on_gpu = cat == "kernel"
    arguments = {} if correlation is None else {"correlation": correlation}
    where = {"pid": 0, "tid": 7, "args": {**arguments, "device": 0}} if on_gpu else {"pid": 1, "tid": 2}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": arguments, **where}


_BEFORE = "Python before NormBackward"
_EVENTS = [
    _event("cuda_driver", "cuLaunchKernel", 2, 6, 1),
    _event("cpu_op", "aten::mm", 1, 7),
    _event("kernel", "matmul", 10, 30, 1),
    _event("cpu_op", "NormBackward", 32, 57),  # 7 to 32: Python, in which the gap begins at 30
    _event("cpu_op", "aten::view", 33, 48),
    _event("cuda_driver", "cuLaunchKernel", 52, 57, 2),
    _event("cuda_driver", "cuLaunchKernel", 57, 58, 3),
    _event("kernel", "norm", 60, 70, 2),
    _event("kernel", "copy", 65, 68, 4),
    _event("kernel", "nccl", 90, 110, 3),
]
