"""Axes that the operands of an op share: which one names the result, and which operand has one twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import ShapeError
from ..ir.digits import Axis, extent, overlaps
from ..ir.expr import BoundTensor

Place = tuple[int, int]
"""An operand, and one of its axes."""


def holding_again(
    found: Mapping[str, Axis], operands: Sequence[BoundTensor], columns: Mapping[str, Sequence[tuple[int, int]]]
) -> list[int]:
    """The operands that give a column an index which an earlier column has; the earlier one's, to keep operand 0."""
    for k, (name, axis) in enumerate(found.items()):
        twin = next((other for other in list(found)[:k] if overlaps([found[other], axis])), None)
        if twin is not None:
            later, earlier = ([j for j, at in columns[c] if operands[j].domain.logical[at]] for c in (name, twin))
            return earlier if 0 in later and 0 not in earlier else later
    return []


def breadth(axis: Axis) -> int:
    """Of two axes that meet the broader one names the result: 0 is a broadcast, 1 an element that ranks share out."""
    return 0 if not axis else 1 if extent(axis) == 1 else 2


def check_alike(op: str, operands: Sequence[BoundTensor], columns: Iterable[Sequence[Place]]) -> None:
    """Raise ShapeError where axes of a column differ in extent: here not even 1 fits another one."""
    for first, *others in columns:
        for other in others:
            if _extent_at(operands, first) != _extent_at(operands, other):
                raise extents_differ(op, operands, first, other, "equal extents", "correct the sizes")


def extents_differ(
    op: str, operands: Sequence[BoundTensor], first: Place, other: Place, expected: str, remedy: str
) -> ShapeError:
    """The error of two axes that cannot be one."""
    shown = [f"{_extent_at(operands, (k, at))} in axis {at} of {operands[k]}" for k, at in (first, other)]
    misfits = [(*place, _extent_at(operands, beside)) for place, beside in ((first, other), (other, first))]
    return ShapeError(op, f"extent {' and '.join(shown)}", expected, remedy, misfits)


def axes_of_inputs(
    error: ShapeError, operands: Sequence[BoundTensor], inputs: Mapping[str, BoundTensor]
) -> list[tuple[str, int, int]]:
    """The axes of ``inputs`` that those of ``operands`` which do not fit are, and the extents that would fit."""
    return [
        (name, d, n)
        for k, at, n in error.misfits
        for name, tensor in inputs.items()
        for d, axis in enumerate(tensor.domain.logical)
        if axis and axis == operands[k].domain.logical[at]
    ]


def _extent_at(operands: Sequence[BoundTensor], place: Place) -> int:
    return extent(operands[place[0]].domain.logical[place[1]])
