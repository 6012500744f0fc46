"""A rank that waits before a first run, and another whose GPU waits for it in a collective, on two GPUs."""

from __future__ import annotations

import pytest
import torch
from fault_cases import SLACK, run_cases

pytestmark = pytest.mark.gpu


def test_both_end_with_what_each_of_them_runs() -> None:
    """The host of the other rank does not wait: its GPU does, for longer than other things may take."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    (outcome,) = run_cases([("calls", "quiet", 1)])
    faults = outcome.faults(SLACK)
    assert faults == [], "\n".join([str(outcome), *outcome.outputs])
