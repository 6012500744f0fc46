"""Images in channels-last between convolutions: copies that are left out, what asks for an order, pools' gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compile_graphs import check, graph_of, listed
from image_graphs import block, blocks_inputs, group_norm, images_read, numbers, run_alike, visible
from torch._inductor import config, inductor_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from shardfuse.compile import random_op, report
from shardfuse.compile.channels_last import keep_channels_last
from shardfuse.compile.graph_pass import hand_over
from shardfuse.compile.memory_orders import is_image_in_channels_last
from shardfuse.compile.pool_op import take_pools
from shardfuse.compile.random_op import channels_last_strides
from shardfuse.ops.random import philox

F = torch.nn.functional
aten = torch.ops.aten
CLONE = aten.clone.default


@pytest.mark.parametrize("take", ["none", "all"])
def test_the_copy_before_a_group_norm_is_left_out(take: str) -> None:
    given = blocks_inputs(last=True)
    gm = visible(graph_of(block, given), 0)
    assert images_read(gm) == [True, False]
    if take == "none":
        assert keep_channels_last(gm.graph, only_gpu=False) == 1
    else:
        hand_over(gm.graph, "all")
    assert not gm.graph.find_nodes(op="call_function", target=CLONE)
    assert images_read(gm) == [True, True]
    run_alike(gm, block, given)


def test_images_on_a_cpu_stay_as_they_are() -> None:
    gm = visible(graph_of(block, blocks_inputs(last=True)), 0)
    hand_over(gm.graph, "auto")
    assert images_read(gm) == [True, False]


def test_a_result_that_the_caller_sees_keeps_its_order() -> None:
    given = blocks_inputs(last=True)
    gm = graph_of(block, given)
    assert keep_channels_last(gm.graph, only_gpu=False) == 0
    run_alike(gm, block, given)


def test_an_op_that_asks_for_an_order_keeps_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w, padding=1).contiguous()
        return (y.reshape(2, -1).cumsum(1),)

    given = blocks_inputs(last=True)[:2]
    gm = visible(graph_of(f, given), 0)
    assert keep_channels_last(gm.graph, only_gpu=False) == 0


def test_a_view_that_would_be_a_copy_keeps_the_order() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w, padding=1).contiguous()
        return ((y.reshape(2, -1) @ v).sum(),)

    given = [*blocks_inputs(last=True)[:2], numbers(288, 5)]
    gm = visible(graph_of(f, given), 0)
    assert keep_channels_last(gm.graph, only_gpu=False) == 0


def test_random_numbers_are_drawn_in_the_order_in_which_they_are_read() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = group_norm(F.conv2d(x, w, padding=1), 4)
        mask = inductor_prims.random(list(y.shape), seed, "rand") > 0.25
        return F.conv2d(mask * y, v, padding=1).pow(2).mean(), mask

    given = [*blocks_inputs(last=True), torch.tensor(7)]
    gm = visible(graph_of(f, given), 0)
    assert keep_channels_last(gm.graph, only_gpu=False) == 1
    assert images_read(gm) == [True, True]
    (mask,) = gm.graph.find_nodes(op="call_function", target=aten.gt.Scalar)
    assert is_image_in_channels_last(mask.meta["val"])
    run_alike(gm, f, given)


@pytest.mark.parametrize("kept", [False, True])
def test_no_numbers_of_blocks_are_drawn_where_another_graph_draws_again(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor of torch 2.13 numbers blocks: the backward of a checkpoint that has the seeds would keep others."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = group_norm(F.conv2d(x, w, padding=1), 4)
        seeds = inductor_prims.seeds(1, x.device)
        mask = inductor_prims.random(list(y.shape), inductor_prims.lookup_seed(seeds, 0), "rand") > 0.25
        loss = F.conv2d(mask * y, v, padding=1).pow(2).mean()
        return (loss, mask, seeds) if kept else (loss, mask)

    monkeypatch.setattr(random_op, "numbers_blocks", lambda device: True)
    gm = visible(graph_of(f, blocks_inputs(last=True)), 0)
    keep_channels_last(gm.graph, only_gpu=False)
    drawn = [n for n in gm.graph.nodes if "image_rand" in str(n.target)]
    assert len(drawn) == (0 if kept else 1)


def test_numbers_of_an_image_follow_from_places_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Inductor's generated code, where ``ops.rand`` would number blocks: the Philox word of each place."""
    monkeypatch.setattr(random_op, "numbers_blocks", lambda device: True)
    op = random_op.register()
    size, seed = [2, 6, 5, 3], torch.tensor(123456789)
    with config.patch(force_disable_caches=True):
        found = torch.compile(lambda s: op(size, s) * 1.0, fullgraph=True)(seed)
    assert is_image_in_channels_last(found)
    word = philox(int(seed), 0, torch.arange(found.numel()))[0].reshape(size)
    folded = torch.where(word < 2**31, word, 2**32 - 1 - word)
    assert torch.equal(found, folded.float() * 4.6566127342e-10)
    assert found.unique().numel() > 170


@pytest.mark.parametrize(("channels", "groups"), [(12, 4), (20, 2), (8, 8)])
def test_a_group_s_variance_is_taken_by_channel_first(channels: int, groups: int) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.reshape(len(x), groups, channels // groups, -1)
        return (*torch.var_mean(y, [2, 3], correction=0, keepdim=True), *torch.var_mean(y, [2, 3], correction=0))

    x = numbers(3, channels, 5, 7, last=True) + 5 + torch.arange(channels)[:, None, None] * 0.25
    (region,) = check(f, [x], n=6)
    assert ("dims=[3]" in region.program) == (channels > groups), "pixels by channel, then channels"
    (plain,) = check(f, [x.contiguous()], n=6)
    assert "dims=[3]" not in plain.program


def as_strided(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = F.silu(F.conv2d(x, w, padding=1).contiguous())
    return (torch.as_strided(z, (8, 64, 3, 3), (4096, 64, 8, 1)).sum((2, 3)),)


def views_of_one(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Small ones, which a copy would make of another order."""
    z = F.silu(F.conv2d(x, w, padding=1).contiguous())
    return z[0, :4].view(256), z[1, :4].view(256)


def written_over(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The backward reads the copy of what was there before."""
    y = x.contiguous()
    with torch.no_grad():
        x.mul_(2.0)
    return (F.conv2d(y, w),)


@pytest.mark.parametrize("f", [as_strided, views_of_one, written_over])
def test_a_copy_stays_where_memory_is_asked_for(f: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    given = [numbers(8, 8, 8, 8, last=True), numbers(64, 8, 3, 3, last=True)]
    mine, own = ([x.clone() for x in given] for _ in range(2))
    options = {"shardfuse.take": "all"}
    for run, tensors in ((torch.compile(f, backend="shardfuse", options=options), mine), (f, own)):
        tensors[1].requires_grad_()
        found = run(*tensors)
        factors = [torch.linspace(-1.0, 1.0, y.numel()).view_as(y) for y in found]
        sum((y * factor).sum() for y, factor in zip(found, factors, strict=True)).backward()
        tensors += [*found, tensors[1].grad]
    for a, b in zip(mine, own, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()


# --- pools -------------------------------------------------------------------------------------------------


def test_the_gradient_of_a_max_pool_is_one_op() -> None:
    def f(g: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices.default(
            offsets, [3, 3], [9, 7], [2, 2], [1, 1], [1, 1]
        )
        return aten.max_pool2d_with_indices_backward.default(g, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices)

    x = numbers(2, 4, 9, 7, last=True)
    pooled, offsets = torch.ops.prims._low_memory_max_pool_with_offsets.default(
        x, [3, 3], [2, 2], [1, 1], [1, 1], False
    )
    given = [numbers(*pooled.shape, seed=3, last=True), x, offsets.contiguous(memory_format=torch.channels_last)]
    gm = graph_of_backward(f, given)
    assert take_pools(gm.graph) == 0, "on a CPU only if all are asked for"
    assert take_pools(gm.graph, only_gains=False) == 1
    gm.recompile()
    leaf = x.clone().requires_grad_()
    F.max_pool2d(leaf, 3, 2, 1).backward(given[0])
    assert leaf.grad is not None
    (found,) = listed(gm(*given))
    torch.testing.assert_close(found, leaf.grad)
    assert list(found.stride()) == channels_last_strides(found.shape)


def test_a_max_pool_is_one_op() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.prims._low_memory_max_pool_with_offsets.default(x, [3, 3], [2, 2], [1, 1], [1, 1], False)

    image = numbers(2, 4, 9, 7, last=True)
    for x, is_taken in ((image, True), (numbers(2, 4, 9, 7), False), (image.double(), False)):
        gm = graph_of_backward(f, [x])
        assert take_pools(gm.graph) == 0, "on a CPU only if all are asked for"
        assert take_pools(gm.graph, only_gains=False) == is_taken
        gm.graph.lint()
        gm.recompile()
        for found, right in zip(listed(gm(x)), f(x), strict=True):
            assert torch.equal(found, right)
            assert not is_taken or list(found.stride()) == channels_last_strides(found.shape)


@pytest.mark.parametrize("rest", [([2, 2], False), ([1, 1], True)], ids=["dilation", "ceil_mode"])
def test_other_max_pools_stay(rest: tuple[list[int], bool]) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.prims._low_memory_max_pool_with_offsets.default(x, [3, 3], [2, 2], [1, 1], *rest)

    gm = graph_of_backward(f, [numbers(2, 4, 9, 8, last=True)])
    assert take_pools(gm.graph, only_gains=False) == 0


@pytest.mark.parametrize(
    ("side", "hidden", "trains", "taken"),
    [(112, False, True, 2), (56, False, True, 1), (56, True, True, 2), (14, True, True, 0), (112, True, False, 1)],
)
def test_pools_are_taken_where_they_gain(side: int, hidden: bool, trains: bool, taken: int) -> None:
    """32 images of 64 channels on a GPU: the gradient gains more than the pool, which gains only for a gradient."""

    def f(x: torch.Tensor, g: torch.Tensor, offsets: torch.Tensor) -> tuple[object, torch.Tensor]:
        window = [3, 3], [2, 2], [1, 1]
        pooled = torch.ops.prims._low_memory_max_pool_with_offsets.default(x, *window, [1, 1], False)
        to_indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices.default
        indices = to_indices(offsets, [3, 3], [side, side], [2, 2], [1, 1], [1, 1])
        gradient = aten.max_pool2d_with_indices_backward(g, x, *window, [1, 1], False, indices)
        return pooled if trains else pooled[0], gradient

    with FakeTensorMode():
        sizes = [(32, 64, n, n) for n in (side, side // 2, side // 2)]
        types = (torch.float32, torch.float32, torch.int8)
        given = [
            torch.empty_strided(n, channels_last_strides(n), dtype=t, device="cuda")
            for n, t in zip(sizes, types, strict=True)
        ]
        gm = graph_of_backward(f, given)
    assert take_pools(gm.graph, is_host_hidden=hidden) == taken


def graph_of_backward(f: Callable[..., object], given: list[torch.Tensor]) -> GraphModule:
    """Without decompositions, one of which adds windows up in float32 on a CPU."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda *x: f(*x), tracing_mode="fake")(*given)


KERNEL = """
import torch
from quick_interpreter import quick_parts
from shardfuse.compile.pool_op import _added, run_gradient, run_pool

for owner, name, value in quick_parts():
    setattr(owner, name, value)

cases = [(2, 5, 8, 8, 3, 2, 1), (1, 130, 9, 7, 3, 2, 1), (1, 3, 8, 9, 2, 2, 0), (2, 4, 7, 7, 3, 1, 1)]
cases += [(1, 8, 10, 11, 5, 3, 2), (1, 8, 11, 12, 2, 3, 0)]
cases += [(1, 4, 9, 12, (2, 3), (1, 2), (0, 1)), (1, 4, 9, 8, (3, 2), (3, 1), (1, 0))]
for dtype in (torch.float32, torch.bfloat16):
    for n, c, h, w, *window in cases:
        k, s, p = ([a, a] if isinstance(a, int) else list(a) for a in window)
        torch.manual_seed(0)
        x = torch.randn(n, c, h, w)
        y, indices = torch.nn.functional.max_pool2d(x, k, s, p, return_indices=True)
        g = torch.randn_like(y).to(dtype).contiguous(memory_format=torch.channels_last)
        rows, columns = (torch.arange(m) * t - q for m, t, q in zip(y.shape[2:], s, p))
        offsets = (indices // w - rows[:, None]) * k[1] + indices % w - columns
        offsets = offsets.to(torch.int8).contiguous(memory_format=torch.channels_last)
        pool = [n, c, h, w], k, s, p
        (found,) = run_gradient(g, offsets, *pool)
        assert found.is_contiguous(memory_format=torch.channels_last) and found.dtype is dtype
        leaf = x.double().requires_grad_()
        torch.nn.functional.max_pool2d(leaf, k, s, p).backward(g.double())
        other = x.double().requires_grad_()
        torch.nn.functional.max_pool2d(other, k, s, p).backward(g.double().abs())
        near = 2.0 ** -8 if dtype is torch.bfloat16 else 2.0 ** -22
        assert ((found.double() - leaf.grad).abs() <= near * other.grad).all(), (dtype, n, c, h, w, k, s, p)
        assert torch.equal(_added(g, offsets.long(), *pool).to(dtype), found)
        least = torch.full_like(x, -torch.inf)
        for image in (x, x.round(), least, torch.where(x > 1.5, torch.nan, x), torch.full_like(x, -0.0)):
            image = image.to(dtype).contiguous(memory_format=torch.channels_last)
            largest, chosen = run_pool(image, *pool[1:])
            wide, one = image.float(), torch.ones_like(x)
            sides = (p[1], p[1], p[0], p[0])
            padded = [torch.nn.functional.pad(t, sides, value=v) for t, v in ((wide, -torch.inf), (one, 0))]
            window, inside = (t.unfold(2, k[0], s[0]).unfold(3, k[1], s[1]).flatten(4) for t in padded)
            right = window.amax(-1, keepdim=True)
            is_it = torch.where(right.isnan(), window.isnan(), window == right) & (inside == 1)
            assert torch.equal(chosen.long(), is_it.int().argmax(-1))
            torch.testing.assert_close(largest, right[..., 0].to(dtype), rtol=0, atol=0, equal_nan=True)
            assert not (image == 0).all() or largest.signbit().all(), "of -0 the largest is -0"
            assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (largest, chosen))
"""


def test_the_kernels_of_a_pool_and_its_gradient() -> None:
    tests = Path(__file__).parent
    path = f"{tests.parent}{os.pathsep}{tests}"
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "PATH": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", KERNEL], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_images_of_symbolic_sizes_train() -> None:
    """The gradient of a group norm is a reshape of a region's result, whose strides Inductor cannot order for a
    convolution: that region stays Inductor's, and the others are taken."""
    torch._dynamo.reset()
    report(clear=True)
    w = numbers(8, 3, 3, 3, last=True).requires_grad_()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.group_norm(F.conv2d(x, w, stride=4, padding=1), 2)
        return F.relu(y).mean((2, 3)).softmax(-1).square().sum()

    compiled = torch.compile(lambda x: f(x, w), backend="shardfuse", dynamic=True, options={"shardfuse.take": "all"})
    x, wide = numbers(4, 3, 32, 32, last=True), w.detach().double().requires_grad_()
    with config.patch(force_disable_caches=True):
        compiled(x).backward()
    f(x.double(), wide).backward()
    assert w.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(w.grad.double(), wide.grad, rtol=1e-4, atol=1e-7)
    left = [r.why for r in report(clear=True).regions if not r.taken]
    assert any(why.startswith("Inductor cannot order the strides of ") for why in left), left
