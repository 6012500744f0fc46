"""The kernels of one AdamW step, bound to a list of parameters: two, with the norm three, and one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..mesh.groups import Team
from .columns import Columns, addresses_of
from .gradient_norm import NormKernels, Parts, added_up, check_finite, norm_type_of, order_of, root_of
from .kernel_text import KINDS, UPDATE_SHAPE, Use
from .tensor_lists import COLUMNS, Launch, Launcher, Table, Walk, as_numbers, column, make_walk


@dataclass(frozen=True)
class Clipping:
    """max_norm: infinite where only the norm is wanted.  raises: is a norm that is not finite an error?"""

    max_norm: float
    exponent: float
    raises: bool


@dataclass(frozen=True)
class Listed:
    """What stays the same of a list of parameters.  mine: which of the gradients this rank counts, over ``team``.

    sizes: elements on this rank; groups: the place of each one's param group.
    """

    device: torch.device
    sizes: Sequence[int]
    dtypes: Sequence[torch.dtype]
    groups: Sequence[int]
    mine: Sequence[bool]
    team: Team | None
    has_amsgrad: bool
    has_masters: bool


EMPTY = 16
"""The address passed to kernels for a gradient without elements: not 0, which says that there is no gradient."""


class UpdateKernels:
    """``exponent``: of the norm that is taken on the way, or None."""

    def __init__(self, listed: Listed, exponent: float | None, call: str) -> None:
        self.listed, self.exponent, self.call = listed, exponent, call
        self.launcher = Launcher(listed.device)
        self.table = Table(listed.device)
        self.count = len(listed.sizes)
        self.factors = torch.zeros(max(self.count, 1) * COLUMNS, dtype=torch.float64, device=listed.device)
        self.norm_dtype = norm_type_of(listed.dtypes)
        self._gradient_types: list[torch.dtype] | None = None
        self._types = list(listed.dtypes)
        """Of the gradients, as they were last."""
        self._empty = [k for k, size in enumerate(listed.sizes) if size == 0]
        self._addresses: list[list[int]] = [[] for _ in range(COLUMNS)]
        self._rows = torch.zeros((self.count, COLUMNS), dtype=torch.int64, device="cpu")

    def run(self, columns: Columns, groups: Sequence[dict[str, Any]], clipping: Clipping | None) -> torch.Tensor | None:
        """Launch a step; returns the norm where there is one.  groups: the optimiser's param groups."""
        gradient_types = columns.gradient_types(self._types)
        if gradient_types != self._gradient_types:
            self._bind(gradient_types)
        table = self.table.put(self._numbers(columns, groups, clipping), self.launcher.begin())
        first = (1 + len(groups)) * COLUMNS
        head, addresses = table[:first].view(torch.float64), table[first:]
        total = self._prepared(addresses, head, clipping)
        norm: torch.Tensor | None = None
        for walk, launch, dtype in reversed(self.walks):
            norm = torch.empty((), dtype=dtype, device=self.listed.device)
            launch(addresses, walk.facts, walk.chunks, self.factors, head, total, norm)
        if clipping is None:
            return None
        return root_of(total, clipping.exponent, self.norm_dtype) if norm is None else norm.to(self.norm_dtype)

    def _prepared(self, addresses: torch.Tensor, head: torch.Tensor, clipping: Clipping | None) -> torch.Tensor:
        """Count the steps, and make the factors of the update; returns the sum that the norm is the root of."""
        if self.norm is None or clipping is None:
            self.prepare(addresses, self.facts, head, self.factors)
            return self.factors  # not read where there is no norm
        own = torch.empty(1, dtype=torch.float64, device=self.listed.device)
        self.norm.partial_norms(addresses, head)
        if not clipping.raises:
            self.finish_and_prepare(self.norm.partials, own, addresses, self.facts, head, self.factors)
            return added_up(own, clipping.exponent, self.listed.team, clipping.max_norm)
        # One kernel more: a step that is refused has not been counted.
        self.norm.finish(own)
        total = added_up(own, clipping.exponent, self.listed.team, clipping.max_norm)
        check_finite(total, clipping.exponent, self.call)
        self.prepare(addresses, self.facts, head, self.factors)
        return total

    def _bind(self, gradient_types: list[torch.dtype]) -> None:
        listed, launcher = self.listed, self.launcher
        kinds = [KINDS[p] | KINDS[g] << 4 for p, g in zip(listed.dtypes, gradient_types, strict=True)]
        order = 2 if self.exponent is None else order_of(self.exponent)
        parts = Parts(kinds)
        self.walks: list[tuple[Walk, Launch, torch.dtype]] = []
        for k, taken in enumerate(parts.taken):
            walk = make_walk(listed.sizes, kinds, listed.groups, taken, UPDATE_SHAPE.chunk, listed.device)
            self.facts = walk.facts
            if walk.programs:
                use = replace(
                    parts.use(k, order, clips=self.exponent is not None, interpreted=launcher.is_interpreted),
                    amsgrad=listed.has_amsgrad,
                    master=listed.has_masters,
                )
                self.walks.append((walk, launcher.bind("adamw", use, UPDATE_SHAPE, walk.programs), parts.dtype(k)))
        use, self.norm = Use(order=order, interpreted=launcher.is_interpreted), None
        self.prepare = launcher.bind("prepare_steps", use, UPDATE_SHAPE, 1, (self.count,))
        if self.exponent is not None:
            self.norm = NormKernels(launcher, listed.sizes, kinds, listed.mine, self.exponent)
            counts = self.norm.partial_count, self.count
            self.finish_and_prepare = launcher.bind("finish_norm_and_prepare", use, UPDATE_SHAPE, 1, counts)
        self._gradient_types = self._types = gradient_types

    def _numbers(self, columns: Columns, groups: Sequence[dict[str, Any]], clipping: Clipping | None) -> torch.Tensor:
        """The table of a step: a row for the norm, one for each group, one of addresses for each parameter."""
        for place, tensors in enumerate(columns.in_order_of_rows()):
            if not tensors:
                continue
            addresses = addresses_of(tensors)
            if place == 1:
                for k in self._empty:  # whose address may be 0, as if there were no gradient
                    addresses[k] = 0 if tensors[k] is None else EMPTY
            if addresses != self._addresses[place]:
                self._rows[:, place] = column(addresses)
                self._addresses[place] = addresses
        return torch.cat((self._head(groups, clipping), self._rows.view(-1)))

    def _head(self, groups: Sequence[dict[str, Any]], clipping: Clipping | None) -> torch.Tensor:
        norm = (math.inf, 2.0) if clipping is None else (clipping.max_norm, clipping.exponent)
        values, integers = [*norm, *[0.0] * (COLUMNS - 2)], dict[int, int]()
        for k, group in enumerate(groups, 1):
            lr = group["lr"]
            if isinstance(lr, torch.Tensor) and lr.is_cuda and lr.device == self.listed.device:
                integers[k * COLUMNS + 1] = lr.data_ptr()
                integers[k * COLUMNS + 7] = int(lr.dtype == torch.float64)
                lr = 0.0
            sign = -1.0 if group["maximize"] else 1.0
            beta1, beta2 = map(float, group["betas"])
            values += [float(lr), 0.0, beta1, beta2, group["eps"], group["weight_decay"], sign, 0.0]
        return as_numbers(values, integers)
