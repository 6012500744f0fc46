"""Gradients of a ReLU that take the sign from what the ReLU reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_graphs import graph_of, listed
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from benchmarks.roundings import assert_near
from shardfuse.compile import graph_pass, joint_graph_pass, post_grad_pass
from shardfuse.compile.relu_signs import take_signs_from_inputs

F = torch.nn.functional
INF, NAN = float("inf"), float("nan")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, as a tensor that the graph computes and a backward does not compute again."""
    return x.index_select(0, torch.arange(x.shape[0]))


def joint_of(f: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> GraphModule:
    """With the names that torch gives to the inputs of a joint graph."""
    gm = graph_of(with_gradients(f), given)
    gm.graph.find_nodes(op="placeholder")[-1].name = "tangents_1"
    return gm


def with_gradients(f: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """The joint graph of ``f``: its result, and the gradients of all inputs but the last, which is the result's."""

    def joint(*given: torch.Tensor) -> list[torch.Tensor]:
        *inputs, gradient = given
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            y = f(*leaves)
            return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]

    return joint


def scaled(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The gradient of ``w`` reads ``x``."""
    return torch.relu(stored(x) * w + b)


def normed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.batch_norm(stored(x), None, None, w, b, training=True))


def joined(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.cat([stored(x), y]) * w)


def residual(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(stored(x) * w + y)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Gradients read the result's sign and no more of it."""
    return torch.relu(x @ w)


def doubled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The gradient of what follows the ReLU reads its result, as that of a GELU or a product would."""
    return F.silu(torch.relu(x @ w))


def shifted(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(stored(x) * 2 + b)


def given_as_it_is(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Whose memory may have been written to before the backward."""
    return torch.relu(x * w)


def behind_a_mask(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The gradient of the inner one reads a mask alone."""
    return torch.relu(F.leaky_relu(stored(x), 0.1) * 2 + b)


def padded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.pad(stored(x) * w, (1, 1)))


def leaky(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.leaky_relu(stored(x) * w, 0.1)


OF_A_RESULT = (torch.ops.aten.relu.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
X, Y, W, B = numbers(64, 96), numbers(64, 96, seed=1), numbers(96, seed=2), numbers(96, seed=3)
IMAGE, VECTOR = numbers(4, 24, 6, 6), numbers(24, seed=4)
CASES = {
    "a product with a vector": (scaled, [X, W, B], 1),
    "a batch norm": (normed, [IMAGE, VECTOR, VECTOR + 1], 1),
    "tensors that are joined": (joined, [X, Y, W], 0),
    "two tensors that are added": (residual, [X, Y, W], 0),
    "a matrix product, which no gradient reads": (product, [X, numbers(96, 96, seed=5)], 0),
    "a matrix product, of whose ReLU gradients read more": (doubled, [X, numbers(96, 96, seed=5)], 0),
    "a sum, which no gradient reads": (shifted, [X, B], 0),
    "an input": (given_as_it_is, [X, W], 0),
    "a leaky ReLU, of which a mask is kept": (behind_a_mask, [X, B], 0),
    "a padded tensor": (padded, [X, W], 0),
    "a slope below zero, which reads its input anyway": (leaky, [X, W], 0),
}


@pytest.mark.parametrize("name", CASES)
def test_which_signs_are_taken_from_the_input(name: str) -> None:
    f, inputs, count = CASES[name]
    given = [*inputs, torch.ones_like(f(*inputs))]
    gm = joint_of(f, given)
    assert take_signs_from_inputs(gm.graph, only_gpu=True) == 0, "on a CPU only if all are asked for"
    assert take_signs_from_inputs(gm.graph, only_gpu=False) == count
    assert take_signs_from_inputs(gm.graph, only_gpu=False) == 0
    gm.graph.lint()
    gm.recompile()
    signs = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar)
    assert len(signs) == (f is not leaky)
    assert all((n.args[0].target in OF_A_RESULT) == (count == 0) for n in signs)
    original = joint_of(f, given)
    for found, expected in zip(listed(gm(*given)), listed(original(*given)), strict=True):
        assert torch.equal(found, expected)


def test_bits_of_special_values() -> None:
    """Zeros of both signs, infinities, NaN, and the smallest numbers: the same elements pass, bit by bit."""
    dtype = torch.float32
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([0.0, -0.0, INF, -INF, NAN, tiny, -tiny, tiny / 4, -tiny / 4, 1, -1, 2], dtype=dtype)
    x = x.repeat(32, 1)
    given = [x, torch.ones(12), torch.zeros(12), numbers(32, 12)]
    gm = joint_of(scaled, given)
    assert take_signs_from_inputs(gm.graph, only_gpu=False) == 1
    gm.recompile()
    original = joint_of(scaled, given)
    for found, expected in zip(listed(gm(*given)), listed(original(*given)), strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def image_norm(x: torch.Tensor, k: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.batch_norm(F.conv2d(x, k), None, None, w, b, training=True))


def stepped(f: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of all but the image, of a sum whose weights differ from element to element."""
    leaves = [x.detach().clone().requires_grad_() for x in given[1:]]
    y = f(given[0], *leaves)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    return [x.grad for x in leaves if x.grad is not None]


def summands(x: torch.Tensor, k: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """How large the summands are of which the gradients of weight and bias are the sums."""

    def apart(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(x, None, None, training=True) * w + b)

    y = F.conv2d(x, k)
    whole = [v[None, :, None, None].expand(y.shape) for v in (w, b)]
    return [g.abs().sum([0, 2, 3]).float() for g in stepped(apart, y, *whole)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many signs are taken from now on, graph by graph; there may be other graphs among them."""
    taken: list[int] = []
    whole = graph_pass.take_signs_from_inputs

    def noted(graph: Graph, *, only_gpu: bool) -> int:
        taken.append(whole(graph, only_gpu=only_gpu))
        return taken[-1]

    monkeypatch.setattr(graph_pass, "take_signs_from_inputs", noted)
    return taken


def test_random_numbers_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward would save another tensor for the sign."""
    taken = counted(monkeypatch)
    f = torch.compile(lambda x, w: torch.relu(F.dropout(x) * w), backend="shardfuse", options={"shardfuse.take": "all"})
    f(X.clone().requires_grad_(), W.clone().requires_grad_())
    assert sum(taken) == 0


def test_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the backend, against float64: a third of the elements would be wrong, were they of another sign."""
    taken = counted(monkeypatch)
    given = [numbers(4, 3, 12, 12), numbers(16, 3, 3, 3, seed=1), numbers(16, seed=2), numbers(16, seed=3)]
    wide = [x.double() for x in given]
    found = stepped(torch.compile(image_norm, backend="shardfuse", options={"shardfuse.take": "all"}), *given)
    assert sum(taken) == 1
    right, own = stepped(image_norm, *wide), stepped(image_norm, *given)
    for k, terms in enumerate(summands(*wide), 1):
        assert_near(found[k], right[k], own[k], signed=False, terms=terms, what=f"gradient {k}")


class Own(CustomGraphPass):
    def __init__(self, name: object) -> None:
        self.name, self.graphs = name, 0

    def __call__(self, graph: Graph) -> None:
        self.graphs += 1

    def uuid(self) -> Any:
        return self.name


def test_a_pass_of_the_caller_s_runs_first() -> None:
    own = Own("own")
    with config.patch(joint_custom_post_pass=own):
        f = torch.compile(scaled, backend="shardfuse", options={"shardfuse.take": "all"})
        assert f(X.clone().requires_grad_(), W, B).requires_grad
        assert config.joint_custom_post_pass is own, "set for one compilation, not for all"
    assert own.graphs >= 1


def test_identity_of_the_pass() -> None:
    assert graph_pass.JointGraphPass("all").uuid() == joint_graph_pass(take="all").uuid()
    assert joint_graph_pass().uuid() != joint_graph_pass("none").uuid()
    assert graph_pass.JointGraphPass("all", [Own(None)]).uuid() is None, "then nothing is kept"
    assert type(joint_graph_pass()) is not type(post_grad_pass())


def test_none_leaves_the_graph_alone() -> None:
    given = [*CASES["a batch norm"][1], torch.ones_like(IMAGE)]
    gm = joint_of(normed, given)
    before = str(gm.graph)
    joint_graph_pass("none")(gm.graph)
    joint_graph_pass()(gm.graph)  # on a CPU
    assert str(gm.graph) == before
    joint_graph_pass("all")(gm.graph)
    assert str(gm.graph) != before


def saved_bytes(f: Callable[..., torch.Tensor], *given: torch.Tensor) -> int:
    """What a compiled forward keeps for its backward, each storage once."""
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    leaves = [x.detach().clone().requires_grad_() for x in given]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        f(*leaves)
    return sum(storage.nbytes() for storage in saved.values())


def perceptron(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x + F.linear(torch.relu(F.linear(x, w, b)), v, c), x.shape[-1:])


def convolved(x: torch.Tensor, k: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.conv2d(image_norm(x, k, w, b), v)


SAVING = {
    "linear": (perceptron, [X, numbers(256, 96), numbers(256), numbers(96, 256), numbers(96)]),
    "convolution": (convolved, [numbers(4, 3, 12, 12), numbers(16, 3, 3, 3), *[numbers(16)] * 2, numbers(8, 16, 3, 3)]),
}


@pytest.mark.parametrize("name", SAVING)
def test_no_more_is_saved_for_the_backward(name: str) -> None:
    """Not a mask for each ReLU of a network's linear layers, of which an OPT kept 256 MiB."""
    f, given = SAVING[name]
    found: list[int] = []
    for take in ("all", "none"):
        torch._dynamo.reset()
        found.append(saved_bytes(torch.compile(f, backend="shardfuse", options={"shardfuse.take": take}), *given))
    assert found[0] <= found[1] + 2048, "vectors, but no mask of 16 KiB"


def test_sizes_that_only_the_run_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = counted(monkeypatch)
    f = torch.compile(
        lambda x, w: torch.relu(x[x[:, 0] > 0] * w).sum(0), backend="shardfuse", options={"shardfuse.take": "all"}
    )
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = f(X.clone().requires_grad_(), W.clone().requires_grad_())
    assert sum(taken) == 0
    assert_near(found.detach(), torch.relu(X.double()[X[:, 0] > 0] * W.double()).sum(0), signed=False, n=8)


def test_sixteen_bits_between_stay_as_they_are() -> None:
    """Kernels round them apart: of 2 million elements 693 had another sign than the forward's."""
    given = [x.bfloat16() for x in (X, W, B, torch.ones_like(X))]
    assert take_signs_from_inputs(joint_of(scaled, given).graph, only_gpu=False) == 0


def half_normed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A batch norm of 16 bits computes in float32, and rounds its result alone."""
    return F.relu(F.batch_norm(stored(x), None, None, w.float(), b.float(), training=True))


def test_a_norm_of_sixteen_bits_masks_as_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = counted(monkeypatch)
    x = numbers(64, 24, 6, 6).bfloat16().requires_grad_()
    b = VECTOR.bfloat16().requires_grad_()
    y = torch.compile(half_normed, backend="shardfuse", options={"shardfuse.take": "all"})(x, VECTOR + 2, b)
    y.backward(torch.ones_like(y))
    assert sum(taken) == 1
    assert b.grad is not None
    assert torch.equal(b.grad, (y > 0).sum([0, 2, 3]).to(b.grad))


def test_a_buffer_that_is_written_to_gives_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = counted(monkeypatch)

    def f(buffer: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(stored(x) * w + buffer.exp())
        buffer.add_(100.0)
        return y

    results: list[torch.Tensor] = []
    for g in (f, torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"})):
        w = W.clone().requires_grad_()
        g(B.clone(), X, w).sum().backward()
        assert w.grad is not None
        results.append(w.grad)
    assert sum(taken) == 0
    torch.testing.assert_close(*results)


def test_comparisons_of_a_forward_and_of_an_inference_stay() -> None:
    def compared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(stored(x) * w)
        return torch.where(y <= 0, x, y)

    gm = graph_of(compared, [X, W])
    assert take_signs_from_inputs(gm.graph, only_gpu=False) == 0
    gm = joint_of(scaled, [X, W, B, torch.ones_like(X)])
    (sign,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar)
    sign.args, sign.kwargs = sign.args[:1], {"other": 0}
    assert take_signs_from_inputs(gm.graph, only_gpu=False) == 0, "no pass of torch's writes it like this"
