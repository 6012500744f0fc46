"""Axes that the operands of an op share: which one names the result, and which operand has one twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import ShapeError
from ..ir.digits import Axis, extent, overlaps
from ..ir.expr import BoundTensor


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


def check_alike(op: str, operands: Sequence[BoundTensor], columns: Iterable[Sequence[tuple[int, int]]]) -> None:
    """Raise ShapeError where axes of a column (operand, axis) differ in extent: here not even 1 fits another one."""
    for (first, at), *others in columns:
        n = extent(operands[first].domain.logical[at])
        for k, other in others:
            m = extent(operands[k].domain.logical[other])
            if m != n:
                found = f"extent {n} in axis {at} of {operands[first]} and {m} in axis {other} of {operands[k]}"
                raise ShapeError(op, found, "equal extents", "correct the sizes")
