"""The gradient of an embedding on a GPU: float32 sums of 16-bit gradients, the same bits in every run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.roundings import assert_near
from shardfuse.nn.functional import embedding

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "shape"), [(50, 1000, (3, 100)), (5000, 4096, (4096,)), (1, 7, (1000,))])
def test_rows_and_gradient(rows: int, width: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(rows, width, device="cuda", requires_grad=True)
    indices = torch.randint(rows, shape, device="cuda")
    found = embedding(indices, weight, dtype)
    assert torch.equal(found, weight.detach()[indices].to(dtype))
    given = torch.randn_like(found)
    made = [torch.autograd.grad(embedding(indices, weight, dtype), weight, given)[0] for _ in range(3)]
    wide = given.double().flatten(0, -2)
    expected, terms = (
        torch.zeros(rows, width, device="cuda", dtype=torch.float64).index_add_(0, indices.flatten(), t)
        for t in (wide, wide.abs())
    )
    assert made[0].dtype is torch.float32
    assert_near(made[0], expected, n=2, rows=None, terms=terms)
    assert all(torch.equal(m, made[0]) for m in made)
