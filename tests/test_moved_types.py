"""Types that torch has few ops for: what only moves their elements runs all the same, alone and between ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
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
