"""Kernels that read chunks of a stream, and write each to its part of the result."""

from __future__ import annotations

import pytest
import torch
from fusion_check import check

from shardfuse import FusionDefinition, ParallelType


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("inner", [False, True])
def test_chunks_of_any_axis(axis: int, inner: bool) -> None:
    """An inner cut's chunks lie apart, and are put together by a copy; those of others are parts of the result."""
    x, w = torch.randn(4, 6, 8), torch.randn(6, 8)
    with FusionDefinition() as fd:
        tx, tw = fd.define_tensor([4, 6, 8]), fd.define_tensor([6, 8])
        y = fd.ops.exp(fd.ops.mul(tx, tw))
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [1]))
        tx.split(axis, 2, inner_split=inner)
        tx.axis(axis + inner).parallelize(ParallelType.stream)
    check(fd, [x, w])
    count = fd.explain().kernels
    assert count >= 2
    assert fd.last_trace().count("# kernel\n") == (count + 1) // 2  # one for both chunks
    text = fd.last_trace().split("# host program\n")[1]
    assert ("= torch_" in text) == inner


def test_norm_of_rows_in_chunks() -> None:
    """Statistics, several segments a chunk, a weight that all chunks read."""
    x, w = torch.randn(6, 40), torch.randn(40)
    with FusionDefinition() as fd:
        tx, tw = fd.define_tensor([-1, 40], contiguity=True), fd.define_tensor([40], contiguity=True)
        var, mean = fd.ops.var_mean(tx, [1], 0, True)
        normal = fd.ops.mul(fd.ops.sub(tx, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5)))
        fd.add_output(fd.ops.mul(normal, tw))
        fd.add_output(mean)
        tx.outer_split(0, 3)
        tx.axis(0).parallelize(ParallelType.stream)
    check(fd, [x, w])
    assert fd.explain().kernels == 3
    assert fd.last_trace().count("# kernel\n") == 1  # which all chunks launch
