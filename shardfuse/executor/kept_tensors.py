"""Tensors that outlive the call which makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def made_to_last(make: Callable[[], T], device: torch.device) -> T:
    """What ``make`` gives, whose tensors on ``device`` are in memory that stays theirs for as long as they live.

    A thread may be allocating from a pool whose owner expects everything in it back when the call ends: CUDA graph
    trees (``mode="reduce-overhead"``) run a graph once like that before they record it, and hand the pool's memory out
    anew in replays.  Such a pool takes the allocations of that one thread, so another one makes the tensors, on the
    same stream.
    """
    if device.type != "cuda":
        return make()
    stream, made, errors = torch.cuda.current_stream(device), list[T](), list[Exception]()

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                made.append(make())
        except Exception as error:  # noqa: BLE001 raised below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, name="shardfuse-allocation")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]
