"""redistribute with a dtype: rounded on arrival, and the gradient comes back in the tensor's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from module_cases import ONE, check_module, each_rank
from nn_cases import S0, S1, Here, P, Placements, R
from ranks import run_ranks
from torch.distributed.tensor import Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardfuse import DeviceMesh
from shardfuse.errors import PlacementError
from shardfuse.nn import redistribute


def check(here: Here, source: Placements, target: Placements, to: torch.dtype, dtype: torch.dtype) -> None:
    x = here.sample(source, (4, 6, 3), dtype, 1)
    gradient = here.sample(target, (4, 6, 3), to, 2)

    def call(t: torch.Tensor) -> torch.Tensor:
        result = redistribute(t, here.mesh, source, target, dtype=to)
        assert result.dtype == to
        return result

    check_module(
        torch.nn.Identity(),
        lambda t: (t if t.dtype is torch.float64 else t.to(to),),  # in float64 nothing is rounded
        {"x": x}, {}, [gradient], dtype, call=call,
    )  # fmt: skip


def test_casts_on_the_way() -> None:
    narrow = {"to": torch.bfloat16, "dtype": torch.float32}
    wide = {"to": torch.float32, "dtype": torch.bfloat16}
    cases = {
        f"{name}{options}": partial(check, source=source, target=target, **options)
        for name, source, target in (
            ("slice", [R], [S1]), ("gather", [S1], [R]), ("reduce", [P], [S0]), ("move", [S0], [S1]),
            ("stay", [S0], [S0]),
        )
        for options in (narrow, wide)
    }  # fmt: skip
    each_rank([2], cases)


@pytest.mark.parametrize(
    "source", [Partial("max"), _StridedShard(0, split_factor=2)], ids=["maximum", "strided shards"]
)
def test_placements_that_are_refused_under_torch_compile_too(source: Partial | _StridedShard) -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda x: redistribute(x, ONE.mesh, source, R), backend="eager")
    with pytest.raises(PlacementError, match="source="):
        call(torch.ones(4, 4))


@pytest.mark.parametrize(("target", "grad"), [(R, S0), (S1, P), (S1, R), (S1, S0)])
def test_a_gradient_that_is_cut_otherwise_than_the_result(target: Placement, grad: Placement) -> None:
    """The backward would have other sizes than the input, or, where it is broadcast to those, other numbers."""

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        with pytest.raises(PlacementError, match=r"^grad=.* does not fit target, as which the gradient is cut: "):
            redistribute(torch.ones(2, 4), mesh, S0, target, grad=grad)
        x = torch.ones(2, 4, requires_grad=True)
        redistribute(x, mesh, S0, S1, grad=Shard(-1)).sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(2, 4))

    run_ranks(2, run)
    assert redistribute(torch.ones(4, 4), ONE.mesh, S0, target, grad=grad).shape == (4, 4), "one rank has all of it"


def test_a_placement_that_is_a_word_is_quoted_whole() -> None:
    with pytest.raises(PlacementError, match=r"^source='Shard\(0\)' does not fit a placement: "):
        redistribute(torch.ones(4, 4), ONE.mesh, "Shard(0)", R)  # pyright: ignore[reportArgumentType]
