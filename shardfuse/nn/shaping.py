"""Views between the tensors of a call and those of its fusions, which autograd records no nodes of.

A module's fusions may take other dims than its callers have: a gated unit has gate and up as a dim before the last, a
rotary embedding has heads behind the sequence where attention has them before.  A view takes autograd a node each way,
of which the host pays as much as of a kernel.  Within the module's own node it is a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

View = Callable[[torch.Tensor], torch.Tensor]
Placed = tuple[int, View]


@dataclass(frozen=True)
class Reshaped:
    """Of one tensor.  enter: of a call -> as the fusions have it.  leave: as these have it -> of a call.

    None: as it is.
    """

    enter: View | None = None
    leave: View | None = None


@dataclass(frozen=True, eq=False)  # part of the key of each call: as quick to hash as its address
class Shaping:
    """tensors, results: the first ones of a call, which are views of those of its fusions, as their gradients are.

    parts: the results of a call from the first one of the forward fusion, in place of their ``leave``: views of no
    other tensor, as of ``leave_alone``; the backward fusion takes a gradient of each.
    is_deferred: are the gradients of parameters this rank's summands, as of ``FusedOp.deferred``?
    """

    tensors: tuple[Reshaped, ...]
    results: tuple[Reshaped, ...]
    parts: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None
    is_deferred: bool = False
    _views: tuple[list[Placed], ...] = field(init=False)
    """What enters and leaves of a call, and of its gradients: views alone, each with its place."""

    def __post_init__(self) -> None:
        ways = (self.tensors, "enter"), (self.results, "leave"), (self.results, "enter"), (self.tensors, "leave")
        found = tuple(
            [(k, view) for k, r in enumerate(of) if (view := r.enter if way == "enter" else r.leave) is not None]
            for of, way in ways
        )
        object.__setattr__(self, "_views", found)

    def enter(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors of the forward fusion."""
        views = self._views[0]
        return viewed(views, given) if views else given

    def leave(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results of a call."""
        return viewed(self._views[1], results) if self.parts is None else self.parts(results[0])

    def leave_alone(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The same, as views of no other tensor, so that autograd lets a caller write over them.

        They count versions of their own: none of those that are reshaped may be saved for the backward.
        """
        if self.parts is not None:
            return self.parts(results[0])
        left = list(results)
        for k, view in self._views[1]:
            left[k] = view(left[k]).data
        return left

    def views(self, saved: Sequence[int], gradients: int) -> Views:
        """What its methods view, of a call that saves these of (tensors..., results..., extras...).

        gradients: how many the backward fusion takes, ahead of those.
        """
        enter, leave, enter_gradients, leave_gradients = self._views
        of_saved = [(gradients + saved.index(k), view) for k, view in enter if k in saved]
        return Views(enter, self.parts is not None or bool(leave), [*enter_gradients, *of_saved], leave_gradients)


class Views(NamedTuple):
    """Found when a call is bound: the views of its tensors, are there any of its results, those of the gradients and of
    what was saved that the backward fusion takes, and of the gradients that it makes."""

    enter: Sequence[Placed] = ()
    has_results: bool = False
    backward: Sequence[Placed] = ()
    found: Sequence[Placed] = ()


def viewed(views: Sequence[Placed], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    found = list(tensors)
    for k, view in views:
        found[k] = view(found[k])
    return found


_SAME = Reshaped()
_VECTOR = Reshaped(leave=lambda x: x.view(-1))


@lru_cache(maxsize=16)
def deferring(parameters: int) -> Shaping:
    """Of (x, parameters..., others...) and gradients that are this rank's summands, with an axis for each mesh dim."""
    return Shaping((_SAME, *(_VECTOR,) * parameters), (), is_deferred=True)


def contiguous_view(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """``x`` with other dims, in its storage where that has no gaps."""
    return (x if x.is_contiguous() else x.contiguous()).view(shape)


def laid_out(
    run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    first: torch.Tensor,
    *others: torch.Tensor,
    keeps_last: bool = False,
) -> torch.Tensor:
    """The first result of ``run((first, *others))``, pointwise and contiguous, laid out as by torch's pointwise ops.

    They follow the strides of the first tensor, without its gaps: a transposed tensor or an image in channels-last is
    read as it is stored, and stays so.  ``first`` is not contiguous: that is asked before, since it is quick to ask.
    keeps_last: does ``run`` ask for the size of the last dim, which then is to be the last one still?  Shapes that
    differ are ``run``'s to refuse, as the caller has them.
    """
    if torch.compiler.is_compiling():
        return run((first, *others))[0]
    strides = torch.empty_like(first, device="meta").stride()
    order = sorted(range(first.ndim), key=lambda d: -strides[d])
    is_moved = keeps_last and order[-1:] != [first.ndim - 1]
    if is_moved or order == list(range(first.ndim)) or any(t.shape != first.shape for t in others):
        return run((first, *others))[0]
    back = [order.index(d) for d in range(first.ndim)]
    return run([t.permute(order) for t in (first, *others)])[0].permute(back)
