"""Dropouts inside of regions: the masks that Inductor's kernels would draw, from its seeds, by the place of an element.

On a CPU Inductor draws other numbers, and its masks are left to it; here regions draw there all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pointwise_references import REFERENCES
from torch._inductor import config
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse.compile import random_op, report

DROPPED = 0.25
"""The probability."""
DRAWS_IN_TRITON = random_op.draws_in_triton


@pytest.fixture(autouse=True)
def drawing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs that draw on a CPU are left in no cache."""
    monkeypatch.setattr(random_op, "draws_in_triton", lambda device: True)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield


def seeds_of(count: int, seed: int) -> torch.Tensor:
    """What Inductor's graph draws first, behind ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (count,))


def mask_of(seed: torch.Tensor, *shape: int) -> torch.Tensor:
    """Of the elements that are kept, in row-major order."""
    count = torch.Size(shape).numel()
    drawn = REFERENCES["philox_uniform"].call(seed, torch.arange(count))
    return (drawn > DROPPED).reshape(shape)


def block(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dropped = functional.dropout(x, DROPPED)
    return functional.rms_norm(dropped + r, x.shape[-1:]), dropped


def compiled_with(f: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    report(clear=True)
    options = {"shardfuse.take": "all"}
    return torch.compile(f, backend="shardfuse", fullgraph=True, dynamic=dynamic, options=options)


def run(f: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    compiled = compiled_with(f, dynamic=False)
    torch.manual_seed(5)
    return compiled(*inputs)


def draws() -> list[int]:
    """Of each region how many numbers it draws of an element."""
    return [sum(n for op, n in r.ops if op == "inductor_random") for r in report().regions]


@pytest.mark.parametrize("shape", [(12, 64), (3, 5, 40), (2, 1, 7, 33)])
def test_a_region_draws_its_mask(shape: tuple[int, ...]) -> None:
    x, r = torch.randn(shape), torch.randn(shape)
    leaf = x.clone().requires_grad_()
    normed, dropped = run(block, leaf, r)
    kept = mask_of(seeds_of(1, 5)[0], *shape)
    assert torch.equal(dropped != 0, kept)
    wide = torch.where(kept, x.double() / (1 - DROPPED), 0.0).requires_grad_()
    right = functional.rms_norm(wide + r.double(), shape[-1:], eps=torch.finfo(torch.float32).eps)
    assert_near(normed.detach(), right.detach(), functional.rms_norm(dropped.detach() + r, shape[-1:]), what="norm")
    (grad,) = torch.autograd.grad(normed.sum(), leaf)
    (gx,) = torch.autograd.grad(right.sum(), wide)
    gx = torch.where(kept, gx / (1 - DROPPED), 0.0)
    assert_near(grad, gx, n=8, terms=gx.abs().amax(), signed=False, what="gradient")
    assert 1 in draws()


def test_masks_of_16_bit_numbers_are_of_what_was_drawn() -> None:
    """As in Inductor's kernels, which do not round it to bfloat16 first: some elements would be dropped for it."""
    x, r = torch.randn(64, 1024).bfloat16(), torch.randn(64, 1024).bfloat16()
    _, dropped = run(block, x, r)
    seed = seeds_of(1, 5)[0]
    assert torch.equal(dropped != 0, mask_of(seed, 64, 1024) & (x != 0))
    drawn = REFERENCES["philox_uniform"].call(seed, torch.arange(1 << 16)).bfloat16()
    assert not torch.equal(drawn > DROPPED, mask_of(seed, 1 << 16)), "there are elements that tell the two apart"


@pytest.mark.parametrize("form", ["transposed", "a view of it", "beside a tensor"])
def test_masks_of_16_bit_numbers_behind_views(form: str) -> None:
    """A view between the numbers and what they are compared with makes no difference."""
    x, p = torch.randn(16, 32, 64).bfloat16(), torch.full((64,), DROPPED).bfloat16()

    def f(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if form == "transposed":
            y = functional.dropout(x.transpose(0, 1), DROPPED).transpose(0, 1)
        elif form == "a view of it":
            y = torch.where(torch.rand_like(x).view(-1, 64).view(x.shape) > DROPPED, x, 0.0)
        else:
            y = torch.where(torch.rand_like(x) > p, x, 0.0)
        return functional.rms_norm(y + x, (64,)), y

    _, dropped = run(f, x, p)
    assert sum(draws()) == 1
    drawn = REFERENCES["philox_uniform"].call(seeds_of(1, 5)[0], torch.arange(x.numel())) > DROPPED
    kept = dropped != 0
    assert any(torch.equal(k.reshape(-1), drawn & (y.reshape(-1) != 0))
               for k, y in ((kept, x), (kept.transpose(0, 1), x.transpose(0, 1))))  # fmt: skip


def test_numbers_that_are_rounded_are_left_to_inductor() -> None:
    """A cast to integers, to Bool or to float64 is no rounding to 16 bits, and one to 16 bits that is read otherwise
    is rounded in Inductor's kernels or not, as they have it."""
    x = torch.randn(12, 64)

    def casts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        r = torch.rand_like(x)
        y = torch.where(r.int() > 0, x, 0.0)
        return functional.rms_norm(y, (64,)), r.int() > 0, r.bool() > 0, r.double() > 0.1

    normed, whole, nonzero, wide = run(casts, x)
    drawn = REFERENCES["philox_uniform"].call(seeds_of(1, 5)[0], torch.arange(x.numel())).reshape(x.shape)
    assert not normed.any()
    assert not whole.any()
    assert torch.equal(nonzero, drawn != 0)
    assert torch.equal(wide, drawn.double() > 0.1)

    def read_otherwise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        r = torch.rand_like(x)
        return functional.rms_norm(x * (0.75 + r).floor(), (64,)), r, r > DROPPED

    _, found, mask = run(read_otherwise, x.bfloat16())
    assert sum(draws()) == 0
    assert torch.equal(mask, found > DROPPED) or torch.equal(mask, found >= DROPPED)


class Layers(torch.nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(count))
        self.norm = torch.nn.ModuleList(torch.nn.LayerNorm(size) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linear, self.norm, strict=True):
            x = norm(functional.dropout(linear(x), DROPPED) + x)
        return x


def test_layers_alike_share_a_program_and_read_seeds_where_they_lie() -> None:
    model, x = Layers(4, 48), torch.randn(6, 48)
    found = run(model, x)
    seeds, expected = seeds_of(4, 5), x.double()
    wide = Layers(4, 48).double()
    wide.load_state_dict(model.state_dict())
    for k, (linear, norm) in enumerate(zip(wide.linear, wide.norm, strict=True)):
        expected = norm(torch.where(mask_of(seeds[k], 6, 48), linear(expected) / (1 - DROPPED), 0.0) + expected)
    assert_near(found.detach(), expected.detach(), n=32, terms=expected.detach().abs().amax(), signed=False)
    programs = [r.program for r in report().regions if "philox_uniform" in r.program]
    assert len(programs) == 4
    assert len(set(programs)) <= 2, "the first layer's input may come otherwise"


def test_sizes_may_be_symbols() -> None:
    compiled = compiled_with(block, dynamic=True)
    for rows in (12, 7):
        x, r = torch.randn(rows, 5, 64), torch.randn(rows, 5, 64)
        torch.manual_seed(5)
        _, dropped = compiled(x, r)
        assert torch.equal(dropped != 0, mask_of(seeds_of(1, 5)[0], rows, 5, 64))
    assert draws() == [1]


@pytest.mark.parametrize("which", ["normal numbers", "torch's own numbers", "on a CPU"])
def test_what_stays_inductors(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(12, 64)
    if which == "normal numbers":
        run(lambda x: functional.rms_norm(x + torch.randn_like(x), (64,)), x)
    elif which == "torch's own numbers":
        with config.patch(fallback_random=True):
            run(block, x, x)
    else:
        monkeypatch.setattr(random_op, "draws_in_triton", DRAWS_IN_TRITON)
        run(block, x, x)
    assert report().regions
    assert sum(draws()) == 0
