"""Zeros of both signs, infinities, NaN, extremes and ties through every op of the table, by generated kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from chosen_products import SIZES, TYPES, check_chosen
from special_rows import ROWS, check_rows
from special_scalars import (
    BINARY,
    WITH_SCALAR,
    check_complex_numbers,
    check_fills,
    check_full,
    check_integers_at_the_ends,
    check_integers_beyond,
    check_lazy_bits,
    check_literals,
    check_scalars,
)
from special_values import CASTS, cases, check_cast, check_special

from shardfuse import DataType

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of overflows that are meant


def test_every_op_in_every_type() -> None:
    for name, dtype in cases():
        check_special(name, dtype, "triton")


def test_casts() -> None:
    for source, target in CASTS:
        check_cast(source, target, "triton")


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("arg")])
def test_rows(name: str) -> None:
    for columns, dtype in ((1, torch.float32), (37, torch.float32), (37, torch.bfloat16), (700, torch.float32)):
        for dim in (0, 1):
            check_rows(name, columns, dtype, dim, "triton")


@pytest.mark.parametrize("dtype", TYPES)
def test_products_of_which_one_is_chosen(dtype: DataType) -> None:
    for (rows, columns), dim in itertools.product(SIZES[:3], (0, 1)):
        if columns < 100 or dim == 1:
            check_chosen(rows, columns, dtype, dim, "triton")


def test_literals() -> None:
    for name, dtype in itertools.product(BINARY, (torch.float32, torch.float64, torch.bfloat16)):
        check_literals(name, dtype, "triton")
    for dtype in (DataType.Float, DataType.Double, DataType.Half, DataType.BFloat16):
        check_full(dtype, "triton")


@pytest.mark.parametrize("name", WITH_SCALAR)
def test_scalars_of_a_call(name: str) -> None:
    check_scalars(name, "triton")


def test_integers_of_a_narrower_type() -> None:
    check_integers_beyond("triton")
    check_integers_at_the_ends("triton")


def test_complex_numbers_and_numbers_that_a_type_does_not_hold() -> None:
    check_complex_numbers("triton")
    check_fills("triton")


def test_tensors_with_the_negative_or_conjugate_bit() -> None:
    check_lazy_bits("triton")
