"""Modules of shardfuse.nn over processes: gloo on the CPU, NCCL where every rank has a GPU of its own."""

from __future__ import annotations

from functools import partial

import pytest
from nn_cases import S0, S1, S2, Here
from test_nn_activations import check_packed, check_softmax
from test_nn_channels import check_batch, check_group
from test_nn_layer_norm import LINE
from test_nn_losses import check_log_prob, check_loss
from test_nn_rotary import check as check_rotary

from shardfuse import DeviceMesh

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


@pytest.mark.parametrize("name", CASES)
def test_on_a_line_of_ranks(name: str, pg) -> None:
    CASES[name](Here(DeviceMesh(list(range(pg.size))), pg.device))
