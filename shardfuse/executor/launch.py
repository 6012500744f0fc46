# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""Launches a compiled kernel without what Triton's own entry does in every call: the only file that knows its insides.

``kernel[grid](...)`` binds arguments by name, works out a specialisation and looks the binary up, 14 us of a call; all
of it is known once a program is bound but one thing, whether a pointer is aligned as it was when the binary was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

ALIGNMENT = 16
"""Bytes; what Triton tells pointers apart by."""


def direct_launcher(
    binary: Any, grid: int, tensors: int, fixed: Sequence[int], otherwise: Callable[..., None]
) -> Callable[..., None]:
    """``launch(*tensors, *scalars)``.

    binary: Triton's compiled kernel, made for aligned pointers.  tensors: how many of the arguments are.  fixed:
    integers behind them.  otherwise: Triton's own entry, for a misaligned pointer and where a profiler hooked launches.
    """
    from triton import knobs

    hooks = knobs.runtime
    run, function, metadata = binary.run, binary.function, binary.packed_metadata
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch.cuda.current_device

    def launch(*arguments: Any) -> None:
        for t in arguments[:tensors]:
            if t.data_ptr() % ALIGNMENT:
                otherwise(*arguments)
                return
        if _is_hooked(hooks.launch_enter_hook) or _is_hooked(hooks.launch_exit_hook):
            otherwise(*arguments)
            return
        run(grid, 1, 1, current_stream(current_device()), function, metadata, None, None, None, *arguments, *fixed)

    return launch


def _is_hooked(hook: Any) -> bool:
    """A chain of hooks that is empty, as Triton begins with, is none."""
    return bool(getattr(hook, "calls", hook is not None))
