"""Ops that a library does better than generated code: one torch call each.

An entry says which axes of which input meet in the output (``axes``), which are contracted, and how torch does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

AxisNames = tuple[str, ...]


@dataclass(frozen=True)
class TorchCall:
    """``names(ndims)``: for each input and then the output the names of its axes, as in an einsum.

    Axes of one name are one axis.  A name that no output axis has is contracted: where it is sharded, each rank's result
    is a partial sum.  A trailing ``*`` marks an axis that may not be sharded.
    """

    names: Callable[[Sequence[int]], tuple[AxisNames, ...]]
    evaluate: Callable[[Sequence[torch.Tensor], Mapping[str, object]], torch.Tensor]


def _matmul(ndims: Sequence[int]) -> tuple[AxisNames, ...]:
    a, b = ndims
    batch = tuple(f"b{k}" for k in range(max(a, b) - 2, 0, -1))
    left = (*batch[len(batch) - max(a - 2, 0) :], "m", "k") if a > 1 else ("k",)
    right = (*batch[len(batch) - max(b - 2, 0) :], "k", "n") if b > 1 else ("k",)
    out = (*batch, *(("m",) if a > 1 else ()), *(("n",) if b > 1 else ()))
    return left, right, out


def _linear(ndims: Sequence[int]) -> tuple[AxisNames, ...]:
    rows = tuple(f"b{k}" for k in range(ndims[0] - 1))
    weight = ("n", "k") if ndims[1] == 2 else ("k",)
    out = (*rows, "n") if ndims[1] == 2 else rows
    bias = [("n",)] * (len(ndims) - 2)
    return (*rows, "k"), weight, *bias, out


def _embedding(ndims: Sequence[int]) -> tuple[AxisNames, ...]:
    index = tuple(f"b{k}" for k in range(ndims[0]))
    return index, ("v*", "d"), (*index, "d")


TORCH_CALLS: dict[str, TorchCall] = {
    "matmul": TorchCall(_matmul, lambda x, _: torch.matmul(x[0], x[1])),
    "linear": TorchCall(_linear, lambda x, _: torch.nn.functional.linear(*x)),
    "embedding": TorchCall(_embedding, lambda x, _: torch.nn.functional.embedding(x[0], x[1])),
}
