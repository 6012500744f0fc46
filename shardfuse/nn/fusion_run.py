"""Runs of one of a module's two fusions: what a call needs is worked out by those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..executor.tensor_guard import Check, check_of
from ..frontend import FusionDefinition
from ..frontend.profiled import profiler
from ..ir import TensorView
from .placement import TensorPlacement
from .tensor_kinds import Specs, plain_metadata_of
from .timer import FusionTimer

if TYPE_CHECKING:
    from ..frontend.repeat import Again, Repeated

Sizes = Mapping[TensorView, Sequence[int]]
Tensors = Sequence[torch.Tensor]
Layout = tuple[object, ...]
"""Strides of tensors that are read in place; shapes, dtypes and devices where those are not known before."""

_TRIES = 64
"""How often one run finds by what to know its tensors again: what changes in each call is asked as before."""
_LAYOUTS = 16
"""Layouts for which one run keeps programs; one beyond empties the list. A training loop has one or two."""


Leading = list[tuple[int, tuple[None, ...]]]
_is_contiguous = torch.Tensor.is_contiguous


class Known(NamedTuple):
    """A program, found by tensors that are known again by one ``check``, before they are viewed as a run takes them.

    again: what runs it, and gives None where something else has changed.  leading: the dims that it asks for.
    is_recorded: is there a node of autograd for such tensors, while gradients are recorded?
    is_direct: are the first outputs the results of the call, and what it is given the program's inputs?
    """

    check: Check
    again: Again
    leading: Leading
    is_recorded: bool
    is_direct: bool = False

    def timed(self, timer: FusionTimer, given: Tensors) -> Tensors | None:
        """What ``again`` gives of tensors of which ``check`` has been asked."""
        return timer.run(self.again, given)


class LastCall(NamedTuple):
    """The last call of a module without gradients that handed its tensors to a program as they were.

    specs, taken: of those tensors that are DTensors, and what gives the local ones of all.  shape: of the first.
    ready: the module's programs, by the settings of that call: others are in another dict.
    """

    check: Check
    again: Again
    specs: Specs
    taken: Callable[[Tensors], Tensors]
    shape: torch.Size
    ready: object


class FusionRun:
    """``run(timer, tensors)``: the outputs of ``fusion``, and the program where that has run before.

    The tensors live as ``placements`` say, those beyond them are contiguous.  ``unsharded``: the shape of the
    activations, where shards differ in size.  ``is_known``: this was found by the tensors' shapes, dtypes and devices.
    ``name``: what a profiler shows it as.
    """

    __slots__ = ("_fusion", "_is_known", "_leading", "_name", "_sizes", "_strided", "_tries", "again")

    def __init__(
        self, fusion: FusionDefinition, placements: Sequence[TensorPlacement], unsharded: Sequence[int] | None, *,
        is_known: bool, name: str,
    ) -> None:  # fmt: skip
        self._fusion, self._is_known, self._name = fusion, is_known, name
        self._sizes = None if unsharded is None else _sizes(fusion, unsharded)
        self._leading = [(n, (None,) * p.leading) for n, p in enumerate(placements) if p.leading]
        self._strided = {n: p for n, p in enumerate(placements) if p.strided}
        self._tries = _TRIES
        self.again: dict[Layout, tuple[Repeated, Leading]] = {}
        """Programs that have run, by what their arguments may differ in, and the leading dims that each asks for."""

    def fresh(self, timer: FusionTimer | None, tensors: Tensors) -> Tensors:
        """The outputs, contiguous and each in a storage of its own: what a functional op returns."""
        outputs, again = self(timer, tensors)
        return outputs if again is not None and again.is_fresh else _new(outputs, tensors)

    def __call__(self, timer: FusionTimer | None, tensors: Tensors) -> tuple[Tensors, Repeated | None]:
        key, arranged = self._arranged(tensors)
        found = self.again.get(key)
        if found is not None:
            again, leading = found
            given = with_leading(arranged, leading) if leading else arranged
            outputs = again(given) if timer is None else timer.run(again, given)
            if outputs is not None:
                return outputs, again
        given = self.with_leading(arranged)
        outputs = self._look_up(timer, given)
        self._remember(key, given)
        return outputs, None

    def known(self, given: Tensors, tensors: Tensors, *, is_recorded: bool) -> Known | None:
        """The program that has run on ``tensors``, by ``given``, of which those are views; None where they are copied
        first, or looked up each time."""
        if self._tries == 0:
            return None
        self._tries -= 1
        key, arranged = self._arranged(tensors)
        found, check = self.again.get(key), check_of(given)
        if found is None or check is None or not all(map(is_, arranged, tensors)) or not check(*given):
            return None
        again, leading = found
        return Known(check, again.known, leading, is_recorded)

    def _arranged(self, tensors: Tensors) -> tuple[Layout, Tensors]:
        """What says which program it is, and the tensors as that reads them."""
        layout = list[object]() if self._is_known else list[object](map(plain_metadata_of, tensors))
        if self._strided:
            arranged = list(tensors)
            for n, placement in self._strided.items():
                arranged[n] = read = placement.in_place(tensors[n])
                layout.append(read.stride())
            tensors = arranged
        if not all(map(_is_contiguous, tensors)):
            tensors = [t if n in self._strided else t.contiguous() for n, t in enumerate(tensors)]
        return tuple(layout), tensors

    def with_leading(self, tensors: Tensors) -> Tensors:
        """With a dim of 1 for each mesh dimension of partial sums, as definitions have them."""
        return with_leading(tensors, self._leading)

    def _look_up(self, timer: FusionTimer | None, given: Tensors) -> Tensors:
        fusion, sizes, device = self._fusion, self._sizes, given[0].device.type

        def run(arguments: Tensors) -> Tensors:
            if profiler._is_profiler_enabled:
                with profiler.record_function(self._name):
                    return fusion.execute(arguments, sizes=sizes)
            return fusion.execute(arguments, sizes=sizes)

        if torch.is_autocast_enabled(device):
            # torch would choose other dtypes for the ops of a fusion that is evaluated by torch.
            with torch.autocast(device, enabled=False):
                return run(given) if timer is None else timer.run(run, given)
        return run(given) if timer is None else timer.run(run, given)

    def _remember(self, layout: Layout, given: Tensors) -> None:
        """A program that was made for unsharded sizes is looked up each time."""
        again = self._fusion.repeat(given, self._name) if self._sizes is None else None
        if again is not None:
            if len(self.again) >= _LAYOUTS:
                self.again.clear()
            asked = [(n, axes) for n, axes in self._leading if n not in again.by_address]
            self.again[layout] = again, asked


def with_leading(tensors: Tensors, leading: Leading) -> Tensors:
    given = list(tensors)
    for n, axes in leading:
        given[n] = given[n][axes]
    return given


def _sizes(fusion: FusionDefinition, unsharded: Sequence[int]) -> Sizes:
    """The unsharded shapes of the inputs: the sizes that they leave open are those of the activations' last dims."""
    inputs = [i.val for i in fusion.fusion.inputs if isinstance(i.val, TensorView)]
    return {tv: [n if n >= 0 else unsharded[k - tv.ndim] for k, n in enumerate(tv.shape)] for tv in inputs}


def _new(outputs: Tensors, given: Tensors) -> list[torch.Tensor]:
    taken = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    made: list[torch.Tensor] = []
    for x in outputs:
        here = x.untyped_storage().data_ptr()
        x = x.clone(memory_format=torch.contiguous_format) if here in taken and x.numel() else x.contiguous()
        taken.add(x.untyped_storage().data_ptr())
        made.append(x)
    return made
