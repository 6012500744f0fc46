"""Sums whose tensors are contiguous along different axes, as models have them, on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.roundings import assert_near
from shardfuse import DataType, FusionDefinition

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("n", "c", "p", "dtype"),
    [
        (32, 768, 512, torch.bfloat16),  # gradients of heads
        (4096, 96, 49, torch.float16),  # of windows
        (64, 96, 3136, torch.float32),  # of a layer scale
        (7, 33, 1001, torch.bfloat16),
    ],
)
def test_rows_and_their_sum(n: int, c: int, p: int, dtype: torch.dtype) -> None:
    """``x`` [n, c, p] becomes rows [n, p, c], which are summed, by themselves and times ``y``; the same bits anew."""
    kind = {torch.bfloat16: DataType.BFloat16, torch.float16: DataType.Half, torch.float32: DataType.Float}[dtype]
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[n, c, p], contiguity=True, dtype=kind)
        y = fd.define_tensor(shape=[n, p, c], contiguity=True, dtype=DataType.BFloat16)
        rows = fd.ops.set(fd.ops.permute(x, dims=[0, 2, 1]))
        wide = fd.ops.cast(rows, dtype=DataType.Float)
        product = fd.ops.mul(wide, fd.ops.cast(y, dtype=DataType.Float))
        for out in (rows, fd.ops.sum(wide, dims=[0, 1]), fd.ops.sum(product, dims=[0, 1])):
            fd.add_output(out)
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(n, c, p, device="cuda", generator=generator).to(dtype)
    b = torch.randn(n, p, c, device="cuda", generator=generator).bfloat16()
    found, again = fd.execute([a, b]), fd.execute([a, b])
    turned = a.permute(0, 2, 1).double()
    assert torch.equal(found[0], a.permute(0, 2, 1))
    for out, terms in ((found[1], turned), (found[2], turned * b.double())):
        assert_near(out, terms.sum((0, 1)), terms=terms.abs().sum((0, 1)))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    (segment,) = fd.explain(sizes={x: (n, c, p), y: (n, p, c)}).segments
    assert segment.turns
