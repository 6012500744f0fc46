"""The kernel that adds up the gradients of an embedding's rows, against float64."""

from __future__ import annotations

import importlib

import pytest
import torch
import triton

from shardfuse.nn import embedding_kernel


@pytest.mark.parametrize(("count", "width", "rows"), [(37, 130, 11), (1, 8, 4), (16, 1030, 5), (40, 16, 1), (8, 4, 2)])
def test_sums_of_rows(count: int, width: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kernels = importlib.reload(embedding_kernel)  # its function is an interpreted one
    torch.manual_seed(count)
    indices, gradient = torch.randint(rows, (count,)), torch.randn(count, width)
    ordered, positions = torch.sort(indices.to(torch.int32), stable=True)
    made = torch.zeros(rows, width)
    grid = (count, triton.cdiv(width, kernels.COLUMNS))
    sizes = {"COLUMNS": kernels.COLUMNS, "AT_ONCE": kernels.AT_ONCE}
    kernels.add_up_rows[grid](ordered, positions, gradient, made, count, width, **sizes)
    expected, terms = (
        torch.zeros(rows, width, dtype=torch.float64).index_add_(0, indices, t.double())
        for t in (gradient, gradient.abs())
    )
    assert bool(((made - expected).abs() <= 2 * torch.finfo(torch.float32).eps * terms).all())
