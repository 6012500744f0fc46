"""The tensors of one step of an optimiser, by what they are."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .dense import ADDRESS, DTYPE, IS_CONTIGUOUS, in_order
from .eager import Row
from .kernel_text import KINDS
from .pieces import local_of

Tensors = list[Any]
"""A tensor for each parameter, or None."""


@dataclass
class Columns:
    """``largest`` and ``masters`` are empty where no parameter has one."""

    weights: Tensors
    gradients: Tensors
    firsts: Tensors
    seconds: Tensors
    largest: Tensors
    masters: Tensors
    steps: Tensors

    @staticmethod
    def of(
        weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], states: Sequence[dict[str, Any]],
        *, amsgrad: Sequence[bool], masters: Sequence[bool],
    ) -> Columns:  # fmt: skip
        """amsgrad, masters: of each parameter, or nothing where none has one."""
        return Columns(
            list(weights),
            list(gradients),
            list(map(_FIRST, states)),
            list(map(_SECOND, states)),
            [s["max_exp_avg_sq"] if has else None for s, has in zip(states, amsgrad, strict=bool(amsgrad))],
            [s["master"] if has else None for s, has in zip(states, masters, strict=bool(masters))],
            list(map(_STEP, states)),
        )

    def localise(self) -> None:
        """Of each DTensor this rank's part; gradients are by now."""
        for tensors in (self.weights, self.firsts, self.seconds, self.largest, self.masters):
            tensors[:] = [None if t is None else local_of(t) for t in tensors]

    def in_order_of_rows(self) -> tuple[Tensors, ...]:
        """As a row of addresses has them."""
        return (
            self.weights, self.gradients, self.firsts, self.seconds, self.largest, self.masters, self.steps
        )  # fmt: skip

    def rows(self) -> list[Row]:
        none = [None] * len(self.weights)
        columns = (self.weights, self.gradients, self.firsts, self.seconds, self.largest or none, self.masters or none)
        return [Row(*row) for row in zip(*columns, strict=True)]


class Order:
    """Brings the tensors of each step into the types and the order in memory that the kernels go by."""

    def __init__(
        self, dtypes: Sequence[torch.dtype], wide: Sequence[torch.dtype], strides: Sequence[tuple[int, ...]],
        *, is_contiguous: bool,
    ) -> None:  # fmt: skip
        """is_contiguous: are all parameters?  wide: types of the states."""
        self.dtypes, self.wide, self.strides, self.is_contiguous = list(dtypes), list(wide), strides, is_contiguous
        self._right: list[tuple[Tensors, list[int]]] = [([], []) for _ in range(6)]
        """Columns that were found right, and where they were: they are as long as both stay."""

    def apply(self, columns: Columns) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Put copies in the place of what is not right; returns those that are to be written back, with their copy."""
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, tensors in enumerate(columns.in_order_of_rows()[:6]):
            if tensors and not self._is_right(place, tensors):
                staged += self._copied(place, tensors)
        return staged

    def _is_right(self, place: int, tensors: Tensors) -> bool:
        if place in MAY_LACK or not self.is_contiguous:
            return False
        known, addresses = self._right[place]
        here = list(map(ADDRESS, tensors))
        if here == addresses and all(map(operator.is_, tensors, known)):
            return True
        dtypes = list(map(DTYPE, tensors))
        has_types = dtypes == self._types(place) or (place == _GRADIENTS and dtypes == self._gradient_types(tensors))
        is_right = has_types and all(map(IS_CONTIGUOUS, tensors))
        self._right[place] = (tensors, here) if is_right else ([], [])
        return is_right

    def _types(self, place: int) -> list[torch.dtype]:
        return self.dtypes if place < 2 else self.wide

    def _gradient_types(self, gradients: Tensors) -> list[torch.dtype]:
        """Their own, which may be wider than the parameters'; but float64 ones have kernels of their own."""
        wide, pairs = torch.float64, zip(map(DTYPE, gradients), self.dtypes, strict=True)
        return [g if g in KINDS and (g == wide) == (p == wide) else p for g, p in pairs]

    def _copied(self, place: int, tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        types = self._gradient_types(tensors) if place == _GRADIENTS else self._types(place)
        for k, (tensor, dtype, strides) in enumerate(zip(tensors, types, self.strides, strict=True)):
            if tensor is not None:
                tensors[k] = in_order(tensor, strides, dtype)
                if place != _GRADIENTS and tensors[k] is not tensor:
                    found.append((tensor, cast(torch.Tensor, tensors[k])))
        return found


_GRADIENTS = 1
MAY_LACK = (4, 5)
"""The columns of which a parameter may have no tensor."""
_FIRST, _SECOND, _STEP = (operator.itemgetter(key) for key in ("exp_avg", "exp_avg_sq", "step"))
