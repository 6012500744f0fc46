"""Runs of a program that has run on arguments like these: nothing is looked up by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..executor.plain_arguments import are_taken_as_they_are, is_dual, set_grad_enabled
from ..executor.uncompiled import uncompiled
from ..ir import TensorView
from ..ir.caller_lines import lines_named
from ..mesh.groups import world_key
from .repro import reproduced

if TYPE_CHECKING:
    from .executor_cache import FusionExecutorCache, Made
    from .running import Running


class Repeat:
    """``repeat(arguments)``: the outputs, or ``None`` where that takes an exchange with all ranks.

    arguments: plain tensors of the shapes, strides, dtypes and devices for which the program was found, of none of
    which a gradient is to be recorded; whoever calls has seen to that.
    by_address: the places of those of which only the address matters, so that they may have another shape.
    is_fresh: is each output contiguous, in a storage of its own?
    """

    __slots__ = ("_fec", "_made", "_programs", "_run", "_turn", "_world", "by_address", "is_fresh")

    def __init__(self, fec: FusionExecutorCache, made: Made, programs: object) -> None:
        self._fec, self._made, self._programs, self._world = fec, made, programs, world_key()
        self._run, self._turn = made.program.run, fec.turn()
        self.by_address, self.is_fresh = made.program.by_address, made.program.is_fresh

    @uncompiled
    def __call__(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        fec, made = self._fec, self._made
        if (
            fec.programs is not self._programs
            or world_key() != self._world
            or not are_taken_as_they_are(arguments)
            or is_dual()
        ):
            return None
        is_recording = torch.is_grad_enabled()
        if is_recording:
            set_grad_enabled(False)
        try:
            with self._turn:
                fec.called(made)
                return self._run(*arguments)  # pyright: ignore[reportReturnType] - None where a rank holds nothing of it
        finally:
            if is_recording:
                set_grad_enabled(True)


class Repeated:
    """A `Repeat` of a definition, which names what goes wrong."""

    __slots__ = ("_again", "_fd", "by_address", "is_fresh")

    def __init__(self, fd: Running, again: Repeat) -> None:
        self._fd, self._again = fd, again
        self.by_address, self.is_fresh = again.by_address, again.is_fresh

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        fd = self._fd
        try:
            return self._again(inputs)
        except Exception:
            with lines_named(fd.fusion), reproduced(lambda: fd.repro_script_for(self._as_declared(inputs))):
                raise

    def _as_declared(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """With the leading dims of 1 that those may lack of which only the address matters."""
        found = list(inputs)
        for k in self.by_address:
            val = self._fd.fusion.inputs[k].val
            if isinstance(val, TensorView):
                found[k] = found[k][(None,) * (val.ndim - found[k].ndim)]
        return found
