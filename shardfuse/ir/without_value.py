"""What tensors and scalars of a definition are not: values that Python's operators could look at."""

from __future__ import annotations

from numbers import Number
from typing import TYPE_CHECKING, NoReturn

from ..errors import DefinitionError


class WithoutValue:
    """A name for what only a run has.  It is equal to itself alone, and an error in place of a condition.

    Without that ``x == 0`` would be False, and ``fd.ops.where(x == 0, 1.0, x)`` a constant that nothing shows.
    """

    name: str
    __hash__ = object.__hash__

    if not TYPE_CHECKING:  # a checker takes what `in` finds in a list of scalars for one, but not beside these

        def __eq__(self, other: object) -> bool:
            """Is it ``other`` itself?  Raises ``DefinitionError`` for a number."""
            if isinstance(other, Number):
                self._refuse_comparison("==", "eq", other)
            return NotImplemented

        def __ne__(self, other: object) -> bool:
            """Is it anything but ``other``?  Raises ``DefinitionError`` for a number."""
            if isinstance(other, Number):
                self._refuse_comparison("!=", "ne", other)
            return NotImplemented

    def __bool__(self) -> NoReturn:
        """Raises ``DefinitionError``."""
        expected = "fd.ops.where(condition, a, b), whose condition fd.ops.eq, fd.ops.ne or the like have made"
        raise DefinitionError(f"bool({self.name})", "a condition on what only a run knows", expected)

    def _refuse_comparison(self, sign: str, op: str, number: object) -> NoReturn:
        found = "a comparison with a number by Python's operator"
        expected = f"fd.ops.{op}({self.name}, {number!r}), as fd.ops.where takes it for a condition"
        raise DefinitionError(f"{self.name} {sign} {number!r}", found, expected)
