"""What errors of losses advise gives the loss of the unsharded tensors."""

from __future__ import annotations

import re

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from benchmarks.roundings import spacing
from shardfuse import DeviceMesh
from shardfuse.errors import ModuleArgumentError, ModuleInputError
from shardfuse.nn import CrossEntropyLoss, LinearCrossEntropyLoss
from shardfuse.nn import functional as ours

ROWS, FEATURES, CLASSES = 8, 4, 10


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, FEATURES, generator=generator, dtype=torch.float64) for n in (ROWS, CLASSES))
    return x, weight, torch.arange(ROWS)


ADVISED = {
    "rows": (Shard(0), "full_tensor", {"grad_placements": [Partial()]}),
    "summands": (Partial(), "full_tensor", {"grad_placements": [Partial()]}),
    "replicas": (Replicate(), "to_local", {"grad_placements": [Partial()]}),
}


@pytest.mark.parametrize("name", ADVISED)
def test_a_dtensor_in_place_of_local_rows(name: str) -> None:
    """``to_local`` of a part of the rows paired other rows on each rank, silently."""
    placement, method, options = ADVISED[name]
    x, weight, target = drawn()
    leaf = x.clone().requires_grad_()
    wanted = functional.cross_entropy(leaf @ weight.T, target)
    wanted.backward()

    def rank_main(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        loss = LinearCrossEntropyLoss(mesh=mesh, logits=Shard(-1))
        given = placed(x, rank, mesh, placement).requires_grad_()
        own = weight.chunk(size)[rank]
        with pytest.raises(ModuleInputError, match=re.escape(f"pass x.{method}(grad_placements=[Partial()])")):
            loss(given, own, target)
        found = loss(getattr(given, method)(**options), own, target)
        assert abs(found - wanted) <= 8 * spacing(wanted, torch.float64)
        found.backward()
        assert isinstance(given.grad, DTensor)
        assert leaf.grad is not None
        torch.testing.assert_close(given.grad.full_tensor(), leaf.grad, rtol=1e-14, atol=1e-15)

    run_ranks(2, rank_main)


def placed(x: Tensor, rank: int, mesh: DeviceMesh, placement: Placement) -> DTensor:
    pieces = {Shard(0): x.chunk(mesh.size), Replicate(): [x] * 2, Partial(): [0.25 * x, 0.75 * x]}
    return DTensor.from_local(pieces[placement][rank].clone(), mesh.to_torch("cpu"), [placement], run_check=False)


def test_a_weight_that_is_no_part_of_the_classes() -> None:
    _, weight, target = drawn()

    def rank_main(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        loss = LinearCrossEntropyLoss(mesh=mesh, logits=Shard(-1))
        x = drawn()[0]
        whole = placed(weight, rank, mesh, Replicate())
        with pytest.raises(ModuleInputError, match=re.escape("weight.redistribute(placements=[Shard(0)]).to_local()")):
            loss(x, whole, target)
        found = loss(x, whole.redistribute(placements=[Shard(0)]).to_local(), target)
        wanted = functional.cross_entropy(x @ weight.T, target)
        assert abs(found - wanted) <= 8 * spacing(wanted, torch.float64)

    run_ranks(2, rank_main)


CUT: dict[str, tuple[list[Placement], list[Placement], list[Placement], str, str]] = {
    "classes along one of two mesh dimensions": (
        [Replicate(), Shard(-1)], [Replicate(), Shard(0)], [Replicate(), Partial()],
        "[Replicate(), Shard(0)]", "[Replicate(), Partial()]",
    ),
    "classes along both": (
        [Shard(-1), Shard(-1)], [Shard(0), Shard(0)], [Partial(), Partial()],
        "[Shard(0), Shard(0)]", "[Partial(), Partial()]",
    ),
}  # fmt: skip
"""Where the logits live; then where weight and gradient of x do, and as the advice writes it."""


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("rows", [[Replicate(), Replicate()], [Shard(0), Replicate()]], ids=str)
def test_on_a_mesh_of_two_dimensions(name: str, rows: list[Placement]) -> None:
    """The advice has a placement for each mesh dimension; one for both gave other losses and gradients, silently."""
    logits, parts, gradient, of_weight, of_x = CUT[name]
    x, _, target = drawn()
    weight = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    wanted = functional.cross_entropy(leaves[0] @ leaves[1].T, target)
    wanted.backward()
    method = "full_tensor" if rows[0].is_shard() else "to_local"

    def rank_main(rank: int, size: int) -> None:
        mesh = DeviceMesh([[0, 1], [2, 3]])
        loss = LinearCrossEntropyLoss(mesh=mesh, logits=logits)
        there = mesh.to_torch("cpu")
        given = distribute_tensor(x.clone(), there, rows).requires_grad_()
        whole = distribute_tensor(weight.clone(), there, [Replicate(), Replicate()]).requires_grad_()
        placed = distribute_tensor(weight.clone(), there, parts)
        with pytest.raises(ModuleInputError, match=re.escape(f"pass x.{method}(grad_placements={of_x})")):
            loss(given, whole, target)
        with pytest.raises(
            ModuleInputError, match=re.escape(f"weight.redistribute(placements={of_weight}).to_local()")
        ):
            loss(x, whole, target)
        with pytest.raises(ModuleInputError, match=re.escape("pass weight.to_local()")):
            loss(x, placed, target)
        local = getattr(given, method)(grad_placements=gradient)
        found = loss(local, whole.redistribute(placements=parts).to_local(), target)
        assert abs(found - wanted) <= 8 * spacing(wanted, torch.float64)
        found.backward()
        for tensor, leaf in zip((given, whole), leaves, strict=True):
            assert isinstance(tensor.grad, DTensor)
            assert leaf.grad is not None
            torch.testing.assert_close(tensor.grad.full_tensor(), leaf.grad, rtol=1e-13, atol=1e-15)

    run_ranks(4, rank_main)


def test_weights_of_classes() -> None:
    """Divided by the sum of the weights, ignored targets without one."""
    logits, target = torch.randn(6, 9, dtype=torch.float64), torch.tensor([1, -100, 2, 3, 4, 5])
    weights = torch.rand(9, dtype=torch.float64) + 0.1
    with pytest.raises(ModuleArgumentError, match="divide their sum by the sum of these weights"):
        CrossEntropyLoss(weight=weights)
    own = torch.where(target == -100, 0.0, weights[target.clamp(min=0)])
    found = (ours.cross_entropy(logits, target, reduction="none") * own).sum() / own.sum()
    wanted = functional.cross_entropy(logits, target, weight=weights)
    assert abs(found - wanted) <= 8 * spacing(wanted, torch.float64)


def test_classes_along_dim_1() -> None:
    logits, target = torch.randn(2, 7, 5), torch.randint(7, (2, 5))
    with pytest.raises(ModuleInputError, match=r"last axis \(logits\.movedim\(1, -1\)"):
        ours.cross_entropy(logits, target)
    found = ours.cross_entropy(logits.movedim(1, -1), target)
    torch.testing.assert_close(found, functional.cross_entropy(logits, target))
