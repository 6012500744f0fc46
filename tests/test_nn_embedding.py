"""An embedding in a narrower dtype: rows and gradients are torch's; the kernel's sums, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shardfuse.nn import embedding as implementation
from shardfuse.nn import embedding_kernel
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


@pytest.mark.parametrize("indices", [torch.arange(12).view(4, 3)[:, 1], torch.tensor([5]).expand(7)])
def test_kernels_are_given_contiguous_indices(indices: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels read them one behind the other; a vector of a stride stays one where it is reshaped."""
    given: list[torch.Tensor] = []

    def rows_of(indices: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        given.append(indices)
        return table[indices].to(dtype)

    def gradient_of(indices: torch.Tensor, gradient: torch.Tensor, rows: int) -> torch.Tensor:
        given.append(indices)
        return torch.zeros(rows, gradient.shape[1]).index_add_(0, indices, gradient.float())

    monkeypatch.setattr(embedding_kernel, "rows_of", rows_of)
    monkeypatch.setattr(embedding_kernel, "gradient_of", gradient_of)
    monkeypatch.setattr(implementation, "_is_known", lambda *_: True)
    weight = torch.randn(12, 6, requires_grad=True)
    found = embedding(indices, weight, torch.bfloat16)
    found.backward(torch.ones_like(found))
    assert [t.is_contiguous() for t in given] == [True, True]
    assert all(torch.equal(t, indices) for t in given)
