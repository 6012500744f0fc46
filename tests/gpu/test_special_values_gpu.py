"""Zeros of both signs, infinities, NaN, extremes, ties through every op of the table on a GPU, against torch there."""

from __future__ import annotations

import itertools

import pytest
from chosen_products import SIZES, TYPES, check_chosen
from narrow_cases import NARROW, STATISTICS, VALUES, run_statistic
from special_rows import ROWS, check_rows
from special_scalars import BINARY, WITH_SCALAR, check_full, check_lazy_bits, check_literals, check_scalars
from special_values import CASTS, FLOATS, cases, check_cast, check_special

from shardfuse import DataType
from shardfuse.ops.table import POINTWISE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", POINTWISE)
def test_every_op_in_every_type(name: str) -> None:
    for _, dtype in (case for case in cases() if case[0] == name):
        check_special(name, dtype, "triton", "cuda")


def test_casts() -> None:
    for source, target in CASTS:
        check_cast(source, target, "triton", "cuda")


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    for columns, dtype, dim in itertools.product((1, 37, 700, 3000, 70001), FLOATS, (0, 1)):
        check_rows(name, columns, dtype, dim, "triton", "cuda")


@pytest.mark.parametrize("name", BINARY)
def test_literals(name: str) -> None:
    for dtype in FLOATS:
        check_literals(name, dtype, "triton", "cuda")


@pytest.mark.parametrize("dtype", TYPES)
def test_products_of_which_one_is_chosen_are_rounded_before_their_differences(dtype: DataType) -> None:
    for (rows, columns), dim in itertools.product(SIZES, (0, 1)):
        check_chosen(rows, columns, dtype, dim, "triton", "cuda")


def test_filled() -> None:
    for dtype in (DataType.Float, DataType.Double, DataType.Half, DataType.BFloat16):
        check_full(dtype, "triton", "cuda")


@pytest.mark.parametrize("name", WITH_SCALAR)
def test_scalars_of_a_call(name: str) -> None:
    check_scalars(name, "triton", "cuda")


def test_tensors_with_the_negative_or_conjugate_bit() -> None:
    check_lazy_bits("triton", "cuda")


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_are_rounded_once(name: str) -> None:
    for values, dtype in itertools.product(VALUES, NARROW):
        run_statistic(name, values, dtype, "triton", device="cuda")
