"""Fusions whose rows are promised the same bits whatever other rows there are, and what says that they have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.promises import CASES, bits, define, inputs, why_rows_differ
from shardfuse import FusionDefinition

__all__ = ["CASES", "assert_rows_alike", "bits", "define", "inputs"]


def assert_rows_alike(fd: FusionDefinition, given: list[torch.Tensor], counts: Sequence[int]) -> None:
    """Runs of some of the rows, from several places, have the bits that all rows together have."""
    found = why_rows_differ(fd, given, counts)
    assert found is None, found
