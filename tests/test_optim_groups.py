"""AdamW whose groups change between steps: what each asks for now is done, as by torch's, and nothing else."""

from __future__ import annotations

import math
import re
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


NONSENSE: list[tuple[str, object, str]] = [
    ("lr", -1, "lr of param_groups[1] is -1, expected a number, 0 or more"),
    ("lr", -1e-9, "lr of param_groups[1] is -1e-09, expected a number, 0 or more"),
    ("lr", math.nan, "lr of param_groups[1] is nan, expected a number, 0 or more"),
    ("lr", "0.1", "lr of param_groups[1] is '0.1', expected a number"),
    ("lr", torch.tensor(-1.0), "lr of param_groups[1] is a Tensor of shape [], expected a number, 0 or more"),
    ("betas", (0.9,), "betas of param_groups[1] is (0.9,), expected two numbers"),
    ("betas", (0.9, 0.99, 0.999), "betas of param_groups[1] is (0.9, 0.99, 0.999), expected two numbers"),
    ("betas", (0.9, 1.0), "betas[1] of param_groups[1] is 1.0, expected a number from 0 up to, but not including, 1"),
    ("betas", [-0.1, 0.9], "betas[0] of param_groups[1] is -0.1, expected a number from 0 up to"),
    ("eps", -1e-8, "eps of param_groups[1] is -1e-08, expected a number, 0 or more"),
    ("weight_decay", -0.1, "weight_decay of param_groups[1] is -0.1, expected a number, 0 or more"),
    ("weight_decay", math.nan, "weight_decay of param_groups[1] is nan, expected a number, 0 or more"),
]


def two() -> list[Parameter]:
    made = [Parameter(torch.ones(3)) for _ in range(2)]
    for p in made:
        p.grad = torch.ones(3)
    return made


@pytest.mark.parametrize(("key", "value", "sentence"), NONSENSE)
def test_nonsense_of_a_group_is_refused_where_it_is_made(key: str, value: object, sentence: str) -> None:
    first, second = two()
    with pytest.raises(OptimizerArgumentError, match=f"^AdamW: {re.escape(sentence)}"):
        optim.AdamW([{"params": [first]}, {"params": [second], key: value}])
    optimizer = optim.AdamW([first])
    with pytest.raises(OptimizerArgumentError, match=f"^AdamW: {re.escape(sentence)}"):
        optimizer.add_param_group({"params": [second], key: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("key", "value", "sentence"), NONSENSE)
def test_nonsense_that_is_assigned_ends_the_step_before_anything_is_written(
    key: str, value: object, sentence: str
) -> None:
    tensors = two()
    optimizer = optim.AdamW([{"params": [p]} for p in tensors])
    optimizer.param_groups[1][key] = value
    with pytest.raises(OptimizerArgumentError, match=f"^AdamW.step: {re.escape(sentence)}"):
        optimizer.step()
    assert all(torch.equal(p, torch.ones(3)) for p in tensors)
    assert not optimizer.state


@pytest.mark.parametrize("group", [[], "weights", torch.ones(3), {"lr": 0.1}])
def test_what_is_no_group(group: object) -> None:
    optimizer = optim.AdamW(two())
    with pytest.raises(OptimizerArgumentError, match=r'^AdamW: a param group is .*, expected a dict with "params"'):
        optimizer.add_param_group(group)  # pyright: ignore[reportArgumentType]


def test_a_rate_that_a_scheduler_rounds_below_zero_makes_a_step() -> None:
    tensors = two()
    optimizer = optim.AdamW([{"params": tensors[:1], "betas": [0, 0.5], "eps": 0}, {"params": tensors[1:]}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 3, 0.0, 7)
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    assert -1e-17 < optimizer.param_groups[1]["lr"] < 0


def test_a_rate_that_is_no_number_yet_or_rounded_is_taken_with_its_group() -> None:
    first, second = two()
    optimizer = optim.AdamW([first])
    optimizer.add_param_group({"params": [second], "lr": -1e-14})
    meta = torch.empty(3, device="meta", requires_grad=True)
    optim.AdamW([{"params": [meta], "lr": torch.tensor(1e-3, device="meta")}])
