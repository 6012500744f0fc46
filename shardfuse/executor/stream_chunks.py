"""Chunks of a stream that are made where they belong: each in its part of the tensor that they are put together to.

A product whose partial sums an all-reduce makes such a chunk of is written there too, and reduced where it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ..analysis.communication_table import Collective, communication_of
from ..ir.call import Call
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce, StreamCat
from ..ops.evaluate import chunked
from ..ops.torch_calls import TORCH_CALLS
from ..segments.segment import Segment
from .steps import Address, Cut, LaunchKernel, Step


@dataclass(frozen=True)
class Place:
    """``whole`` is ``chunks`` one behind the other along dim ``at``, ``size`` of each.

    partial: where a chunk is reduced in place, its partial sums, with axes of 1 before its own.
    """

    whole: BoundTensor
    chunks: tuple[BoundTensor, ...]
    at: int
    size: int
    partial: Mapping[BoundTensor, BoundTensor]

    @property
    def parts(self) -> tuple[BoundTensor, ...]:
        """All that is a view of ``whole``."""
        return (*self.chunks, *self.partial)

    def cut(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts."""
        views = dict(zip(self.chunks, torch.split(whole, self.size, self.at), strict=True))
        return (*views.values(), *(views[t][(None,) * (p.ndim - t.ndim)] for p, t in self.partial.items()))


def places_of(segments: Sequence[tuple[Segment, str]], rank: int) -> dict[BoundTensor, Place]:
    """For each chunk that can be made in its place, and for what they are put together to, the place.

    segments: with their schedulers, in order.  Not those that are views of something else, and not chunks whose parts
    lie apart.
    """
    made = {t: name for segment, name in segments for t in segment.outputs}
    maker = {t: segment for segment, _ in segments for t in segment.outputs}
    times_read = Counter(t for segment, _ in segments for t in segment.inputs)
    found: dict[BoundTensor, Place] = {}
    for segment, _ in segments:
        expr = segment.exprs[0]
        if not isinstance(expr.op, StreamCat) or any(
            made.get(t, "no_op") == "no_op" or t in found for t in expr.tensors
        ):
            continue
        stream = expr.op.stream
        at, (above, _, below) = chunked(expr.output.domain, stream.digits, rank)
        if above == 1:
            summands = {_summand(maker[t], maker): t for t in expr.tensors}
            partial = {p: t for p, t in summands.items() if p is not None and times_read[p] == 1}
            place = Place(expr.output, stream.by_chunk(expr.tensors, rank), at, below, partial)
            found.update(dict.fromkeys((expr.output, *place.parts), place))
    return found


def _summand(segment: Segment, maker: Mapping[BoundTensor, Segment]) -> BoundTensor | None:
    """The product that ``segment`` reduces over a mesh, where it can be written to the place of the sum."""
    expr = segment.exprs[0]
    communication = communication_of(expr)
    if len(segment.exprs) > 1 or communication is None or communication.kind is not Collective.ALL_REDUCE:
        return None
    assert isinstance(expr.op, Reduce), "an all-reduce is a reduction"
    (source,), axes = expr.tensors, expr.op.axes
    by = maker.get(source)
    is_product = by is not None and len(by.exprs) == 1 and _product(by.exprs[0]) is not None
    return source if is_product and axes == tuple(range(len(axes))) and source.dtype is expr.output.dtype else None


def address_chunks(steps: Sequence[Step], outputs: Sequence[str]) -> list[Step]:
    """``steps`` with addresses for chunks that only kernels read, in place of views.

    T6, T7 = chunks_T5(T5)

    T5_at = T5.data_ptr()
    T6 = T5_at + 0
    T7 = T5_at + 128

    outputs: what the program returns, which lives on.
    """
    out = list[Step]()
    for k, step in enumerate(steps):
        if not isinstance(step, Cut) or not _are_addressed(step, steps[k + 1 :], outputs):
            out.append(step)
            continue
        begin = f"{step.whole}_at"
        out.append(Address(begin, step.whole))
        out += [Address(part, begin, offset) for part, offset in zip(step.parts, step.offsets, strict=True)]
    return out


def _are_addressed(cut: Cut, later: Sequence[Step], outputs: Sequence[str]) -> bool:
    """Do kernels alone read the chunks, and does the whole live as long as they do?"""
    used = [k for k, step in enumerate(later) if any(map(step.mentions, cut.parts))]
    is_kept = cut.whole in outputs or any(step.mentions(cut.whole) for step in later[max(used, default=-1) + 1 :])
    return is_kept and all(isinstance(later[k], LaunchKernel) for k in used)


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
        made = [_put(x, next(targets)) if placed else x for x, placed in zip(several, is_placed, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    return run


def _put(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target if x.data_ptr() == target.data_ptr() else target.copy_(x)


def _product(expr: Expr) -> Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor] | None:
    """A torch call that writes its result to a given tensor."""
    op, names = expr.op, expr.tensors
    if not isinstance(op, Call) or len(names) != len(expr.inputs):
        return None
    evaluate = TORCH_CALLS[op.name].evaluate_into
    if evaluate is None:
        return None
    inputs = list(dict.fromkeys(names))
    of_this_rank = (0,) * expr.partial

    def run(arguments: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        env = dict(zip(inputs, arguments, strict=True))
        evaluate([env[t] for t in names], op, out[of_this_rank])
        return out

    return run
