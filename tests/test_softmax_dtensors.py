"""Softmax of DTensors: masks, batches of one row, dims without elements."""

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import S0, S1, S2, R
from ranks import run_ranks
from torch.nn import functional
from torch_answers import assert_beside

from shardfuse import DeviceMesh, nn
from shardfuse.errors import ModuleInputError, PlacementError


def test_a_mask_that_is_a_dtensor() -> None:
    x, mask = numbers((4, 5, 7), 1, torch.float64), numbers((5, 7), 2, torch.float64) > -0.5
    bias = numbers((1, 7), 3, torch.float64)
    bias = bias.clone().requires_grad_()
    weights = numbers(x.shape, 4, torch.float64)
    wanted = (x + bias).softmax(-1)
    wanted.backward(weights)

    def run(rank: int, size: int) -> None:
        torch_mesh = make_mesh((2,))
        mesh = DeviceMesh(torch_mesh.mesh)
        for at, fitting in ((S1, S0), (S2, S1), (S0, R)):
            module, given = nn.Softmax(mesh=mesh, input=at), distribute(x, torch_mesh, [at])
            found = module(given, distribute(mask, torch_mesh, [fitting])).full_tensor()
            assert_beside(found, x.masked_fill(~mask, -torch.inf).softmax(-1), "result")
            with pytest.raises(PlacementError, match="mask"):
                module(given, distribute(mask, torch_mesh, [R if fitting != R else S0]))
        learned = distribute(bias.detach(), torch_mesh, [R]).requires_grad_()
        even = distribute(x, torch_mesh, [S0])
        found = nn.Softmax(mesh=mesh, input=S0)(even, learned)
        found.backward(distribute(weights, torch_mesh, [S0]))
        assert_beside(learned.grad.full_tensor(), bias.grad, "the mask's gradient")
        with pytest.raises(ModuleInputError, match="mask has a DTensor"):
            nn.Softmax(mesh=mesh, input=S0)(even.to_local(), learned)
        with pytest.raises(ModuleInputError, match="a gradient that is wanted"):
            nn.Softmax(mesh=mesh, input=S1)(distribute(x, torch_mesh, [S1]), learned)

    run_ranks(2, run)


def test_a_mask_of_one_row() -> None:
    """The last batch may be of one row, so that a rank has none: the mask may be sharded as it is, or replicated."""
    x, mask = numbers((3, 7), 1, torch.float64), numbers((1, 7), 2, torch.float64) > -0.5
    bias, weights = numbers((1, 7), 3, torch.float64), numbers((1, 7), 4, torch.float64)
    alone, beside = x[:1].clone().requires_grad_(), bias.clone().requires_grad_()
    wanted = alone.masked_fill(~mask, -torch.inf).softmax(-1)
    wanted.backward(weights)
    (x[:1] + beside).softmax(-1).backward(weights)

    def run(rank: int, size: int) -> None:
        torch_mesh = make_mesh((2,))
        module = nn.Softmax(mesh=DeviceMesh(torch_mesh.mesh), input=S0)
        for placed in (S0, R):
            row = distribute(x[:1], torch_mesh, [S0]).requires_grad_()
            found = module(row, distribute(mask, torch_mesh, [placed]))
            assert_beside(found.full_tensor().detach(), wanted.detach(), "result")
            found.backward(distribute(weights, torch_mesh, [S0]))
            assert_beside(row.grad.full_tensor(), alone.grad, "gradient")
        learned = distribute(bias, torch_mesh, [S0]).requires_grad_()
        module(distribute(x[:1], torch_mesh, [S0]), learned).backward(distribute(weights, torch_mesh, [S0]))
        assert_beside(learned.grad.full_tensor(), beside.grad, "the mask's gradient")
        replicated = distribute(bias, torch_mesh, [R]).requires_grad_()
        for rows in (1, 3):  # of which one rank has a row, or none: both refuse it
            with pytest.raises(ModuleInputError, match=r"a gradient that is wanted.*expand it and place it as x is"):
                module(distribute(x[:rows], torch_mesh, [S0]), replicated)
        given = distribute(x, torch_mesh, [S0])
        beside_all = bias.clone().requires_grad_()
        (x + beside_all).softmax(-1).square().sum().backward()
        placed_as_x = replicated.expand(x.shape).redistribute(placements=given.placements)
        module(given, placed_as_x).square().sum().full_tensor().backward()
        assert_beside(replicated.grad.full_tensor(), beside_all.grad, "the gradient of what was expanded")

    run_ranks(2, run)


def test_along_a_dim_in_shards_without_elements() -> None:
    def run(rank: int, size: int) -> None:
        torch_mesh = make_mesh((2,))
        mesh = DeviceMesh(torch_mesh.mesh)
        for make, wanted in ((nn.Softmax, functional.softmax), (nn.LogSoftmax, functional.log_softmax)):
            for shape, dim, at in (((3, 0), -1, S1), ((0, 3), 0, S0), ((3, 0), -1, S0), ((0, 3), -1, S0)):
                x = torch.ones(shape, dtype=torch.float64)
                given = distribute(x, torch_mesh, [at]).requires_grad_()
                found = make(dim, mesh=mesh, input=at)(given)
                assert found.shape == wanted(x, dim).shape
                found.full_tensor().sum().backward()
                assert given.grad.full_tensor().shape == shape

    run_ranks(2, run)
