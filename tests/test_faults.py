"""A rank that is killed, stopped, raises, exits or forks, at every stage of its life, of the first rank and another."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fault_cases import CASES, SLACK, Case, Outcome, is_in_ci, run_cases

CHOSEN = [case for case in CASES if is_in_ci(case)]


@pytest.fixture(scope="module")
def outcomes() -> Mapping[Case, Outcome]:
    """Most of their time is waiting.  `python tests/fault_cases.py` tries all, by the clock."""
    return {outcome.case: outcome for outcome in run_cases(CHOSEN)}


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: "-".join(map(str, case)))
def test_fault(case: Case, outcomes: Mapping[Case, Outcome]) -> None:
    outcome = outcomes[case]
    faults = outcome.faults(SLACK)
    assert faults == [], "\n".join([str(outcome), *outcome.outputs])
