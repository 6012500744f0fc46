"""What torch gives for results and gradients of a function of unsharded tensors, and how far roundings move them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch_answers import RUNS, Expected, moved_by_a_rounding

from benchmarks.roundings import accumulator

Function = Callable[..., tuple[Tensor, ...]]
Rounded = tuple[torch.dtype, Tensor]
"""A type, and the magnitude of which a rounding of it is meant."""


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def answers(function: Function, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The results, then the gradients of the inputs."""
    leaves = [leaf(t) for t in inputs]
    results = function(*leaves)
    torch.autograd.backward(results, [g.to(out.dtype) for g, out in zip(upstream, results, strict=True)])
    assert all(t.grad is not None for t in leaves)
    return [*(t.detach() for t in results), *(t.grad for t in leaves if t.grad is not None)]


def with_gradients(
    function: Function,
    inputs: Sequence[Tensor],
    upstream: Sequence[Tensor],
    dtype: torch.dtype | None = None,
    rounded: Sequence[Rounded] | None = None,
) -> list[Expected]:
    """Eager in ``dtype`` (left out: in that of each tensor), and in float64: the results, then gradients of ``inputs``.

    ``moved`` moves each tensor by a rounding of the type in which sums of it are accumulated, or as ``rounded`` says.
    """
    given = [*inputs, *upstream]
    kinds = rounded or [(accumulator(t.dtype), t.double()) for t in given]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return answers(function, tensors[: len(inputs)], tensors[len(inputs) :])

    @cache
    def moved() -> list[list[Tensor]]:
        found: list[list[Tensor]] = []
        for seed in range(RUNS):
            generator = torch.Generator().manual_seed(seed)
            pairs = zip(given, kinds, strict=True)
            found.append(run([moved_by_a_rounding(t.double(), kind, generator, size) for t, (kind, size) in pairs]))
        return found

    eager, wide = run([t if dtype is None else t.to(dtype) for t in given]), run([t.double() for t in given])
    return [
        Expected(a, b, lambda k=k: [one[k] for one in moved()], signed=False)
        for k, (a, b) in enumerate(zip(eager, wide, strict=True))
    ]
