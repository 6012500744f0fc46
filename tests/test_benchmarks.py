"""The benchmarks themselves, without a GPU: fusions and peers against float64, plans, reports, the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import optimiser, page, peers, plot, report, run, startup, suite
from benchmarks.accuracy import judge
from benchmarks.dry import plan_case
from benchmarks.host import CALLED, independent_segments
from benchmarks.promise_table import promise_section
from benchmarks.workload import Case, CaseError, Draw, Workload, moved_bytes, vector_bytes
from benchmarks.workloads import SUITES, WORKLOADS
from benchmarks.workloads.norms import RMS_NORM
from shardfuse import FusionDefinition

CPU = torch.device("cpu")
VIEWS_ON_A_CPU = ("transpose",)
"""Evaluated with torch's calls, where a transposed output is a view of another memory format."""
EVERY = [*WORKLOADS.values(), independent_segments(3)]
TINY = [(w, text) for w in EVERY for text in w.tiny]


def drawn(workload: Workload, case: Case, seed: int = 0) -> list[torch.Tensor]:
    return workload.arguments(case, Draw(CPU, seed))


@pytest.mark.parametrize(("workload", "text"), TINY, ids=[f"{w.name}-{text}" for w, text in TINY])
def test_fusion_and_eager_are_the_reference(workload: Workload, text: str) -> None:
    case = Case.parse(text)
    inputs = drawn(workload, case)
    results = {
        "shardfuse": workload.fusion(case).execute(workload.bind(inputs)),
        "eager": list(workload.eager(case, *inputs)),
    }
    views = ["shardfuse"] if workload.name in VIEWS_ON_A_CPU else []
    for name, verdicts in judge(workload, case, inputs, results, views).items():
        assert [v.note for v in verdicts] == [""] * len(workload.sums), name
    if case.channels_last:
        assert results["shardfuse"][0].stride() == inputs[0].stride()


@pytest.mark.parametrize("workload", EVERY, ids=lambda w: w.name)
def test_every_case_of_the_grid_is_planned(workload: Workload) -> None:
    case = Case.parse(workload.cases[-1])
    planned = plan_case(workload, case)
    inputs = workload.arguments(case, Draw(torch.device("meta")))
    assert planned.torch_calls == 0 or workload.name == "rope", planned
    assert planned.kernels >= 1
    assert planned.bytes > moved_bytes(inputs, [])
    assert planned.moved >= planned.bytes


@pytest.mark.parametrize("name", [*SUITES, "autotuned", "host", "compile"])
def test_dry_prints_every_case(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([name, "--dry"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    others = {"host": CALLED, "compile": [0], "autotuned": WORKLOADS}
    expected = [c for w in SUITES.get(name, ()) for c in w.cases] or others[name]
    assert len(lines) == len(expected)


def test_dry_compiles_for_sm90() -> None:
    """In a process of its own, as it is called."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "benchmarks/run.py", "forward", "--dry", "--compile", "--case", "8192x1024:float16"]
    done = subprocess.run(command, cwd=report.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 kernels compiled for sm_90, 0 with spills" in done.stdout
    kernels = [line for line in done.stdout.splitlines() if "registers" in line]
    assert [line.split()[0] for line in kernels] == ["layer_norm", "rms_norm", "add_rms_norm"]
    assert not any(" 0 loads and" in line for line in kernels), kernels


# cases and peers


def test_a_run_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that was given, on the commit that git names."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "_machine", lambda: "a CPU")
    monkeypatch.setattr(run, "run_tables", partial(suite.run_tables, device=CPU))
    words = ["forward", "--only", "rms_norm", "--peers", "copy,eager", "--case", "5x16", "--seconds", "0.01"]
    words += ["--json", str(path := tmp_path / "forward.json")]
    assert run.main(words) == 0
    found = report.Results.from_json(path.read_text())
    assert found.command == f"benchmarks/run.py {' '.join(words)}"
    assert [r.impl for r in found.rows] == ["shardfuse", "eager", "copy"]
    assert all(r.counts for r in found.rows)
    assert found.commit.rstrip("+") in ("", *_head())
    assert "times as fast as, geometric means:" in capsys.readouterr().out


def _head() -> list[str]:
    command = ["git", "-C", str(report.ROOT), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def test_the_whole_command_is_recorded() -> None:
    words = ["forward", "--only", "rms_norm", "--case", "64x1024", "--peers", "copy,inductor"]
    assert run._options(["autotuned"]).peers == ["copy", "inductor", "inductor_max_autotune"]
    assert run._options(words).command == f"benchmarks/run.py {' '.join(words)}"


def test_cases() -> None:
    case = Case.parse("2x320x128x128:float16:channels_last:groups=16")
    assert case == Case((2, 320, 128, 128), torch.float16, channels_last=True, groups=16)
    assert Case.parse(str(case)) == case
    assert case.stride_order == [3, 0, 2, 1]
    x = Draw(CPU).normal((2, 6, 3, 4, 5), torch.float32)
    assert replace(case, shape=(2, 6, 3, 4, 5)).arranged(x).stride() == (360, 1, 120, 30, 6)
    assert [vector_bytes(Case.parse(t)) for t in ("8x5140:float16", "8x5139", "8x4096")] == [8, 2, 16]
    for text, part in (("8x-1", "8x-1"), ("8x16:half16", "half16"), ("8x16:groups=x", "groups=x")):
        with pytest.raises(CaseError, match=part):
            Case.parse(text)


def test_cases_go_to_the_workloads_of_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["pointwise", "--dry", "--case", "64x2048", "2x64x4x32:float16"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    names = ["swiglu", "broadcast", "rope", "rope_halves", "rope_apart", "transpose", "transpose_add"]
    shapes = ["2x64x4x32:float16" if n.startswith("rope") else "64x2048:bfloat16" for n in names]
    assert lines == [[n, s] for n, s in zip(names, shapes, strict=True)]
    assert run.main(["forward", "--dry", "--case", "8x16:nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert run.main(["groupnorm", "--dry", "--case", "2x320x4x4:groups=7"]) == 2
    assert "320 channels in groups=7" in capsys.readouterr().err
    assert run.main(["reduction", "--dry", "--case", "0x16"]) == 0
    assert "0x16" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "cutlass" else object())
    assert peers.why_absent("liger") is None
    assert peers.why_absent("eager") is None
    assert peers.why_absent("quack") == "quack is left out: cutlass not installed (pip install quack-kernels==0.6.5)"


def test_the_tuned_peer_is_shardfuse_behind_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where it is named; on a CPU, where nothing can be tuned, it says so."""
    case = Case.parse("5x16")
    ((_, refused),) = suite.run_tables([(RMS_NORM, case)], ["tuned"], 0.01, CPU)
    assert refused.note.startswith("failed: TuningUnavailableError")
    searched: list[FusionDefinition] = []
    monkeypatch.setattr(FusionDefinition, "tune", lambda fd, inputs: searched.append(fd))
    ((own, peer),) = suite.run_tables([(RMS_NORM, case)], ["tuned"], 0.01, CPU)
    assert len(searched) == 1
    assert (peer.impl, peer.note, peer.errors) == ("tuned", "", own.errors)
    assert run._options(["forward"]).peers == ["copy", "eager", "inductor", "liger", "quack"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["forward"]) == 2
    assert "--dry" in capsys.readouterr().err


# start-up and host


def test_first_calls_are_timed_in_fresh_processes() -> None:
    found = startup.measure("rms_norm", "5x16", "shardfuse")
    assert list(found) == ["cold", "warm"]
    for seconds in found.values():
        assert list(seconds) == ["import", "first", "both", "second", "plan", "new_size"]
        assert seconds["both"] == seconds["import"] + seconds["first"]
        assert seconds["import"] > 0
        assert 0 < seconds["second"] < seconds["first"]
        assert 0 < seconds["plan"] < seconds["new_size"]


def test_what_is_imported_is_told_beside_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both sides: what excludes imports is held to what excludes them, and what includes them likewise."""
    seconds = {"import": 1.0, "first": 2.0, "both": 3.0, "second": 0.5}
    monkeypatch.setattr(suite, "measure_startup", lambda *_: {"cold": seconds, "warm": seconds})
    own, inductor = suite.run_startup(["eager", "inductor"])
    assert [(r.workload, r.us) for r in own] == [(r.workload, r.us) for r in inductor]
    assert [r.workload.removesuffix(", cold caches") for r in own[:4]] == [
        "import",
        "first call, after the import",
        "import and first call",
        "second call",
    ]
    assert {r.impl for r in inductor} == {"inductor"}


def test_results_are_checked_before_the_time_on_the_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(peer: str, workload: Workload, case: Case, inputs: list[torch.Tensor]) -> peers.Run:
        return lambda: tuple(map(torch.zeros_like, workload.eager(case, *inputs)))

    monkeypatch.setattr(peers, "prepare", zeros)
    monkeypatch.setattr(suite, "host_microseconds", lambda run: (5.0, 4.0, 6.0))
    work = [(workload, Case.parse(text)) for workload, text in CALLED]
    for own, eager in suite.run_host(work, ["copy", "eager"], CPU):
        assert (own.us, own.note, own.bytes) == (5.0, "", 0)
        assert own.planned == (int(own.workload.removeprefix("segments_")) if "segments" in own.workload else 1)
        assert eager.us is None
        assert eager.note.startswith("WRONG: ")


def test_compiling_ahead_tells_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(peer: str, *_: object) -> peers.Run:
        raise RuntimeError(f"no {peer}")

    monkeypatch.setattr(peers, "prepare", refused)
    told = list(suite.compile_tables([(RMS_NORM, Case.parse("5x16"))], ["copy", "eager"], CPU))
    assert told == ["rms_norm 5x16:bfloat16 eager: failed: RuntimeError: no eager"]


def test_host_time_is_of_as_many_segments_as_it_says() -> None:
    for workload, text in CALLED[2:]:
        assert plan_case(workload, Case.parse(text)).kernels == int(workload.name.removeprefix("segments_"))


# reports


def results() -> report.Results:
    rows = [
        report.Row("rms_norm", "8x16:bfloat16", "shardfuse", 2000, 2.0, 1.9, 2.1, (1e-3,), 1, 1),
        report.Row("rms_norm", "8x16:bfloat16", "copy", 2000, 1.5, 1.4, 1.6),
        report.Row("rms_norm", "8x16:bfloat16", "inductor", 2000, 3.0, 2.9, 3.1, (2e-3,), 2),
        report.Row("rms_norm", "8x32:bfloat16", "shardfuse", 4000, 3.0, 2.9, 3.1, (1e-3,), None, 1),
        report.Row("rms_norm", "8x32:bfloat16", "inductor", 4000, 18.0, 2.9, 3.1, (2e-3,)),
        report.Row("rms_norm", "8x32:bfloat16", "quack", 4000, note="failed: RuntimeError: no"),
    ]
    return report.Results(
        "forward", "2026-01-02", "a machine", "benchmarks/run.py forward", tuple(rows), ("liger is left out",)
    )


def test_the_table_has_both_numbers_of_each_ratio() -> None:
    headers, ((workload, rows),) = report.table(results())
    assert workload == "rms_norm"
    assert headers == ["case", "implementation", "us", "GB/s", "of copy", "shardfuse is", "kernels", "error"]
    assert rows[0] == ("8x16:bfloat16", "shardfuse", "2.0", "1", "0.75", "", "1", "1.0e-03")
    assert rows[2][2:7] == ("3.0", "1", "0.50", "1.50 x", "2")
    assert rows[5][2] == "failed: RuntimeError: no"
    assert report.means(results()) == ["rms_norm: copy 0.75 (least 0.75), inductor 3.00 (least 1.50)"]
    text = report.as_text(results())
    assert "liger is left out" in text
    assert "a machine" in text


def test_slow_calls_and_errors_are_shown_where_they_were_measured() -> None:
    """Of results that have neither, as those of before, both tables are as they were."""
    assert "99th" not in report.as_text(results()) + page.section(results())
    assert "roundings" not in report.as_text(results()) + page.section(results())
    measured = {"shardfuse": (2.5, 0.5), "inductor": (5.0, 1.25)}
    rows = [
        replace(r, p99=measured[r.impl][0], roundings=measured[r.impl][1]) if r.impl in measured else r
        for r in results().rows[:3]
    ]
    shown = replace(results(), rows=tuple(rows))
    headers, ((_, (own, copy, inductor)),) = report.table(shown)
    assert (headers[2:4], headers[-2:]) == (["us", "99th"], ["roundings", "error"])
    assert (own[2:4], copy[2:4], inductor[2:4]) == (("2.0", "2.5"), ("1.5", ""), ("3.0", "5.0"))
    assert (own[-2], copy[-2], inductor[-2]) == ("0.50", "", "1.25")
    (line,) = [line for line in page.section(shown).splitlines() if line.startswith("| rms_norm")]
    assert "| 1.50 (3.0 us); 99th: 2.00 (least 2.00) |" in line
    assert line.endswith("| shardfuse 0.50, inductor 1.25 |")
    assert report.Results.from_json(shown.to_json()) == shown


def test_results_survive_json() -> None:
    assert report.Results.from_json(results().to_json()) == results()
    assert "us" not in json.loads(results().to_json())["rows"][5]


def test_wrong_results_are_in_no_mean() -> None:
    """However fast or slow they are; neither are those in another dtype or memory format."""
    rows = list(results().rows)
    for note in ("WRONG: element [0]", "OTHER: torch.bfloat16 where torch.float32 was asked for"):
        rows[4] = replace(rows[4], note=note)
        spoilt = replace(results(), rows=tuple(rows))
        assert report.means(spoilt) == ["rms_norm: copy 0.75 (least 0.75), inductor 1.50 (least 1.50)"]
        assert " 6.00 x" not in report.as_text(spoilt)
        assert note in report.as_text(spoilt)
        assert "x inductor |" in page.section(spoilt)
        assert "1.50 (3.0 us)" in page.section(spoilt)
        assert note.split(":")[0] in page.section(spoilt)
    rows = [replace(row, note="WRONG: all", us=None) if row.impl == "shardfuse" else row for row in results().rows]
    assert report.means(replace(results(), rows=tuple(rows))) == []


def test_the_page_is_made_of_the_results(tmp_path: Path) -> None:
    """What people wrote stays; a suite without a place gets one at the end."""
    page.save(results(), tmp_path)
    assert page.load(tmp_path) == [results()]
    once = page.page(
        "# Measured\n\n## forward\n<!-- forward -->\nold\n<!-- end of forward -->\n\nkept\n", page.load(tmp_path)
    )
    assert page.page(once, page.load(tmp_path)) == once
    assert "old" not in once
    assert once.startswith(
        "# Measured\n\n## forward\n<!-- forward -->\n2026-01-02, a machine; `benchmarks/run.py forward`. "
    )
    assert "| rms_norm | 2 | 0.75 (2" not in once
    assert "| rms_norm | 2 | 0.75 (1.5 us) | 3.00 (least 1.50) | 8x16 0.75 of copy |" in once
    assert "Failed or wrong: rms_norm, quack at 8x32:bfloat16: failed: RuntimeError: no." in once
    assert once.endswith("<!-- end of forward -->\n\nkept\n")
    more = page.page(once, [results(), replace(results(), suite="softmax")])
    assert more.startswith(once.rstrip())
    assert more.endswith("<!-- end of softmax -->\n")


def test_results_of_another_machine_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the data and the page, with the commit that was measured."""
    (given := tmp_path / "given.json").write_text(replace(results(), suite="compile").to_json())
    (measured := tmp_path / "measured.md").write_text("# Measured\n")
    (kept := tmp_path / "results").mkdir()
    monkeypatch.setattr(page, "MEASURED", measured)
    monkeypatch.setattr(page, "RESULTS", kept)
    monkeypatch.setattr(run, "plot", lambda results: None)
    assert run.main(["compile", "--read", str(given), "--commit", "1a2b3c", "--write"]) == 0
    assert report.Results.from_json((kept / "compile.json").read_text()).commit == "1a2b3c"
    assert "a machine, commit 1a2b3c; `benchmarks/run.py forward`" in measured.read_text()


def test_what_promises_cost_is_a_table() -> None:
    """Of calls; a case beyond the limit is named with its time in a graph, a wrong one instead of its time."""
    us = {
        "rms_norm": (4.0, 4.4),
        "rms_norm, in a graph": (2.0, 2.0),
        "softmax": (5.0, 6.0),
        "softmax, in a graph": (4.0, 5.0),
    }
    rows = [
        report.Row(workload, "8x4096:bfloat16", impl, 1, time)
        for workload, times in us.items()
        for impl, time in zip(("shardfuse", "promised"), times, strict=True)
    ]
    rows += [report.Row("layer_norm", "8x1024:bfloat16", "promised", 1, 3.0, note="WRONG: output 0: 2 bytes differ")]
    text = promise_section(replace(results(), suite="promises", rows=tuple(rows)))
    assert "| RMSNorm, 4096 | 1.10 |" in text
    assert "softmax of 8 x 4096 1.20 x (1.25 x); 1 in both" in text
    assert "RMSNorm of 8" not in text
    assert "Other bits than promised: layer_norm 8x1024:bfloat16." in text


def test_the_page_is_what_the_kept_results_say() -> None:
    assert page.main(["--check"]) == 0
    assert len(page.MEASURED.read_text().splitlines()) <= 250


def test_results_of_another_machine_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "forward.json").write_text(results().to_json())
    assert run.main(["forward", "--read", str(path)]) == 0
    assert capsys.readouterr().out.startswith("forward · 2026-01-02 · a machine\nliger is left out\n\nrms_norm\n")


@pytest.mark.parametrize("text", [None, "not JSON", "[]", '{"rows": [{}]}'], ids=str)
def test_a_file_without_results_is_one_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "forward.json"
    if text is not None:
        path.write_text(text)
    assert run.main(["forward", "--read", str(path)]) == 2
    what = "No such file or directory" if text is None else "holds no results that --json wrote"
    assert capsys.readouterr().err == f"--read {path}: {what}\n"


def test_a_plot_is_drawn_from_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (path := tmp_path / "forward.json").write_text(results().to_json())
    drawn_to = plot.plot(report.Results.from_json(path.read_text()), tmp_path)
    first = drawn_to.read_text()
    assert drawn_to.name == "bandwidth_forward.svg"
    assert "shardfuse" in first
    assert "inductor" in first
    plot.plot(results(), tmp_path)
    assert drawn_to.read_text() == first


def test_optimiser_steps_are_right_and_timed() -> None:
    """All that runs on a GPU, on small tensors: own steps against float64, peers, copies, and time on the host."""
    shapes = ((64, 32), (7,))
    cases = [optimiser.Listed(f"{dtype}", shapes, dtype) for dtype in (torch.float32, torch.bfloat16)]
    rows = [row for found in optimiser.run_optimiser(0.02, CPU, cases, cases[0]) for row in found]
    assert {r.impl for r in rows} == {"shardfuse", "torch fused", "torch foreach", "copy"}
    assert all(r.us for r in rows)
    assert not [r.note for r in rows if r.note.startswith("WRONG")]
    assert [c.bytes(clips=True) / c.elements for c in cases] == [32, 24]
    wrong = optimiser._Steps(cases[0], CPU)
    assert optimiser._why_wrong(cases[0], wrong, lambda: None, False).startswith("WRONG: tensor 0")
