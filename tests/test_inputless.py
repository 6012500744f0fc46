"""Fusions without inputs: run, and compared with torch on the device that their outputs come to."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from inputless import INPUTLESS, check_inputless, defined

from shardfuse import DataType, FusionDefinition
from shardfuse.errors import DefinitionError
from shardfuse.frontend import validation
from shardfuse.frontend.eager import evaluate_eager


@pytest.mark.skipif(torch.cuda.is_available(), reason="outputs are on the GPU: tests/gpu has these")
@pytest.mark.parametrize("name", INPUTLESS)
def test_they_are_run_and_validated(name: str) -> None:
    check_inputless(name, torch.device("cpu"))


@pytest.mark.parametrize("name", [name for name, (_, by_torch) in INPUTLESS.items() if by_torch])
def test_their_reference_is_made_on_one_device_alone(name: str) -> None:
    fd = defined(INPUTLESS[name][0])
    outputs = evaluate_eager(fd.fusion.native, [], torch.device("meta"))
    assert [x.device.type for x in outputs] == ["meta"] * len(outputs)


class AskedForError(Exception):
    """The device that the reference was to be made on."""


def test_their_reference_is_made_where_outputs_come_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(fusion: object, inputs: object, device: torch.device) -> None:
        raise AskedForError(str(device))

    monkeypatch.setattr(validation, "evaluate_eager", ask)
    monkeypatch.setattr(validation, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fd = defined(INPUTLESS["causal mask"][0])
    with pytest.raises(AskedForError, match="cuda:0"):
        fd.validate([])
    with pytest.raises(AskedForError, match="cuda:0"):
        defined(INPUTLESS["causal mask"][0]).manual_validate([])
    with pytest.raises(AskedForError, match="cpu"):
        fd.validate([], device="cpu")
    with FusionDefinition() as native:
        native.add_output(native.ops.full([3], 1.0, DataType.Float))
    for device, asked in (("cuda", "cuda:0"), (0, "cuda:0"), (None, "cpu")):
        with pytest.raises(AskedForError, match=asked):
            native.validate([], device=device)


def test_a_device_that_has_no_data_is_refused() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.full([3], 1.0, DataType.Float))
    with pytest.raises(DefinitionError, match="outputs on meta"):
        fd.execute([], device="meta")
    assert torch.equal(fd.execute([], device="cpu")[0], torch.ones(3))
