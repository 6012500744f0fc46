"""A call that a program is bound for, and what was made for it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from ..compiler import Plan
from ..executor.binding import Bound
from ..executor.host_program import Program
from ..ir.scalar import Number, Scalar
from ..ir.tensor_view import TensorView

Sizes = Mapping[TensorView, Sequence[int]]


@dataclass(frozen=True, eq=False)
class Made:
    """A program and the plan that it runs; None on a rank that has no part of it."""

    program: Program
    plan: Plan | None


@dataclass(frozen=True)
class BoundCall:
    """What a program is bound for.  key: that it is found by; ranks: of all meshes; text: what they must have alike.

    has_part: False on a rank that none of the program is on, and that does not know its sizes.
    sized: the inputs whose unsharded sizes the caller passed.
    """

    key: Hashable
    bound: Bound
    sizes: Sizes
    numbers: Mapping[Scalar, Number]
    rank: int
    ranks: tuple[int, ...]
    text: str
    has_part: bool = True
    sized: Collection[TensorView] = ()
