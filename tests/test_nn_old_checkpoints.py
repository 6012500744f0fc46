"""State dicts of batch norms that were saved before these counted batches load as they do into torch's."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import nn as fused
from shardfuse.nn import convert


def saved(version: int | None, *, counts: bool) -> dict[str, Tensor]:
    """The state of torch's batch norm within a Sequential, as a version of its class saved it; None: of no version."""
    generator = torch.Generator().manual_seed(0)
    made: Any = OrderedDict((f"0.{name}", torch.rand(8, generator=generator)) for name in ("weight", "bias"))
    made.update((f"0.running_{name}", torch.rand(8, generator=generator)) for name in ("mean", "var"))
    if counts:
        made["0.num_batches_tracked"] = torch.tensor(5)
    made._metadata = OrderedDict() if version is None else OrderedDict({"": {"version": 1}, "0": {"version": version}})
    return made


MAKE: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.Sequential(fused.BatchNorm1d(8)),
    "SyncBatchNorm": lambda: nn.Sequential(fused.SyncBatchNorm(8)),
    "converted": lambda: convert(nn.Sequential(nn.BatchNorm1d(8))).model,
    "on the meta device": lambda: nn.Sequential(fused.BatchNorm1d(8, device="meta")),
    "untracked": lambda: nn.Sequential(fused.BatchNorm1d(8, track_running_stats=False)),
}
THEIRS: dict[str, dict[str, Any]] = {
    "on the meta device": {"device": "meta"},
    "untracked": {"track_running_stats": False},
}


@pytest.mark.parametrize("counts", [True, False], ids=["with counts", "without counts"])
@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("kind", MAKE)
def test_a_state_loads_as_into_torchs(kind: str, version: int | None, counts: bool) -> None:
    mine, theirs = MAKE[kind](), nn.Sequential(nn.BatchNorm1d(8, **THEIRS.get(kind, {})))
    assign = kind == "on the meta device"
    for model in (mine, theirs):
        if not assign and model[0].num_batches_tracked is not None:
            model[0].num_batches_tracked.fill_(3)
    found = [m.load_state_dict(saved(version, counts=counts), strict=False, assign=assign) for m in (mine, theirs)]
    assert found[0] == found[1]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for name, wanted in theirs.state_dict().items():
        got = mine.state_dict()[name]
        assert got.is_meta == wanted.is_meta
        assert got.is_meta or torch.equal(got, wanted), name
        assert not got.is_meta or version == 2
    if not any(t.is_meta for t in theirs.state_dict().values()):
        torch.testing.assert_close(mine.eval()(x), theirs.eval()(x))
    assert mine.state_dict()._metadata == theirs.state_dict()._metadata
    if version != 2 and kind == "converted":
        mine.load_state_dict(copy.copy(saved(version, counts=counts)))  # strict
