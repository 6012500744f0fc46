"""``invariant="batch"``: kernels of small batches, with texts of their own, add up a row in the order of large ones.

The order follows from which thread has which elements of a row, and that is the compiler's choice: it is read off what
it makes of each text for ``sm_90``, without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from shardfuse import DataType, FusionDefinition
from shardfuse.codegen import KernelSource
from shardfuse.ir.tensor_view import TensorView

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.promises import define
from benchmarks.sm90 import compile_all, sources_of

BF16, F32 = DataType.BFloat16, DataType.Float
MANY = 70
"""Rows that several programs walk in a loop."""
FEW = (1, 2, 3, 8)


def sources(fd: FusionDefinition, rows: int, gap: int = 0) -> list[KernelSource]:
    """``gap``: elements between the end of a row and the next one."""
    shapes = {t: tuple(rows if n < 0 else n for n in t.shape) for t in fd.fec.tensors()}
    made = [_with_gaps(t, shape, gap) for t, shape in shapes.items()]
    return sources_of(fd.fec.plan(shapes), made)


def _with_gaps(tensor: TensorView, shape: Sequence[int], gap: int) -> torch.Tensor:
    *outer, n = shape
    return torch.empty((*outer, n + gap * bool(outer)), dtype=tensor.dtype.torch, device="meta")[..., :n]


def gradient(
    n: int, rows: DataType, weight: DataType | None, given: DataType, summed: DataType, *, is_dense: bool = True
) -> FusionDefinition:
    """Of an RMSNorm's rows, which are ``given``, and of its weight, ``summed``; without a weight, of a softmax."""
    with FusionDefinition(invariant="batch") as fd:
        ops = fd.ops
        x, dy = (fd.define_tensor([-1, n], contiguity=[is_dense, True], dtype=rows) for _ in range(2))
        x, dy = ops.cast(x, dtype=F32), ops.cast(dy, dtype=F32)
        if weight is None:
            inner = ops.sum(ops.mul(x, dy), [-1], keepdim=True)
            fd.add_output(ops.cast(ops.mul(x, ops.sub(dy, inner)), dtype=given))
            fd.add_output(ops.cast(ops.sum(dy, [0]), dtype=summed))
            return fd
        w = ops.cast(fd.define_tensor([n], contiguity=True, dtype=weight), dtype=F32)
        rstd = ops.rsqrt(ops.add(ops.mean(ops.mul(x, x), [-1], keepdim=True), 1e-6))
        normed, g = ops.mul(x, rstd), ops.mul(dy, w)
        inner = ops.mul(normed, ops.mean(ops.mul(g, normed), [-1], keepdim=True))
        fd.add_output(ops.cast(ops.mul(ops.sub(g, inner), rstd), dtype=given))
        fd.add_output(ops.cast(ops.sum(ops.mul(dy, normed), [0]), dtype=summed))
    return fd


def _differing(make: Callable[[], FusionDefinition], counts: Sequence[int], gap: int = 0) -> dict[int, object]:
    """The numbers of rows whose kernels add up in another order than those of many, with both orders."""
    found = {rows: sources(make(), rows, gap) for rows in (*counts, MANY)}
    compiled = iter(compile_all([s for each in found.values() for s in each]))
    orders = {rows: [o for _ in each if (o := next(compiled).along_rows)] for rows, each in found.items()}
    assert orders[MANY]
    return {rows: (own, orders[MANY]) for rows, own in orders.items() if own != orders[MANY]}


TYPES = {
    "bfloat16": (BF16, BF16, BF16, BF16),
    "float32": (F32, F32, F32, F32),
    "a weight in float32": (BF16, F32, BF16, F32),
    "rows in float32": (F32, BF16, F32, BF16),
    "gradients in bfloat16": (F32, F32, BF16, BF16),
    "no weight": (BF16, None, BF16, BF16),
}


@pytest.mark.parametrize(
    ("types", "n"), [*product(TYPES, (96, 1280)), *product(("bfloat16", "a weight in float32"), (200, 1001, 5120))]
)
def test_gradients_of_few_rows(types: str, n: int) -> None:
    counts = FEW if n < 1000 else FEW[:1]
    assert _differing(lambda: gradient(n, *TYPES[types]), counts) == {}


@pytest.mark.parametrize("weight", [BF16, None])
@pytest.mark.parametrize(("n", "gap"), [(4096, 1), (4096, 8), (256, 2)])
def test_rows_with_gaps(n: int, gap: int, weight: DataType | None) -> None:
    assert _differing(lambda: gradient(n, BF16, weight, BF16, BF16, is_dense=False), FEW[:2], gap) == {}


@pytest.mark.parametrize("n", [256, 1024])
def test_gradients_that_are_wider_than_their_rows(n: int) -> None:
    """Without a loop the compiler would give each thread twice as many elements of a row: they stay in one."""
    assert _differing(lambda: gradient(n, BF16, None, F32, F32), FEW[:2]) == {}


@pytest.mark.parametrize("case", ["layer_norm_backward 256", "layer_norm_backward 1024", "layer_norm_backward 8192"])
def test_gradients_of_layer_norms(case: str) -> None:
    name, n = case.split()
    assert _differing(lambda: define(name, int(n), BF16), FEW[:2]) == {}


def test_a_row_that_a_group_shares() -> None:
    """By itself it is not in a loop over rows."""
    losses = define("cross_entropy", 128256, BF16)
    texts = [sources(losses, rows)[0].text for rows in (1, 2)]
    assert ["for row in" in text for text in texts] == [False, True]
    assert _differing(lambda: losses, (1, 2)) == {}


@pytest.mark.parametrize(
    ("name", "n", "rows"),
    [("layer_norm_backward", 768, 8), ("layer_norm_backward", 5120, 8192), ("softmax", 16384, 8), ("softmax", 96, 64)],
)
def test_sums_in_pairs_do_not_spill(name: str, n: int, rows: int) -> None:
    """Of two rows side by side they did, 46 KB: LayerNorm's gradient of 8192 x 768 took 637 times as long."""
    fd = define(name, n, DataType.BFloat16, "ranks")
    shapes = [(rows, n) if t.ndim == 2 else (n,) for t in fd.fec.tensors()]
    plan = fd.fec.plan(dict(zip(fd.fec.tensors(), shapes, strict=True)))
    for found in compile_all(sources_of(plan, [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes])):
        assert found.spills == 0, str(found)
