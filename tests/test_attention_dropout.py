"""Dropout of attention on a mesh: what the ranks drop is what one rank would drop, forward and backward."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch_answers import assert_beside

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir.call import WithRoles
from shardfuse.ops.attention_calls import ATTENTION_CALLS
from shardfuse.ops.call_signature import DRAWN

SHAPE = [2, 4, 5, 3]
QUERY = ("query", "key", "value")


def definition(forward: int | None, backward: int | None) -> FusionDefinition:
    """Attention of tensors whose axis ``forward`` is sharded, and its gradients with ``backward`` sharded."""
    with FusionDefinition() as fd:
        given = [fd.define_tensor(SHAPE, dtype=DataType.Double) for _ in range(4)]
        out, sums, seed, offset = fd.ops.sdpfa_fwd(*given[:3], dropout_p=0.4)
        again = [fd.ops.set(t) for t in (*given, out, sums)]
        gradients = fd.ops.sdpfa_bwd(again[3], *again[:3], *again[4:], 0.4, None, seed, offset)
        whole = [fd.ops.set(t) for t in (out, *gradients)]
        for tv in (*whole, seed):
            fd.add_output(tv)
    mesh = DeviceMesh([0, 1])
    for at, tensors in ((forward, given), (backward, again), (None, whole)):
        for tv in tensors:
            tv.set_device_mesh(mesh)
            if at is not None:
                tv.outer_split(at, 2)
                tv.axis(at).parallelize(ParallelType.mesh_x)
    return fd


@pytest.mark.parametrize("forward", [None, 0, 1])
@pytest.mark.parametrize("backward", [None, 0, 1])
def test_ranks_drop_what_one_rank_would(forward: int | None, backward: int | None) -> None:
    """Seeded apart, they agree on the first one's seed, which comes out: torch's result for it, wherever is sharded."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(SHAPE, dtype=torch.float64, generator=draw) for _ in range(4))

    def run(rank: int, size: int) -> list[torch.Tensor]:
        torch.manual_seed(7 + rank)
        pieces = [t if forward is None else t.chunk(2, forward)[rank].contiguous() for t in (q, k, v, grad)]
        return definition(forward, backward).execute(pieces)

    ranks = run_ranks(2, run)
    seed, offset = ranks[0][-1].view(torch.int64).tolist()
    call = WithRoles("sdpfa_fwd", (*QUERY, "dropout_p", *DRAWN))
    out, sums, *key = ATTENTION_CALLS["sdpfa_fwd"].evaluate([q, k, v, 0.4, seed, offset], call)
    kept = ATTENTION_CALLS["sdpfa_fwd"].evaluate([q, k, v], WithRoles("sdpfa_fwd", QUERY))[0]
    assert not torch.allclose(out, kept)
    roles = ("grad_output", *QUERY, "output", "logsumexp", "dropout_p", "philox_seed", "philox_offset")
    call = WithRoles("sdpfa_bwd", roles)
    gradients = ATTENTION_CALLS["sdpfa_bwd"].evaluate([grad, q, k, v, out, sums, 0.4, *key], call)
    for found in ranks:
        for x, want in zip(found, (out, *gradients, key[0]), strict=True):
            assert_beside(x, want)
