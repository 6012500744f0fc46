"""Every dtype through the changes of sharding, and through the reductions that it has, over sharded rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from fusion_check import local_arguments, local_piece
from ranks import run_ranks
from resharding_cases import WHOLE, Placed, place

from shardfuse import DataType, DeviceMesh, FusionDefinition
from shardfuse.errors import OperandError

PLACES = [WHOLE, Placed("outer", 0), Placed("outer", 1), Placed("inner", 0)]


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if dtype == torch.bool:
        return x % 3 == 0
    return (x % 7 + 1j * (x % 5)).to(dtype) if dtype.is_complex else (x % 7).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def run(fd: FusionDefinition, x: torch.Tensor, rank: int) -> torch.Tensor:
    (out,) = fd.execute(local_arguments(fd.fusion, [x], rank))
    return out


@pytest.mark.parametrize("dtype", DataType, ids=lambda d: d.name)
def test_changes_of_sharding(dtype: DataType) -> None:
    x = values(dtype.torch, (8, 8, 2))

    def move(rank: int, size: int) -> None:
        for source, target in itertools.product(PLACES, repeat=2):
            with FusionDefinition() as fd:
                t = fd.define_tensor(list(x.shape), dtype=dtype)
                moved = fd.ops.set(t)
                fd.add_output(moved)
            for tv, placed in ((t, source), (moved, target)):
                place(tv, DeviceMesh([0, 1]), (placed,), reverse=False)
            found, want = run(fd, x, rank), local_piece(moved, x, rank)
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            assert torch.equal(bits(found), bits(want)), f"{source} to {target}"

    run_ranks(2, move)


@pytest.mark.parametrize("dtype", DataType, ids=lambda d: d.name)
def test_reductions_of_sharded_rows(dtype: DataType) -> None:
    x = values(dtype.torch, (6, 4))
    wide = x.to(torch.complex128) if x.is_complex() else x.double()
    expected = {"sum": wide.sum(0), "prod": wide.prod(0), "any": wide.bool().any(0), "all": wide.bool().all(0)}
    if not dtype.is_complex:
        expected |= {"max": wide.amax(0), "min": wide.amin(0)}
    if dtype is DataType.Bool:
        del expected["sum"], expected["prod"]  # whose results are integers, as torch's are

    def reduce(rank: int, size: int) -> None:
        for (op, want), target in itertools.product(expected.items(), PLACES[:2]):
            with FusionDefinition() as fd:
                t = fd.define_tensor([6, 4], dtype=dtype)
                out = getattr(fd.ops, op)(t, [0])
                fd.add_output(out)
            for tv, placed in ((t, PLACES[1]), (out, target)):
                place(tv, DeviceMesh([0, 1]), (placed,), reverse=False)
            found, own = run(fd, x, rank), local_piece(out, want.to(out.dtype.torch), rank)
            assert torch.equal(bits(found), bits(own)), f"{op} to {target}: {found}, not {own}"

    run_ranks(2, reduce)


def test_complex_numbers_have_no_order() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], dtype=DataType.ComplexFloat)
        for op in (fd.ops.max, fd.ops.min):
            with pytest.raises(OperandError, match=r"a tensor of ComplexFloat.*expected a type that has an order"):
                op(x)
        fd.add_output(x)
