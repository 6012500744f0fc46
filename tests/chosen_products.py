"""Products of which one is chosen, and others are subtracted from it or it from them: bit by bit what torch has."""

from __future__ import annotations

import torch

from shardfuse import DataType, FusionDefinition
from shardfuse.executor.options import Backend
from shardfuse.ir.tensor_view import TensorView

SIZES = ((3, 1), (3, 37), (4, 512), (2, 3000), (2, 70001))
"""Rows and columns: a row in registers, one in chunks, one in a loop."""
TYPES = {DataType.Float: torch.float32, DataType.Double: torch.float64}


def check_chosen(rows: int, columns: int, dtype: DataType, dim: int, backend: Backend, device: str = "cpu") -> None:
    """Differences from the largest, the smallest, the whole part; the exponential of the largest's is 1.

    Contracted to one operation with the product they are off by half a rounding of a product of 1e6, or 1e12.
    """
    size = 1e6 if dtype is DataType.Float else 1e12
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float64) * size
    x = x.to(TYPES[dtype]).to(device)
    with FusionDefinition(backend=backend) as fd:
        t = fd.define_tensor([-1, -1], dtype=dtype)
        for y in (fd.ops.mul(t, 0.3), fd.ops.square(t)):
            for chosen in _chosen(fd, y, dim):
                fd.add_output(fd.ops.sub(y, chosen))
                fd.add_output(fd.ops.add(fd.ops.neg(y), chosen))
        p = fd.ops.mul(t, 0.3)
        fd.add_output(fd.ops.exp(fd.ops.sub(p, fd.ops.max(p, [dim], keepdim=True))))
    *found, exponentials = fd.execute([x])
    want = [
        d for y in (x * 0.3, x * x)
        for chosen in (y.amax(dim, keepdim=True), y.amin(dim, keepdim=True), y.floor())
        for d in (y - chosen, -y + chosen)
    ]  # fmt: skip
    for k, (y, expected) in enumerate(zip(found, want, strict=True)):
        assert y is not None
        assert torch.equal(y, expected), f"output {k}: off by {(y - expected).abs().max().item():g}"
    assert exponentials is not None
    assert torch.equal(exponentials.amax(dim), torch.ones_like(exponentials.amax(dim)))


def _chosen(fd: FusionDefinition, y: TensorView, dim: int) -> list[TensorView]:
    return [fd.ops.max(y, [dim], keepdim=True), fd.ops.min(y, [dim], keepdim=True), fd.ops.floor(y)]
