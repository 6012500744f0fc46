"""What callers say about promises, checked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from ..errors import DefinitionError
from ..ir.promises import INVARIANTS, Promises

Invariant = Literal["batch", "ranks"] | Collection[str] | None
"""What a result does not change with: one name, several, or none."""


def promised(method: str, invariant: Invariant, accumulate: str | None) -> Promises:
    """Raises ``DefinitionError``."""
    names = () if invariant is None else (invariant,) if isinstance(invariant, str) else tuple(invariant)
    if any(name not in INVARIANTS for name in names):
        raise DefinitionError(method, f"invariant={invariant!r}", f"{' or '.join(map(repr, INVARIANTS))}, or both")
    if accumulate not in (None, "float32"):
        raise DefinitionError(method, f"accumulate={accumulate!r}", "'float32' or None")
    return Promises("batch" in names, "ranks" in names, accumulate is not None)
