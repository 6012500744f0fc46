"""shardfuse.collectives: 16-bit sums over ranks, added in float32 and rounded once."""

from __future__ import annotations

import pytest
import torch

from shardfuse import collectives
from shardfuse.errors import CollectiveArgumentError

pytestmark = pytest.mark.mpi

SHAPES = ((5, 7), (9, 70000))


def given(shape: tuple[int, ...], size: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """What each rank has: 1 and more, or so little that a sum of 16 bits loses each of them.  Exact in float32."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(1, 16, shape, generator=generator) for _ in range(size)]
    step = torch.finfo(dtype).eps / 32
    return [(x * step if rank else 1 + x * step * 32).to(dtype).to(device) for rank, x in enumerate(drawn)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(dtype: torch.dtype, pg) -> None:
    for shape in SHAPES:
        parts = given(shape, pg.size, dtype, pg.device)
        total = torch.stack(parts).double().sum(0).to(dtype)
        assert torch.equal(collectives.all_reduce(parts[pg.rank]), total)
        pieces = [*total.chunk(pg.size, 1), *[total[:, :0]] * pg.size]
        assert torch.equal(collectives.reduce_scatter(parts[pg.rank], 1), pieces[pg.rank])
        if pg.size > 2:  # two numbers are rounded once by whoever adds them
            hops = parts[0]
            for x in parts[1:]:
                hops = hops + x
            assert not torch.equal(hops, total), "rounding at every hop would not be seen"


def test_maxima_keep_nan(pg) -> None:
    x = torch.full((3,), float(pg.rank), device=pg.device)
    x[1] = float("nan") if pg.rank == 0 else 0.0
    found = collectives.all_reduce(x, op="max")
    assert found[0] == pg.size - 1
    assert found[1].isnan()


def test_arguments(pg) -> None:
    x = torch.ones(2, 2, device=pg.device)
    with pytest.raises(CollectiveArgumentError, match="dim is 2, expected a dimension of a tensor of 2"):
        collectives.reduce_scatter(x, 2)
    with pytest.raises(CollectiveArgumentError, match="op is 'mean'"):
        collectives.all_reduce(x, op="mean")  # pyright: ignore[reportArgumentType]
