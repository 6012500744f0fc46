"""An embedding on a GPU: rows cast as they are read, float32 sums of 16-bit gradients, the same bits in every run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.roundings import assert_near
from shardfuse.nn.functional import embedding

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "shape"),
    [(50, 1000, (3, 100)), (5000, 4096, (4096,)), (1, 7, (1000,)), (3, 1030, (5000,)), (3, 9, (40000,))],
)
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


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_rows_without_a_gradient(kind: torch.dtype) -> None:
    """In one kernel, of a table that is part of a wider one as well."""
    table = torch.randn(50, 1003, device="cuda")
    indices = torch.randint(50, (3, 7, 5), device="cuda", dtype=kind).transpose(0, 2)
    for weight in (table, table[:, 2:1000], table[:, :1], table.t()):
        here = indices % weight.shape[0]
        found = embedding(here, weight, torch.bfloat16)
        assert torch.equal(found, weight[here].bfloat16())
        assert found.is_contiguous()


def test_indices_of_a_stride() -> None:
    """One column of several, and one index for all places."""
    weight = torch.randn(50, 64, device="cuda", requires_grad=True)
    several = torch.randint(50, (100, 3), device="cuda")
    for indices in (several[:, 1], several[3, :1].expand(200)):
        found = embedding(indices, weight, torch.bfloat16)
        assert torch.equal(found, weight[indices].bfloat16())
        given = torch.randn_like(found)
        (made,) = torch.autograd.grad(found, weight, given)
        expected, terms = (
            torch.zeros(50, 64, device="cuda", dtype=torch.float64).index_add_(0, indices, t)
            for t in (given.double(), given.double().abs())
        )
        assert_near(made, expected, n=2, rows=None, terms=terms)


_REFUSED = """
import torch
from shardfuse.nn.functional import embedding
embedding(torch.tensor([0, {wrong}, 3], device="cuda"), torch.randn(5, 8, device="cuda"), torch.bfloat16)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("wrong", [-1, 5])
def test_what_is_no_row_is_refused(wrong: int) -> None:
    """As torch does it: by a failed assertion, after which the process can no more use the GPU."""
    made = subprocess.run(
        [sys.executable, "-c", _REFUSED.format(wrong=wrong)], capture_output=True, text=True, check=False, timeout=120
    )
    assert made.returncode != 0
    assert "device-side assert" in made.stderr
