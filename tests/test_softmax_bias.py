"""The gradient of a bias that is added to the scores, where ranks have one head, sample or column each: the one element
that the bias has along that dim may be this rank's, or the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import S0, S1, R
from ranks import run_ranks
from torch.distributed.tensor import Placement, Shard
from torch_answers import assert_beside

from shardfuse import DeviceMesh, nn
from shardfuse.errors import ModuleInputError, PlacementError
from shardfuse.nn import functional
from shardfuse.nn.library import module_of
from shardfuse.nn.mask_placement import with_mask

SHAPE = (2, 2, 3, 2)
"""[samples, heads, queries, keys], of which each but the third may be cut into ones."""


def eager(x: torch.Tensor, bias: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    bias = bias.clone().requires_grad_()
    (0.5 * x + bias).softmax(-1).backward(seed)
    assert bias.grad is not None
    return bias.grad


def drawn(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return numbers(SHAPE, 1, torch.float64), numbers(shape, 2, torch.float64), numbers(SHAPE, 3, torch.float64)


LOCAL: list[tuple[tuple[int, ...], int, Placement | None]] = [
    ((1, 2, 3, 2), 1, S1),
    ((2, 2, 3, 2), 1, S1),
    ((2, 1, 2), 1, S0),
    ((1, 1, 3, 2), 1, R),
    ((2, 2, 3, 2), 0, S0),
    ((1, 2, 3, 2), 0, R),
    ((2, 3, 2), 0, None),
    ((3, 2), 1, None),
    ((1, 2, 3, 2), 3, Shard(3)),
]
"""Shapes of a bias; the dim of x that is cut; how the bias is placed, None where its shape tells."""


@pytest.mark.parametrize(("shape", "dim", "placed"), LOCAL)
@pytest.mark.parametrize("is_told", [False, True], ids=["even", "unsharded="])
def test_pieces(shape: tuple[int, ...], dim: int, placed: Placement | None, is_told: bool) -> None:
    x, bias, seed = drawn(shape)
    right = eager(x, bias, seed)

    def pieces(whole: torch.Tensor, at: Placement | None, rank: int) -> torch.Tensor:
        if at is None or at.is_replicate():
            return whole
        assert isinstance(at, Shard)
        return whole.chunk(2, at.dim)[rank].clone()

    def run(rank: int, size: int) -> None:
        cut, options = Shard(dim), {} if placed is None else {"mask": placed}
        module = nn.Softmax(-1, 0.5, mesh=DeviceMesh(range(2)), input=cut, **options)
        own = pieces(bias, placed, rank).clone().requires_grad_()
        told = {"unsharded": SHAPE} if is_told else {}
        module(pieces(x, cut, rank), own, **told).backward(pieces(seed, cut, rank))
        assert own.grad is not None
        assert_beside(own.grad, pieces(right, placed, rank), "the bias's gradient")

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("shape", "at", "placed"),
    [
        ((1, 2, 3, 2), [S1], [S1]),
        ((1, 1, 3, 2), [S1], [R]),
        ((2, 1, 3, 2), [S0], [S0]),
        ((1, 2, 3, 2), [S0, S1], [R, S1]),
        ((2, 2, 3, 2), [S0, S1], [S0, S1]),
        ((2, 1, 3, 2), [S1, S0], [R, S0]),
        ((2, 3, 2), [S0, S1], [R, S0]),
        ((2, 2, 1, 2), [R, S1], [R, S1]),
    ],
)
def test_dtensors(shape: tuple[int, ...], at: list[Placement], placed: list[Placement]) -> None:
    """Which say where they are: nothing has to be told."""
    x, bias, seed = drawn(shape)
    right = eager(x, bias, seed)

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,) * len(at))
        module = nn.Softmax(-1, 0.5, mesh=DeviceMesh(mesh.mesh), input=at)
        learned = distribute(bias, mesh, placed).requires_grad_()
        module(distribute(x, mesh, at), learned).backward(distribute(seed, mesh, at))
        assert learned.grad is not None
        assert_beside(learned.grad.full_tensor(), right, "the bias's gradient")

    run_ranks(2 ** len(at), run)


def test_what_no_shape_tells_is_asked_for() -> None:
    def run(rank: int, size: int) -> None:
        module = nn.LogSoftmax(mesh=DeviceMesh(range(2)), input=S1)
        x, bias = torch.ones(2, 1, 3, 2), torch.ones(1, 1, 3, 2, requires_grad=True)
        with pytest.raises(ModuleInputError, match=r"LogSoftmax: mask has one element along a dim .* mask="):
            module(x, bias)
        with torch.no_grad():
            module(x, bias)
        module(x, bias.detach())
        module(torch.ones(2, 2, 3, 2), bias).sum().backward()  # two heads: one bias for both, and for all ranks

    run_ranks(2, run)


def test_an_op_of_a_graph_knows_how_the_bias_is_placed() -> None:
    """By its text, which is all that a compiled graph has of the module."""

    def run(rank: int, size: int) -> None:
        module = nn.Softmax(mesh=DeviceMesh(range(2)), input=S1, mask=S1)
        x, bias = torch.ones(2, 1, 3, 2), torch.ones(1, 1, 3, 2)
        for placed, shards in ((module._mask, (1,)), (None, (None,))):
            made = module_of("softmax", with_mask(module.twin_text, placed))
            for found in (made, module.twin(mask=placed)):
                assert found.bind((x, bias), None).arguments[1].shards == shards

    run_ranks(2, run)


def test_pieces_of_two_sizes_along_one_dim_and_one_a_rank_along_another() -> None:
    """Of 3 samples and 2 heads over 2 x 2 ranks: the bias of all heads has the sum over both, of own samples."""
    x, bias, seed = (
        numbers((3, *sizes), k, torch.float64) for k, sizes in enumerate(((2, 3, 2), (1, 3, 2), (2, 3, 2)))
    )
    right = eager(x, bias, seed)

    def run(rank: int, size: int) -> None:
        i, j = divmod(rank, 2)
        own = bias.chunk(2)[i].clone().requires_grad_()
        module = nn.Softmax(-1, 0.5, mesh=DeviceMesh([[0, 1], [2, 3]]), input=[S0, S1], mask=[S0, R])
        given = x.chunk(2)[i].chunk(2, 1)[j].contiguous()
        module(given, own, unsharded=x.shape).backward(seed.chunk(2)[i].chunk(2, 1)[j].contiguous())
        assert own.grad is not None
        assert_beside(own.grad, right.chunk(2)[i], "the bias's gradient")

    run_ranks(4, run)


def test_a_bias_of_all_ranks_beside_pieces_of_several_sizes_is_refused_on_all() -> None:
    """Of two heads over three ranks: two have one, and cannot tell it from their own."""

    def run(rank: int, size: int) -> None:
        module = nn.Softmax(mesh=DeviceMesh(range(3)), input=S1, mask=R)
        x = torch.ones(2, 2, 3, 2).tensor_split([1, 2], 1)[rank]
        with pytest.raises(ModuleInputError, match="a gradient that is wanted"):
            module(x, torch.ones(1, 1, 3, 2, requires_grad=True), unsharded=(2, 2, 3, 2))

    run_ranks(3, run)


@pytest.mark.parametrize("placed", [S1, Shard(-1)], ids=str)
def test_a_mask_that_is_cut_otherwise_than_x_is_refused(placed: Placement) -> None:
    """[heads, queries, keys] are counted by themselves: heads are dim 0."""

    def run(rank: int, size: int) -> None:
        module = nn.Softmax(mesh=DeviceMesh(range(2)), input=S1, mask=placed)
        with pytest.raises(PlacementError, match=r"mask=Shard\(\d\) does not fit x, of which that mesh dimension cuts"):
            module(torch.ones(2, 1, 3, 2), torch.ones(1, 3, 2, requires_grad=True))

    run_ranks(2, run)


def test_a_module_that_was_pickled_before_it_had_a_mask() -> None:
    module = nn.Softmax(-1, 0.5)
    state = module.__getstate__()
    state.pop("_mask")
    again = nn.Softmax.__new__(nn.Softmax)
    again.__setstate__(state)
    assert torch.equal(again(torch.ones(2, 3)), module(torch.ones(2, 3)))


@pytest.mark.parametrize("function", [functional.softmax, functional.log_softmax])
def test_a_bias_beside_rows_of_no_element_has_a_gradient_of_zeros(function: Callable[..., torch.Tensor]) -> None:
    x, bias = torch.randn(0, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    function(x, 0, mask=bias).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.zeros(2))
