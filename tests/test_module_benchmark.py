"""The suite ``modules`` of the benchmarks, without a GPU: all of shardfuse.nn is in it, right, and judged."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import called as called_module
from benchmarks import page, peers, report, run, suite
from benchmarks.accuracy import judge
from benchmarks.called import BACKWARD, called, function
from benchmarks.module_dry import CPU, dry_modules, run_dry
from benchmarks.workload import Case, Draw, Tensors
from benchmarks.workloads.module_norms import rows_and_vectors
from benchmarks.workloads.modules import MODULES, UNTIMED
from shardfuse import nn
from shardfuse.nn import functional, quantized


def test_the_package_s_own_list_is_timed() -> None:
    """A name that is new in shardfuse.nn goes to a workload, or to those that are not timed."""
    public = {*nn.__all__, *(f"functional.{n}" for n in functional.__all__)}
    public |= {f"quantized.{n}" for n in quantized.__all__}
    timed = {name for workload in MODULES.values() for name in workload.makes}
    assert timed | set(UNTIMED) == public
    assert not timed & set(UNTIMED)


def test_the_list_of_functions_is_what_the_page_says() -> None:
    text = (report.ROOT / "docs" / "modules.md").read_text()
    section = text.split("`shardfuse.nn.functional` has ")[1].split(", with torch's arguments")[0]
    assert sorted(re.findall(r"`(\w+)`", section)) == functional.__all__
    defined = {name for name, made in vars(functional).items() if hasattr(made, "__wrapped__")}
    assert defined <= set(functional.__all__)


def test_every_module_and_function_is_right() -> None:
    """Each way: results, and gradients of all inputs, against float64; twice, the second time into poisoned memory."""
    rows = run_dry(MODULES.values())
    assert [f"{r.workload} {r.case} {r.impl}: {r.note}" for r in rows if r.note] == []
    assert {r.workload for r in rows} == set(MODULES)
    assert len(rows) == sum(len(w.makes) for w in MODULES.values())


def test_the_grid_has_a_small_and_a_large_size_each_way() -> None:
    for name, workload in MODULES.items():
        sizes = [torch.Size(Case.parse(text).shape).numel() for text in workload.cases]
        assert max(sizes) >= 8 * min(sizes), name
        assert name.startswith("quantized.") or {f"{name}{BACKWARD}", name.removesuffix(BACKWARD)} & set(MODULES)


@pytest.mark.parametrize("k", range(3), ids=["result", "gradient of x", "gradient of the weight"])
def test_what_is_wrong_has_no_time(k: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One element that is off, of the result or of a gradient."""

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return off(x.clone(), k == 0), w.clone()

        @staticmethod
        def backward(ctx, dx, dw):
            return off(dx.clone(), k == 1), off(dw.clone(), k == 2)

    def off(t: torch.Tensor, spoils: bool) -> torch.Tensor:
        if spoils:
            t.view(-1)[3] += 0.5
        return t

    def own(case: Case, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, v = Spoilt.apply(x, w)
        return y * v

    made = called(
        name="scaled", title="x * weight", cases=(), tiny=("6x16:float32",), arguments=rows_and_vectors(1, 1),
        makes={"scaled": function(own)}, forward=lambda case, x, w: x * w,
    )  # fmt: skip
    alone, both = run_dry(made)
    assert alone.note.startswith("WRONG") == (k == 0)
    assert both.note.startswith("WRONG")
    assert both.us is None
    assert dry_modules(made) == 1
    assert "WRONG" in capsys.readouterr().out


def test_what_dropout_draws_is_not_compared_and_all_else_is() -> None:
    workload = MODULES[f"DropoutAddNorm{BACKWARD}"]
    case = Case.parse("8x64:float32")
    inputs = workload.arguments(case, Draw(CPU))
    first, second = (workload.in_torch(case, *inputs) for _ in range(2))
    assert not torch.equal(first[2], second[2])
    for a, b in zip(workload.comparable(first), workload.comparable(second), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-22, atol=0)
    shown = workload.comparable([*first[:2], torch.zeros_like(first[2]), *first[3:]])
    assert torch.equal(shown[2], first[3] / 0.9)  # of the residual's gradient, where nothing is dropped


def test_bytes_are_those_that_have_to_move() -> None:
    """The forward reads x and writes y; the backward reads both gradients' and x's, and writes what it gives."""
    case, element = Case.parse("8x64:float32"), 4
    for name, floats in ((f"GELU{BACKWARD}", 5 * 512), ("GELU", 2 * 512), ("RMSNorm", 2 * 512 + 64)):
        workload = MODULES[name]
        inputs = workload.arguments(case, Draw(CPU))
        assert workload.moved(inputs, workload.in_torch(case, *inputs)) == floats * element
    workload = MODULES["Linear"]
    assert workload.moved(workload.arguments(case, Draw(CPU)), []) == 0


def test_a_run_beside_its_peers_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is called on a GPU: the module, the function, eager torch and a copy, interleaved."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "_machine", lambda: "a CPU")
    monkeypatch.setattr(run, "run_tables", partial(suite.run_tables, device=CPU))
    words = ["modules", "--only", "SwiGLU", f"Linear{BACKWARD}", "--case", "8x32:float32", "--seconds", "0.01"]
    words += ["--peers", "copy,eager", "--json", str(path := tmp_path / "modules.json")]
    assert run.main(words) == 0
    rows = report.Results.from_json(path.read_text()).rows
    assert [r.note for r in rows if r.impl != "copy"] == [""] * len([r for r in rows if r.impl != "copy"])
    assert all(r.counts for r in rows)
    found = {w: [r.impl for r in rows if r.workload == w] for w in dict.fromkeys(r.workload for r in rows)}
    assert found == {
        "SwiGLU": ["shardfuse", "shardfuse, functional.swiglu", "eager", "copy"],
        f"SwiGLU{BACKWARD}": ["shardfuse", "shardfuse, functional.swiglu", "eager", "copy"],
        f"Linear{BACKWARD}": ["shardfuse", "shardfuse, functional.linear", "eager"],
    }
    assert "times as fast as, geometric means:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["modules", "--only", "SwiGLUU"])


@pytest.mark.parametrize("name", ["SwiGLU", f"DropoutAddNorm{BACKWARD}", f"BatchNorm2d{BACKWARD}"])
def test_a_compiler_is_given_the_forward_and_its_backward_is_run(name: str) -> None:
    """What Inductor is given, in one graph; here the graph is run by torch's ops."""
    workload, graphs = MODULES[name], []
    case = Case.parse(workload.tiny[0])
    inputs = workload.arguments(case, Draw(CPU))

    def compiler(graph: Callable[..., Tensors]) -> Callable[..., Tensors]:
        graphs.append(graph)
        return torch.compile(graph, backend="aot_eager", fullgraph=True)

    made = list(workload.compiled(case, inputs, compiler)())
    (verdicts,) = judge(workload, case, inputs, {"compiled": made}).values()
    assert [v.note for v in verdicts] == [""] * len(workload.in_torch(case, *inputs))
    assert len(graphs) == 1


def test_no_run_makes_its_leaves_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be timed, and of one implementation alone."""
    workload, case = MODULES[f"RMSNorm{BACKWARD}"], Case.parse("5x16:float32")
    inputs = workload.arguments(case, Draw(CPU))
    own = [make() for make in workload.own(case, inputs).runs.values()]
    eager = peers.prepare("eager", workload, case, inputs)
    monkeypatch.setattr(called_module, "Parameter", None)
    for made in [run_again() for run_again in (*own, eager)]:
        assert [t.shape for t in made] == [(5, 16), (5, 16), (16,)]


def test_the_page_has_room_for_its_results() -> None:
    """All workloads of the suite are one paragraph."""
    rows = [
        report.Row(workload.name, text, impl, 1000, us)
        for workload in MODULES.values()
        for text in workload.cases
        for impl, us in (("shardfuse", 2.0), ("copy", 1.0), ("eager", 9.0), ("inductor", 3.0))
    ]
    rows += [report.Row("GELU", text, "shardfuse, functional.gelu", 1000, 4.0) for text in MODULES["GELU"].cases]
    made = report.Results("modules", "2026-01-02", "a GPU", "benchmarks/run.py modules", tuple(rows), (), "1a2b3c")
    old = page.MEASURED.read_text()
    text = page.page(old, [made])
    assert len(text.splitlines()) <= len(old.splitlines()) + 4  # the heading, two marks and the paragraph
    assert "RMSNorm 2048x1024 0.50 of copy" in text
    assert f"and in {len(MODULES) - page.LISTED} more workloads" in text
    assert f"**x inductor**, {len(MODULES)} workloads: 1.50 (least 1.50)." in text
    assert "**x the function** of `shardfuse.nn.functional`: 2.00 (least 2.00)." in text
    assert "bandwidth_modules" not in text
