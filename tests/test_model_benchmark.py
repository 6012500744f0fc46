"""Whole models under the pass, tiny, on the CPU; and what the suite ``models`` tells."""

from __future__ import annotations

import pytest
import torch

from benchmarks.model_cases import model_cases
from benchmarks.model_dry import dry
from benchmarks.model_steps import OWN, PEER, losses, step_of
from benchmarks.models import why_wrong

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["BERT-large", "Qwen3-0.6B layers", "UNet blocks, channels-last"])
def test_regions_are_taken_and_losses_agree(name: str) -> None:
    found = dry(model_cases(tiny=True)[name])
    assert found.why_wrong() == "", found


def test_every_model_learns() -> None:
    for name, case in model_cases(tiny=True).items():
        first, *_, last = losses(step_of(case, CPU, None), 5)
        assert last < first, name


def test_losses_may_differ_as_far_as_eager_torch_s_do() -> None:
    found = {"eager": [2.0, 1.5], PEER: [2.0, 1.4], OWN: [2.0, 1.6]}
    assert why_wrong(found) == ""
    assert why_wrong({**found, OWN: [2.0, 1.65]}).startswith("WRONG: losses 0.25")
