"""Tells DTensors from tensors without importing torch.distributed.tensor, which is slow to import."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def has_dtensor(values: Sequence[object]) -> bool:
    """Is one of them a DTensor?  Costs no import: where DTensor was not imported there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # not there yet while another thread imports it
    return kind is not None and any(isinstance(value, kind) for value in values)
