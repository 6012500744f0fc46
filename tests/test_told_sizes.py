"""What ``sizes=`` says has to be what the definition, and a DTensor, say."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from thread_check import X, shard, world_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardfuse import FusionDefinition
from shardfuse.errors import DefinitionError, InputError
from shardfuse.ir.tensor_view import TensorView


def summed(ranks: int) -> tuple[FusionDefinition, TensorView]:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        fd.add_output(fd.ops.sum(x, [0]))
        if ranks > 1:
            shard(x, world_mesh(ranks), (X, (0, "outer")))
    return fd, x


@pytest.mark.parametrize("call", ["execute", "timeline", "explain"])
def test_a_dtensor_of_another_size_is_refused(call: str) -> None:
    def run(rank: int, size: int) -> None:
        fd, x = summed(size)
        given = [distribute_tensor(torch.ones(5, 4), world_mesh(size).to_torch("cpu"), [Shard(0)])]
        if call == "execute":
            assert len(fd.execute(given, sizes={x: (5, 4)})) == 1
        with pytest.raises(
            InputError, match=r"input 0, T0, to be of shape \[6, 4\], as sizes= says but got a DTensor of \[5, 4\]"
        ):
            getattr(fd, call)(given, sizes={x: (6, 4)})

    run_ranks(2, run)


@pytest.mark.parametrize("call", ["execute", "timeline", "explain", "tune"])
def test_another_size_than_the_definition_has_is_refused(call: str) -> None:
    fd, x = summed(1)
    with pytest.raises(DefinitionError, match=r"sizes: found \[3, 5\] for T0.*, expected \[-1, 4\], as it is defined"):
        getattr(fd, call)([torch.ones(3, 4)], sizes={x: (3, 5)})
