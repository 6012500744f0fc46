"""GatedMLP over layers whose weights are DTensors, against torch's own ops unsharded in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import S0, S1, R
from ranks import run_ranks
from torch.distributed.tensor import Placement
from torch.nn import functional
from torch_answers import assert_beside

from shardfuse import nn
from shardfuse.errors import PlacementError

FEATURES, HIDDEN = 4, 7  # which 2 ranks share unevenly


def weights() -> list[torch.Tensor]:
    shapes = (HIDDEN, FEATURES), (HIDDEN, FEATURES), (FEATURES, HIDDEN)
    return [numbers(shape, k, torch.float64) for k, shape in enumerate(shapes)]


def layers(mesh: object, placements: Sequence[Placement | None]) -> list[torch.nn.Module]:
    made = []
    for full, at in zip(weights(), placements, strict=True):
        layer = torch.nn.Linear(full.shape[1], full.shape[0], bias=False, device="meta")
        layer.weight = torch.nn.Parameter(full if at is None else distribute(full, mesh, [at]))
        made.append(layer)
    return made


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_column_and_row_parallel(activation: Literal["silu", "gelu"]) -> None:
    x, weight = numbers((3, 2, FEATURES), 5, torch.float64), numbers((3, 2, FEATURES), 6, torch.float64)
    gate, up, down = (w.requires_grad_() for w in weights())
    plain = x.clone().requires_grad_()
    gated = getattr(functional, activation)(functional.linear(plain, gate)) * functional.linear(plain, up)
    wanted = functional.linear(gated, down)
    wanted.backward(weight)

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        for at in ((S0, S0, S1), (R, R, R)):
            made = layers(mesh, at)
            mlp = nn.GatedMLP(*made, activation=activation)
            given = distribute(x, mesh, [R]).requires_grad_()
            found = mlp(given)
            assert_beside(found.full_tensor().detach(), wanted.detach(), "result")
            found.redistribute(mesh, [R]).backward(distribute(weight, mesh, [R]))
            assert_beside(given.grad.full_tensor(), plain.grad, "gradient of x")
            for layer, want in zip(made, (gate, up, down), strict=True):
                assert_beside(layer.weight.grad.full_tensor(), want.grad, "gradient of a weight")
            assert len(list(mlp.modules())) == 5  # what is made for a mesh is no part of it

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("placements", "at", "message"),
    [
        ((S1, S1, S1), S1, r"gate_proj\(x\)=P.* does not fit GatedMLP.*: make gate_proj column-parallel, or redis"),
        (
            (S0, R, S1),
            R,
            r"up_proj\(x\)=R.* does not fit \(Shard\(dim=1\),\).*: shard the weights of both layers alike",
        ),
    ],
    ids=["row-parallel", "not alike"],
)
def test_what_cannot_be_gated(placements: Sequence[Placement], at: Placement, message: str) -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        mlp = nn.GatedMLP(*layers(mesh, placements))
        with pytest.raises(PlacementError, match=message):
            mlp(distribute(numbers((3, FEATURES), 5, torch.float64), mesh, [at]))

    run_ranks(2, run)


class Local(torch.nn.Module):
    """A layer whose result is taken out of its DTensor."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).to_local()


def test_a_layer_that_gives_plain_tensors() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        mlp = nn.GatedMLP(*layers(mesh, (S0, S0, S1)))
        mlp.up_proj = Local(mlp.up_proj)
        with pytest.raises(
            PlacementError, match=r"gate_proj\(x\)=S\(1\) does not fit a plain tensor.* what up_proj gives"
        ):
            mlp(distribute(numbers((3, FEATURES), 5, torch.float64), mesh, [R]))

    run_ranks(2, run)


def test_compiled() -> None:
    torch._dynamo.reset()
    x = numbers((3, FEATURES), 5, torch.float64)

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((1,))
        mlp = nn.GatedMLP(*layers(mesh, (S0, S0, S1)))
        given = distribute(x, mesh, [R])
        found = torch.compile(mlp, backend="aot_eager", fullgraph=True)(given)
        assert_beside(found.full_tensor().detach(), mlp(given).full_tensor().detach(), "result")

    run_ranks(1, run)
