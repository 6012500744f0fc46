"""Runs of a program that has run on arguments like these: nothing is looked up by them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import ref

import torch
from torch.distributed import distributed_c10d as c10d

from ..config import read_cache_directory
from ..executor.binding import Argument
from ..executor.driver import Driver, RepeatParts, open_driver
from ..executor.plain_arguments import are_real_as_they_are, are_taken_as_they_are, forward_ad, set_grad_enabled
from ..executor.tensor_guard import Check, check_of
from ..executor.turns import Held, go_on, is_of_autograd
from ..executor.uncompiled import uncompiled
from ..ir import TensorView
from ..ir.caller_lines import lines_named
from ..mesh.groups import world_key
from .profiled import name_of, profiled, profiler
from .repro import reproduced

if TYPE_CHECKING:
    from .executor_cache import FusionExecutorCache, Made
    from .running import Running

Tensors = Sequence[torch.Tensor]
Again = Callable[[Tensors], Tensors | None]
"""Gives the outputs; ``None`` where something is not as it was, so that the program has to be looked up."""


def driver_for(tensors: Tensors) -> Driver | None:
    """What repeats calls in C.  A call on a CPU takes too long for that to matter."""
    return open_driver(read_cache_directory()) if tensors and tensors[0].is_cuda else None


class Repeated:
    """``repeated(inputs)``: the outputs of a definition, or ``None`` where that takes an exchange with all ranks.

    inputs: plain tensors of the shapes, strides, dtypes and devices for which the program was found, of none of which a
    gradient is to be recorded; whoever calls has seen to that.
    by_address: the places of those of which only the address matters, so that they may have another shape.
    is_complex: may one of them be?
    is_fresh: is each output contiguous, in a storage of its own?
    known: the same of inputs of which the caller knows, too, that the program takes them as they are.
    name: what a profiler shows a run as, else what the fusion computes.
    """

    __slots__ = (
        "_are_taken", "_call", "_driver", "_fd", "_fec", "_made", "_note", "_profiled", "_programs", "_run", "_turn",
        "_world", "by_address", "is_fresh", "known",
    )  # fmt: skip

    def __init__(
        self,
        fd: Running,
        fec: FusionExecutorCache,
        made: Made,
        programs: object,
        inputs: Sequence[Argument],
        name: str = "",
    ) -> None:
        self._fd, self._fec, self._made, self._programs, self._world = fd, fec, made, programs, world_key()
        turn = fec.turn()
        self._turn = None if isinstance(turn, nullcontext) else turn  # which has an entry and an exit of Python's
        self._run, self._note, self._call = made.program.run, made.program.note, made.program.call
        self._profiled = profiled(self._run, lambda arguments: name or name_of(fec.fusion, arguments))
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        is_complex = any(t.is_complex() for t in tensors)
        self._are_taken = are_taken_as_they_are if is_complex else are_real_as_they_are
        self.by_address, self.is_fresh = made.program.by_address, made.program.is_fresh
        self._driver = driver_for(tensors)
        self.known = self.after(None, len(inputs))

    @uncompiled
    def __call__(self, inputs: Tensors, are_known: bool = False) -> Tensors | None:
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
            run = self._profiled if profiler._is_profiler_enabled else self._run
            if self._turn is None:
                fec.last_made = self._made
                return run(*inputs)  # pyright: ignore[reportReturnType] - None where a rank holds nothing of it
            with self._turn:
                fec.last_made = self._made
                if self._note is not None:
                    self._note(self._call)
                return run(*inputs)  # pyright: ignore[reportReturnType]
        except Exception:  # what goes wrong is named
            with lines_named(self._fd.fusion), reproduced(lambda: self._script(inputs)):
                raise
        finally:
            if is_recording:
                set_grad_enabled(True)

    def after(self, check: Check | None, count: int, *, has_gradients: bool = False, gives_list: bool = False) -> Again:
        """The same of ``count`` inputs that ``check`` knows, in C where there is a compiler for it.

        has_gradients: does one of them require a gradient?  Then it is ``None`` while gradients are recorded.
        """
        known = self._after_in_python(check, count, has_gradients=has_gradients, gives_list=gives_list)
        if self._driver is None:
            return known
        group: Any = cast("Any", c10d)._world.default_pg
        return self._driver.repeat(
            RepeatParts(
                check=check,
                run=self._made.program.body,
                otherwise=known,
                failed=self._fail,
                cache=self._fec,
                programs=self._programs,
                made=self._made,
                group=None if group is None else ref(group),
                held=cast("Held | None", self._turn),
                note=self._note,
                call=self._call,
                inputs=count,
                has_gradients=has_gradients,
                gives_list=gives_list,
                c10d=c10d,
                forward_ad=forward_ad,
                is_grad_enabled=torch.is_grad_enabled,
                set_grad_enabled=set_grad_enabled,
                current_thread=threading.current_thread,
                is_of_autograd=is_of_autograd,
                go_on=go_on,
                profiler=profiler,
            )
        )

    def _after_in_python(self, check: Check | None, count: int, *, has_gradients: bool, gives_list: bool) -> Again:
        def run(inputs: Tensors) -> Tensors | None:
            if type(inputs) not in (list, tuple) or len(inputs) != count or not (check is None or check(*inputs)):
                return None
            if has_gradients and torch.is_grad_enabled():
                return None
            outputs = self(inputs, True)
            return list(outputs) if gives_list and outputs is not None else outputs

        return run

    def _fail(self, inputs: Tensors, error: Exception, is_programs: bool) -> NoReturn:
        """Raise the error in the words that a caller sees.  is_programs: has the program's body raised it?"""
        on_failure = self._made.program.on_failure
        if is_programs and on_failure is not None:
            on_failure(error)
        with lines_named(self._fd.fusion), reproduced(lambda: self._script(inputs)):
            raise error

    def _script(self, inputs: Tensors) -> str:
        return self._fd.repro_script_for(self._as_declared(inputs))

    def _as_declared(self, inputs: Tensors) -> list[torch.Tensor]:
        """With the leading dims of 1 that those may lack of which only the address matters."""
        found = list(inputs)
        for k in self.by_address:
            val = self._fd.fusion.inputs[k].val
            if isinstance(val, TensorView):
                found[k] = found[k][(None,) * (val.ndim - found[k].ndim)]
        return found


class SameCall:
    """``run(inputs)``: the outputs of ``made``, a new list, where ``inputs`` are tensors like those of its last call.

    ``None`` where they are not, and where a gradient of one would be recorded.
    """

    __slots__ = ("made", "run")

    def __init__(self, made: Made, repeated: Repeated, inputs: Sequence[Argument]) -> None:
        self.made = made
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        check = check_of(tensors) if len(tensors) == len(inputs) > 0 else None
        has_gradients = any(t.requires_grad for t in tensors)
        self.run: Callable[[Sequence[Argument]], list[torch.Tensor] | None] = _never
        if check is not None:
            self.run = cast("Any", repeated.after(check, len(inputs), has_gradients=has_gradients, gives_list=True))


def _never(inputs: Sequence[Argument]) -> None:
    """Of numbers among the inputs, and of subclasses of tensors."""
