"""The stream on which collectives run beside kernels, and what holds the two together.

``start`` runs a collective on the communication stream once all that the current stream was given so far is done, and
returns at once; ``wait`` has the current stream wait for it.  Collectives that started earlier have then ended too, as
they run in the order in which they start.  Both are events on streams, and can be captured into a graph.  On a CPU a
collective runs where it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

Collective = Callable[..., object]
Start = Callable[..., tuple[object, ...]]
Wait = Callable[..., None]


@cache
def communication_stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    """One for each stream of kernels, of which ``beside`` is the handle; its work goes before theirs."""
    return torch.cuda.Stream(device, priority=-1)


def start_and_wait(device: torch.device) -> tuple[Start, Wait]:
    """``start(collective, *arguments)`` gives the results and what ``wait`` takes.

    ``wait(done, *tensors)``: ``tensors`` are what the collective read and made.  They are kept until then, and their
    memory is used again only after the waiting stream.
    """
    return _on_streams(device) if device.type == "cuda" else (_at_once, _nothing)


def _at_once(collective: Collective, *arguments: object) -> tuple[object, ...]:
    return (*_several(collective(*arguments)), None)


def _nothing(done: None, *tensors: torch.Tensor | None) -> None:
    """The collective has run."""


def _several(results: object) -> tuple[object, ...]:
    return tuple(results) if isinstance(results, tuple) else (results,)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _on_streams(device: torch.device) -> tuple[Start, Wait]:
    # What was started and not waited for yet, with what it reads: where a run fails in between, only this keeps that,
    # and its memory would be used again at once.  The next wait is behind all of them.
    started: list[tuple[object, tuple[object, ...]]] = []

    def start(collective: Collective, *arguments: object) -> tuple[object, ...]:
        current = torch.cuda.current_stream(device)
        stream = communication_stream(device, current.cuda_stream)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results = _several(collective(*arguments))
        done = stream.record_event()
        started.append((done, arguments))
        return (*results, done)

    def wait(done: torch.cuda.Event, *tensors: torch.Tensor | None) -> None:
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        for t in tensors:
            if t is not None:
                t.record_stream(current)
        while started and started.pop(0)[0] is not done:
            pass

    return start, wait
