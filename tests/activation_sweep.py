"""Activations and their gradients at numbers from -12 to 12, a row for each twentieth of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse.nn import functional as ours

Op = Callable[..., Tensor]


def _of_tanh(x: Tensor) -> Tensor:
    """GELU by tanh without the difference 1 + tanh, of which nothing is left at -6, in float64 either."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


SWEEPS: dict[str, tuple[Op, Op, Op]] = {
    "gelu_tanh": (
        lambda x: ours.gelu(x, approximate="tanh"),
        lambda x: functional.gelu(x, approximate="tanh"),
        _of_tanh,
    ),
    "geglu_tanh": (
        lambda x, up: ours.geglu(x, up, approximate="tanh"),
        lambda x, up: functional.gelu(x, approximate="tanh") * up,
        lambda x, up: _of_tanh(x) * up,
    ),
    "gelu": (
        ours.gelu,
        functional.gelu,
        lambda x: 0.5 * x * torch.special.erfc(-x * math.sqrt(0.5)),
    ),
    "swiglu": (ours.swiglu, *[lambda x, up: functional.silu(x) * up] * 2),
}
"""By each name: ours, eager torch's, and the function that is right in float64."""


def check_sweep(name: str, dtype: torch.dtype, columns: int) -> None:
    """Forward and gradients: within 4 roundings of each element, and twice what eager torch is off in a row.

    Where the slope runs through 0 it is a difference of terms of a tenth: of those come 4 roundings more.
    """
    own, theirs, exact = SWEEPS[name]
    x = torch.linspace(-12, 12, 480 * columns, dtype=torch.float64).reshape(480, columns).to(dtype)
    generator = torch.Generator().manual_seed(0)
    dy, up = (1 + torch.rand(x.shape, generator=generator).to(dtype) for _ in range(2))
    given = (x, up)[: 1 + ("glu" in name)]
    found, eager = _results(own, given, dy), _results(theirs, given, dy)
    wide = _results(exact, [t.double() for t in given], dy)
    crosses = ((x > -2) & (x < 0)).double()
    for k, (mine, right, torchs) in enumerate(zip(found, wide, eager, strict=True)):
        terms = 0.1 * crosses if k == 1 else None
        assert_near(mine, right, torchs, n=4, terms=terms, signed=False, what=f"{name} of {dtype}, result {k}")


def _results(op: Op, given: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """What comes out, and the gradient of each that went in."""
    leaves = [t.clone().requires_grad_() for t in given]
    result = op(*leaves)
    result.backward(dy.to(result.dtype))
    return [result.detach(), *(t.grad for t in leaves if t.grad is not None)]
