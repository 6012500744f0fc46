"""Whole models under the pass, tiny, on the CPU; and what the suite ``models`` tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.model_cases import model_cases
from benchmarks.model_dry import dry
from benchmarks.model_steps import OWN, PEER, losses, step_of
from benchmarks.models import _Process, why_wrong

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["BERT-large", "Qwen3-0.6B layers", "UNet blocks, channels-last"])
def test_regions_are_taken_and_losses_agree(name: str) -> None:
    found = dry(model_cases(tiny=True)[name])
    assert found.why_wrong() == "", found


def test_every_model_learns() -> None:
    for name, case in model_cases(tiny=True).items():
        first, *_, last = losses(step_of(case, CPU, None), 5)
        assert last < first, name


def test_a_process_tells_what_it_printed_last_or_why_it_failed(tmp_path: Path) -> None:
    found: list[object] = []
    fine = "import sys; print('x'); sys.stderr.write('y' * 200000); print('{\"us\": 1}')"
    for code in (fine, "raise SystemExit('no GPU')"):
        printed = tmp_path / "out", tmp_path / "err"
        with printed[0].open("wb") as out, printed[1].open("wb") as error:
            running = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=error)
        found.append(_Process(running, printed).result())
    assert found == [{"us": 1}, "failed: no GPU"]


def test_losses_may_differ_as_far_as_eager_torch_s_do() -> None:
    found = {"eager": [2.0, 1.5], PEER: [2.0, 1.4], OWN: [2.0, 1.6]}
    assert why_wrong(found) == ""
    assert why_wrong({**found, OWN: [2.0, 1.65]}).startswith("WRONG: losses 0.25")
