"""Pointwise chains that a second segment computes again instead of reading, and segments that then become one."""

from __future__ import annotations

import torch
from fusion_check import check
from test_segmenter import described

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.tensor_view import TensorView

HALF, FLOAT = DataType.BFloat16, DataType.Float
ROWS = [64, 32, 511]
"""Of an odd length, so that they have no blocks whose sums are stored (``segments/sums_of_blocks.py``)."""


def wide(fd: FusionDefinition, shape: list[int]) -> TensorView:
    return fd.ops.cast(fd.define_tensor(shape, dtype=HALF), dtype=FLOAT)


def product_summed_both_ways(fd: FusionDefinition, shape: list[int]) -> None:
    """Sums that no one kernel takes: over dims 1 and 2, and over dims 0 and 2."""
    product = fd.ops.mul(wide(fd, shape), wide(fd, shape))
    rows = fd.ops.sum(product, [1, 2], keepdim=True)
    fd.add_output(fd.ops.div(product, rows))
    fd.add_output(fd.ops.sum(product, [0, 2]))


def test_a_wide_product_of_narrow_tensors_is_not_stored() -> None:
    found = described(lambda fd: product_summed_both_ways(fd, ROWS))
    assert found == ["persistent: T0 T2 -> T7", "reduction: T0 T2 -> T8"]


def test_a_narrow_result_of_wide_tensors_is_stored() -> None:
    """Reading two float32 tensors costs no less than storing and reading one."""

    def define(fd: FusionDefinition) -> None:
        x, y = (fd.define_tensor([64, 32, 512]) for _ in range(2))
        product = fd.ops.mul(x, y)
        fd.add_output(fd.ops.sum(product, [1, 2]))
        fd.add_output(fd.ops.sum(product, [0, 2]))

    assert described(define) == ["reduction: T0 T1 -> T2 T3", "reduction: T2 -> T4"]


def test_what_is_an_output_is_read() -> None:
    def define(fd: FusionDefinition) -> None:
        square = fd.ops.square(fd.define_tensor([64, 32, 512]))
        fd.add_output(square)
        fd.add_output(fd.ops.sum(square, [1, 2]))
        fd.add_output(fd.ops.sum(square, [0, 2]))

    first, second = described(define)
    assert first == "reduction: T0 -> T1 T2"
    assert second == "reduction: T1 -> T3"


def test_sums_that_come_to_read_the_same_become_one_segment() -> None:
    """dw and db: the second read the product alone, before it took the product's chain over."""

    def define(fd: FusionDefinition) -> None:
        x, dy = wide(fd, ROWS), wide(fd, ROWS)
        product = fd.ops.mul(x, dy)
        fd.add_output(fd.ops.div(product, fd.ops.sum(product, [1, 2], keepdim=True)))
        fd.add_output(fd.ops.sum(product, [0, 2]))
        fd.add_output(fd.ops.sum(dy, [0, 2]))

    assert described(define) == ["persistent: T0 T2 -> T7", "reduction: T0 T2 -> T8 T9"]


def test_the_numbers_stay() -> None:
    shape = [6, 5, 7]
    with FusionDefinition() as fd:
        product_summed_both_ways(fd, shape)
    check(fd, [torch.randn(shape).bfloat16() for _ in range(2)])
