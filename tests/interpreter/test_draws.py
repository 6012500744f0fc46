"""Random numbers in generated kernels: bit for bit the torch backend's, however the tensor is sharded."""

from __future__ import annotations

import pytest
import torch
from torch_answers import assert_like

import shardfuse
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.executor.options import Backend

KEYS = ((3, 1), (-1, -1), ((1 << 62) + 5, (1 << 40) + 3))
FLOATS = (DataType.Double, DataType.Float, DataType.Half, DataType.BFloat16)


def drawn(backend: Backend, kind: str, bounds: tuple[float, float], dtype: DataType, key: tuple[int, int]):
    with FusionDefinition(backend=backend) as fd:
        seed, offset = (fd.define_scalar(dtype=DataType.Int) for _ in range(2))
        fd.add_output(getattr(fd.ops, kind)(*bounds, shape=[5, 1, 37], rng_seed=seed, rng_offset=offset, dtype=dtype))
    (found,) = fd.execute(list(key))
    assert fd.explain().kernels == 1
    return found


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_is_bitwise_the_same(dtype: DataType) -> None:
    for key in KEYS:
        for bounds in ((0.0, 1.0), (-1.5, 3.7), (0.0, 5.3), (1.0, 2.0)):
            assert torch.equal(*(drawn(b, "uniform", bounds, dtype, key) for b in ("triton", "torch"))), (key, bounds)


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal(dtype: DataType) -> None:
    for key in KEYS:
        found, wanted = (drawn(b, "normal", (2.0, 0.5), dtype, key).double() for b in ("triton", "torch"))
        # 2 + 0.5 x of numbers below 4: a rounding of 4 each for the logarithm, the root, the cosine and the sum
        assert (found - wanted).abs().max() <= 4 * torch.finfo(dtype.torch).eps


def largest_drawn(world: int, backend: Backend) -> float:
    with FusionDefinition(backend=backend) as fd:
        x = fd.define_tensor([1])
        drawn = fd.ops.uniform(0.0, 1.0, [37], rng_seed=3, rng_offset=0)
        fd.add_output(fd.ops.max(fd.ops.add(x, drawn), [0]))
    x.set_device_mesh(mesh := DeviceMesh(range(world)))
    if world > 1:
        drawn.set_device_mesh(mesh)
        drawn.outer_split(0, world, uneven=True)
        drawn.axis(0).parallelize(ParallelType.mesh_x)
    return fd.execute([torch.zeros(1)])[0].item()


def test_numbers_that_one_kernel_draws_and_reads_are_this_ranks() -> None:
    """Also where nothing that is stored is sharded."""
    wanted = largest_drawn(1, "torch")
    for world in (2, 4):
        assert shardfuse.simulate(largest_drawn, world, args=(world, "triton")) == [wanted] * world


def dropout_layer_norm(backend: Backend, world: int, dim: int) -> FusionDefinition:
    """dropout(x + bias) + residual, and its LayerNorm; x sharded by ``dim``."""
    with FusionDefinition(backend=backend) as fd:
        x, bias, residual = fd.define_tensor([-1, -1]), fd.define_tensor([-1]), fd.define_tensor([-1, -1])
        seed, offset = (fd.define_scalar(dtype=DataType.Int) for _ in range(2))
        total = fd.ops.add(fd.ops.dropout(fd.ops.add(x, bias), 0.3, seed, offset), residual)
        var, mean = fd.ops.var_mean(total, [1], correction=0, keepdim=True)
        fd.add_output(total)
        fd.add_output(fd.ops.mul(fd.ops.sub(total, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5))))
        if world > 1:
            for tv, at in ((x, dim), (residual, dim), *([(bias, 0)] if dim else [])):
                tv.set_device_mesh(DeviceMesh(list(range(world))))
                tv.outer_split(at, world, uneven=True)
                tv.axis(at).parallelize(ParallelType.mesh_x)
    return fd


def torch_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:], eps=1e-5)


@pytest.mark.parametrize(("world", "dim"), [(1, 0), (2, 0), (2, 1), (8, 0), (8, 1)])
def test_dropout_drops_the_same_elements(world: int, dim: int) -> None:
    """Rows and columns that the ranks share unevenly; one kernel where the row is whole."""
    g = torch.Generator().manual_seed(0)
    x, bias, residual = (torch.randn(s, generator=g) for s in ((19, 45), (45,), (19, 45)))
    whole, _ = dropout_layer_norm("torch", 1, 0).execute([x, bias, residual, 7, 2])
    assert torch.equal(whole == residual, (whole - residual) == 0)
    dropped = (whole == residual).double().mean().item()
    assert 0.2 < dropped < 0.4

    def run() -> None:
        rank = shardfuse.initialize().rank if world > 1 else 0
        fd = dropout_layer_norm("triton", world, dim)
        size = -(-x.shape[dim] // world)

        def piece(t: torch.Tensor) -> torch.Tensor:
            at = dim if t.ndim > 1 else 0
            return t if t.ndim == 1 and dim == 0 else t[(slice(None),) * at + (slice(rank * size, (rank + 1) * size),)]

        values = [piece(t).contiguous() for t in (x, bias, residual)]
        tensors = fd.fec.tensors()
        shapes = ((19, 45), (45,), (19, 45))
        found = fd.execute([*values, 7, 2], sizes=dict(zip(tensors, shapes, strict=True)))
        assert torch.equal(found[0], piece(whole))
        assert_like(found[1], torch_norm, whole, place=piece)
        if dim == 0:
            assert fd.explain().kernels == 1

    if world == 1:
        run()
    else:
        shardfuse.simulate(run, world)


def drawn_in_rows(backend: Backend, columns: int, dtype: DataType, world: int) -> list[torch.Tensor]:
    """Numbers beside rows that a kernel holds; rank 0 has the first of them, or of ``world`` ranks all have some."""
    rows = 3
    with FusionDefinition(backend=backend) as fd:
        x = fd.define_tensor([rows, columns], contiguity=True, dtype=dtype)
        drawn = fd.ops.uniform(0.0, 1.0, [rows, columns], rng_seed=5, rng_offset=2)
        summed = fd.ops.add(fd.ops.cast(x, DataType.Float), drawn)
        fd.add_output(fd.ops.sub(summed, fd.ops.mul(fd.ops.sum(summed, [-1], keepdim=True), 0.0)))
    x.set_device_mesh(mesh := DeviceMesh(range(world)))
    if world > 1:
        x.outer_split(1, world)
        x.axis(1).parallelize(ParallelType.mesh_x)
    local = torch.zeros(rows, columns // world, dtype=dtype.torch)
    assert mesh.size == world
    return [t for t in fd.execute([local]) if t is not None]


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16])
def test_neighbours_draw_the_words_of_one_counter(dtype: DataType) -> None:
    """Rows of whole counters, of odd ends, longer than a chunk, and too long to be held: the numbers of each alone."""
    for columns in (4, 8, 64, 70, 1025, 4096 + 8, 20000):
        (found,), (wanted,) = (drawn_in_rows(backend, columns, dtype, 1) for backend in ("triton", "torch"))
        assert torch.equal(found, wanted), columns
        assert len(found.unique()) > 0.9 * found.numel()


def test_shards_draw_the_numbers_of_the_whole() -> None:
    """Also where a rank's part begins within a counter."""
    for columns in (32, 24, 20):
        (wanted,) = drawn_in_rows("torch", columns, DataType.Float, 1)
        parts = shardfuse.simulate(drawn_in_rows, 2, args=("triton", columns, DataType.Float, 2))
        assert torch.equal(torch.cat([part for (part,) in parts], -1), wanted), columns
