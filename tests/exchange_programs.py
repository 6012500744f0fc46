"""Random programs of rows that ranks have parts of, most of which kernels exchange; a seed replays one.

Values are small integers, so that sums are exact and a word of another row, rank, statistic or launch is far off.
"""

from __future__ import annotations

import random

import torch
from thread_check import Case

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir.tensor_view import TensorView

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
_DTYPES = (DataType.Float, DataType.BFloat16, DataType.Half)
_COLUMNS = (5, 8, 24, 32, 64, 96, 640)
"""Of 5, the last of four ranks has none."""
_ROWS = (1, 2, 3, 5, 8)


def random_program(seed: int, world: int) -> Case:
    """Statistics of rows that are sharded, or of partial sums, on all ranks or on some, in the order of any mesh."""
    rng = random.Random(seed)
    mesh = _mesh(rng, world)
    ranks, rows, n = mesh.extent(X), rng.choice(_ROWS), rng.choice(_COLUMNS)
    if rng.random() < 0.3:
        return _of_partial_sums(rng, seed, mesh, rows, n)
    if rng.random() < 0.3 and n // ranks > 1:
        n += rng.randrange(1, ranks)
    rows *= mesh.extent(Y) if mesh.ndim > 1 and rng.random() < 0.7 else 1
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1, n], dtype=rng.choice(_DTYPES)) for _ in range(rng.randint(1, 3))]
        results = _rows(rng, fd, [fd.ops.cast(x, DataType.Float) for x in tensors])
        for t in results:
            fd.add_output(t)
        first = tensors[0]
        first.set_device_mesh(mesh)
        at = 1
        if mesh.ndim > 1 and rows % mesh.extent(Y) == 0:
            first.outer_split(0, mesh.extent(Y))
            first.axis(0).parallelize(Y)
            at = 2
        first.outer_split(at, ranks, uneven=n % ranks != 0)
        first.axis(at).parallelize(X)
    given = [_values(rng, (rows, n), x.dtype) for x in tensors]
    return Case(fd, given, {x: v.shape for x, v in zip(tensors, given, strict=True)}, name=f"seed {seed}")


def _of_partial_sums(rng: random.Random, seed: int, mesh: DeviceMesh, rows: int, n: int) -> Case:
    ranks, dtype = mesh.extent(X), rng.choice(_DTYPES[1:])
    with FusionDefinition() as fd:
        summands = fd.define_tensor([ranks, -1, n], contiguity=True, dtype=dtype)
        beside = fd.define_tensor([-1, n], dtype=dtype)
        x = fd.ops.add(fd.ops.cast(fd.ops.sum(summands, [0]), DataType.Float), fd.ops.cast(beside, DataType.Float))
        for t in _rows(rng, fd, [x]):
            fd.add_output(t)
        summands.set_device_mesh(mesh)
        summands.axis(0).parallelize(X)
    given = [_values(rng, (ranks, rows, n), dtype), _values(rng, (rows, n), dtype)]
    return Case(fd, given, {summands: given[0].shape, beside: given[1].shape}, name=f"seed {seed}")


def _rows(rng: random.Random, fd: FusionDefinition, known: list[TensorView]) -> list[TensorView]:
    """Results of a few statistics of rows, each of which may be of what was made with those before."""
    o = fd.ops
    for _ in range(rng.randint(1, 3)):
        x = rng.choice(known)
        if rng.random() < 0.3 and len(known) > 1:
            x = o.add(x, rng.choice(known))
        kind = rng.choice(("sum", "max", "min", "mean", "squares", "var", "softmax", "amax"))
        if kind == "squares":
            known.append(o.mul(x, o.rsqrt(o.add(o.sum(o.mul(x, x), [1], keepdim=True), 1.0))))
        elif kind == "var":
            var, mean = o.var_mean(x, [1], correction=0, keepdim=True)
            known.append(o.mul(o.sub(x, mean), o.rsqrt(o.add(var, 1.0))))
        elif kind == "softmax":
            e = o.exp(o.sub(x, o.max(x, [1], keepdim=True)))
            known.append(o.truediv(e, o.sum(e, [1], keepdim=True)))
        elif kind == "amax":
            known.append(o.truediv(x, o.add(o.max(o.abs(x), [1], keepdim=True), 1.0)))
        elif kind == "mean":
            known.append(o.add(o.abs(x), o.mean(o.abs(x), [1], keepdim=True)))
        else:
            known.append(o.add(o.abs(x), getattr(o, kind)(o.abs(x), [1], keepdim=True)))
    results = [known[-1]]
    if rng.random() < 0.3:
        results.append(o.max(known[-1], [1], keepdim=rng.random() < 0.5))
    if rng.random() < 0.3:
        results.append(rng.choice(known[:-1]))
    return [o.set(t) for t in results]


def _mesh(rng: random.Random, world: int) -> DeviceMesh:
    """Of all ranks, or of some; in two dimensions now and then."""
    ranks = rng.sample(range(world), world if rng.random() < 0.7 else rng.randint(2, world))
    if len(ranks) == 4 and rng.random() < 0.5:
        return DeviceMesh([ranks[:2], ranks[2:]])
    return DeviceMesh(ranks)


def _values(rng: random.Random, shape: tuple[int, ...], dtype: DataType) -> torch.Tensor:
    made = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return torch.randint(-2, 4, shape, generator=made).to(dtype.torch)
