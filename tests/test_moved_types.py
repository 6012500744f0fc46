"""Types that torch has few ops for: what only moves their elements runs all the same, alone and between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import OperandError
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops

D = DataType
FEW_OPS = (D.UInt16, D.UInt32, D.UInt64, D.Float8_e4m3fn, D.Float8_e5m2, D.Float8_e8m0fnu)


def bits(dtype: DataType, n: int) -> torch.Tensor:
    """Elements of which all are others."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.arange(1, n + 1).to(kind).view(dtype.torch)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", FEW_OPS, ids=lambda d: d.name)
def test_elements_are_moved(dtype: DataType) -> None:
    """Of one dim, which is where torch has fewest of these."""
    with FusionDefinition(backend="torch") as fd:
        x, index = fd.define_tensor([16], dtype=dtype), fd.define_tensor([3], dtype=D.Int)
        o = fd.ops
        flat = o.reshape(o.reshape(x, [4, 4]), [16])
        fd.add_output(o.flip(flat, [0]))
        fd.add_output(o.flip(o.reshape(x, [4, 4]), [0, 1]))
        fd.add_output(o.slice(o.flip(x, [0]), [1], [14], [3]))
        for op in (o.index_select, o.gather, o.take_along_axis):
            fd.add_output(op(x, index, 0))
    given, at = bits(dtype, 16), torch.tensor([15, 0, 7])
    word = given.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    expected = [word.flip(0), word.view(4, 4).flip(0, 1), word.flip(0)[1:14:3], *[word[at]] * 3]
    for found, right in zip(fd.execute([given, at]), expected, strict=True):
        assert same_bits(found.contiguous(), right.view(dtype.torch).contiguous())


@pytest.mark.parametrize("dtype", FEW_OPS, ids=lambda d: d.name)
def test_pieces_change_hands(dtype: DataType) -> None:
    """From blocks to every third element: an all-to-all between places that no slice says."""
    whole = bits(dtype, 12)

    def run(rank: int, size: int) -> bool:
        mesh = DeviceMesh(range(size))
        with FusionDefinition(backend="torch") as fd:
            x = fd.define_tensor([12], dtype=dtype)
            y = fd.ops.set(x)
            fd.add_output(y)
            for tv, split in ((x, x.outer_split), (y, y.inner_split)):
                tv.set_device_mesh(mesh)
                split(0, size)
            x.axis(0).parallelize(ParallelType.mesh_x)
            y.axis(1).parallelize(ParallelType.mesh_x)
        (found,) = fd.execute([whole.chunk(size)[rank]])
        return same_bits(found.contiguous(), whole.view(12 // size, size)[:, rank].contiguous())

    assert run_ranks(3, run) == [True] * 3


@pytest.mark.parametrize("dtype", FEW_OPS, ids=lambda d: d.name)
def test_elements_are_compared(dtype: DataType) -> None:
    """As wide numbers of the same values are; unsigned ones above the signed range too."""
    given = torch.tensor([[3.0, 64, 0.5, 8], [16, 1, 2, 4], [0.25, 32, 128, 6]]).to(dtype.torch)
    if dtype.is_integral:
        given.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])[1, 2] = -5  # a large one
    wide = [[value.item() for value in row] for row in given]  # Python's numbers, of any size
    with FusionDefinition(backend="torch") as fd:
        x, o = fd.define_tensor([3, 4], dtype=dtype), fd.ops
        outputs = [o.cummax(x, 1), o.cummin(x, 1), o.argmax(x, 1), o.argmin(x, 1), *o.topk(x, 2, 1)]
        for y in (*outputs, *o.topk(x, 3, 1, largest=False), o.argsort(x, 1), o.argsort(x, 1, descending=True)):
            fd.add_output(y)
    up = [sorted(range(4), key=row.__getitem__) for row in wide]
    expected = [
        [list(itertools.accumulate(row, max)) for row in wide],
        [list(itertools.accumulate(row, min)) for row in wide],
        [order[-1] for order in up],
        [order[0] for order in up],
        [[row[k] for k in order[:1:-1]] for row, order in zip(wide, up, strict=True)],
        [order[:1:-1] for order in up],
        [[row[k] for k in order[:3]] for row, order in zip(wide, up, strict=True)],
        [order[:3] for order in up],
        up,
        [order[::-1] for order in up],
    ]
    assert [y.tolist() for y in fd.execute([given])] == expected


@pytest.mark.parametrize("dtype", FEW_OPS, ids=lambda d: d.name)
def test_elements_are_replaced_and_added(dtype: DataType) -> None:
    given, at = torch.tensor([[1.0, 2, 4], [8, 16, 1], [2, 1, 4]]).to(dtype.torch), torch.tensor([2, 0, 2])
    index = torch.tensor([[2, 0, 1]])
    with FusionDefinition(backend="torch") as fd:
        x, k, r = (fd.define_tensor(s, dtype=d) for s, d in (([3, 3], dtype), ([1, 3], D.Int), ([3], D.Int)))
        fd.add_output(fd.ops.scatter(x, k, fd.ops.slice(x, [1, 0], [2, 3]), 0))
        fd.add_output(fd.ops.scatter(x, k, 32, 0))
        fd.add_output(fd.ops.index_put_accumulate(x, r, x))
    wide = given.double()
    moved, number = wide.scatter(0, index, wide[1:2]), wide.scatter(0, index, 32.0)
    added = wide.index_put((at,), wide, accumulate=True).float().to(dtype.torch)
    replaced, filled, summed = fd.execute([given, index, at])
    assert torch.equal(replaced.double(), moved)
    assert torch.equal(filled.double(), number)
    assert same_bits(summed, added)


@pytest.mark.parametrize("dtype", [d for d in FEW_OPS if d.is_floating], ids=lambda d: d.name)
def test_scans_of_narrow_floats_are_accumulated_in_float32(dtype: DataType) -> None:
    given = torch.tensor([[1.0, 0.5, 8, 64, 0.25, 2]]).to(dtype.torch)
    with FusionDefinition(backend="torch") as fd:
        x = fd.define_tensor([1, 6], dtype=dtype)
        fd.add_output(fd.ops.cumsum(x, 1))
        fd.add_output(fd.ops.cumprod(x, 1))
    sums, products = fd.execute([given])
    assert same_bits(sums, given.double().cumsum(1).float().to(dtype.torch))
    assert same_bits(products, given.double().cumprod(1).float().to(dtype.torch))


@pytest.mark.parametrize("dtype", [D.Bool, D.UInt16, D.UInt32, D.UInt64, D.Float8_e8m0fnu], ids=lambda d: d.name)
def test_matrices_that_torch_does_not_multiply_are_refused(dtype: DataType) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], dtype=dtype)
        for op in (fd.ops.matmul, fd.ops.linear):
            with pytest.raises(OperandError, match=f"T0 is a tensor of {dtype.name}, expected floats or signed"):
                op(x, x)


VIEWS: dict[str, Callable[[Ops, TensorView], TensorView]] = {
    "permute": lambda o, x: o.permute(x, [1, 0]),
    "reshape": lambda o, x: o.reshape(x, [16]),
    "expand": lambda o, x: o.expand(o.broadcast(x, [True, False, False]), [2, 4, 4]),
    "squeeze": lambda o, x: o.squeeze(o.broadcast(x, [True, False, False]), [0]),
}


@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("given", "made"), [(D.Double, D.ComplexDouble), (D.Bool, D.ComplexFloat), (D.Float8_e8m0fnu, D.Float)]
)
def test_views_of_what_only_torch_casts(given: DataType, made: DataType, view: str, backend: str | None) -> None:
    """A kernel has no complex numbers: such a cast is no part of the one that makes a view of it."""
    with FusionDefinition(backend=backend) as fd:
        x = fd.define_tensor([4, 4], dtype=given)
        y = fd.ops.cast(x, made)
        fd.add_output(y)
        fd.add_output(VIEWS[view](fd.ops, y))
        fd.add_output(fd.ops.mul(y, y))
    value = torch.arange(16).view(4, 4).to(torch.float32).to(given.torch)
    wide = value.to(made.torch)
    seen = {"permute": wide.t(), "reshape": wide.view(16), "expand": wide.expand(2, 4, 4), "squeeze": wide}[view]
    for found, right in zip(fd.execute([value]), (wide, seen, wide * wide), strict=True):
        assert torch.equal(found, right)
