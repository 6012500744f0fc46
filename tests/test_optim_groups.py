"""AdamW whose groups change between steps: what each asks for now is done, as by torch's, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch.distributed.tensor import Replicate, Shard
from torch.nn import Parameter

from shardfuse import DeviceMesh, optim
from shardfuse.optim.optim_errors import OptimizerArgumentError

Groups = list[dict[str, object]]
STEPS = 6


def switched(groups: Groups) -> None:
    groups[0]["amsgrad"] = False


def switched_the_other(groups: Groups) -> None:
    groups[1]["amsgrad"] = False


def moved(groups: Groups) -> None:
    """The last parameter of the first group is the first one of the second: all follow one another as before."""
    first, second = groups[0]["params"], groups[1]["params"]
    assert isinstance(first, list)
    assert isinstance(second, list)
    second.insert(0, first.pop())


def stepped(
    make: Callable[[Groups], torch.optim.Optimizer], change: Callable[[Groups], None], amsgrad: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Parameters and largest second moments behind six steps, of which the third and later are of other groups."""
    parameters = [Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(4)]
    optimizer = make(
        [
            {"params": parameters[:2], "lr": 0.1, "amsgrad": amsgrad},
            {"params": parameters[2:], "lr": 0.01, "weight_decay": 0.3, "amsgrad": True},
        ]
    )
    for k in range(STEPS):
        if k == 2:
            change(optimizer.param_groups)
        for p in parameters:
            p.grad = torch.full((3,), 10.0 / (1 + k) ** 2, dtype=torch.float64)
        optimizer.step()
    return [p.detach() for p in parameters], [optimizer.state[p].get("max_exp_avg_sq") for p in parameters]


@pytest.mark.parametrize(
    ("change", "amsgrad"), [(switched, True), (switched_the_other, True), (switched_the_other, False), (moved, True)]
)  # torch's own does not switch it on
def test_like_torchs(change: Callable[[Groups], None], amsgrad: bool) -> None:
    found, largest = stepped(lambda groups: optim.AdamW(groups, betas=(0.5, 0.9)), change, amsgrad)
    right, theirs = stepped(lambda groups: torch.optim.AdamW(groups, betas=(0.5, 0.9)), change, amsgrad)
    torch.testing.assert_close(found, right, rtol=1e-14, atol=0)
    for ours, other in zip(largest, theirs, strict=True):
        assert (ours is None) == (other is None)
        if ours is not None and other is not None:
            torch.testing.assert_close(ours, other, rtol=1e-14, atol=0)


def norm_squared(optimizer: optim.AdamW) -> int:
    optimizer.step()
    assert optimizer.grad_norm is not None
    return round(optimizer.grad_norm.item() ** 2)


@pytest.mark.parametrize("is_first", [True, False])
def test_placements_may_be_assigned_between_steps(is_first: bool) -> None:
    """Set, changed, taken away and left half said, as the constructor takes them: what is said holds for the next."""

    def run(rank: int, size: int) -> list[int]:
        mesh = DeviceMesh(range(size))
        p = Parameter(torch.ones(2, 3))
        p.grad = torch.ones(2, 3)
        optimizer = optim.AdamW([p], max_norm=1.0)
        (group,) = optimizer.param_groups
        found = [] if is_first else [norm_squared(optimizer)]
        said = [
            (mesh, Shard(0)),
            (mesh, [Replicate()]),
            (mesh, (Shard(-1),)),
            (mesh, Shard(1)),
            (None, None),
        ]
        for group["mesh"], group["placements"] in said:
            found += [norm_squared(optimizer), norm_squared(optimizer)]
        group["mesh"], group["placements"] = mesh, Shard(0)
        found.append(norm_squared(optimizer))
        del group["mesh"], group["placements"]
        found.append(norm_squared(optimizer))
        before, group["mesh"] = p.detach().clone(), mesh
        with pytest.raises(
            OptimizerArgumentError, match=r"AdamW.step: placements is None, expected Shard or Replicate"
        ):
            optimizer.step()
        assert torch.equal(p, before)
        group["placements"] = Shard(0)
        return [*found, norm_squared(optimizer)]

    once, twice = 6, 12
    wanted = [twice, twice, once, once, twice, twice, twice, twice, once, once, twice, once, twice]
    for rank, found in enumerate(run_ranks(2, run)):
        assert found == ([] if is_first else [once]) + wanted, rank
