"""Wall time of a function on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def time_on_gpu(function: Callable[[], object], repeats: int = 10) -> float:
    """Milliseconds a call, between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    function()
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats
