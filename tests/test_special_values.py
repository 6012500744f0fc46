"""Zeros of both signs, infinities, NaN, extremes and ties through every op of the table, computed by torch's calls."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from fusion_check import local_piece
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
from special_values import CASTS, FLOATS, KEEP_DENORMALS, assert_special, cases, check_cast, check_special

import shardfuse
from benchmarks.sm90 import sources_of
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import InputError, OperandError
from shardfuse.ops.table import POINTWISE, Rule


def test_every_op_in_every_type() -> None:
    for name, dtype in cases():
        check_special(name, dtype, "torch")


def test_erfcinv_of_small_numbers() -> None:
    """The complementary error function gives them back, where 1 - x has lost them."""
    x = torch.logspace(-300, math.log10(1.99), 400, dtype=torch.float64)
    for dtype, fits in ((torch.float64, x > 0), (torch.float32, x > 1e-45)):
        given = x[fits].to(dtype)
        with FusionDefinition(backend="torch") as fd:
            fd.add_output(fd.ops.erfcinv(fd.from_pytorch(given)))
        (found,) = fd.execute([given])
        # one rounding of y moves erfc(y) by y * eps * |erfc'(y)|
        y = found.double()
        moved = 2 / math.sqrt(math.pi) * torch.exp(-y * y) * y.abs() * torch.finfo(dtype).eps
        assert ((torch.erfc(y) - given.double()).abs() <= 4 * moved + 1e-13 * given.double()).all()


def test_kernels_keep_denormals_where_they_matter() -> None:
    """Other kernels may take them for 0, as ``exp2`` and ``rsqrt`` are quicker so."""
    keep = set()
    for name, op in POINTWISE.items():
        if op.rule in (Rule.COMPLEX, Rule.WHERE) or op.triton is None:
            continue
        with FusionDefinition() as fd:
            tensors = [fd.define_tensor([1024], contiguity=True) for _ in range(op.arity)]
            try:
                fd.add_output(getattr(fd.ops, name)(*tensors))
            except OperandError:  # takes no floats
                continue
        plan = fd.fec.plan(dict.fromkeys(fd.fec.tensors(), (1024,)))
        sources = sources_of(plan, [torch.empty(1024, device="meta") for _ in tensors])
        if any(source.keeps_denormals for source in sources):
            keep.add(name)
    assert keep == set(KEEP_DENORMALS)


def test_casts() -> None:
    for source, target in CASTS:
        check_cast(source, target, "torch")


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    for columns, dtype, dim in itertools.product((1, 2, 37, 3000), FLOATS, (0, 1)):
        check_rows(name, columns, dtype, dim, "torch")


def test_literals() -> None:
    for name, dtype in itertools.product(BINARY, FLOATS):
        check_literals(name, dtype, "torch")
    for dtype in (DataType.Float, DataType.Double, DataType.Half, DataType.BFloat16):
        check_full(dtype, "torch")


@pytest.mark.parametrize("name", WITH_SCALAR)
def test_scalars_of_a_call(name: str) -> None:
    check_scalars(name, "torch")


def test_integers_of_a_narrower_type() -> None:
    check_integers_beyond("torch")
    check_integers_at_the_ends("torch")


def test_complex_numbers_and_numbers_that_a_type_does_not_hold() -> None:
    check_complex_numbers("torch")
    check_fills("torch")


def test_tensors_with_the_negative_or_conjugate_bit() -> None:
    check_lazy_bits("torch")


def test_a_target_with_the_negative_bit_is_refused() -> None:
    with FusionDefinition(backend="torch") as fd:
        x = fd.define_tensor([4], contiguity=True)
        fd.add_output(fd.ops.add(x, 1.0), alias_input=x)
    with pytest.raises(InputError, match="resolve_neg"):
        fd.execute([torch._neg_view(torch.ones(4))])


@pytest.mark.parametrize("value", [2**64, 2**70, -(2**63) - 1])
def test_integers_beyond_64_bits_are_refused(value: int) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4])
        with pytest.raises(OperandError, match="64 bits"):
            fd.ops.mul(x, value)
        fd.add_output(x)


def test_integers_that_the_tensor_does_not_hold_are_refused() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], dtype=DataType.Int32)
        for op in ("add", "lt", "maximum"):
            with pytest.raises(OperandError, match="Int32"):
                getattr(fd.ops, op)(x, 2**31)
        for value in (2**31, math.inf, math.nan):
            with pytest.raises(OperandError, match="Int32"):
                fd.ops.full([4], value, DataType.Int32)
        fd.add_output(fd.ops.add(x, 2**31 - 1))
    assert fd.execute([torch.zeros(4, dtype=torch.int32)])[0].tolist() == [2**31 - 1] * 4


def test_integers_of_sizes_wrap_as_torch_has_it() -> None:
    with FusionDefinition(backend="torch") as fd:
        x, n = fd.define_tensor([2], dtype=DataType.Int), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.add(x, fd.ops.mul(n, 4)))
    assert fd.execute([torch.zeros(2, dtype=torch.int64), 2**62 + 1])[0].tolist() == [4, 4]


@pytest.mark.parametrize("value", [-0.0, math.nan, math.inf, np.float64(-0.0), np.float64(2.5), np.int64(-3)])
def test_a_script_rebuilds_a_literal(value: float) -> None:
    with FusionDefinition(backend="torch") as fd:
        x = fd.define_tensor([3], contiguity=True)
        fd.add_output(fd.ops.mul(x, value))
    given = torch.tensor([1.0, -1.0, 0.0])
    space: dict[str, object] = {"FusionDefinition": FusionDefinition, "DataType": DataType, "torch": torch}
    exec(repr(fd), space)
    with FusionDefinition(backend="torch") as again:
        space["nvfuser_fusion"](again)
    want = given * float(value)
    for found in (fd.execute([given])[0], again.execute([given])[0]):
        assert_special(repr(value), found, [want], want.double(), [given])


@pytest.mark.parametrize("columns", [7, 4])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_variance_that_overflows_is_infinite_sharded_too(ranks: int, columns: int) -> None:
    """Also where a rank holds nothing, and where the distances between the ranks' means alone overflow."""
    large = [1e30, -1e30, 3.1e29, 2.3e30, 0.0, 1e20, -7e29]
    small = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0]
    apart = [1e25, 1e25, -1e25, -1e25, -1e25, -1e25, -1e25]
    x = torch.tensor([large, small, apart])[:, :columns]

    def run() -> None:
        rank = shardfuse.initialize().rank
        with FusionDefinition(backend="torch") as fd:
            t = fd.from_pytorch(x)
            fd.add_output(fd.ops.var(t, [1]))
            t.set_device_mesh(DeviceMesh(list(range(ranks))))
            t.outer_split(1, ranks, uneven=True)
            t.axis(1).parallelize(ParallelType.mesh_x)
        (found,) = fd.execute([local_piece(fd.fusion.inputs[0].val, x, rank)], sizes={t: tuple(x.shape)})
        want = x.double().var(1).float()
        assert_special("var", found, [want], want.double(), [x[:, 0]], roundings=4)

    shardfuse.simulate(run, ranks)


def test_means_of_nothing() -> None:
    x = torch.empty(3, 0)
    with FusionDefinition(backend="torch") as fd:
        t = fd.from_pytorch(x)
        for op in (fd.ops.mean, fd.ops.var, fd.ops.sum, fd.ops.prod, fd.ops.any, fd.ops.all):
            fd.add_output(op(t, [1]))
    found = fd.execute([x])
    for y, want in zip(found, (x.mean(1), x.var(1), x.sum(1), x.prod(1), x.any(1), x.all(1)), strict=True):
        torch.testing.assert_close(y, want.to(y.dtype), rtol=0, atol=0, equal_nan=True)
