"""Operations of products, convolutions and attention, against torch's own counter where that counts them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compile_graphs import graph_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from shardfuse.compile.graph_pass import hand_over
from shardfuse.compile.hidden_host import hides_host
from shardfuse.compile.product_flops import flops_of

aten: Any = torch.ops.aten
F = torch.nn.functional
Shape = tuple[int, ...]


def call(op: Any, *args: object, result: Sequence[Shape]) -> Node:
    """A node of ``op``; tuples are shapes of its tensors."""
    graph = Graph()

    def given(x: object) -> object:
        if not isinstance(x, tuple):
            return x
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = torch.empty(x, device="meta")
        return node

    node = graph.call_function(op.default, tuple(map(given, args)))
    values = tuple(torch.empty(shape, device="meta") for shape in result)
    node.meta["val"] = values if len(values) > 1 else values[0]
    return node


def torchs_count(node: Node) -> float:
    values: Any = tree_map(lambda a: a.meta["val"] if isinstance(a, Node) else a, node.args)
    count: Any = flop_registry[getattr(node.target, "overloadpacket")]  # noqa: B009
    return count(*values, out_val=node.meta["val"])


def convolution(image: Shape, weight: Shape, result: Shape, *, transposed: bool = False, groups: int = 1) -> Node:
    rest = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    return call(aten.convolution, image, weight, None, *rest, result=[result])


def gradients(image: Shape, weight: Shape, result: Shape, wanted: list[bool], *, transposed: bool = False) -> Node:
    rest = (None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1, wanted)
    return call(aten.convolution_backward, result, image, weight, *rest, result=[image, weight, (1,)])


def attention(kind: str, query: Shape, key: Shape, value: Shape) -> Node:
    op = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    return call(op, query, key, value, result=[(*query[:-1], value[-1]), query[:-1]])


def attention_gradients(kind: str, query: Shape, key: Shape, value: Shape) -> Node:
    op = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    result = (*query[:-1], value[-1])
    return call(op, result, query, key, value, result, query[:-1], result=[query, key, value])


HEADS = ((2, 6, 128, 64), (2, 6, 96, 64), (2, 6, 96, 64))
ALIKE: dict[str, Callable[[], Node]] = {
    "mm": lambda: call(aten.mm, (5, 7), (7, 11), result=[(5, 11)]),
    "addmm": lambda: call(aten.addmm, (11,), (5, 7), (7, 11), result=[(5, 11)]),
    "bmm": lambda: call(aten.bmm, (3, 5, 7), (3, 7, 11), result=[(3, 5, 11)]),
    "baddbmm": lambda: call(aten.baddbmm, (3, 5, 11), (3, 5, 7), (3, 7, 11), result=[(3, 5, 11)]),
    "a convolution": lambda: convolution((2, 6, 9, 9), (8, 6, 3, 3), (2, 8, 7, 7)),
    "of groups": lambda: convolution((2, 6, 9, 9), (8, 3, 3, 3), (2, 8, 7, 7), groups=2),
    "transposed": lambda: convolution((2, 6, 9, 9), (6, 8, 3, 3), (2, 8, 11, 11), transposed=True),
    "both gradients": lambda: gradients((2, 6, 9, 9), (8, 6, 3, 3), (2, 8, 7, 7), [True, True, False]),
    "a weight's": lambda: gradients((2, 6, 9, 9), (8, 6, 3, 3), (2, 8, 7, 7), [False, True, True]),
    "a transposed one's": lambda: gradients((2, 6, 9, 9), (6, 8, 3, 3), (2, 8, 11, 11), [True] * 3, transposed=True),
    **{f"{k} attention": (lambda k=k: attention(k, *HEADS)) for k in ("efficient", "flash", "cudnn")},
    **{f"{k}, backward": (lambda k=k: attention_gradients(k, *HEADS)) for k in ("efficient", "flash", "cudnn")},
}


@pytest.mark.parametrize("name", ALIKE)
def test_as_torch_counts(name: str) -> None:
    node = ALIKE[name]()
    found = flops_of(node)
    if name.startswith("a transposed"):  # torch counts the gradient of the image with another shape of the filter
        assert found == 2 * flops_of(convolution((2, 6, 9, 9), (6, 8, 3, 3), (2, 8, 11, 11), transposed=True))
    else:
        assert found == torchs_count(node) > 0


@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn"])
def test_grouped_query_attention(kind: str) -> None:
    """Of keys and values of two heads each, as if they were repeated; the counter of torch 2.11 raises."""
    query, key, value = HEADS
    few = ((2, 2, *key[2:]), (2, 2, *value[2:]))
    for made in (attention, attention_gradients):
        assert flops_of(made(kind, query, *few)) == flops_of(made(kind, query, key, value)) > 0


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_packed_sequences(kind: str) -> None:
    """Of [..., length, heads, size of a head]: keys of the longest sequence, or of the tensor."""
    query, key = (1, 256, 4, 64), (1, 256, 2, 64)
    forward, backward = (getattr(aten, f"_{kind}_attention_{way}") for way in ("forward", "backward"))
    cu, pairs = [(3,), (3,), 160, 160], 4.0 * 256 * 4 * 160 * 64
    bias = [] if kind == "flash" else [None]
    node = call(forward, query, key, key, *bias, *cu, 0.0, result=[query, (4, 256)])
    assert flops_of(node) == pairs
    lse = [] if kind == "efficient" else [(4, 256)]  # behind the numbers of the other one
    node = call(backward, query, query, key, key, *bias, query, *lse, *cu, result=[query, key])
    assert flops_of(node) == 2.5 * pairs
    if kind == "efficient":
        node = call(forward, query, key, key, None, None, None, None, None, 0.0, result=[query, (4, 256)])
        assert flops_of(node) == 4.0 * 256 * 4 * 256 * 64


def test_arguments_by_name() -> None:
    node = ALIKE["addmm"]()
    expected = flops_of(node)
    (_, left, right), node.args = node.args, node.args[:1]
    node.kwargs = {"mat2": right, "mat1": left}
    assert flops_of(node) == expected > 0


def test_values_of_another_size_than_keys() -> None:
    found = flops_of(attention("flash", (1, 4, 32, 192), (1, 4, 64, 192), (1, 4, 64, 128)))
    assert found == 2 * 4 * 32 * 64 * (192 + 128)


def test_what_is_not_counted() -> None:
    assert flops_of(call(aten.exp, (3, 4), result=[(3, 4)])) == 0
    node = ALIKE["mm"]()
    del node.args[0].meta["val"]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    assert flops_of(node) == 0, "no shape is known"
    unknown = ShapeEnv().create_unbacked_symint()
    with FakeTensorMode(shape_env=unknown.node.shape_env):
        node = ALIKE["mm"]()
        node.meta["val"] = torch.empty((unknown, 11), device="cuda")
    assert flops_of(node) == 0, "a size that only the run tells"


def test_a_graph_with_grouped_query_attention_on_a_gpu() -> None:
    """As of Llama, Qwen3 and Gemma3: keys of fewer heads, and a norm whose region is weighed."""

    def block(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        given = [q.unflatten(-1, (8, 64)).transpose(1, 2), *(k.unflatten(-1, (2, 64)).transpose(1, 2),) * 2]
        y = aten._scaled_dot_product_flash_attention(*given, 0.0, True)[0]
        return F.rms_norm(x + y.transpose(1, 2).reshape(x.shape), x.shape[-1:])

    with FakeTensorMode():
        shapes = ((4, 4096, 512), (4, 4096, 512), (4, 4096, 128))
        gm = graph_of(block, [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes])
        nodes = [n for n in gm.graph.nodes if "attention" in str(n.target)]
        assert [flops_of(n) for n in nodes] == [4.0 * math.prod((4, 8, 4096, 4096, 64))]
        assert hides_host(gm.graph)
        hand_over(gm.graph, "auto")
