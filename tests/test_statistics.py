"""Variance, norms and softmax over a sharded axis: one exchange, and the values of the unsharded tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from fusion_check import check
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir.tensor_view import TensorView

Define = Callable[[FusionDefinition, TensorView], list[TensorView]]


def layer_norm(fd: FusionDefinition, x: TensorView, axes: tuple[int, ...] = (1,)) -> list[TensorView]:
    var, mean = fd.ops.var_mean(x, list(axes), 0, keepdim=True)
    return [fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5))), var, mean]


def softmax(fd: FusionDefinition, x: TensorView) -> list[TensorView]:
    e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True)))
    return [fd.ops.truediv(e, fd.ops.sum(e, [1], keepdim=True))]


def log_softmax(fd: FusionDefinition, x: TensorView) -> list[TensorView]:
    shifted = fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))
    return [fd.ops.sub(shifted, fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), [1], keepdim=True)))]


def entropy(fd: FusionDefinition, x: TensorView) -> list[TensorView]:
    """Of a softmax: a logit of -inf adds nothing to it."""
    apart = fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))
    e = fd.ops.exp(apart)
    total = fd.ops.sum(e, [1], keepdim=True)
    weighted = fd.ops.where(fd.ops.eq(e, 0.0), 0.0, fd.ops.mul(e, apart))
    return [fd.ops.sub(fd.ops.log(total), fd.ops.div(fd.ops.sum(weighted, [1], keepdim=True), total))]


def in_half(fd: FusionDefinition, x: TensorView) -> list[TensorView]:
    return [fd.ops.cast(y, dtype=DataType.Half) for y in layer_norm(fd, fd.ops.cast(x, dtype=DataType.Float))]


DEFINITIONS: dict[str, Define] = {
    "var": lambda fd, x: [fd.ops.var(x, [1])],
    "layer_norm": layer_norm,
    "batch_norm": lambda fd, x: layer_norm(fd, x, (0, 1)),
    "softmax": softmax,
    "log_softmax": log_softmax,
    "entropy": entropy,
    "half": in_half,
}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def run(define: Define, x: torch.Tensor, rank: int, size: int, *, inner: bool = False) -> list[str]:
    mesh = DeviceMesh(list(range(size)))
    with FusionDefinition() as fd:
        t = fd.define_tensor(list(x.shape), contiguity=True, dtype=DataType.from_torch(x.dtype))
        for y in define(fd, t):
            fd.add_output(y)
        t.set_device_mesh(mesh)
        if inner:
            t.inner_split(1, size)
            t.axis(2).parallelize(ParallelType.mesh_x)
        else:
            t.outer_split(1, size, uneven=x.shape[1] % size != 0)
            t.axis(1).parallelize(ParallelType.mesh_x)
    check(fd, [x])
    return [str(c) for c in fd.explain().collectives]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("columns", [16, 13, 5, 3])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_one_exchange(name: str, columns: int, size: int) -> None:
    """Even, uneven and empty shards."""
    x = numbers(6, columns).to(torch.float16 if name == "half" else torch.float32)
    for found in run_ranks(size, lambda rank, size: run(DEFINITIONS[name], x, rank, size)):
        elements = 1 if name == "batch_norm" else 6
        of_each = 2 if "softmax" in name else 3
        assert found == [f"all_gather over mesh_x of {size} ranks, {of_each * 4 * elements * size} bytes"]


@pytest.mark.parametrize("name", ["layer_norm", "softmax"])
def test_cyclic(name: str) -> None:
    for found in run_ranks(4, lambda rank, size: run(DEFINITIONS[name], numbers(6, 16), rank, size, inner=True)):
        of_each = 2 if name == "softmax" else 3
        assert found == [f"all_gather over mesh_x of 4 ranks, {of_each * 96} bytes"]


def test_a_variance_of_exponentials_and_their_sum() -> None:
    """The sum belongs to the softmax and to the variance: one exchange makes it, and the squares have an all-reduce."""

    def define(fd: FusionDefinition, x: TensorView) -> list[TensorView]:
        return [fd.ops.var(fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))), [1])]

    for found in run_ranks(2, lambda rank, size: run(define, numbers(6, 13), rank, size)):
        assert [c.split()[0] for c in found] == ["all_gather", "all_reduce"]


@pytest.mark.parametrize("columns", [4096, 4095])
def test_a_mean_of_ten_thousand_costs_no_digits(columns: int) -> None:
    """The deviation is 1: E[x²] − E[x]² would have no digit left in float32."""
    x = numbers(3, columns) + 1e4
    run_ranks(4, lambda rank, size: run(layer_norm, x, rank, size))


def test_special_values() -> None:
    """Whole shards of -inf, whole rows of -inf, inf and NaN: as torch has them."""
    x = numbers(7, 8)
    x[0, :2] = float("-inf")
    x[1, 2:] = float("-inf")
    x[2] = float("-inf")
    x[3, 5] = float("inf")
    x[4, 1] = float("nan")
    x[5, 6] = float("-inf")
    for define in (softmax, log_softmax, entropy, layer_norm):
        run_ranks(4, lambda rank, size, define=define: run(define, x, rank, size))


def test_large_statistics_are_reduced() -> None:
    """Many rows on many ranks: the bytes of a gather outweigh a latency."""
    mesh = DeviceMesh(list(range(8)))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 64], contiguity=True)
        fd.add_output(fd.ops.var(x, [1]))
        x.set_device_mesh(mesh)
        x.outer_split(1, 8)
        x.axis(1).parallelize(ParallelType.mesh_x)
    assert [c.kind for c in fd.explain(sizes={x: (1024, 64)}).collectives] == ["all_gather"]
    assert [c.kind for c in fd.explain(sizes={x: (2**20, 64)}).collectives] == ["all_reduce"] * 2


def test_on_a_mesh_of_two_dimensions() -> None:
    def run_2d(rank: int, size: int) -> list[str]:
        mesh = DeviceMesh([[0, 1], [2, 3]])
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            for y in layer_norm(fd, x):
                fd.add_output(y)
            x.set_device_mesh(mesh)
            for axis, parallel_type in ((1, ParallelType.mesh_x), (0, ParallelType.mesh_y)):
                x.outer_split(axis, 2)
                x.axis(axis).parallelize(parallel_type)
        check(fd, [numbers(6, 8)])
        return [str(c) for c in fd.explain().collectives]

    assert run_ranks(4, run_2d) == [["all_gather over mesh_x of 2 ranks, 72 bytes"]] * 4


# Mesh dimensions and the dims that they cut, the first one first; inner is cyclic.
Y, X, Z = ParallelType.mesh_y, ParallelType.mesh_x, ParallelType.mesh_z
OVER_TWO = {
    "both of one axis": [(Y, 1, False), (X, 1, False)],
    "both of one axis, inner first": [(X, 1, False), (Y, 1, False)],
    "one of each axis": [(Y, 0, False), (X, 1, False)],
    "cyclic within blocks": [(Y, 1, False), (X, 1, True)],
    "three": [(Z, 0, False), (Y, 1, False), (X, 1, False)],
}


@pytest.mark.parametrize("over", OVER_TWO)
def test_over_several_mesh_dimensions_at_once(over: str) -> None:
    """One packed gather over the ranks of all of them, even, uneven and empty."""
    cuts = OVER_TWO[over]
    reduces_rows = any(axis == 0 for _, axis, _ in cuts)
    widths = (16, 12) if "cyclic" in over else (16, 12, 7, 5, 2, 1)
    shape = (2, 2, 2) if len(cuts) == 3 else (2, 2)

    def run_all(rank: int, size: int) -> list[list[str]]:
        mesh = DeviceMesh(torch.arange(size).reshape(shape))
        found: list[list[str]] = []
        names = ("batch_norm",) if reduces_rows else ("var", "layer_norm", "softmax", "half")
        for columns, name in itertools.product(widths, names):
            x = numbers(6, columns).to(torch.float16 if name == "half" else torch.float32)
            with FusionDefinition() as fd:
                t = fd.define_tensor([6, columns], contiguity=True, dtype=DataType.from_torch(x.dtype))
                for y in DEFINITIONS[name](fd, t):
                    fd.add_output(y)
                t.set_device_mesh(mesh)
                left = list(t.domain.loop)
                for p, axis, inner in cuts:
                    at = t.domain.loop.index(left[axis])
                    t.split(at, 2, inner_split=inner, uneven=not inner)
                    left[axis] = t.domain.loop[at + (not inner)]
                    t.axis(at + inner).parallelize(p)
            check(fd, [x])
            found.append([str(c) for c in fd.explain().collectives])
        return found

    size = torch.Size(shape).numel()
    dims = ", ".join(f"mesh_{d}" for d in "zyx"[-len(shape) :])
    for found in run_ranks(size, run_all):
        numbers_of_each = [3] if reduces_rows else [18, 18, 12, 18]
        wanted = [[f"all_gather over {dims} of {size} ranks, {4 * n * size} bytes"] for n in numbers_of_each]
        assert found == wanted * len(widths)


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_flattened_rows_of_uneven_shards(rows: int) -> None:
    """A rank has whole rows of what is flattened: 7, 7 and none of 14 elements."""

    def run_flat(rank: int, size: int) -> list[str]:
        with FusionDefinition() as fd:
            x = fd.define_tensor([rows, 7], contiguity=True)
            for y in fd.ops.var_mean(fd.ops.reshape(x, [rows * 7]), [0], 0):
                fd.add_output(y)
            x.set_device_mesh(DeviceMesh([0, 1, 2]))
            x.outer_split(0, 3, uneven=True)
            x.axis(0).parallelize(ParallelType.mesh_x)
        check(fd, [numbers(rows, 7)])
        return [str(c) for c in fd.explain().collectives]

    assert run_ranks(3, run_flat) == [["all_gather over mesh_x of 3 ranks, 36 bytes"]] * 3


def test_of_rows_that_are_repeated() -> None:
    """Nothing is read element by element: the kernel walks an axis that its input does not have."""

    def run_repeated(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 2, 3], contiguity=True)
            wide = fd.ops.expand(fd.ops.unsqueeze(x, 0), [3, 4, 2, 3])
            fd.add_output(fd.ops.permute(fd.ops.var(wide, [0, 1, 3], 0, keepdim=True), [0, 3, 1, 2]))
            x.set_device_mesh(DeviceMesh([2, 1, 0]))
            x.outer_split(0, 3, uneven=True)
            x.axis(0).parallelize(ParallelType.mesh_x)
        check(fd, [numbers(4, 2, 3)])

    run_ranks(3, run_repeated)


def test_of_rows_that_are_read_in_reverse() -> None:
    """The kernel that loops over the rows reads its input through a window alone."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6, 5], contiguity=True)
        for y in softmax_over(fd, fd.ops.flip(x, [2]), [0, 2]):
            fd.add_output(y)
    check(fd, [numbers(4, 6, 5)])


def softmax_over(fd: FusionDefinition, x: TensorView, axes: list[int]) -> list[TensorView]:
    e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, axes, keepdim=True)))
    return [fd.ops.truediv(e, fd.ops.sum(e, axes, keepdim=True))]


SPREADS: dict[str, Define] = {
    "of absolute values": lambda fd, x: [fd.ops.mean(fd.ops.abs(distance(fd, x)), [1])],
    "of cubes": lambda fd, x: [fd.ops.sum(fd.ops.pow(distance(fd, x), 3.0), [1])],
    "of tanh": lambda fd, x: [fd.ops.sum(fd.ops.tanh(distance(fd, x)), [1])],
    "of products with another": lambda fd, x: [fd.ops.sum(fd.ops.mul(distance(fd, x), fd.ops.add(x, 1.0)), [1])],
    "of squares about the largest": lambda fd, x: [
        fd.ops.sum(fd.ops.square(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))), [1])
    ],
    "of exponentials about the mean": lambda fd, x: [fd.ops.sum(fd.ops.exp(distance(fd, x)), [1])],
    "of exponentials of base 2": lambda fd, x: [
        fd.ops.sum(fd.ops.exp2(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))), [1])
    ],
    "of squares about the mean of other axes": lambda fd, x: [
        fd.ops.sum(fd.ops.square(fd.ops.sub(x, fd.ops.mean(x, [0], keepdim=True))), [1])
    ],
}
"""What is summed up of distances, and is neither a variance nor a softmax's sum."""


def distance(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.sub(x, fd.ops.mean(x, [1], keepdim=True))


@pytest.mark.parametrize("spread", SPREADS)
def test_what_is_no_statistic_is_not_taken_for_one(spread: str) -> None:
    x = numbers(3, 12)
    run_ranks(2, lambda rank, size: run(SPREADS[spread], x, rank, size))
