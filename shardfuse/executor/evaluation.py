"""A segment that torch runs on a rank's local tensors, op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from ..allocation.layouts import strides_of
from ..base_error import ShardfuseError
from ..ir.caller_lines import RAISED_BY
from ..ir.scalar import Number
from ..ops.evaluate import evaluate_all
from ..segments.segment import Segment
from .storage import stored


def evaluation_of(segment: Segment, rank: int, device: torch.device) -> Callable[..., object]:
    """A function from the segment's tensors and numbers to its results, in new storage of the agreed layout."""
    scalars = [s for s in segment.scalars if s.value is None]
    layouts = [(t, t.domain.local_shape(rank), strides_of(t.domain, rank)) for t in segment.outputs]
    count = len(segment.inputs)

    def run(*arguments: torch.Tensor | Number) -> object:
        tensors = cast(tuple[torch.Tensor, ...], arguments[:count])
        env = dict(zip(segment.inputs, tensors, strict=True))
        numbers = dict(zip(scalars, cast(tuple[Number, ...], arguments[count:]), strict=True))
        for e in segment.exprs:
            try:
                env.update(zip(e.outputs, evaluate_all(e, env, numbers, rank, device), strict=True))
            except Exception as error:
                if not isinstance(error, ShardfuseError):  # torch's, which knows of no op of the caller's
                    error.add_note(f"{RAISED_BY}{e.op.name} of {e.output}")
                raise
        return one_or_all([stored(env[t], shape, strides, tensors) for t, shape, strides in layouts])

    return run


def one_or_all(results: Sequence[torch.Tensor | None]) -> object:
    """The only result, or all of them."""
    return results[0] if len(results) == 1 else tuple(results)
