"""Modules whose results are promised not to change with other rows, or with the number of ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch

from ..errors import ArgumentError
from ..frontend import FusionDefinition
from ..frontend.promise_arguments import Invariant, promised
from ..ir.promises import Promises
from .settings import Setting
from .stand_in import StandIn
from .timer import FusionTimer, TimedModule

if TYPE_CHECKING:
    from ..mesh import DeviceMesh
    from .fused import FusedOp

PROMISES = 512
"""Pairs of fusions that are kept with what they promise."""
_NOTHING = Promises()


class PromisingModule(StandIn, TimedModule):
    """A module of fusions that may promise bits.  ``promises``: what its fusions, forward and backward, keep."""

    promises: Setting[Promises | None] = Setting(Promises)
    mesh: Setting[DeviceMesh | None]
    input_name: str = "input"
    """The name that callers may have for the first tensor: torch's, or that of the module in whose place this is."""

    def promise(self, *, invariant: Invariant = None, accumulate: Literal["float32"] | None = None) -> Self:
        """Results, and gradients of the inputs, are the same bits whatever the batch or the number of ranks.

        ``invariant``, ``accumulate``: as ``FusionDefinition.promise``.  What is not named is no longer promised.
        Gradients of parameters are sums over the batch: they are the same on any number of ranks (``"ranks"``), and
        change with the batch.  Under torch.compile the module is then one op, instead of torch's own ops, which
        promise nothing.  A call raises PromiseError for what cannot be kept.  Raises DefinitionError.
        """
        found = promised(f"{type(self).__name__}.promise", invariant, accumulate)
        self.promises = None if found == _NOTHING else found
        return self

    def is_decomposed(self) -> bool:
        """Does torch.compile take it apart into torch's own ops?"""
        return self.mesh is None and self.promises is None and torch.compiler.is_compiling()

    def promised_op(self, op: FusedOp) -> FusedOp:
        """``op``, whose fusions keep what this module promises."""
        return kept_by(op, self.promises)

    def common_settings(self) -> dict[str, object]:
        """The settings of any module that its op needs besides its own arguments."""
        timer, kept = self.timer, self.promises
        found: dict[str, object] = {} if timer is None else {"timer": timer.number}
        if kept is not None:
            found["promises"] = " ".join([*kept.invariant, *(["float32"] if kept.wide_sums else [])])
        return found

    def set_common(self, settings: Mapping[str, object]) -> None:
        """The reverse, of a module that was made again from the arguments."""
        self.timer = FusionTimer.numbered.get(cast("int", settings.get("timer")))
        words = str(settings.get("promises", "")).split()
        kept = Promises("batch" in words, "ranks" in words, "float32" in words)
        self.promises = None if kept == _NOTHING else kept


def kept_by(op: FusedOp, promises: Promises | None) -> FusedOp:
    """``op``, whose fusions keep ``promises``."""
    return op if promises is None else _with_promises(op, promises)


@lru_cache(maxsize=PROMISES)
def _with_promises(op: FusedOp, promises: Promises) -> FusedOp:
    backward = None if op.backward is None else _promising(op.backward, promises)
    return replace(op, forward=_promising(op.forward, promises), backward=backward)


def _promising(fd: FusionDefinition, promises: Promises) -> FusionDefinition:
    """A copy that was not run yet."""
    fusion = copy.deepcopy(fd.fusion)
    fusion.reopen()
    fusion.promises = promises
    return FusionDefinition.recording(fusion)


def check_model(function: str, model: object) -> None:
    """Raise ArgumentError for what is no module."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(function, "model", model, "a torch.nn.Module")


def promise(
    model: torch.nn.Module, *, invariant: Invariant = None, accumulate: Literal["float32"] | None = None
) -> torch.nn.Module:
    """Have every module of shardfuse.nn in ``model`` promise this (``RMSNorm.promise``); gives ``model`` back.

    Modules of torch in it promise nothing: ``convert(model)`` first.  Warns (UserWarning) where no module promises
    anything.  Raises ArgumentError and DefinitionError.
    """
    check_model("promise", model)
    said = promised("promise", invariant, accumulate)
    parts = [part for part in cast(Any, model).modules() if isinstance(part, PromisingModule)]
    for part in parts:
        part.promise(invariant=invariant, accumulate=accumulate)
    if not parts and said != _NOTHING:
        warnings.warn(
            f"promise({said}) found no module of shardfuse.nn that promises anything in {type(model).__name__}: call "
            "shardfuse.nn.convert(model) first, and promise of its model; matrix products promise nothing",
            stacklevel=2,
        )
    return model
