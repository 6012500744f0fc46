# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""What every call of a program asks about its device: is it the current one, which stream, has a profiler hooked in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

Begin = Callable[[], int | None]


def begin_on(device: torch.device) -> Begin:
    """``begin()``: the handle of the stream that kernels go to, ``None`` where they go through Triton's own entry.

    That is where a profiler hooked Triton's launches, and under Triton's interpreter.
    """
    if device.type != "cuda":
        return lambda: None
    index = index_of(device)
    current_stream, modules = cast(Callable[[int], int], torch._C._cuda_getCurrentRawStream), sys.modules

    def begin() -> int | None:
        knobs = modules.get("triton.knobs")
        if knobs is not None:
            runtime = knobs.runtime  # a chain of hooks that is empty, as Triton begins with, is none
            enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
            if getattr(enter, "calls", enter is not None) or getattr(leave, "calls", leave is not None):
                return None
        return current_stream(index)

    return begin


def queue_on(device: torch.device) -> Callable[[], int]:
    """``queue()``: the handle of the current stream, to which collectives go, whatever hooks launches; 0 on a CPU."""
    if device.type != "cuda":
        return int
    return partial(cast(Callable[[int], int], torch._C._cuda_getCurrentRawStream), index_of(device))


def index_of(device: torch.device) -> int:
    index = cast(int | None, device.index)
    return torch.cuda.current_device() if index is None else index


def current_on(device: torch.device) -> dict[str, object]:
    """What a program calls to see that ``device``, a GPU, is the current one: ``current_device`` and ``on_device``."""
    index = index_of(device)

    def on_device(program: Callable[..., Any], *arguments: object) -> Any:
        with torch.cuda.device(index):
            return program(*arguments)

    return {"current_device": torch._C._cuda_getDevice, "on_device": on_device}
