"""What a forward saves for its backward keeps its order in memory, under Inductor's own lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_graphs import graph_of, listed
from image_graphs import numbers, visible
from torch._inductor.compile_fx import record_original_output_strides
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from shardfuse.compile import graph_pass, saved_orders
from shardfuse.compile.graph_pass import Take, hand_over
from shardfuse.compile.saved_orders import keep_saved_orders

F = torch.nn.functional


def norm_between(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As in a ConvNeXt: a LayerNorm over channels; what is saved, in four axes of which the last are channels."""
    y = F.conv2d(x, w, padding=1).permute(0, 2, 3, 1)
    var, mean = torch.var_mean(y, [3], correction=0, keepdim=True)
    rstd = torch.rsqrt(var + 1e-6)
    normed = (y - mean) * rstd
    z = F.conv2d(normed.permute(0, 3, 1, 2), v, padding=1)
    return z, mean, rstd, normed.contiguous()


def in_training(f: Callable[..., object], given: list[torch.Tensor], *sees: int) -> GraphModule:
    """The graph of a forward, of whose results the caller sees these."""
    gm = visible(graph_of(f, given), *sees)
    for k, n in enumerate(gm.graph.find_nodes(op="placeholder")):
        n.name = f"primals_{k}"
    record_original_output_strides(gm)
    return gm


def graph_and_inputs(*, sees: tuple[int, ...] = (0,)) -> tuple[GraphModule, list[torch.Tensor]]:
    given = [
        numbers(2, 3, 6, 8, last=True), numbers(8, 3, 3, 3, last=True), numbers(8, 8, 3, 3, seed=1, last=True)
    ]  # fmt: skip
    return in_training(norm_between, given, *sees), given


def inductors_strides(gm: GraphModule) -> list[list[int]]:
    """Of what the graph gives, behind Inductor's lowering."""
    mode = FakeTensorMode()
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    fake: Any = [mode.from_tensor(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)) for x in inputs]
    with V.set_fake_mode(mode):
        lowering = GraphLowering(gm, fake)
        with V.set_graph_handler(lowering):
            lowering.run(*fake)
    return [[int(n) for n in out.get_stride()] for out in lowering.graph_outputs]


TURNED = [[48, 1, 6, 6], [48, 1, 6, 6], [384, 1, 48, 6]]
SAVED = [[48, 8, 1, 1], [48, 8, 1, 1], [384, 64, 8, 1]]


def test_inductor_would_lay_them_out_as_images() -> None:
    """Without the pass: what it is there for."""
    gm, _ = graph_and_inputs()
    assert inductors_strides(gm)[1:] == TURNED


@pytest.mark.parametrize("take", ["none", "all"])
def test_saved_tensors_keep_their_order(take: Take) -> None:
    gm, given = graph_and_inputs()
    if take == "none":
        assert keep_saved_orders(gm.graph, only_gpu=False) == 3
    else:
        hand_over(gm.graph, take)
    gm.recompile()
    assert inductors_strides(gm)[1:] == SAVED
    for mine, expected in zip(listed(gm(*given)), norm_between(*given), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-5, atol=2e-5)


def test_strides_are_those_of_the_graph_behind_the_pass() -> None:
    """Contiguous images become channels-last in it, and what is saved of them has other strides than before."""
    given = [numbers(2, 3, 6, 8), numbers(8, 3, 3, 3), numbers(8, 8, 3, 3, seed=1)]

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w, padding=1)
        z = torch.relu(y.permute(0, 2, 3, 1))
        return F.conv2d(z.permute(0, 3, 1, 2) + 1, v, padding=1), z

    gm = in_training(f, given, 0)
    hand_over(gm.graph, "all")
    gm.recompile()
    assert inductors_strides(gm)[1:] == [[384, 64, 8, 1]]


def operands(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What convolutions read is saved, itself and before it is copied, and an image in channels-last."""
    y = F.conv2d(x, w, padding=1)
    image = torch.relu(y).contiguous()
    z = F.conv2d(image, v, padding=1)
    weight = v * 2
    z = F.conv2d(z, weight.clone(memory_format=torch.channels_last), padding=1)
    return F.conv2d(z, v), y, image, weight


def test_what_convolutions_read_is_left() -> None:
    given = [numbers(2, 3, 6, 8, last=True), numbers(8, 3, 3, 3, last=True), numbers(8, 8, 3, 3, seed=1)]
    gm = in_training(operands, given, 0)
    assert keep_saved_orders(gm.graph, only_gpu=False) == 0
    (output,) = gm.graph.find_nodes(op="output")
    assert output.meta["user_visible_output_idxs"] == [0]


def test_only_where_inductor_lays_images_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _ = graph_and_inputs()
    monkeypatch.setattr(saved_orders, "inductor_turns", lambda graph: False)
    assert keep_saved_orders(gm.graph, only_gpu=False) == 0


def test_not_where_inductor_turns_what_the_graph_says_is_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _ = graph_and_inputs()
    monkeypatch.setattr(graph_pass, "read_in_other_orders", lambda graph, only_gpu: set(graph.nodes))
    hand_over(gm.graph, "all")
    assert inductors_strides(gm)[1:] == TURNED


def test_what_the_caller_sees_is_not_touched() -> None:
    gm, _ = graph_and_inputs(sees=(0, 1, 2, 3))
    assert keep_saved_orders(gm.graph, only_gpu=False) == 0
    assert inductors_strides(gm)[1:] == SAVED


def test_only_what_is_on_a_gpu() -> None:
    gm, _ = graph_and_inputs()
    assert keep_saved_orders(gm.graph, only_gpu=True) == 0
