"""What everything that quantises gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Quantized(NamedTuple):
    """values: float8.  scales: float32, by which they are multiplied."""

    values: Tensor
    scales: Tensor
