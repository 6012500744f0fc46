"""The benchmark of a training step: steps are right by its own rule, and one that is wrong is reported."""

from __future__ import annotations

import pytest
import torch

from benchmarks import train, trained
from benchmarks.train import EAGER, OWN, run_train
from benchmarks.workload import Case

pytestmark = [pytest.mark.mpi, pytest.mark.two_ranks_suffice]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "STEPS", 3)


def test_the_steps_that_are_asked_for(pg) -> None:
    ((own, eager),) = run_train([Case.parse("64")], pg.device, rounds=1, only=(OWN,))
    assert [own.impl, eager.impl] == [OWN, EAGER]
    assert own.us is not None
    assert not own.note
    assert not eager.note


@pytest.mark.parametrize("late", [False, True], ids=["at first", "at trained weights"])
def test_a_gradient_that_is_off_is_reported(late: bool, pg, monkeypatch: pytest.MonkeyPatch) -> None:
    made = train._Sized.own
    off = 0.7 if pg.device.type == "cuda" else 0.99  # in bfloat16, 1 % is what eager torch's are off too

    def wrong(sized: train._Sized) -> train.Step:
        step = made(sized)
        parameter = next(step.model.parameters())
        at_first = parameter.detach().clone()

        def run() -> torch.Tensor:
            loss = step.run()
            if torch.equal(parameter, at_first) is not late:
                parameter.grad.mul_(off)
            return loss

        return train.Step(step.model, run)

    monkeypatch.setattr(train._Sized, "own", wrong)
    ((own, _),) = run_train([Case.parse("64")], pg.device, rounds=1, only=(OWN,))
    assert own.note.startswith("WRONG")
