"""A module's backward beside the matmul that makes a weight's gradient, on a stream of its own.

A linear layer's backward makes the gradient of its input first, and that of its weight, for which nobody waits, after
it.  On one stream the backward of the norm before, with its collectives, would begin when both are there.  So the
gradient of the input carries an event, recorded as soon as it was made, and the norm's backward runs on another stream
that waits for this event alone; the first stream goes on with the weight's gradient, and waits for the norm's backward
before anything reads that.

This is right where everything that the backward reads was made before the event: tensors that forward saved, unless
hooks make them again (checkpointing, offloading to the CPU), and gradients that say so themselves.  Marks on tensors
say it; a gradient without one, or one changed since, was made by somebody else, and the backward runs on the stream on
which autograd calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

_core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_numbers = count()
_NAME = "_shardfuse_made"

LONG_MATMUL = 1 << 36
"""Multiply-adds of a weight's gradient from which another stream pays: 170 us on an H200, at the 790 TFLOP/s that
matmuls in bfloat16 reach there.  Changing streams took a host 140 us there (steps of examples/lm_model.py on two GPUs,
dim 2048, 12 matmuls of 30 us: 21.8 ms without and 23.5 with it; dim 4096, 8 of 260 to 460 us: 35.3 and 34.9)."""


@dataclass(frozen=True, slots=True)
class _Made:
    """When a tensor was made.

    number: all work of a tensor of a smaller number, on this stream, comes before ``event``.
    stream: as the driver knows it.  version: of the tensor, by which later changes are seen.
    event: after which it is ready; None where that is not known.
    """

    number: int
    stream: int
    version: int
    event: torch.cuda.Event | None


def _stream(tensor: Tensor) -> int:
    return _core._cuda_getCurrentRawStream(tensor.device.index)


def mark_made(tensors: Sequence[Tensor | None]) -> None:
    """Say that ``tensors`` are made by what was given to their GPU's current stream so far."""
    number = next(_numbers)
    for t in tensors:
        if t is not None and t.is_cuda:
            vars(t)[_NAME] = _Made(number, _stream(t), t._version, None)


def mark_ready(tensor: Tensor) -> None:
    """The same of one tensor, with an event after which it is ready."""
    number = next(_numbers)  # before the event: what has a smaller number was given to the stream before
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    vars(tensor)[_NAME] = _Made(number, _stream(tensor), tensor._version, event)


def has_saving_hooks() -> bool:
    """Is what autograd saves now given to hooks, which may make it anew in the backward?"""
    return _core._autograd._top_saved_tensors_default_hooks(False) is not None


def overlapped(run: Callable[[], list[Tensor]], gradients: Sequence[Tensor], may_overlap: bool) -> list[Tensor]:
    """``run``'s tensors, made of ``gradients`` and of what forward saved, beside a matmul where that is right.

    may_overlap: is there a collective to hide, and was what forward saved there before the backward began?
    """
    if not gradients[0].is_cuda:
        return run()
    event = ready_event(gradients) if may_overlap else None
    made = run() if event is None else beside(event, gradients[0].device, run)
    mark_made(made)
    return made


def ready_event(gradients: Sequence[Tensor]) -> torch.cuda.Event | None:
    """The event after which all of ``gradients`` are ready and which is not the end of the current stream, if any."""
    marks = [cast("_Made | None", vars(g).get(_NAME)) for g in gradients]
    newest: _Made | None = None
    for g, mark in zip(gradients, marks, strict=True):
        if mark is None or mark.version != g._version or mark.stream != _stream(g):
            return None
        if newest is None or mark.number > newest.number:
            newest = mark
    return None if newest is None else newest.event


@lru_cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # its blocks go first where a matmul has taken all multiprocessors


def beside(event: torch.cuda.Event, device: torch.device, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """``run``'s tensors, made on another stream that waits for ``event``; the current stream waits for them."""
    here = torch.cuda.current_stream(device)
    there = _side_stream(here.device_index)
    there.wait_event(event)
    with torch.cuda.stream(there):
        made = run()
    here.wait_stream(there)
    for t in made:
        t.record_stream(here)  # allocated for the other stream, which may have its memory back after this one's reads
    return made
