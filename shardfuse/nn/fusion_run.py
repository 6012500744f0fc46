"""Runs of one of a module's two fusions: what a call needs is worked out by those before it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..frontend import FusionDefinition
from ..ir import TensorView
from .placement import TensorPlacement
from .timer import FusionTimer

if TYPE_CHECKING:
    from ..frontend.repeat import Repeated

Sizes = Mapping[TensorView, Sequence[int]]
Tensors = Sequence[torch.Tensor]
Layout = tuple[object, ...]
"""Strides of tensors that are read in place; shapes, dtypes and devices where those are not known before."""

_LAYOUTS = 16
"""Layouts for which one run keeps programs; one beyond empties the list. A training loop has one or two."""


class FusionRun:
    """``run(timer, tensors)``: the outputs of ``fusion``.

    The tensors live as ``placements`` say, those beyond them are contiguous.  ``unsharded``: the shape of the
    activations, where shards differ in size.  ``is_known``: this was found by the tensors' shapes, dtypes and devices.
    """

    __slots__ = ("_fusion", "_is_known", "_leading", "_sizes", "_strided", "again")

    def __init__(
        self, fusion: FusionDefinition, placements: Sequence[TensorPlacement], unsharded: Sequence[int] | None, *,
        is_known: bool,
    ) -> None:  # fmt: skip
        self._fusion, self._is_known = fusion, is_known
        self._sizes = None if unsharded is None else _sizes(fusion, unsharded)
        self._leading = [(n, (None,) * p.leading) for n, p in enumerate(placements) if p.leading]
        self._strided = {n: p for n, p in enumerate(placements) if p.strided}
        self.again: dict[Layout, Repeated] = {}
        """Programs that have run, by what their arguments may differ in."""

    def __call__(self, timer: FusionTimer | None, tensors: Tensors) -> Tensors:
        return self._run(timer, tensors)[0]

    def fresh(self, timer: FusionTimer | None, tensors: Tensors) -> Tensors:
        """The outputs, contiguous and each in a storage of its own: what a functional op returns."""
        outputs, again = self._run(timer, tensors)
        return outputs if again is not None and again.is_fresh else _new(outputs, tensors)

    def _run(self, timer: FusionTimer | None, tensors: Tensors) -> tuple[Tensors, Repeated | None]:
        """The outputs, and the program where that has run before."""
        layout, strided, arranged = list[object](), self._strided, list(tensors)
        for n, t in enumerate(tensors):
            if n in strided:
                arranged[n] = read = strided[n].in_place(t)
                layout.append(read.stride())
            elif not t.is_contiguous():
                arranged[n] = t.contiguous()
            if not self._is_known:
                layout += (t.shape, t.dtype, t.device)
        key = tuple(layout)
        again = self.again.get(key)
        if again is not None:
            given = self.with_leading(arranged, again.by_address)
            outputs = again(given) if timer is None else timer.run(again, given)
            if outputs is not None:
                return outputs, again
        given = self.with_leading(arranged, ())
        outputs = self._look_up(timer, given)
        self._remember(key, given)
        return outputs, None

    def with_leading(self, tensors: Tensors, bare: Collection[int]) -> Tensors:
        """With a dim of 1 for each mesh dimension of partial sums, as definitions have them, but for the ``bare``."""
        if not self._leading:
            return tensors
        given = list(tensors)
        for n, axes in self._leading:
            if n not in bare:
                given[n] = given[n][axes]
        return given

    def _look_up(self, timer: FusionTimer | None, given: Tensors) -> Tensors:
        fusion, sizes, device = self._fusion, self._sizes, given[0].device.type

        def run(arguments: Tensors) -> Tensors:
            return fusion.execute(arguments, sizes=sizes)

        if torch.is_autocast_enabled(device):
            # torch would choose other dtypes for the ops of a fusion that is evaluated by torch.
            with torch.autocast(device, enabled=False):
                return run(given) if timer is None else timer.run(run, given)
        return run(given) if timer is None else timer.run(run, given)

    def _remember(self, layout: Layout, given: Tensors) -> None:
        """A program that was made for unsharded sizes is looked up each time."""
        again = self._fusion.repeat(given) if self._sizes is None else None
        if again is not None:
            if len(self.again) >= _LAYOUTS:
                self.again.clear()
            self.again[layout] = again


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
