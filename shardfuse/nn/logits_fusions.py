"""What the fusions of losses and of log-probabilities share: logits, targets, and which rows count."""

from __future__ import annotations

from dataclasses import dataclass

from ..frontend import FusionDefinition
from ..ir import DataType, TensorView
from .placed_spec import PlacedSpec
from .placement import TensorPlacement, define, give


@dataclass(frozen=True, kw_only=True)
class LogitsSpec(PlacedSpec):
    """Logits [..., classes], which are divided by ``temperature``, and a target for each row.

    ``counts_strays``: the last result is how many targets are neither a class nor ignored, on every rank.
    """

    classes: int
    temperature: float
    ignore_index: int
    counts_strays: bool

    @property
    def row_shape(self) -> list[int]:
        """One number per row, with the axis of classes kept."""
        return [*[-1] * (self.ndim - 1), 1]

    @property
    def shape(self) -> list[int]:
        return [*self.row_shape[:-1], self.classes]

    @property
    def rows(self) -> TensorPlacement:
        """Where one number per row lives."""
        return self.placement.without(self.ndim - 1)

    @property
    def scalar(self) -> TensorPlacement:
        """Replicated."""
        return self.placement.replicated()


def logits_and_target(
    fd: FusionDefinition, spec: LogitsSpec, given: TensorView | None = None
) -> tuple[TensorView, TensorView]:
    """Declare both: logits over the temperature, in the compute dtype, and targets, [..., 1].

    given: the logits, where they are declared already.
    """
    given = define(fd, spec.mesh, spec.placement, spec.shape, spec.dtype) if given is None else given
    logits = cooled(fd, spec, fd.ops.cast(given, dtype=spec.compute))
    return logits, define(fd, spec.mesh, spec.rows, spec.row_shape, DataType.Int)


def cooled(fd: FusionDefinition, spec: LogitsSpec, x: TensorView) -> TensorView:
    """``x`` divided by the temperature."""
    return x if spec.temperature == 1 else fd.ops.mul(x, 1.0 / spec.temperature)


def is_target(fd: FusionDefinition, spec: LogitsSpec, target: TensorView) -> TensorView:
    """[..., classes] of bool: is this class the row's target?  Classes are numbered through all ranks."""
    classes = fd.ops.iota(spec.classes, 0, 1, DataType.Int)
    return fd.ops.eq(classes, target)


def is_class(fd: FusionDefinition, spec: LogitsSpec, target: TensorView) -> TensorView:
    """[..., 1] of bool: is the row's target one of the classes?"""
    return fd.ops.logical_and(fd.ops.ge(target, 0), fd.ops.lt(target, spec.classes))


def give_strays(fd: FusionDefinition, spec: LogitsSpec, counted: TensorView, known: TensorView) -> None:
    """Return how many targets are ``counted`` and no class, where the spec says so."""
    if spec.counts_strays:
        strays = fd.ops.logical_and(counted, fd.ops.logical_not(known))
        strays = fd.ops.sum(fd.ops.cast(strays, dtype=DataType.Int), list(range(spec.ndim)))
        give(fd, strays, spec.mesh, spec.scalar)
