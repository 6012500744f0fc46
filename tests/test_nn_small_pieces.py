"""Norms of images whose channels come last, where a rank has nothing or one pixel, which is stored in both ways."""

from __future__ import annotations

import pytest
import torch
from dtensor_cases import make_mesh
from nn_cases import S0, S1, S2
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Placement
from torch_answers import assert_beside

import shardfuse
from shardfuse import DeviceMesh, nn
from shardfuse.nn.placement import TensorPlacement

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


@pytest.mark.parametrize("images", [2, 3])
@pytest.mark.parametrize("name", NORMS)
def test_dtensors_of_one_image_keep_their_format(name: str, images: int) -> None:
    """torch gives the local tensor of one image another stride of the batch than that of several."""
    make, by_torch = NORMS[name]
    whole, seed = torch.randn(2, images, 4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = whole.clone().requires_grad_()
    wanted = by_torch().double()(leaf)
    wanted.backward(seed)

    def run(rank: int, size: int) -> None:
        mesh, ordered = make_mesh((2,)), whole.contiguous(memory_format=LAST)

        def distributed(x: torch.Tensor) -> DTensor:
            local = x.tensor_split(2)[rank] if images == 2 else x.split(2)[rank]
            return DTensor.from_local(local, mesh, [S0], run_check=False, shape=x.shape, stride=x.stride())

        module = make(mesh=DeviceMesh.from_torch(mesh), input=S0).double()
        x = distributed(ordered).requires_grad_()
        found = module(x)
        assert found.to_local().is_contiguous(memory_format=LAST)
        found.backward(distributed(seed.contiguous(memory_format=LAST)))
        assert x.grad is not None
        for ours, right in ((found.detach(), wanted), (x.grad, leaf.grad)):
            assert_beside(ours.full_tensor().flatten(2), right.detach().flatten(2))

    run_ranks(2, run)


def test_compiled_for_any_size() -> None:
    """Of symbolic sizes too, from the second batch on: 9 samples over 4 ranks leave the last one nothing."""

    def run() -> list[torch.Tensor]:
        torch._dynamo.reset()
        rank = shardfuse.initialize().rank
        module = nn.BatchNorm2d(4, mesh=DeviceMesh(range(4)), input=S0)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        found: list[torch.Tensor] = []
        for samples in (7, 10, 9):
            whole = torch.randn(samples, 4, 3, 3, generator=torch.Generator().manual_seed(1))
            each = -(-samples // 4)
            x = whole[rank * each : (rank + 1) * each].clone(memory_format=LAST)
            with torch._dynamo.config.patch(recompile_limit=64):  # of four ranks in one process
                found.append(compiled(x, unsharded=tuple(whole.shape)))
        return found

    ranks = shardfuse.simulate(run, 4)
    for k, samples in enumerate((7, 10, 9)):
        whole = torch.randn(samples, 4, 3, 3, generator=torch.Generator().manual_seed(1))
        found = torch.cat([own[k] for own in ranks])
        torch.testing.assert_close(found, torch.nn.BatchNorm2d(4)(whole), rtol=1e-5, atol=1e-5)


def test_no_piece_is_smaller_than_the_last() -> None:
    sizes = [(rows, columns) for rows in range(9) for columns in (1, 2, 5)]

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh([[0, 1, 2], [3, 4, 5]])
        both, each = TensorPlacement.of("x", [S0, S0], mesh), TensorPlacement.of("x", [S1, S0], mesh)
        for placed in (both, each):
            for shape in sizes:
                least, here = placed.smallest_shape(mesh, shape), placed.local_shape(mesh, shape)
                assert all(a <= b for a, b in zip(least, here, strict=True))
                assert rank < 5 or least == here

    run_ranks(6, run)


def test_one_image_without_a_mesh_is_laid_out_as_by_torch() -> None:
    image = torch.randn(6, 4, 8).permute(2, 0, 1)[None]
    assert nn.GroupNorm(2, 8)(image).stride() == torch.nn.GroupNorm(2, 8)(image).stride()
