"""An embedding in a narrower dtype: rows and gradients are torch's; the kernel's sums, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shardfuse.nn.functional import embedding


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_rows_and_gradient(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    weight, indices = torch.randn(11, 6, requires_grad=True), torch.randint(11, (3, 5))
    found = embedding(indices, weight, dtype)
    expected = functional.embedding(indices, weight).to(dtype or torch.float32)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    given = torch.randn(found.shape).to(found.dtype)
    gradients = [torch.autograd.grad(y, weight, given)[0] for y in (found, expected)]
    assert torch.equal(*gradients)
    with pytest.raises(IndexError):
        embedding(torch.tensor([11]), weight, dtype)


def test_compiled_whole() -> None:
    weight, indices = torch.randn(11, 6), torch.randint(11, (3, 5))
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(indices, weight, torch.bfloat16), embedding(indices, weight, torch.bfloat16))
