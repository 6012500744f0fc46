"""GELU between matrix products: a region of its own, which is the op of that name again."""

from __future__ import annotations

import math

import pytest
import torch
from compile_graphs import calls_in, check, graph_of, regions_in

F = torch.nn.functional
BF16 = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_gelu_is_one_op(dtype: torch.dtype) -> None:
    # torch's float32 GELU of -0.0 is 0.0 in vectors of CPUs without AVX-512, its 16-bit one -0.0 everywhere
    (found,) = check(F.gelu, [random(64, 96, dtype=dtype)], signed=dtype == torch.float32)
    assert "gelu(" in found.program
    assert "erf(" not in found.program.split("gelu(")[1]
    check(lambda x: F.gelu(x[:, ::2]) * 3, [random(64, 96, dtype=dtype)], signed=dtype == torch.float32)


def test_in_float64_it_stays_as_it_is_written() -> None:
    """Where erf + 1 keeps its digits: below 0 torch's eager GELU in float64 has more of them."""
    (found,) = check(F.gelu, [random(64, 96, dtype=torch.float64).abs()])
    assert "gelu(" not in found.program


def written(x: torch.Tensor, half: float = 0.5, scale: float = math.sqrt(0.5), one: float = 1.0) -> torch.Tensor:
    return (torch.special.erf(x * scale) + one) * (x * half)


def test_only_gelu_is_taken_for_it() -> None:
    """Above 0, where neither form loses digits: below, torch's GELU on a CPU has fewer of them than erf + 1."""
    x = random(32, 48).abs()
    (found,) = check(written, [x])
    assert "gelu(" in found.program, "whichever factor stands first"
    others = [
        lambda x: written(x, half=0.25),
        lambda x: written(x, scale=1.0),
        lambda x: written(x, one=2.0),
        lambda x: torch.add(torch.special.erf(x * math.sqrt(0.5)), 1, alpha=3) * (x * 0.5),
        lambda x: (torch.special.erf((x + 1) * math.sqrt(0.5)) + 1) * (x * 0.5),
    ]
    for f in others:
        (found,) = check(f, [x])
        assert "gelu(" not in found.program


def test_parts_of_gelu_that_others_read_are_given_too() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = torch.special.erf(x * math.sqrt(0.5)) + 1
        return x * 0.5 * share, share

    check(f, [random(32, 48).abs()])


def test_what_a_reduction_has_taken_is_no_region_of_its_own() -> None:
    (found,) = check(lambda x: F.gelu(x).softmax(-1), [random(16, 64)])
    assert found.outputs == 1


def test_gelu_before_and_behind_products_are_regions_of_their_own() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.gelu(x @ w) @ w) @ w

    gm = graph_of(f, [random(8, 16), random(16, 16)])
    regions_in(gm)
    assert calls_in(gm) == 2


def test_other_pointwise_chains_stay_inductors() -> None:
    gm = graph_of(lambda x: torch.tanh(x).exp() * 2, [random(8, 16)])
    assert not regions_in(gm)
