"""Which elements a reduction of a graph adds up: how many, of how many rows or columns, and where in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import torch
from torch.fx import Node

from ..device.region_costs import SHORT_COLUMN, SPLIT_ELEMENTS, SPLIT_ROWS
from .aten_reductions import FEW
from .translation import argument, hinted, tensor_of


@dataclass(frozen=True)
class ReductionKernel:
    """One kernel of Inductor's: everything that is reduced over ``reduced`` elements of each of ``kept``.

    ``side_by_side``: reduced elements in a row of memory; 0 where they are columns.  ``columns``: kept ones, or 0.
    """

    kept: int
    reduced: int
    side_by_side: int
    columns: int

    @property
    def is_inner(self) -> bool:
        return self.side_by_side > 0

    @property
    def is_scattered(self) -> bool:
        return 0 < self.side_by_side < min(self.reduced, FEW)

    @property
    def is_short_middle(self) -> bool:
        """Is a short middle axis reduced, such as the pixels of small images in channels-last?"""
        return self.reduced <= SHORT_COLUMN and 0 < self.columns < self.kept

    @property
    def is_split(self) -> bool:
        """Are the parts of a row reduced by several programs, and added up by another kernel?"""
        return self.is_inner and self.kept < SPLIT_ROWS and self.reduced > SPLIT_ELEMENTS


def kernel_of(node: Node) -> ReductionKernel:
    source = source_of(node)
    sizes = [hinted(n) for n in source.shape]
    axes = axes_of(node, len(sizes))
    reduced = math.prod(sizes[d] for d in axes)
    kept = math.prod(sizes) // max(reduced, 1)
    moving = [d for d in range(len(sizes)) if sizes[d] != 1]
    inward = sorted(moving, key=lambda d: (hinted(source.stride(d)), -d))  # in memory, the innermost first
    if not inward:
        return ReductionKernel(kept, reduced, side_by_side=reduced, columns=0)
    is_inner = inward[0] in axes
    run = math.prod(sizes[d] for d in takewhile(lambda d: (d in axes) == is_inner, inward))
    return ReductionKernel(kept, reduced, *((run, 0) if is_inner else (0, run)))


def source_of(reduction: Node) -> torch.Tensor:
    return tensor_of(cast(Node, reduction.args[0]))


def axes_of(node: Node, ndim: int) -> list[int]:
    if node.target is torch.ops.aten.native_layer_norm.default:
        return list(range(ndim - len(cast(Sequence[int], node.args[1])), ndim))
    given = argument(node, 1, "dim")
    axes = [given] if isinstance(given, int) else list(cast("Sequence[int] | None", given) or range(ndim))
    return [d % ndim for d in axes]
