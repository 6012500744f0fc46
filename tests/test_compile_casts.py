"""Casts of weights and of their gradients, joined to lists; and the list's kernel, in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from compile_graphs import graph_of, listed
from torch import nn
from torch._inductor.utils import run_and_get_code

from shardfuse.compile import cast_op, graph_pass
from shardfuse.compile.cast_op import join_casts
from shardfuse.compile.graph_pass import hand_over
from shardfuse.compile.written_back import join_copies

CAST = torch.ops.prims.convert_element_type.default
LIST = torch.ops.shardfuse.cast_list_v1.default
BF16 = torch.bfloat16


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A chain of products in bfloat16, and the gradients of its weights in float32."""
    narrow = [CAST(w, BF16) for w in weights]
    given = [CAST(x, BF16)]
    for w in narrow:
        given.append(given[-1] @ w.t())
    grads: list[torch.Tensor] = []
    g = torch.ones_like(given[-1])
    for w, y in zip(reversed(narrow), reversed(given[:-1]), strict=True):
        grads.append(CAST(g.t() @ y, torch.float32))
        g = g @ w
    return given[-1], *grads


@pytest.mark.parametrize("take", ["all", "auto"])
def test_casts_of_weights_and_of_their_gradients_are_lists(take: str) -> None:
    given = [numbers(6, 8), *(numbers(8, 8, seed=k) for k in range(4))]
    gm = graph_of(layers, given)
    hand_over(gm.graph, take)  # pyright: ignore[reportArgumentType]
    gm.graph.lint()
    gm.recompile()
    lists = gm.graph.find_nodes(op="call_function", target=LIST)
    assert [len(n.args[0]) for n in lists] == ([5, 4] if take == "all" else []), "on a CPU only if all are asked for"
    for found, expected in zip(listed(gm(*given)), layers(*given), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_what_inductor_computes_where_it_is_read_stays() -> None:
    def f(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        narrow = [CAST(w, BF16) for w in weights]
        return tuple(x @ (w * 2) for w in narrow)

    given = [numbers(6, 8).bfloat16(), *(numbers(8, 8, seed=k) for k in range(4))]
    gm = graph_of(f, given)
    assert join_casts(gm.graph, only_gpu=False) == 0


def test_casts_behind_a_change_of_a_tensor_stay_behind_it() -> None:
    def f(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights[-1].mul_(2.0)
        return tuple(x @ CAST(w, BF16) for w in weights)

    given = [numbers(6, 8).bfloat16(), *(numbers(8, 8, seed=k) for k in range(4))]
    expected = f(*[x.clone() for x in given])
    gm = graph_of(f, given)
    join_casts(gm.graph, only_gpu=False)
    gm.recompile()
    for mine, theirs in zip(listed(gm(*[x.clone() for x in given])), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_lists_end_where_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_op, "LIST_BYTES", 2 * 64 * 3)
    given = [numbers(6, 8), *(numbers(8, 8, seed=k) for k in range(6))]
    gm = graph_of(layers, given)
    join_casts(gm.graph, only_gpu=False)
    gm.recompile()
    lists = gm.graph.find_nodes(op="call_function", target=LIST)
    assert max(len(n.args[0]) for n in lists) <= 4
    assert len(lists) == 2
    for found, expected in zip(listed(gm(*given)), layers(*given), strict=True):
        assert torch.equal(found, expected)


KERNEL = """
from dataclasses import replace

import torch
from shardfuse.compile.cast_call import CastCall
from shardfuse.compile.cast_op import run_casts

torch.manual_seed(0)
wide, narrow = torch.float32, torch.bfloat16
for source, result in ((wide, narrow), (narrow, wide), (wide, torch.float16)):
    for _ in range(2):  # the second finds the plan
        given = [torch.randn(n).to(source) for n in (1, 5, 8192, 8193, 20000)]
        given.append(torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last).to(source))
        given[1][2], given[2][5], given[3][7] = float("nan"), float("inf"), -0.0
        for x, y in zip(given, run_casts(given, result), strict=True):
            assert y.stride() == x.stride() and y.dtype is result
            assert torch.equal(y.isnan(), x.isnan())
            assert torch.equal(y.signbit() & ~y.isnan(), x.signbit() & ~x.isnan())
            assert torch.equal(y.nan_to_num(0.0), x.to(result).nan_to_num(0.0)), (source, result, x.shape)
    apart = torch.randn(40).to(source)[1:]  # at no multiple of 16 bytes
    assert torch.equal(run_casts([apart, apart], result)[1], apart.to(result))
    weights = [torch.randn(n, 3).t().to(source) for n in (5, 3, 4000)]
    joined = CastCall(result, [(tuple(w.shape), w.stride()) for w in weights], True)
    for _ in range(3):
        found = joined.run(*weights)
        for x, y in zip(weights, found, strict=True):
            assert y.stride() == x.stride() and torch.equal(y, x.to(result))
            assert y.untyped_storage().data_ptr() == found[0].data_ptr()
        del x, y, found
    assert len(joined._tables) == 1, "weights stay where they are"
    joined._made = replace(joined._made, queue=lambda: 1)
    joined.run(*weights)
    assert len(joined._tables) == 2, "another stream does not wait for the copy of a table"
    captured = CastCall(result, joined.layouts, True)
    captured._made = replace(joined._made, is_captured=lambda: True)
    for x, y in zip(weights, captured.run(*weights), strict=True):
        assert y.stride() == x.stride() and torch.equal(y, x.to(result))
    assert not len(captured._tables), "a replay would read what is gone"
"""


def test_generated_code_calls_the_list_itself() -> None:
    def f(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            for w in weights:
                x = torch.nn.functional.linear(x, w)
        return x.float().square().sum()

    given, other = ([numbers(6, 8), *(numbers(8, 8, seed=k).requires_grad_() for k in range(4))] for _ in range(2))
    compiled = torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"})
    (_, *gradients), codes = run_and_get_code(lambda: [y := compiled(*given), *torch.autograd.grad(y, given[1:])])
    assert [code.count(" = shardfuse_casts(") for code in codes] == [1, 1]
    lines = [line for code in codes for line in code.splitlines() if "#" not in line]
    assert not any("cast_list_v1.default(" in line for line in lines)
    for found, expected in zip(gradients, torch.autograd.grad(f(*other), other[1:]), strict=True):
        assert torch.equal(found, expected)
        assert found.untyped_storage().nbytes() == found.numel() * 4, "a gradient has memory of its own"


def test_the_kernel_of_a_list() -> None:
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""}
    run = subprocess.run([sys.executable, "-c", KERNEL], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_nothing_is_stored_over_a_part_of_the_tensor_that_casts_share() -> None:
    def f(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = x @ CAST(w, BF16)
        return x

    given = [numbers(8, 8).bfloat16(), *(numbers(8, 8, seed=k) for k in range(4))]
    found = torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"})(*given)
    assert torch.equal(found, f(*given))
    assert found.untyped_storage().nbytes() == found.numel() * 2


def written_back(x: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
    """A product, and running averages of it that a graph writes to its inputs at its end."""
    y = x @ x.t()
    kept = [b * 0.9 + y.mean(0) * 0.1 if b.is_floating_point() else b + 1 for b in buffers]
    out = y * 2
    for b, now in zip(buffers, kept, strict=True):
        b.copy_(now)
    return out


def test_what_a_graph_writes_back_is_a_list() -> None:
    x = numbers(4, 4)
    buffers = [*(numbers(4, seed=k) for k in range(4)), *(torch.tensor(k) for k in range(3))]
    gm = graph_of(written_back, [x, *buffers])
    assert join_copies(gm.graph) == 0, "on a CPU only if all are asked for"
    assert join_copies(gm.graph, only_gpu=False) == 7
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_copy_.default)) == 2
    mine, theirs = ([b.clone() for b in buffers] for _ in range(2))
    (found,) = listed(gm(x, *mine))
    assert torch.equal(found, written_back(x, *theirs))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


def test_copies_that_are_read_or_of_another_shape_stay() -> None:
    def f(x: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        for b in buffers:
            b.copy_(x[0])
        return buffers[0] + x

    given = [numbers(4, 4), *(numbers(4, 4, seed=k) for k in range(4))]
    gm = graph_of(f, given)
    before = len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    join_copies(gm.graph, only_gpu=False)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)) == before


def test_copies_that_read_what_another_writes_stay_in_their_order() -> None:
    def f(x: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        out, (first, second, third, a, b, *averages) = x + 1, buffers
        shifted = [(first, second), (second, third), (third, x[0] * 2)]
        swapped = [(a, b * 2 + 1), (b, a - 1)]
        moved = [(t, t * 0.5 + x.mean(0)) for t in averages]
        for target, source in (*moved, *shifted, *swapped):
            torch.ops.aten.copy_.default(target, source)
        return out

    given = [numbers(4, 4), *(numbers(4, seed=k) for k in range(8))]
    gm = graph_of(f, given)
    assert join_copies(gm.graph, only_gpu=False) == 3, "the averages alone"
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)) == 5
    mine, theirs = ([x.clone() for x in given] for _ in range(2))
    for a, b in zip((*listed(gm(*mine)), *mine), (f(*theirs), *theirs), strict=True):
        assert torch.equal(a, b)


def test_running_statistics_that_regions_give_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region reads both statistics of its batch norm, of which a copy writes one: it ran before all copies."""
    joined: list[int] = []
    whole = graph_pass.join_copies

    def counted(graph: torch.fx.Graph, *, only_gpu: bool) -> int:
        joined.append(whole(graph, only_gpu=only_gpu))
        return joined[-1]

    monkeypatch.setattr(graph_pass, "join_copies", counted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    other = deepcopy(model)
    compiled = torch.compile(model, backend="shardfuse", options={"shardfuse.take": "all"})
    for k in range(3):
        x = numbers(2, 4, 3, 3, seed=k)
        torch.testing.assert_close(compiled(x), other(x))
    assert joined[0] == 4, "the counters are two, which stay"
    for (name, found), expected in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
