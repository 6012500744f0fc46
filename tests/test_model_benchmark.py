"""Whole models under the pass, tiny, on the CPU; and what the suite ``models`` tells."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.model_cases import chosen, model_cases
from benchmarks.model_dry import dry
from benchmarks.model_gradients import eager_gradients, gradient_errors, relative, why_gradients_wrong
from benchmarks.model_profile import table
from benchmarks.model_steps import OWN, PEER, losses, step_of
from benchmarks.models import _Process, _rows, why_wrong
from benchmarks.package_cases import package_cases, why_absent
from benchmarks.run import main as run

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


@pytest.mark.parametrize("last", [2.5, float("nan"), float("inf")])
def test_losses_that_do_not_fall_compare_nothing(last: float) -> None:
    found = {name: [2.0, last] for name in ("eager", PEER, OWN)}
    assert why_wrong(found).startswith("WRONG: losses do not fall, from 2.0000 to")


def test_a_gradient_is_as_right_as_eager_torch_s() -> None:
    case = model_cases(tiny=True)["ViT-L"]
    exact, beside = (eager_gradients(case, CPU, exact=exact) for exact in (True, False))
    assert why_gradients_wrong(gradient_errors(case, beside, beside, beside, exact)) == ""
    name = "blocks.1.up.weight"
    wrong = {**beside, name: beside[name] * 1.02}  # as of a scale that was left out somewhere
    errors = gradient_errors(case, wrong, beside, beside, exact)
    assert errors[0].name == name
    assert 0.015 < errors[0].own < 0.025
    assert why_gradients_wrong(errors).startswith(f"WRONG: 1 of {len(exact)} gradients, {name} ")


def test_gradients_that_are_nothing_but_rounding_errors_are_not_compared_relatively() -> None:
    noise = torch.full((4,), 1e-9)
    assert relative(noise, -noise) == pytest.approx(2.0)
    assert relative(noise, -noise, least=1e-3) == pytest.approx(4e-6)


def test_models_are_chosen_by_parts_of_their_names() -> None:
    names = list(model_cases())
    assert chosen(["unet", "BERT"], names) == ["BERT-large", "UNet blocks", "UNet blocks, channels-last"]
    assert chosen([], names) == names


def test_models_of_packages_are_chosen_where_the_package_is(capsys: pytest.CaptureFixture[str]) -> None:
    names = list(package_cases())
    assert chosen(["llama", "Swin"], names) == ["Swin-T", "Llama, 8 layers"]
    for name, package in (("Swin-T", "torchvision"), ("Llama, 8 layers", "transformers")):
        why = why_absent(name)
        assert why is None if find_spec(package) else why == f"{name} is a model of {package}, which is not installed"
    with pytest.raises(SystemExit):
        run(["packages", "--dry"])
    assert "packages has no --dry" in capsys.readouterr().err


def test_a_table_of_kernels_begins_with_their_sum() -> None:
    found = table([("a", 1.5), ("b", 4.0), ("a", 1.5)]).splitlines()
    assert found[0] == "sum 7 launches 3"
    assert [line.split() for line in found[1:]] == [["4.0", "1", "b"], ["3.0", "2", "a"]]


@pytest.mark.parametrize("last", [1.5, 1.65])
def test_kernels_of_a_step_are_a_row_beside_it_and_count_as_it_does(last: float) -> None:
    compiled = {"graphs": 1, "breaks": 0, "taken": 2, "regions": 2, "ops": 9}
    both = (OWN, PEER)
    found = dict.fromkeys(both, compiled) | {
        "us": {OWN: (30.0, 29.0, 31.0), PEER: (30.5, 29.0, 31.0)},
        "kernels": {OWN: 20.0, PEER: 25.0},
        "host": dict.fromkeys(both, 30.0),
        "bytes": dict.fromkeys(both, 0),
        "losses": {"eager": [2.0, 1.5], PEER: [2.0, 1.4], OWN: [2.0, last]},
        "gradients": [{"name": "weight", "size": 1.0, "own": 0.01, "peer": 0.01, "eager": 0.01}],
    }
    cold, warm = ({name: {"seconds": seconds} for name in both} for seconds in (2.0, 1.0))
    rows = _rows("a model", cold, warm, found)
    kernels = {row.impl: row for row in rows if row.workload == "kernels of a training step"}
    assert {name: row.us for name, row in kernels.items()} == found["kernels"]
    assert [row.counts for row in kernels.values()] == [last == 1.5, True]
