"""Which extents of a torch call's tensors fit each other, beside those that are one axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ..errors import ShapeError

Place = tuple[int, int]
"""A tensor among those of a call, and one of its axes."""


class Rule(Enum):
    """What the extent ``n`` of an axis has to be beside ``m``, the extent of another."""

    EQUAL = "equal"
    REPEATED = "repeated"
    WITHIN = "within"
    BLOCKS = "blocks"

    def fits(self, n: int, m: int) -> bool:
        match self:
            case Rule.EQUAL:
                return n == m
            case Rule.REPEATED:
                return n in (1, m)
            case Rule.WITHIN:
                return n <= m
            case Rule.BLOCKS:
                return n in (1, m) or (n > 0 and m % n == 0)

    def expected(self, m: int) -> str:
        match self:
            case Rule.EQUAL:
                return str(m)
            case Rule.REPEATED:
                return "1" if m == 1 else f"1 or {m}"
            case Rule.WITHIN:
                return f"{m} at most"
            case Rule.BLOCKS:
                return f"a number of blocks that divides {m}"


@dataclass(frozen=True)
class Fit:
    """``place`` has to fit what is at ``beside``; an axis that nothing is beside is 1."""

    place: Place
    beside: Place | None
    rule: Rule = Rule.REPEATED


def fits_at_end(k: int, shapes: Sequence[Sequence[int]], beside: Sequence[Place], rule: Rule) -> Iterator[Fit]:
    """The axes of tensor ``k``, aligned at the end with those at ``beside``; any before these are 1."""
    ndim = len(shapes[k])
    for at in range(ndim):
        other = at - ndim + len(beside)
        yield Fit((k, at), beside[other] if other >= 0 else None, rule)


def check_fits(op: str, shapes: Sequence[Sequence[int]], fits: Iterable[Fit], name: Callable[[int], str]) -> None:
    """Raise ShapeError for the first extent that does not fit.  An extent that is not known yet (-1) fits.

    ``name``: of a tensor by its number.
    """
    for fit in fits:
        (k, at), beside = fit.place, fit.beside
        n = shapes[k][at]
        m = 1 if beside is None else shapes[beside[0]][beside[1]]
        if n < 0 or m < 0 or fit.rule.fits(n, m):
            continue
        found = f"extent {n} in axis {at} of {name(k)}"
        if beside is None:
            raise ShapeError(op, found, fit.rule.expected(m), "correct the sizes")
        found = f"{found} and {m} in axis {beside[1]} of {name(beside[0])}"
        raise ShapeError(
            op, found, f"{fit.rule.expected(m)} in the former", "correct the sizes", [(k, at, m), (*beside, n)]
        )
