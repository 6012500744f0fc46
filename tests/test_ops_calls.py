"""Every op that is no pointwise one against torch in float64: on one rank, and sharded over two."""

from __future__ import annotations

import pytest
import torch
from fusion_check import bound_piece, local_piece
from op_calls import CALLS, Call, define, expected
from ranks import run_ranks

from shardfuse import DeviceMesh, FusionDefinition, ParallelType

NAMES = [call.name for call in CALLS]


def made(call: Call) -> list[torch.Tensor]:
    return call.make(torch.Generator().manual_seed(len(call.name)))


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_one_rank(call: Call) -> None:
    values = made(call)
    with FusionDefinition(backend="torch") as fd:
        define(fd, call, values)
    for found, wanted in zip(fd.execute(values), expected(call, values), strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_the_printed_definition_runs(call: Call) -> None:
    values = made(call)
    with FusionDefinition(backend="torch") as fd:
        define(fd, call, values)
    space: dict[str, object] = {}
    exec("from shardfuse import FusionDefinition, DataType\n" + repr(fd), space)
    with FusionDefinition(backend="torch") as again:
        space["nvfuser_fusion"](again)  # type: ignore[operator]
    assert repr(again) == repr(fd)
    for a, b in zip(again.execute(values), fd.execute(values), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def sharded(call: Call, which: int, dim: int, rank: int, world: int) -> None:
    """Input ``which`` sharded by ``dim``; every rank's outputs are its pieces of torch's."""
    values = made(call)
    mesh = DeviceMesh(list(range(world)))
    with FusionDefinition(backend="torch") as fd:
        inputs = define(fd, call, values)
        tv = inputs[which]
        tv.set_device_mesh(mesh)
        tv.outer_split(dim, world)
        tv.axis(dim).parallelize(ParallelType.mesh_x)
    fd.fec  # noqa: B018 closes the definition
    pieces = [local_piece(tv, v, rank) for tv, v in zip(inputs, values, strict=True)]
    found = fd.execute(pieces, sizes={tv: tuple(v.shape) for tv, v in zip(inputs, values, strict=True)})
    plan = fd.fec.last_plan
    assert plan is not None
    for tensor, out, wanted in zip(plan.fusion.outputs, found, expected(call, values), strict=True):
        torch.testing.assert_close(out, bound_piece(tensor.domain, wanted, rank), rtol=1e-12, atol=1e-12)


def ways() -> list[tuple[Call, int, int]]:
    """Every axis of every input that two ranks can share evenly."""
    return [
        (call, k, d) for call in CALLS for k, v in enumerate(made(call)) for d in range(v.ndim) if v.shape[d] % 2 == 0
    ]


@pytest.mark.parametrize(("call", "which", "dim"), ways(), ids=lambda v: v.name if isinstance(v, Call) else str(v))
def test_two_ranks(call: Call, which: int, dim: int) -> None:
    run_ranks(2, lambda rank, world: sharded(call, which, dim, rank, world))
