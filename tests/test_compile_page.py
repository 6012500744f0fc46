"""``shardfuse.compile.report(html=...)``: one page, with the graph's regions, costs, and reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compile_graphs import graph_of, regions_in
from test_explain_page import Checked

from shardfuse.compile import ledger, report, reporting
from shardfuse.compile.graph_pass import hand_over
from shardfuse.compile.ledger import Report
from shardfuse.compile.program_text import on_lines
from shardfuse.compile.region_page import page
from shardfuse.errors import ArgumentError, PageError
from shardfuse.frontend.page import COPY_BANDWIDTH


def two_norms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two regions with a matrix product between."""
    y = torch.nn.functional.layer_norm(x, (64,)) @ w
    return torch.nn.functional.softmax(y, -1)


def given() -> list[torch.Tensor]:
    return [torch.randn(32, 64), torch.randn(64, 48)]


def test_a_page_holds_regions_and_what_is_between(tmp_path: Path) -> None:
    report(clear=True)
    hand_over(graph_of(two_norms, given()).graph, "auto")
    found = report(html=tmp_path / "regions.html")
    text = (tmp_path / "regions.html").read_text(encoding="utf-8")
    checked = Checked(text)
    assert len(found.regions) == 2
    assert found.regions[1].behind == (0,)
    assert "there is nothing to gain on a CPU" in checked.text
    for r in found.regions:
        assert on_lines(r.program) in checked.text
        assert f"{r.us:.1f} us" in checked.text
        assert r.plan is not None
        for segment in r.plan.segments:
            assert all(kernel in checked.text for kernel in segment.kernels)


def test_taken_regions_and_measured_times_are_told() -> None:
    first, second = regions_in(graph_of(two_norms, given()))
    assert first.bytes is not None
    timed = replace(first, measured_us=first.bytes / COPY_BANDWIDTH * 1e6 * 2, measured_inductor_us=99.5)
    text = Checked(page(Report((timed, second)))).text
    assert "taken: all regions are taken" in text
    assert "99.5 us" in text
    assert "50%" in text


def test_an_empty_report_and_one_of_cached_graphs_have_pages() -> None:
    assert "0" in Checked(page(Report(()))).text
    (first, _) = regions_in(graph_of(two_norms, given()))
    cached = replace(
        first, graph="cached", of=ledger.FROM_CACHE, bytes=None, us=None, inductor_us=None, plan=None, lines=()
    )
    assert "From torch's cache" in Checked(page(Report((cached,)))).text


def test_regions_from_the_cache_have_a_graph_and_numbers_of_their_own() -> None:
    ledger.report(clear=True)
    for k in range(3):
        ledger.note_cached(f"program {k}", ["add"], 1, 1)
    found = ledger.report(clear=True)
    assert [r.number for r in found.regions] == [0, 1, 2]
    both = Report((replace(found.regions[0], graph="forward", of=0), *found.regions))
    assert "From torch's cache" in Checked(page(both)).text


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    regions_in(graph_of(two_norms, given()))
    noted = len(report().regions)
    for wrong in ({"clear": "x"}, {"measure": 1}, {"html": 5}):
        with pytest.raises(ArgumentError, match=f"report: {next(iter(wrong))} is "):
            report(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PageError, match=r"report: html='.*regions.html' cannot be written: No such file") as caught:
        report(html=tmp_path / "none" / "regions.html", clear=True)
    assert isinstance(caught.value, OSError)
    with pytest.raises(ArgumentError, match="report: html is True, expected a string or a Path"):
        report(html=True, clear=True)  # type: ignore[arg-type]
    assert len(report().regions) == noted


def test_old_regions_let_go_of_their_graphs() -> None:
    (first, second) = regions_in(graph_of(two_norms, given()))
    assert first.plan is not None
    assert first.alone is not None
    ledger.report(clear=True)
    for k in range(0, ledger.DETAILED + 10, 2):
        ledger.note([replace(first, of=k), replace(second, of=k + 1)])
    found = ledger.report(clear=True).regions
    assert [r.of for r in found] == list(range(ledger.DETAILED + 10))
    assert [r.of for r in found if r.plan is None and r.alone is None] == list(range(10))
    assert all(r.plan is not None and r.alone is not None for r in found[10:])


def test_regions_of_one_program_are_measured_at_each_of_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of dynamic shapes have one text; what is measured is at the sizes of the call that made the graph."""
    seen: list[tuple[object, ...]] = []

    def times(module: torch.fx.GraphModule, program: str, device: torch.device) -> tuple[float, float]:
        seen.append(reporting.sizes_of(module))
        return float(len(seen)), 0.5

    monkeypatch.setattr(reporting, "measured", times)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    report(clear=True)
    for rows in (8, 16, 8):
        torch._dynamo.reset()
        row_softmax = torch.compile(
            lambda x: torch.softmax(x * 2, -1), backend="shardfuse", dynamic=True, options={"shardfuse.take": "all"}
        )
        with torch._inductor.config.patch(force_disable_caches=True):
            row_softmax(torch.ones(rows, 32))
    found = reporting._measured(report(clear=True))
    assert len({r.program for r in found.regions}) == 1, "rows are a symbol of each graph"
    assert [r.measured_us for r in found.regions] == [1.0, 2.0, 1.0]
    assert len(set(seen)) == 2


def test_collectives_of_a_cached_graph_are_told_by_name() -> None:
    ledger.report(clear=True)
    program = "fd.define_tensor()\nfd.ops.all_reduce_sum(T0)\nfd.ops.add(T0, T1)\nfd.add_output(T2)"
    ledger.note_cached_text(program)
    (found,) = ledger.report(clear=True).regions
    assert found.collectives == ("all_reduce_sum: inside",)
    assert "all_reduce_sum: inside" in str(found)
