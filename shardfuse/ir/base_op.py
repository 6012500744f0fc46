"""What all ops have: how a printed program shows them, and which scalars of a definition are among their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Self, cast

from .scalar import Number, Scalar, Size


@dataclass(frozen=True)
class BaseOp:
    """What all ops have."""

    def arguments(self) -> list[tuple[str, object]]:
        """What a printed program shows behind the inputs: names and values."""
        told = self.__dict__
        return [(k, told[k]) for k, default in _told_of(type(self)) if default is MISSING or told[k] != default]

    def scalars(self) -> list[Scalar]:
        """The scalars of a definition among its parameters."""
        return [s for k, _ in _told_of(type(self)) for s in _scalars_in(self.__dict__[k])]

    def with_numbers(self, value_of: Callable[[Scalar], Number]) -> Self:
        """With numbers in place of scalars."""
        if not self.scalars():
            return self
        return replace(self, **{k: _valued(self.__dict__[k], value_of) for k, _ in _told_of(type(self))})


@cache
def _told_of(op: type[BaseOp]) -> tuple[tuple[str, object], ...]:
    """The fields of an op but for its names, with their defaults."""
    return tuple((f.name, f.default) for f in fields(op) if f.name not in ("name", "kind", "called"))


def _scalars_in(value: object) -> list[Scalar]:
    if isinstance(value, tuple):
        return [v for v in cast("tuple[object, ...]", value) if isinstance(v, Scalar)]
    return [value] if isinstance(value, Scalar) else []


def _valued(value: object, value_of: Callable[[Scalar], Number]) -> object:
    if isinstance(value, tuple):
        return tuple(_valued(v, value_of) for v in cast("tuple[object, ...]", value))
    return value_of(value) if isinstance(value, Scalar) else value


def numbers(sizes: Sequence[Size]) -> tuple[int, ...]:
    """``sizes`` of a bound Expr, where no scalar is left."""
    assert all(isinstance(n, int) for n in sizes), f"{sizes} are not known yet"
    return cast("tuple[int, ...]", tuple(sizes))


def check_axes(axes: Sequence[int]) -> None:
    assert len({*axes}) == len(axes), f"{axes} have an axis twice"
    assert min(axes, default=0) >= 0, f"{axes} count from the end"
