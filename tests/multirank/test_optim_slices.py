"""Norms of tensors on slices of one torch mesh, as FSDP and tensor parallelism have them beside each other."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.roundings import assert_near
from shardfuse import optim

pytestmark = pytest.mark.mpi
DP, TP, BOTH = ("dp",), ("tp",), ("dp", "tp")
CASES = [
    [(DP, [Shard(0)]), (BOTH, [Shard(0), Shard(1)])],
    [(DP, [Shard(0)]), (TP, [Shard(0)])],
    [(DP, [Replicate()]), (TP, [Shard(1)])],
    [(DP, [Replicate()]), (TP, [Replicate()])],
    [(TP, [Shard(1)]), (BOTH, [Shard(0), Replicate()]), (DP, [Shard(1)])],
    [(DP, [Shard(0)]), (("flat",), [Shard(0)])],
    [(DP, [Shard(0)])],
]


def make_mesh(pg) -> DeviceMesh:
    """Of two columns on four ranks; two ranks are all in one row, so that one dimension has one rank."""
    mesh = init_device_mesh(pg.device.type, (pg.size // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh["dp", "tp"]._flatten("flat")
    return mesh


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_plain", [False, True])
def test_what_is_on_a_slice_counts_once(
    case: Sequence[tuple[tuple[str, ...], Sequence[Placement]]], is_plain: bool, pg
) -> None:
    mesh = make_mesh(pg)
    whole = [torch.randn(8, 6, device=pg.device) for _ in case]
    made = [distribute_tensor(t, mesh[names], at) for t, (names, at) in zip(whole, case, strict=True)]
    expected = torch.cat([t.double().flatten() for t in whole]).norm()
    if not is_plain:
        found = optim.get_total_norm(made)
        assert_near(found, expected, n=2, what="norm")
        return
    groups = [
        {"params": [torch.nn.Parameter(t.to_local())], "mesh": mesh[names], "placements": at}
        for t, (names, at) in zip(made, case, strict=True)
    ]
    for group in groups:
        group["params"][0].grad = group["params"][0].detach().clone()
    optimizer = optim.AdamW(groups, max_norm=1.0)
    optimizer.step()
    assert_near(optimizer.grad_norm, expected, n=2, what="norm")


@pytest.mark.parametrize("names", [[DP, BOTH], [DP, TP], [TP, BOTH]])
def test_slices_of_a_dimension_that_is_taken_apart(names: Sequence[tuple[str, ...]], pg) -> None:
    line = init_device_mesh(pg.device.type, (pg.size,), mesh_dim_names=("world",))
    mesh = line._unflatten(0, (pg.size // 2, 2), ("dp", "tp"))
    mesh["dp", "tp"]._flatten("flat")
    whole = [torch.randn(8, 6, device=pg.device) for _ in names]
    made = [
        distribute_tensor(t, mesh[its], [Shard(k) for k in range(len(its))])
        for t, its in zip(whole, names, strict=True)
    ]
    expected = torch.cat([t.double().flatten() for t in whole]).norm()
    assert_near(optim.get_total_norm(made), expected, n=2, what="norm")


def test_fsdp_over_a_model_of_which_tensor_parallelism_has_left_the_norm(pg) -> None:
    mesh = make_mesh(pg)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.RMSNorm(8), torch.nn.Linear(8, 12, bias=False), torch.nn.Linear(12, 8, bias=False)
    ).to(pg.device)
    x = torch.randn(4, 8, device=pg.device)
    whole = copy.deepcopy(model).double()
    whole(x.double()).square().sum().backward()
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model(x).square().sum().backward()
    found = optim.clip_grad_norm_(model.parameters(), 1.0)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor().double(), q.grad, rtol=2e-5, atol=1e-6)
