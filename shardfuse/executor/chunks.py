"""Chunks of a stream that are made where they belong: each in its part of the tensor that they are put together to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ..ir.digits import Axis
from ..ir.expr import BoundTensor, Expr
from ..ops.evaluate import chunked
from ..ops.torch_calls import TORCH_CALLS
from ..schedulers.segment import Segment


@dataclass(frozen=True)
class Place:
    """``whole`` is ``chunks`` one behind the other along dim ``at``, ``size`` of each."""

    whole: BoundTensor
    chunks: tuple[BoundTensor, ...]
    at: int
    size: int

    def cut(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The chunks as views."""
        return torch.split(whole, self.size, self.at)


def places_of(segments: Sequence[tuple[Segment, str]], rank: int) -> dict[BoundTensor, Place]:
    """For each chunk that can be made in its place, and for what they are put together to, the place.

    segments: with their schedulers, in order.  Not those that are views of something else, and not chunks whose parts
    lie apart.
    """
    made = {t: name for segment, name in segments for t in segment.outputs}
    found: dict[BoundTensor, Place] = {}
    for segment, _ in segments:
        expr = segment.exprs[0]
        if expr.op != "stream_cat" or any(made.get(t, "no_op") == "no_op" or t in found for t in expr.tensors):
            continue
        at, (above, _, below) = chunked(expr.output.domain, cast(Axis, expr.attributes["digits"]), rank)
        if above == 1:
            place = Place(expr.output, expr.tensors, at, below)
            found.update(dict.fromkeys((expr.output, *expr.tensors), place))
    return found


def in_place(
    function: Callable[..., object], segment: Segment, places: Mapping[BoundTensor, Place]
) -> Callable[..., object]:
    """``function`` with an argument more for each output of ``segment`` that has a place: that, to be written into."""
    is_placed = [t in places for t in segment.outputs]
    count = sum(is_placed)
    product = _product(segment.exprs[0]) if len(segment.exprs) == 1 else None

    @torch.no_grad()
    def run(*arguments: torch.Tensor) -> object:
        targets = iter(arguments[-count:])
        if product is not None:
            return product(arguments[:-1], arguments[-1])
        results = function(*arguments[:-count])
        several = cast(tuple[torch.Tensor, ...], results if isinstance(results, tuple) else (results,))
        made = [next(targets).copy_(x) if placed else x for x, placed in zip(several, is_placed, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    return run


def _product(expr: Expr) -> Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor] | None:
    """A torch call that writes its result where it is told."""
    call = TORCH_CALLS.get(expr.op)
    if call is None or call.evaluate_into is None or len(expr.tensors) != len(expr.inputs):
        return None
    evaluate, names = call.evaluate_into, expr.tensors
    inputs = list(dict.fromkeys(names))

    def run(arguments: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        env = dict(zip(inputs, arguments, strict=True))
        return evaluate([env[t] for t in names], expr.attributes, out)

    return run
