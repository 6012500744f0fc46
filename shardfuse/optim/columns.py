"""The tensors of one step of an optimiser, by what they are."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .counted_pieces import local_of
from .dense import ADDRESS, DTYPE, IS_CONTIGUOUS, in_order, is_whole, repeats
from .torch_update import Row

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
        weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], states: Sequence[dict[str, Any]],
        *, amsgrads: Sequence[bool], has_masters: bool,
    ) -> Columns:  # fmt: skip
        """states: ``NO_STATE`` of a parameter that never had a gradient.

        amsgrads: of each, does its group ask for it now?  Empty where none does.  What a state has from a time when its
        group did is left alone.
        """
        return Columns(
            list(weights),
            list(gradients),
            list(map(_FIRST, states)),
            list(map(_SECOND, states)),
            [s.get("max_exp_avg_sq") if is_on else None for s, is_on in zip(states, amsgrads, strict=True)]
            if amsgrads
            else [],
            [s.get("master") for s in states] if has_masters else [],
            list(map(_STEP, states)),
        )

    def localise(self) -> None:
        """Of each DTensor this rank's part; gradients are by now."""
        for tensors in (self.weights, self.firsts, self.seconds, self.largest, self.masters):
            tensors[:] = [None if t is None else local_of(t) for t in tensors]

    def gradient_types(self, otherwise: Sequence[torch.dtype]) -> list[torch.dtype]:
        """otherwise: of parameters that have none."""
        if is_whole(self.gradients):
            return list(map(DTYPE, self.gradients))
        return [dtype if g is None else g.dtype for g, dtype in zip(self.gradients, otherwise, strict=True)]

    def in_order_of_rows(self) -> tuple[Tensors, ...]:
        """As a row of addresses has them."""
        return (
            self.weights, self.gradients, self.firsts, self.seconds, self.largest, self.masters, self.steps
        )  # fmt: skip

    def rows(self) -> list[Row]:
        """Of the parameters that have a gradient."""
        none = [None] * len(self.weights)
        columns = (self.weights, self.gradients, self.firsts, self.seconds, self.largest or none, self.masters or none)
        return [Row(*row) for row in zip(*columns, strict=True) if row[_GRADIENTS] is not None]


class Order:
    """Brings the tensors of each step into the types and the order in memory that the kernels go by."""

    def __init__(
        self, device: torch.device, dtypes: Sequence[torch.dtype], wide: Sequence[torch.dtype],
        shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]], *, is_contiguous: bool,
    ) -> None:  # fmt: skip
        """is_contiguous: are all parameters?  wide: types of the states."""
        self.device, self.shapes = device, shapes
        self.misfit: tuple[int, str, list[int]] | None = None
        """A state that is not of its parameter's shape: the place of that, what it is, and its shape."""
        self.repeated: tuple[int, str | None] | None = None
        """A parameter, or what of its states, that would be written and has several elements in one place."""
        self.dtypes, self.wide, self.strides, self.is_contiguous = list(dtypes), list(wide), strides, is_contiguous
        self._right: list[tuple[Tensors, list[int]]] = [([], []) for _ in range(6)]
        """Columns that were found right, and where they were: they are as long as both stay."""

    def apply(self, columns: Columns) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Put copies in the place of what is not right; returns those that are to be written back, with their copy.

        Nothing is to be done with them where one is ``repeated``, or there is a ``misfit``.
        """
        self.misfit, self.repeated = None, None
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, tensors in enumerate(columns.in_order_of_rows()[:6]):
            if tensors and not self._is_right(place, tensors):
                if place > _GRADIENTS:
                    self._look_at_shapes(place, tensors)
                    if self.misfit is not None:
                        return []
                staged += self._copied(place, tensors)
        return staged

    def _is_right(self, place: int, tensors: Tensors) -> bool:
        if not self.is_contiguous:
            return False
        known, addresses = self._right[place]
        here = addresses_of(tensors)
        if here == addresses and all(map(operator.is_, tensors, known)):
            return True
        if is_whole(tensors):
            found, listed = list(map(DTYPE, tensors)), tensors
            has_types = found == (self.wide if place > 1 else self.dtypes) or found == self._types(place, tensors)
        else:
            listed = [t for t in tensors if t is not None]
            types = zip(tensors, self._types(place, tensors), strict=True)
            has_types = all(t is None or t.dtype == dtype for t, dtype in types)
        is_right = has_types and all(map(IS_CONTIGUOUS, listed))
        if place > _GRADIENTS:  # of which torch itself sees to it that they are where their parameters are
            is_right = is_right and all(t.device == self.device or t.numel() == 0 for t in listed)
            is_right = is_right and all(
                t is None or t.shape == shape for t, shape in zip(tensors, self.shapes, strict=True)
            )
        self._right[place] = (tensors, here) if is_right else ([], [])
        return is_right

    def _look_at_shapes(self, place: int, tensors: Tensors) -> None:
        for k, (tensor, shape) in enumerate(zip(tensors, self.shapes, strict=True)):
            if tensor is not None and tensor.shape != shape:
                self.misfit = k, _KEYS[place - 2], list(tensor.shape)

    def _types(self, place: int, tensors: Tensors) -> list[torch.dtype]:
        """Of gradients their own, which may be wider than the parameters'; but float64 has kernels of its own."""
        if place != _GRADIENTS:
            return self.dtypes if place == 0 else self.wide
        wide, pairs = torch.float64, zip(tensors, self.dtypes, strict=True)
        return [p if g is None or (g.dtype == wide) != (p == wide) else g.dtype for g, p in pairs]

    def _copied(self, place: int, tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        types = self._types(place, tensors)
        for k, (tensor, dtype, strides) in enumerate(zip(tensors, types, self.strides, strict=True)):
            if tensor is not None:
                tensors[k] = in_order(tensor, strides, dtype, self.device)
                if place != _GRADIENTS and tensors[k] is not tensor:
                    if repeats(tensor):
                        self.repeated = k, _KEYS[place - 2] if place > _GRADIENTS else None
                    found.append((tensor, cast(torch.Tensor, tensors[k])))
        return found


def addresses_of(tensors: Tensors) -> list[int]:
    """0 where there is no tensor."""
    try:
        return list(map(ADDRESS, tensors))
    except TypeError:  # of None
        return [0 if t is None else t.data_ptr() for t in tensors]


NO_STATE: dict[str, Any] = {"exp_avg": None, "exp_avg_sq": None, "step": None}
_GRADIENTS = 1
"""The place of gradients among the columns of addresses; see ``kernels.py``."""
_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
_FIRST, _SECOND, _STEP = (operator.itemgetter(key) for key in ("exp_avg", "exp_avg_sq", "step"))
