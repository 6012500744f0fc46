"""Running statistics between a forward and its backward: a checkpoint repeats it, or another forward moves them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import S0, S1, S2, P, Placements, R
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from torch_answers import assert_beside

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


LAST = Shard(-1)
TWO_RESULTS: dict[str, tuple[Callable[[DeviceMesh | None], torch.nn.Module], tuple[int, ...], Sequence[Placements]]] = {
    "rows": (lambda m: nn.AddRMSNorm(6, mesh=m, **at(m, input=S0, residual=S0)), (5, 6), ([S0], [S0])),
    "hidden": (lambda m: nn.AddRMSNorm(7, mesh=m, **at(m, input=LAST, residual=LAST)), (5, 7), ([S1], [S1])),
    "gradient of summands": (
        lambda m: nn.AddRMSNorm(6, mesh=m, **at(m, input=P, residual=S0, output=R, output_grad=P)), (4, 6), ([P], [S0])
    ),
    "replicated": (lambda m: nn.AddRMSNorm(6, mesh=m), (5, 6), ([R], [R])),
    "rotary": (lambda m: nn.RotaryEmbedding(6, mesh=m, **at(m, input=S1)), (2, 4, 3, 6), ([S1], [S1])),
    "rotary of a sequence": (lambda m: nn.RotaryEmbedding(6, mesh=m, **at(m, input=S2)), (2, 3, 5, 6), ([S2], [S2])),
}  # fmt: skip


def at(mesh: DeviceMesh | None, **placements: object) -> dict[str, object]:
    return {} if mesh is None else placements


@pytest.mark.parametrize("case", TWO_RESULTS)
def test_one_of_two_dtensors_may_stay_unused(case: str) -> None:
    """A reentrant checkpoint fills a plain zero in for the gradient of the other, and a function of Python's None."""
    make, shape, placements = TWO_RESULTS[case]
    full = [numbers(shape, k, torch.float64) for k in range(2)]
    weight = numbers(shape, 2, torch.float64)

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((size,))
        module, alone = make(DeviceMesh.from_torch(mesh)), make(None)
        for used in range(2):
            wanted = [t.clone().requires_grad_() for t in full]
            (alone(*wanted)[used] * weight).sum().backward()
            for way in (partial(checkpoint, module, use_reentrant=True), partial(dropped, used, module)):
                given = [distribute(t, mesh, p).requires_grad_() for t, p in zip(full, placements, strict=True)]
                result = way(*given)[used]
                result.backward(distribute(weight, mesh, result.placements))
                for k, (leaf, right) in enumerate(zip(given, wanted, strict=True)):
                    found = torch.zeros(shape) if leaf.grad is None else leaf.grad.full_tensor()
                    assert_beside(found.double(), torch.zeros_like(right) if right.grad is None else right.grad, str(k))

    run_ranks(2, run)


def dropped(used: int, module: torch.nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    """The result that is used, twice; the other has a gradient of None."""

    class Dropping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, *tensors: torch.Tensor) -> torch.Tensor:
            return tensors[used].view_as(tensors[used])

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return tuple(gradient if k == used else None for k in range(2))

    return [Dropping.apply(*module(*given))] * 2
