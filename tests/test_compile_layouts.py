"""Convolutions of contiguous images get channels-last before regions are planned, and who asks for more gets a copy."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from compile_graphs import graph_of, listed
from image_graphs import CONVOLUTION, block, blocks_inputs, images_read, numbers, run_alike, visible
from torch import library
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule, Node

from shardfuse.compile import convolution_layouts, graph_pass, report
from shardfuse.compile.channels_last import keep_channels_last

F = torch.nn.functional
aten = torch.ops.aten
GIVEN_BACK = torch.ops.prims.inductor_force_stride_order.default


@pytest.fixture
def by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_layouts, "inductor_turns", lambda graph: False)
    monkeypatch.setattr(convolution_layouts, "cudnn_turns", lambda convolution: True)


@pytest.fixture
def by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_layouts, "inductor_turns", lambda graph: True)


def large_inputs() -> list[torch.Tensor]:
    return [numbers(2, 3, 16, 16), numbers(8, 3, 3, 3), numbers(8, 8, 3, 3, seed=1)]


def given_back(gm: GraphModule) -> list[object]:
    """Of what a copy in the order that it had is made: its node's target."""
    sources = [n.args[0] for n in gm.graph.find_nodes(op="call_function", target=GIVEN_BACK)]
    return [n.target for n in sources if isinstance(n, Node)]


@pytest.mark.usefixtures("by_cudnn")
def test_contiguous_images_of_convolutions_are_turned_once() -> None:
    given = large_inputs()
    gm = visible(graph_of(block, given), 0)
    assert keep_channels_last(gm.graph, only_gpu=False) == 3, "two weights and the first image"
    assert images_read(gm) == [True, True]
    run_alike(gm, block, given)


@pytest.mark.usefixtures("by_cudnn")
def test_the_gradient_of_a_weight_of_one_pixel_has_the_weights_strides() -> None:
    """Those of its axes of one element say nothing, but torch compares them, and cuDNN has others than it was said."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w, padding=1)
        z = F.conv2d(y, v)
        once, none = [1, 1], [0, 0]
        given = (z, y, v, None, once, none, once, False, none, 1, [False, True, False])
        return z.pow(2).mean(), aten.convolution_backward(*given)[1]

    given = [*large_inputs()[:2], numbers(8, 8, 1, 1)]
    gm = graph_of(f, given)
    assert keep_channels_last(gm.graph, only_gpu=False) == 2
    assert images_read(gm) == [True, True]
    run_alike(gm, f, given)
    (output,) = gm.graph.find_nodes(op="output")
    gradient = output.args[0][1]
    assert gradient.target is aten.as_strided.default
    assert gradient.args[1:] == ([8, 8, 1, 1], [8, 1, 1, 1])


@pytest.mark.usefixtures("by_cudnn")
def test_what_needs_more_copies_than_cudnn_makes_stays_contiguous() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w, padding=1)
        y = y.reshape(2, -1).cumsum(1).reshape(y.shape)
        return (F.conv2d(y, v, padding=1, stride=4).pow(2).mean(),)

    gm = visible(graph_of(f, large_inputs()), 0)
    before = str(gm.graph)
    assert keep_channels_last(gm.graph, only_gpu=False) == 0
    assert str(gm.graph) == before
    small = blocks_inputs(last=False)
    gm = visible(graph_of(block, [numbers(1, 3, 4, 4), *small[1:]]), 0)
    assert keep_channels_last(gm.graph, only_gpu=False) == 0, "weights are larger than images"
    for side, copies in ((12, 3), (8, 0)):  # 4896 and 3936 B of copies beside 15552 and 6912 of images
        gm = visible(graph_of(block, [numbers(1, 3, side, side), *small[1:]]), 0)
        assert keep_channels_last(gm.graph, only_gpu=False) == copies, "half of cuDNN's copies, and not a few fewer"


@pytest.mark.usefixtures("by_inductor")
def test_who_asks_for_the_order_that_it_had_gets_a_copy() -> None:
    """``cumsum`` reads a matrix of the image's rows, and the caller gets the second image."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w, padding=1)
        z = torch.relu(F.conv2d(torch.relu(y), v, padding=1))
        return y.reshape(2, -1).cumsum(1), z, z.mean((2, 3))

    given = large_inputs()
    gm = graph_of(f, given)
    assert keep_channels_last(gm.graph, only_gpu=False) == 3
    assert images_read(gm) == [True, True]
    assert given_back(gm) == [aten.convolution.default, aten.relu.default]
    (output,) = gm.graph.find_nodes(op="output")
    assert [n.meta["val"].stride() for n in output.args[0]] == [(2048, 1), (2048, 256, 16, 1), (8, 1)]
    run_alike(gm, f, given)


@pytest.mark.usefixtures("by_inductor")
def test_pools_and_other_ops_that_inductor_writes_follow() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w, padding=1)
        pooled, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(y, [3, 3], [2, 2], [1, 1], [1, 1], False)
        z = F.interpolate(F.avg_pool2d(F.conv2d(pooled, v, padding=1), 2), scale_factor=2.0)
        return z.pow(2).mean(), offsets.sum()

    given = large_inputs()
    gm = visible(graph_of(f, given), 0, 1)
    assert keep_channels_last(gm.graph, only_gpu=False) == 3
    assert images_read(gm) == [True, True]
    assert not given_back(gm)
    run_alike(gm, f, given)


@pytest.mark.parametrize(("prefix", "inference"), [("primals", False), ("arg", True)])
def test_inductor_is_asked_as_it_will_ask_itself(
    monkeypatch: pytest.MonkeyPatch, prefix: str, *, inference: bool
) -> None:
    asked: list[bool] = []

    def decide(module: GraphModule, *, is_inference: bool) -> bool:
        asked.append(is_inference)
        return False

    monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(decide))
    gm = graph_of(block, large_inputs())
    for n in gm.graph.find_nodes(op="placeholder"):
        n.name = f"{prefix}_{n.name}"
    assert not convolution_layouts.inductor_turns(gm.graph)
    assert asked == [inference]


def test_a_region_reads_the_order_for_which_it_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Inductor makes of the convolution before it."""
    monkeypatch.setattr(graph_pass, "keep_channels_last", lambda graph, only_gpu: 0)
    monkeypatch.setattr(graph_pass, "read_in_other_orders", lambda graph, only_gpu: set())

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w, padding=1)
        var, mean = torch.var_mean(y, [0, 2, 3], correction=0, keepdim=True)
        return F.relu((y - mean) * torch.rsqrt(var + 1e-5))

    given = [numbers(2, 3, 16, 16), numbers(8, 3, 3, 3)]
    with torch.no_grad():
        run = torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"})
        found, (code,) = run_and_get_code(run, *given)
    torch.testing.assert_close(found, f(*given), rtol=1e-4, atol=1e-4)
    (read,) = re.findall(r"region_\w+\.run\((\w+)", code)
    assert f"{read} = empty_strided_cpu((2, 8, 16, 16), (2048, 256, 16, 1), torch.float32)" in code


# --- results and ops that share memory with an image -------------------------------------------------------


def image(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.conv2d(torch.relu(F.conv2d(x, w, padding=1)), v, padding=1))


@library.custom_op("shardfuse_tests::triple", mutates_args=("x",))
def triple(x: torch.Tensor) -> None:
    x.mul_(3.0)


def written_clone(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = image(x, w, v)
    copied = z.clone()
    triple(copied)
    return copied.sum((1, 2)), z.sum((2, 3)), F.conv2d(z, v)


def places(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.relu(F.conv2d(x, w, padding=1))
    return torch.as_strided(y, (8, 8), (8, 1)).sin(), F.conv2d(y, v, padding=1).sum()


SHARED: dict[str, Callable[..., object]] = {
    "two views": lambda *given: (lambda z: (z.flatten(1), z.view(-1)))(image(*given)),
    "halves of the channels": lambda *given: image(*given).chunk(2, 1),
    "samples": lambda *given: image(*given).unbind(0),
    "an image and its first sample": lambda *given: (lambda z: (z, z[0]))(image(*given)),
    "a clone that an op writes to": written_clone,
    "places in memory": places,
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_what_shares_memory_with_an_image_stays_what_it_is(name: str, *, trains: bool) -> None:
    """As Inductor lays images out in channels-last, which on a CPU it always does."""
    f = SHARED[name]
    if trains and f is written_clone:
        pytest.skip("the op has no gradient")
    given = [numbers(2, 3, 8, 8), *large_inputs()[1:]]
    wants, has = ([x.clone().requires_grad_(trains) for x in given] for _ in range(2))
    with torch.set_grad_enabled(trains):
        expected = listed(f(*wants))
        found = listed(torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"})(*has))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
        addresses = [[t.untyped_storage().data_ptr() for t in each] for each in (found, expected)]
        assert [len(set(each)) for each in addresses] == [len({*addresses[1]})] * 2
        if trains:
            for outputs in (found, expected):
                sum((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs).backward()
            for a, b in zip(has, wants, strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_regions_of_images_that_cannot_be_turned_are_inductors() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = F.conv2d(x, w, padding=1).softmax(1)
        return z, z[0]

    given = large_inputs()[:2]
    gm = graph_of(f, given)
    assert keep_channels_last(gm.graph, only_gpu=False) == 0
    read = convolution_layouts.read_in_other_orders(gm.graph, only_gpu=False)
    assert {n.target for n in read} >= {CONVOLUTION}
    report(clear=True)
    graph_pass.hand_over(gm.graph, "all")
    (region,) = report(clear=True).regions
    assert not region.taken
    assert "channels-last" in region.why
    gm = visible(graph_of(block, large_inputs()), 0)
    assert keep_channels_last(gm.graph, only_gpu=False)
    assert not convolution_layouts.read_in_other_orders(gm.graph, only_gpu=False)
