"""Runs of a program that has run on arguments like these: nothing is looked up by them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from ..executor.binding import Argument
from ..executor.plain_arguments import are_real_as_they_are, are_taken_as_they_are, forward_ad, set_grad_enabled
from ..executor.tensor_guard import check_of
from ..executor.uncompiled import uncompiled
from ..ir import TensorView
from ..ir.caller_lines import lines_named
from ..mesh.groups import world_key
from .repro import reproduced

if TYPE_CHECKING:
    from .executor_cache import FusionExecutorCache, Made
    from .running import Running


class Repeated:
    """``repeated(inputs)``: the outputs of a definition, or ``None`` where that takes an exchange with all ranks.

    inputs: plain tensors of the shapes, strides, dtypes and devices for which the program was found, of none of which a
    gradient is to be recorded; whoever calls has seen to that.
    by_address: the places of those of which only the address matters, so that they may have another shape.
    is_complex: may one of them be?
    is_fresh: is each output contiguous, in a storage of its own?
    """

    __slots__ = (
        "_are_taken", "_call", "_fd", "_fec", "_made", "_note", "_programs", "_run", "_turn", "_world", "by_address",
        "is_fresh",
    )  # fmt: skip

    def __init__(
        self, fd: Running, fec: FusionExecutorCache, made: Made, programs: object, *, is_complex: bool
    ) -> None:
        self._fd, self._fec, self._made, self._programs, self._world = fd, fec, made, programs, world_key()
        turn = fec.turn()
        self._turn = None if isinstance(turn, nullcontext) else turn  # which has an entry and an exit of Python's
        self._run, self._note, self._call = made.program.run, made.program.note, made.program.call
        self._are_taken = are_taken_as_they_are if is_complex else are_real_as_they_are
        self.by_address, self.is_fresh = made.program.by_address, made.program.is_fresh

    @uncompiled
    def __call__(self, inputs: Sequence[torch.Tensor], are_known: bool = False) -> Sequence[torch.Tensor] | None:
        """are_known: has the caller seen to it that the program takes them as they are?"""
        fec = self._fec
        is_recording = torch.is_grad_enabled()
        try:
            if fec.programs is not self._programs or world_key() != self._world:
                return None
            if not (are_known or self._are_taken(inputs)) or forward_ad._current_level >= 0:
                return None
            if is_recording:
                set_grad_enabled(False)
            if self._turn is None:
                fec.last_made = self._made
                return self._run(*inputs)  # pyright: ignore[reportReturnType] - None where a rank holds nothing of it
            with self._turn:
                fec.last_made = self._made
                if self._note is not None:
                    self._note(self._call)
                return self._run(*inputs)  # pyright: ignore[reportReturnType]
        except Exception:  # what goes wrong is named
            with lines_named(self._fd.fusion), reproduced(lambda: self._fd.repro_script_for(self._as_declared(inputs))):
                raise
        finally:
            if is_recording:
                set_grad_enabled(True)

    def _as_declared(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """With the leading dims of 1 that those may lack of which only the address matters."""
        found = list(inputs)
        for k in self.by_address:
            val = self._fd.fusion.inputs[k].val
            if isinstance(val, TensorView):
                found[k] = found[k][(None,) * (val.ndim - found[k].ndim)]
        return found


class SameCall:
    """``again(inputs)``: the outputs of ``made``, where ``inputs`` are tensors like those of the last call of it.

    ``None`` where they are not, where there are numbers among them, and where a gradient of one would be recorded.
    """

    __slots__ = ("_are_alike", "_count", "_has_gradients", "_repeated", "made")

    def __init__(self, made: Made, repeated: Repeated, inputs: Sequence[Argument]) -> None:
        self.made, self._repeated, self._count = made, repeated, len(inputs)
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        self._are_alike = check_of(tensors) if len(tensors) == len(inputs) > 0 else None
        self._has_gradients = any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs)

    def __call__(self, inputs: Sequence[Argument]) -> list[torch.Tensor] | None:
        are_alike = self._are_alike
        if are_alike is None or type(inputs) not in (list, tuple) or len(inputs) != self._count:
            return None
        if not are_alike(*inputs):
            return None
        if self._has_gradients and torch.is_grad_enabled():
            return None
        outputs = self._repeated(inputs, True)  # pyright: ignore[reportArgumentType] - they are tensors
        return None if outputs is None else list(outputs)
