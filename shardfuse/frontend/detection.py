"""Tells DTensors from tensors without importing torch.distributed.tensor, which is slow to import."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def has_dtensor(values: Sequence[object]) -> bool:
    """Is one of them a DTensor?  Costs no import: where nobody has imported DTensor there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in values)
