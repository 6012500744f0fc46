"""Running statistics between a forward and its backward: a checkpoint repeats it, or another forward moves them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from nn_cases import S0
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardfuse import DeviceMesh, nn
from shardfuse.nn import functional

BEHIND: dict[str, Callable[[], list[torch.nn.Module]]] = {
    "last": list,  # the repetition stops in the norm
    "a view behind": lambda: [torch.nn.Flatten()],
    "an activation behind": lambda: [torch.nn.ReLU()],
}


def trained(model: torch.nn.Module, x: torch.Tensor, *, reentrant: bool) -> dict[str, torch.Tensor]:
    result = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
    result.square().sum().backward()
    return {**model.state_dict(), **{f"{name}'s gradient": p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("behind", BEHIND)
def test_running_statistics_move_in_both_forwards(behind: str, momentum: float | None, reentrant: bool) -> None:
    first, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
    found, wanted = (
        trained(
            torch.nn.Sequential(copy.deepcopy(first), kind(4, momentum=momentum), *BEHIND[behind]()),
            x,
            reentrant=reentrant,
        )
        for kind in (nn.BatchNorm1d, torch.nn.BatchNorm1d)
    )
    assert found["1.num_batches_tracked"] == 2
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)


def test_of_a_mesh() -> None:
    """Local tensors and DTensors: the exchange of the repetition is of all ranks."""
    whole = torch.randn(8, 4)
    theirs = torch.nn.BatchNorm1d(4)
    trained(theirs, whole, reentrant=False)

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        mine = whole.chunk(size)[rank]
        for x in (mine, DTensor.from_local(mine, mesh.to_torch("cpu"), [S0])):
            module = nn.BatchNorm1d(4, mesh=mesh, input=S0)
            trained(module, x, reentrant=False)
            assert module.num_batches_tracked == 2
            torch.testing.assert_close(module.running_mean, theirs.running_mean)
            torch.testing.assert_close(module.running_var, theirs.running_var)

    run_ranks(2, run)


def test_of_the_function() -> None:
    x = torch.randn(8, 4)
    found, wanted = ([torch.zeros(4), torch.ones(4)] for _ in range(2))
    for call, kept in ((functional.batch_norm, found), (torch.nn.functional.batch_norm, wanted)):
        given = x.clone().requires_grad_()
        y = checkpoint(lambda t, call=call, kept=kept: call(t, *kept, training=True), given, use_reentrant=False)
        y.square().sum().backward()
    torch.testing.assert_close(found, wanted)


def test_of_evaluation_nothing_moves() -> None:
    module = nn.BatchNorm1d(4).eval()
    trained(module, torch.randn(8, 4), reentrant=False)
    assert module.num_batches_tracked == 0
    assert not module.running_mean.any()


def test_statistics_that_moved_before_the_backward_of_an_evaluation_are_reported() -> None:
    """torch's own gradient is that of the moved ones."""
    module, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    result = module.eval()(x.clone().requires_grad_())
    module.train()(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
