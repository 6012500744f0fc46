"""Modules of shardfuse.nn over processes: gloo on the CPU, NCCL where every rank has a GPU of its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from nn_cases import S0, S1, S2, Here
from test_nn_activations import check_packed, check_softmax
from test_nn_channels import check_batch, check_group
from test_nn_layer_norm import LINE
from test_nn_losses import check_log_prob, check_loss
from test_nn_quantized_norm import CASES as QUANTIZED
from test_nn_rotary import check as check_rotary
from torch.distributed.tensor import Partial, Shard

from shardfuse import DeviceMesh
from shardfuse.nn import quantized

pytestmark = pytest.mark.mpi

CASES = {
    **{f"layer_norm_{name}": LINE[name] for name in ("hidden", "add_sequence_parallel", "several_dims")},
    "group_norm": partial(check_group, at=[S2], silu=True, last=True, shape=(2, 8, 7, 3)),
    "batch_norm": partial(check_batch, at=[S0]),
    "softmax": partial(check_softmax, at=[S2], mask="bool", scale=0.25),
    "packed": partial(check_packed, at=[S2], bias=True),
    "rotary": partial(check_rotary, at=[S1], key_heads=4),
    "loss": partial(check_loss, at=[S2], z_loss=0.3, temperature=0.7, smoothing=0.1),
    "log_prob": partial(check_log_prob, at=[S2], shape=(2, 3, 9)),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantised_norms_on_a_line_of_ranks(name: str, pg) -> None:
    QUANTIZED[name](Here(DeviceMesh(list(range(pg.size))), pg.device))


@pytest.mark.parametrize("scales", ["row", "block"])
def test_a_compiled_norm_that_is_quantised(scales: str, pg) -> None:
    """One op of the graph, whose results are those of a call without a compiler."""
    mesh = DeviceMesh(list(range(pg.size)))
    module = quantized.AddRMSNorm(256, scales=scales, mesh=mesh, input=Partial(), output=Shard(0), device=pg.device)  # pyright: ignore[reportArgumentType]
    x, r = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(pg.rank)).to(pg.device)
    r = torch.ones_like(r)
    torch._dynamo.reset()
    found, plain = torch.compile(module, fullgraph=True, backend="aot_eager")(x, r), module(x, r)
    for got, want in zip((*found[0], found[1]), (*plain[0], plain[1]), strict=True):
        assert torch.equal(got.float(), want.float())
        assert got.stride() == want.stride()


@pytest.mark.parametrize("name", CASES)
def test_on_a_line_of_ranks(name: str, pg) -> None:
    CASES[name](Here(DeviceMesh(list(range(pg.size))), pg.device))
