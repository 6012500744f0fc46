"""Norms of images whose channels come last, where a rank has nothing or one pixel, which is stored in both ways."""

from __future__ import annotations

import pytest
import torch
from nn_cases import S0, S2
from ranks import run_ranks
from torch.distributed.tensor import Placement
from torch_answers import assert_beside

from shardfuse import DeviceMesh, nn

LAST, SECOND = torch.channels_last, torch.contiguous_format
NORMS = {
    "BatchNorm2d": (lambda **at: nn.BatchNorm2d(4, **at), lambda: torch.nn.BatchNorm2d(4)),
    "GroupNorm": (lambda **at: nn.GroupNorm(2, 4, **at), lambda: torch.nn.GroupNorm(2, 4)),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("formats", [[LAST], [SECOND, LAST], [LAST, SECOND]], ids=["last", "both", "and back"])
@pytest.mark.parametrize(
    ("shape", "cut"), [((1, 4, 6, 6), S0), ((2, 4, 3, 1), S2), ((3, 4, 5, 5), S0), ((2, 4, 3, 5), S2)], ids=str
)
def test_ranks_run_one_program(
    shape: tuple[int, ...], cut: Placement, formats: list[torch.memory_format], name: str
) -> None:
    make, by_torch = NORMS[name]
    dim = 0 if cut == S0 else 2
    generator = torch.Generator().manual_seed(0)
    whole, seed = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    leaf = whole.clone().requires_grad_()
    wanted = by_torch().double()(leaf)
    wanted.backward(seed)

    def piece(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor.detach().tensor_split(2, dim)[rank]

    def run(rank: int, size: int) -> None:
        module = make(mesh=DeviceMesh(range(2)), input=cut).double()
        for kept in formats:
            x = piece(whole, rank).clone(memory_format=kept).requires_grad_()
            found = module(x, unsharded=shape)
            assert found.shape == x.shape
            assert found.numel() == 0 or found.is_contiguous(memory_format=kept)
            found.backward(piece(seed, rank))
            assert x.grad is not None
            if found.numel():
                for ours, right in ((found.detach(), wanted), (x.grad, leaf.grad)):
                    assert_beside(ours.flatten(), piece(right, rank).flatten())  # rows of one or more pixels

    run_ranks(2, run)
