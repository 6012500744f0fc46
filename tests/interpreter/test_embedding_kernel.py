"""The kernels that cast an embedding's rows, and add up their gradients, against torch and float64."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
import triton

from shardfuse.nn import embedding_kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return importlib.reload(embedding_kernel)  # its functions are interpreted ones


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(("count", "width", "rows"), [(37, 130, 11), (1, 8, 4), (3, 4100, 5), (300, 7, 2), (8, 1, 1)])
def test_rows_are_cast(count: int, width: int, rows: int, kind: torch.dtype, kernels: ModuleType) -> None:
    """Of a table that is part of a wider one; nothing is written beside the result.

    In float16: Triton's interpreter does not round bfloat16.
    """
    torch.manual_seed(count)
    table, indices = torch.randn(rows, width + 3)[:, 2 : width + 2], torch.randint(rows, (count,), dtype=kind)
    kept = torch.full((count + 2, width), torch.nan, dtype=torch.float16)
    grid, sizes = kernels.cast_tiles(count, width)
    kernels.cast_rows[grid](indices, table, kept[1:-1], count, width, table.stride(0), rows, **sizes)
    assert torch.equal(kept[1:-1], table[indices].half())
    assert kept[[0, -1]].isnan().all()


@pytest.mark.parametrize(("count", "width", "rows"), [(37, 130, 11), (1, 8, 4), (16, 1030, 5), (40, 16, 1), (8, 4, 2)])
def test_sums_of_rows(count: int, width: int, rows: int, kernels: ModuleType) -> None:
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
