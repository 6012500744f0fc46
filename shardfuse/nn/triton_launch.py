# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false
"""Launches of a Triton function by what it was compiled to for such arguments before.

Triton's own entry looks up in each call what it has compiled, by the arguments' types and by what it is told of their
values: 25 us and more of the host's time.  Here that is found by a tuple of the same facts, once for a process:
settings of Triton for debugging and instrumentation count where they are made before a first launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

ALIGNED = 16
"""Bytes that addresses, and units that integers are multiples of, of which Triton tells the compiler.  So it does of an
integer that is 1, and of one that 32 bits do not hold."""
_KEPT = 64
"""Kernels of one function that are kept."""
Number = int | float


class Launches:
    """``launch(grid, tensors, numbers, constants)`` of ``function``, on the GPU of the first tensor.

    tensors, numbers: its first arguments, in their order.  constants: its constexpr arguments by name, and options of
    Triton's such as num_warps, always in one order; each combination of values is a kernel of its own.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Number],
        constants: dict[str, Any],
    ) -> None:
        index = tensors[0].get_device()
        if index >= 0 and torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                self(grid, tensors, numbers, constants)
            return
        key = (index, *map(_kind, tensors), *map(_known, numbers), *constants.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            names = self._function.arg_names[len(tensors) + len(numbers) :]
            own = [constants[name] for name in names]
            whole = (*grid, 1, 1)[:3]
            compiled[whole](*tensors, *numbers, *own)
            return
        found = self._function[grid](*tensors, *numbers, **constants)
        found = found.result() if hasattr(found, "result") else found  # of one that is compiled by another thread
        if found is not None:  # under the interpreter there is none
            if len(self._compiled) >= _KEPT:
                self._compiled.clear()
            self._compiled[key] = found


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool]:
    return tensor.dtype, tensor.data_ptr() % ALIGNED == 0


def _known(number: Number) -> Hashable:
    """What Triton tells the compiler of it."""
    if isinstance(number, float):
        return float
    return number == 1, number % ALIGNED == 0, -(1 << 31) <= number < 1 << 31
