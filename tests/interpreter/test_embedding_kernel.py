"""The kernels that cast an embedding's rows, and add up their gradients, against torch and float64."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
import triton

from shardfuse.device import H200
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


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("count", "width", "rows"), [(37, 130, 11), (1, 8, 4), (520, 3, 2), (1100, 33, 700), (16, 1, 1)]
)
def test_order_is_that_of_a_stable_sort(
    count: int, width: int, rows: int, kind: torch.dtype, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside which the sums' zeros are written, and nothing else."""
    monkeypatch.setitem(kernels.ORDERED, "CLEARED", 1024)  # several programs of zeros
    torch.manual_seed(count)
    indices = torch.randint(rows, (count,), dtype=kind)
    programs, orderers = kernels.order_tiles(count, rows, width)
    ordered, positions = (torch.full((count + 2,), -7, dtype=torch.int32) for _ in range(2))
    made = torch.full((rows * width + 2,), torch.nan)
    orders, zeros = (ordered[1:-1], positions[1:-1]), made[1:-1]
    numbers = count, rows, zeros.numel(), orderers
    kernels.order_and_clear[(programs,)](indices, *orders, zeros, *numbers, **kernels.ORDERED)
    assert all(map(torch.equal, orders, (t.int() for t in torch.sort(indices, stable=True))))
    assert not zeros.any()
    assert made[[0, -1]].isnan().all()
    assert all(t[[0, -1]].eq(-7).all() for t in (ordered, positions))


@pytest.mark.parametrize(
    ("count", "width", "rows"),
    [(37, 130, 11), (1, 8, 4), (16, 1030, 5), (40, 16, 1), (8, 4, 2), (63, 9, 1), (64, 1100, 1), (300, 70, 2)],
)
def test_sums_of_rows(count: int, width: int, rows: int, kernels: ModuleType) -> None:
    """Of few rows, which a program adds up, and of many, which several do."""
    torch.manual_seed(count)
    indices, gradient = torch.randint(rows, (count,)), torch.randn(count, width)
    _assert_sums(indices, gradient, rows, kernels)


@pytest.mark.parametrize("many", [63, 64, 65, 128, 129])
def test_sums_of_a_frequent_row_among_others(many: int, kernels: ModuleType) -> None:
    """Before and behind it are rows of one position, of several, and of none."""
    torch.manual_seed(many)
    indices = torch.cat([torch.full((many,), 3), torch.tensor([0, 1, 1, 4, 6, 6, 6])])
    indices = indices[torch.randperm(len(indices))]
    _assert_sums(indices, torch.randn(len(indices), 65), 8, kernels)


def _assert_sums(indices: torch.Tensor, gradient: torch.Tensor, rows: int, kernels: ModuleType) -> None:
    (count, width), sizes = gradient.shape, kernels.SUMS
    ordered, positions = torch.sort(indices.to(torch.int32), stable=True)
    kept = torch.zeros(rows + 2, width)
    kept[[0, -1]] = torch.nan
    made = kept[1:-1]
    kernels.add_up_rows[(count, triton.cdiv(width, sizes["COLUMNS"]))](
        ordered, positions, gradient, made, count, width, **sizes
    )
    expected, terms = (
        torch.zeros(rows, width, dtype=torch.float64).index_add_(0, indices, t.double())
        for t in (gradient, gradient.abs())
    )
    assert bool(((made - expected).abs() <= 2 * torch.finfo(torch.float32).eps * terms).all())
    assert kept[[0, -1]].isnan().all()


def test_where_comparing_ends(kernels: ModuleType) -> None:
    """Where comparisons take longer than a sort."""
    assert all(kernels.is_compared(n, H200) for n in (1, 2048, 16384))
    assert not any(kernels.is_compared(n, H200) for n in (32768, 1 << 20))


@pytest.mark.parametrize("is_compared", [True, False])
def test_the_whole_gradient(is_compared: bool, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order and sums, to the same bits however the order comes about."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(kernels, "is_compared", lambda *_: is_compared)
    torch.manual_seed(0)
    indices, gradient = torch.randint(9, (700,)), torch.randn(700, 40)
    indices[::3] = 5
    made = kernels.gradient_of(indices, gradient, 11)
    monkeypatch.setattr(kernels, "is_compared", lambda *_: not is_compared)
    assert torch.equal(made, kernels.gradient_of(indices, gradient, 11))
    expected, terms = (
        torch.zeros(11, 40, dtype=torch.float64).index_add_(0, indices, t.double()) for t in (gradient, gradient.abs())
    )
    assert bool(((made - expected).abs() <= 2 * torch.finfo(torch.float32).eps * terms).all())
