"""``explain(html=...)``: the page holds the plan, needs nothing else, and says right who holds what."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, TensorView, initialize, simulate
from shardfuse.errors import DefinitionError, PageError
from shardfuse.executor.timeline import COLLECTIVES, KERNELS, Span, Timeline
from shardfuse.frontend.explain import explain_plan
from shardfuse.frontend.holdings import held, held_text
from shardfuse.frontend.page import COPY_BANDWIDTH, page

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
VOID = ("meta", "path", "rect", "br")


class Checked(HTMLParser):
    """Every tag that is opened is closed, in order, and nothing is asked of a network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), tag
        assert not {name for name, _ in attrs} & {"src", "href"}, attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += f" {data}"


def two_norms(n: int = 64) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([n, n], contiguity=True)
        for axis in (0, 1):
            fd.add_output(fd.ops.sub(x, fd.ops.max(x, [axis], keepdim=True)))
    return fd


def test_a_page_holds_the_plan_and_needs_no_network(tmp_path: Path) -> None:
    fd = two_norms()
    plan = fd.explain(html=tmp_path / "plan.html")
    assert plan == fd.explain()
    text = (tmp_path / "plan.html").read_text()
    found = Checked(text).text
    assert "://" not in text
    assert "@import" not in text
    assert '<meta name="viewport"' in text
    for segment in plan.segments:
        assert segment.text.splitlines()[0] in found
        for word in (segment.scheduler, *segment.kernels, *(why for _, why in segment.refusals[: segment.asked])):
            assert word in found
    (cut,) = plan.cuts
    assert cut.reason in found
    assert text.count('class="cut"') == 1
    assert f"0 and 1 64.0 KiB 48.0 KiB {cut.reason}" in re.sub(r"\s+", " ", found)


def test_names_are_escaped() -> None:
    fd = two_norms()
    fd.explain()
    plan = fd.fec.last_plan
    assert plan is not None
    spans = (Span("<script>alert(1)</script>", KERNELS, 0.0, 1.0),)
    Checked(page(plan, explain_plan(plan), Timeline(0, spans)))


def test_measured_times_stand_against_the_roof(tmp_path: Path) -> None:
    """A kernel that takes twice as long as a copy of as many bytes is at 50 %."""
    fd = two_norms(2048)
    plan = fd.explain()
    first, second = plan.segments
    roof = first.bytes / COPY_BANDWIDTH * 1e6
    spans = (
        Span(first.kernels[0], KERNELS, 0.0, 2 * roof),
        Span("all_reduce T9", COLLECTIVES, 0.0, roof),
        Span(second.kernels[0], KERNELS, 2 * roof, 2 * roof + 1.25 * second.bytes / COPY_BANDWIDTH * 1e6),
    )
    fd.explain(html=tmp_path / "plan.html", timeline=Timeline(3, spans))
    found = Checked((tmp_path / "plan.html").read_text()).text
    assert "50% of the roof" in found
    assert "80% of the roof" in found
    assert f"{2 * roof:.1f} us" in found
    assert f"{roof:.1f} us of them on both streams" in found
    assert "Measured on the GPU of rank 3" in found
    fd.explain(html=tmp_path / "plan.html", timeline=Timeline(3, spans[:1]))
    text = (tmp_path / "plan.html").read_text()
    assert text.count("class=share>") == text.count("% of the roof") == 1  # a kernel that was not measured has none


def test_times_of_a_cpu_are_no_share_of_a_gpus_roof(tmp_path: Path) -> None:
    fd = two_norms()
    inputs = [torch.ones(64, 64)]
    fd.explain(html=tmp_path / "plan.html", timeline=fd.timeline(inputs))
    found = Checked((tmp_path / "plan.html").read_text()).text
    assert "Measured on the CPU of rank 0" in found
    assert "% of the roof" not in found
    assert found.count("the roof is a GPU's") == 2


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    fd = two_norms()
    with pytest.raises(DefinitionError, match="explain: found html True, expected a string or a Path"):
        fd.explain(html=True)  # type: ignore[arg-type]
    with pytest.raises(PageError, match=r"explain: html='.*missing/plan.html' cannot be written: No such file"):
        fd.explain(html=tmp_path / "missing/plan.html")
    with pytest.raises(DefinitionError, match="timeline= without html=, expected html= as well"):
        fd.explain(timeline=Timeline(0, ()))


Sharded = Callable[[TensorView], None]


def blocks(parts: int, *, uneven: bool = False) -> Sharded:
    def shard(t: TensorView) -> None:
        t.outer_split(0, parts, uneven=uneven)
        t.axis(0).parallelize(X)

    return shard


def cyclic(t: TensorView) -> None:
    t.inner_split(0, 4)
    t.axis(1).parallelize(X)


def block_cyclic(t: TensorView) -> None:
    t.inner_split(0, 2)
    t.inner_split(0, 4)
    t.axis(1).parallelize(X)


def by_two_dimensions(t: TensorView) -> None:
    t.outer_split(0, 2, uneven=True)
    t.axis(0).parallelize(Y)
    t.outer_split(1, 2, uneven=True)
    t.axis(1).parallelize(X)


@pytest.mark.parametrize(
    ("size", "shape", "shard"),
    [
        (16, (4,), blocks(4)),
        (10, (4,), blocks(4, uneven=True)),
        (5, (4,), blocks(4, uneven=True)),
        (16, (4,), cyclic),
        (24, (4,), block_cyclic),
        (16, (2, 2), by_two_dimensions),
        (11, (2, 2), by_two_dimensions),
    ],
    ids=["blocks", "uneven", "empty", "cyclic", "block_cyclic", "two_dimensions", "two_dimensions_uneven"],
)
def test_who_holds_what(size: int, shape: tuple[int, ...], shard: Sharded) -> None:
    """The indices that are told are the elements of 0, 1, 2, ... that come out on the rank."""

    def run() -> tuple[list[int], list[int], str]:
        world = initialize()
        with FusionDefinition() as fd:
            x = fd.define_tensor([size], dtype=DataType.Int)
            y = fd.ops.set(x)
            fd.add_output(y)
        for t in (x, y):
            t.set_device_mesh(DeviceMesh(torch.arange(4).reshape(shape)))
        shard(y)
        (local,) = fd.execute([torch.arange(size)])
        plan = fd.fec.last_plan
        assert plan is not None
        domain = plan.fusion.outputs[0].domain
        told = held(domain, 0, world.rank)
        assert told is not None
        text = page(plan, explain_plan(plan))
        assert f"[{held_text(domain, 0, world.rank)}]" in text or "nothing" in text
        return local.tolist(), [k for start, stop in told for k in range(start, stop)], text

    results = simulate(run, 4)
    for came, told, _ in results:
        assert told == came
    assert len({text for _, _, text in results}) == 1
    Checked(results[0][2])


def test_collectives_and_meshes_are_on_the_page(tmp_path: Path) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 16], contiguity=True)
        fd.add_output(fd.ops.sum(x, [1]))
    x.set_device_mesh(DeviceMesh(range(2)))
    x.outer_split(1, 2)
    x.axis(1).parallelize(X)
    plan = fd.explain(html=tmp_path / "plan.html")
    found = re.sub(r"\s+", " ", Checked((tmp_path / "plan.html").read_text()).text)
    (collective,) = plan.collectives
    assert f"{collective.kind} mesh_x 2 32 B 12.0 us" in found
    assert "0 (0,) [0:8, 0:8] [0:8] 1 (1,) [0:8, 8:16] [0:8]" in found
