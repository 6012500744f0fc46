"""What callers say about promises, checked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch

from ..errors import DefinitionError, PromiseError
from ..executor.options import CompileOptions
from ..ir.promises import INVARIANTS, Promises

Invariant = Literal["batch", "ranks"] | Collection[str] | None
"""What a result does not change with: one name, several, or none."""


def promised(method: str, invariant: Invariant, accumulate: str | None) -> Promises:
    """Raises ``DefinitionError``."""
    given = (invariant,) if isinstance(invariant, str) or not isinstance(invariant, Collection) else tuple(invariant)
    names = () if invariant is None else given
    if any(name not in INVARIANTS for name in names):
        raise DefinitionError(method, f"invariant={invariant!r}", f"{' or '.join(map(repr, INVARIANTS))}, or both")
    if accumulate not in (None, "float32"):
        raise DefinitionError(method, f"accumulate={accumulate!r}", "'float32' or None")
    return Promises("batch" in names, "ranks" in names, accumulate is not None)


def check_promises_kept(promises: Promises, options: CompileOptions, device: torch.device) -> None:
    """Raise PromiseError where torch evaluates: it adds up, and takes exponentials, in an order that follows sizes."""
    if promises.invariant and options.backend_for(device) == "torch":
        found = f"the operations would be torch's own, on {device.type}"
        raise PromiseError(str(promises), found, "run it by generated kernels: on a GPU, or with TRITON_INTERPRET=1")
