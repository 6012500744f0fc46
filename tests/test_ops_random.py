"""Random numbers: moments and range, torch's generator, and masks that do not depend on the sharding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fusion_check import bound_piece
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import OperandError
from shardfuse.nn import DropoutAddNorm
from shardfuse.ops import random

FLOATS = (DataType.Double, DataType.Float, DataType.Half, DataType.BFloat16)


def test_philox_is_the_published_one() -> None:
    """Known answers of Random123 for Philox 4x32-10: counters and keys of zeros, and of ones."""
    zeros = random.philox(0, 0, torch.zeros(1, dtype=torch.int64))
    assert [int(w) for w in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = random.philox(-1, -1, torch.full((1,), -1, dtype=torch.int64))
    assert [int(w) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.5, 3.7)])
def test_uniform(dtype: DataType, low: float, high: float) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.uniform(low, high, shape=[1 << 18], rng_seed=7, rng_offset=3, dtype=dtype))
    (x,) = fd.execute([])
    assert x.dtype == dtype.torch
    wide = x.double()
    assert wide.min() >= torch.tensor(low, dtype=dtype.torch).double()
    assert wide.max() < torch.tensor(high, dtype=dtype.torch).double()
    span = high - low
    error = span * (3 / math.sqrt(12 * x.numel()) + torch.finfo(x.dtype).eps)
    assert abs(wide.mean().item() - (low + high) / 2) < error + (span / 2**8 if dtype is DataType.BFloat16 else 0)
    assert abs(wide.var().item() - span**2 / 12) < 0.02 * span**2


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal(dtype: DataType) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.normal(2.0, 0.5, shape=[1 << 18], rng_seed=11, rng_offset=0, dtype=dtype))
    (x,) = fd.execute([])
    assert x.dtype == dtype.torch
    assert abs(x.double().mean().item() - 2) < 0.01
    assert abs(x.double().std().item() - 0.5) < 0.01
    below = (x.double() < 2 - 0.5).double().mean().item()
    assert abs(below - 0.1587) < 0.01


def test_the_generator_reproduces() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        fd.add_output(fd.ops.rand_like(x))
        fd.add_output(fd.ops.randn_like(x))
    zeros = torch.zeros(8, 4)
    torch.manual_seed(5)
    first, again = fd.execute([zeros]), fd.execute([zeros])
    torch.manual_seed(5)
    repeated = fd.execute([zeros])
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_offsets_are_other_numbers() -> None:
    with FusionDefinition() as fd:
        seed, offset = fd.define_scalar(dtype=DataType.Int), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.uniform(0.0, 1.0, shape=[64], rng_seed=seed, rng_offset=offset))
    draws = [fd.execute([s, o])[0] for s in (1, 2) for o in (0, 1)]
    for k, a in enumerate(draws):
        for b in draws[:k]:
            assert not torch.equal(a, b)
    assert torch.equal(fd.execute([2, 1])[0], draws[-1])


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_masks_do_not_depend_on_the_sharding(world: int, dim: int) -> None:
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))

    def define(fd: FusionDefinition) -> object:
        t = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.dropout(t, 0.25, rng_seed=3, rng_offset=1))
        return t

    with FusionDefinition(backend="torch") as whole:
        define(whole)
    (wanted,) = whole.execute([x])
    kept = wanted != 0
    assert torch.equal(wanted[kept], (x * (1 / 0.75))[kept])
    assert 0.15 < 1 - kept.double().mean().item() < 0.35

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        with FusionDefinition(backend="torch") as fd:
            t = define(fd)
            t.set_device_mesh(mesh)
            t.outer_split(dim, size)
            t.axis(dim).parallelize(ParallelType.mesh_x)
        (found,) = fd.execute([x.chunk(size, dim)[rank].contiguous()])
        assert torch.equal(found, wanted.chunk(size, dim)[rank])

    run_ranks(world, run)


def test_ranks_agree_on_a_drawn_seed() -> None:
    """Without a seed of the caller's the first rank's is everybody's, however the others were seeded."""

    def run(rank: int, size: int) -> torch.Tensor:
        mesh = DeviceMesh(list(range(size)))
        with FusionDefinition(backend="torch") as fd:
            x = fd.define_tensor([8, 6])
            u = fd.ops.uniform(0.0, 1.0, shape=[8, 6])
            fd.add_output(fd.ops.add(x, u))
            x.set_device_mesh(mesh)
            x.outer_split(0, size)
            x.axis(0).parallelize(ParallelType.mesh_x)
        found = fd.execute([torch.zeros(8 // size, 6)])[0]
        plan = fd.fec.last_plan
        assert plan is not None
        assert found.shape == bound_piece(plan.fusion.outputs[0].domain, torch.zeros(8, 6), rank).shape
        return found

    pieces = run_ranks(2, run)
    assert not torch.equal(pieces[0], pieces[1])
    assert (torch.cat(pieces) >= 0).all()
    assert (torch.cat(pieces) < 1).all()


def test_what_cannot_be_drawn() -> None:
    with FusionDefinition() as fd:
        with pytest.raises(OperandError, match=r"ops.uniform: dtype is DataType.Int, expected Double, Float, Half"):
            fd.ops.uniform(0.0, 1.0, shape=[4], dtype=DataType.Int)
        with pytest.raises(OperandError, match=r"ops.normal: rng_offset is None, .* given together"):
            fd.ops.normal(0.0, 1.0, shape=[4], rng_seed=3)


BEYOND = {
    "uniform": [
        (math.nan, 1.0, DataType.Float, "minval is nan, expected a finite number that Float holds"),
        (0.0, math.inf, DataType.Double, "maxval is inf, expected a finite number that Double holds"),
        (0, 70_000, DataType.Half, "maxval is 70000, expected a finite number that Half holds"),
        (2, 1.5, DataType.Float, "minval is 2, expected a number that is not above maxval, 1.5"),
        (np.float32(2), 1, DataType.BFloat16, "minval is 2.0, expected a number that is not above maxval, 1"),
        (-40_000, 40_000, DataType.Half, "maxval is 40000, expected one above minval, -40000, by 65504.0 at most"),
        (-3e38, 3e38, DataType.Float, r"maxval is 3e\+38, expected one above minval, -3e\+38, by 3.40"),
        (-1e308, 1e308, DataType.Double, r"maxval is 1e\+308, expected one above minval"),
    ],
    "normal": [
        (0.0, -1, DataType.Float, "std is -1, expected a number of 0 or more"),
        (0.0, math.nan, DataType.Half, "std is nan, expected a number of 0 or more"),
    ],
}


@pytest.mark.parametrize("op", BEYOND)
def test_numbers_that_are_no_distributions_are_refused(op: str) -> None:
    with FusionDefinition() as fd:
        for first, second, dtype, said in BEYOND[op]:
            with pytest.raises(OperandError, match=f"^ops.{op}: {said}"):
                getattr(fd.ops, op)(first, second, [4], dtype=dtype)


def test_distributions_of_one_number_and_of_all_that_a_type_holds() -> None:
    with FusionDefinition(backend="torch") as fd:
        fd.add_output(fd.ops.uniform(1.5, 1.5, [100]))
        fd.add_output(fd.ops.normal(-2.0, 0, [100]))
        fd.add_output(fd.ops.uniform(-32752, 32752, [100], dtype=DataType.Half))
        fd.add_output(fd.ops.uniform(0.0, torch.finfo(torch.float32).max, [100]))
    same, mean, half, wide = fd.execute([])
    assert same.eq(1.5).all()
    assert mean.eq(-2.0).all()
    for drawn, ends in ((half, (-32752, 32752)), (wide, (0.0, torch.finfo(torch.float32).max))):
        assert drawn.isfinite().all()
        assert drawn.min().item() < ends[0] + 0.2 * (ends[1] - ends[0])
        assert drawn.max().item() > ends[0] + 0.8 * (ends[1] - ends[0])


# --- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [2**63, 2**63 + 5, 2**64 - 1])
def test_the_sign_of_a_seed_is_a_bit_as_any_other(seed: int) -> None:
    """As large as what torch's generators have for one."""
    found: list[list[torch.Tensor]] = []
    for same in (seed, seed - 2**64):
        with FusionDefinition(backend="torch") as fd:
            fd.add_output(fd.ops.dropout(fd.define_tensor([64]), 0.5, same, same))
            fd.add_output(fd.ops.normal(0.0, 1.0, [64], same, same))
            fd.add_output(fd.ops.philox_uniform(same, fd.ops.iota(64)))
        found.append(fd.execute([torch.ones(64)]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_seeds_and_probabilities_that_are_none() -> None:
    fd = FusionDefinition(backend="torch")
    with fd:
        x, tensor = fd.define_tensor([8]), fd.define_tensor([], dtype=DataType.Int)
        double = fd.define_scalar()
        for wrong, said in (
            (1.5, "rng_seed is 1.5, expected an integer"),
            (math.nan, "rng_seed is nan, expected an integer"),
            (double, r"rng_seed is S\d+, expected an integer, or a scalar declared with dtype=DataType.Int"),
            (tensor, "philox_uniform takes seeds that are tensors"),
        ):
            with pytest.raises(OperandError, match=f"ops.dropout: .*{said}"):
                fd.ops.dropout(x, 0.5, wrong, 0)  # pyright: ignore[reportArgumentType]
        with pytest.raises(OperandError, match=r"ops.dropout: rng_offset is None, .* given together"):
            fd.ops.dropout(x, 0.5, 1)
        with pytest.raises(OperandError, match=r"ops.uniform: rng_seed is None, .* given together"):
            fd.ops.uniform(0.0, 1.0, [8], rng_offset=1)
        for p in (-0.1, 1.5, math.nan):
            with pytest.raises(OperandError, match=r"ops.dropout: p is .*, expected a probability from 0 to 1"):
                fd.ops.dropout(x, p)
        with pytest.raises(OperandError, match=r"ops.philox_uniform: seed is 3.5, expected an integer or Bool"):
            fd.ops.philox_uniform(seed=3.5, index=tensor)
        with pytest.raises(OperandError, match=r"ops.philox_uniform: index is T\d+.*, expected an integer"):
            fd.ops.philox_uniform(3, x)
        with pytest.raises(OperandError, match=r"ops.philox_uniform: seed is 3.5, expected an integer or Bool"):
            fd.ops.philox_uniform(3.5, 4)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_what_is_dropped_is_what_torch_drops(p: float) -> None:
    """NaN, and infinity, that are dropped are NaN: 0 times either."""
    x = torch.tensor([1.0, -2.0, math.nan, math.inf]).repeat(64)
    with FusionDefinition(backend="torch") as fd:
        fd.add_output(fd.ops.dropout(fd.define_tensor([256]), p, 7, 0))
        fd.add_output(fd.ops.uniform(0.0, 1.0, [256], 7, 0))
    found, drawn = fd.execute([x])
    expected = x * (drawn >= p) * (1 / (1 - p) if p < 1 else 0.0)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    module = DropoutAddNorm(64, p=p or 0.5, norm="rms")
    _, total = module(torch.full((4, 64), math.nan), torch.zeros(4, 64))
    assert total.isnan().all()


def test_numbers_of_numpy_are_numbers() -> None:
    """Of any width, where an op takes a number and where it takes an operand."""
    found: list[list[torch.Tensor]] = []
    for half, seed, three in (
        (0.5, 4, 3),
        (np.float32(0.5), np.int64(4), np.int32(3)),
        (np.float64(0.5), np.uint8(4), 3),
    ):
        with FusionDefinition(backend="torch") as fd:
            x = fd.define_tensor([64])
            fd.add_output(fd.ops.dropout(x, half, rng_seed=seed, rng_offset=seed))
            fd.add_output(fd.ops.uniform(half, seed, [64], three, three))
            fd.add_output(fd.ops.philox_uniform(three, fd.ops.iota(64)))
            fd.add_output(fd.ops.clamp(x, half, max=half))
        found.append(fd.execute([torch.ones(64)]))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
