"""Sharded fusions on 2 to 8 ranks that are threads, against the same ops unsharded in torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from thread_check import Case, Placement, X, check_on_threads, shard, world_mesh

from shardfuse import DataType, FusionDefinition

EVEN, UNEVEN, SHORT = (12, 24, 24), (7, 5, 13), (2, 3, 5)
"""Shapes that 2, 3 and 4 ranks divide, that none does, and that leave some ranks without anything."""


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Integers, so that sums are exact and an element that is out of place is far off."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def placements(shape: tuple[int, ...], world: int) -> list[Placement]:
    """Replicated, the outer part of each axis, and the inner part of each that the ranks divide."""
    outer: list[Placement] = [(k, "outer") for k in range(len(shape))]
    inner: list[Placement] = [(k, "inner") for k, n in enumerate(shape) if n % world == 0]
    return [None, *outer, *inner]


def names(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


# --- from every sharding to every other --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [EVEN, UNEVEN, SHORT], ids=names)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_from_every_sharding_to_every_other(world: int, shape: tuple[int, ...]) -> None:
    def cases() -> Iterator[Case]:
        for source, target in itertools.product(placements(shape, world), repeat=2):
            with FusionDefinition() as fd:
                x = fd.define_tensor(list(shape))
                y = fd.ops.set(x)
                fd.add_output(y)
            shard(x, world_mesh(world), (X, source))
            shard(y, world_mesh(world), (X, target))
            yield Case(fd, [values(*shape)], reference=lambda x: x, name=f"{source} to {target}")

    check_on_threads(world, list(cases()))


@pytest.mark.parametrize("shape", [EVEN, UNEVEN, SHORT], ids=names)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_from_partial_sums(world: int, shape: tuple[int, ...]) -> None:
    """One [world, ...] tensor, its first axis on the mesh: all-reduce, or reduce-scatter to every sharding."""

    def cases() -> Iterator[Case]:
        for target, op in itertools.product(placements(shape, world), ("sum", "max")):
            with FusionDefinition() as fd:
                x = fd.define_tensor([world, *shape])
                y = getattr(fd.ops, op)(x, [0])
                fd.add_output(y)
            x.set_device_mesh(world_mesh(world))
            x.axis(0).parallelize(X)
            shard(y, world_mesh(world), (X, target))
            torch_op = torch.sum if op == "sum" else torch.amax
            reference = lambda x, f=torch_op: f(x, 0)  # noqa: E731
            yield Case(fd, [values(world, *shape)], reference=reference, name=f"{op} to {target}")

    check_on_threads(world, list(cases()))


def test_eight_ranks() -> None:
    for shape in ((16, 8), (13, 3)):
        cases: list[Case] = []
        for source, target in itertools.product(placements(shape, 8), repeat=2):
            with FusionDefinition() as fd:
                x = fd.define_tensor(list(shape))
                y = fd.ops.set(x)
                fd.add_output(y)
            shard(x, world_mesh(8), (X, source))
            shard(y, world_mesh(8), (X, target))
            cases.append(Case(fd, [values(*shape)], name=f"{source} to {target}"))
        check_on_threads(8, cases)


# --- reductions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [EVEN, UNEVEN, SHORT], ids=names)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_reductions_over_sharded_axes(world: int, shape: tuple[int, ...]) -> None:
    """Every sharding of the input, every set of axes, every sharding of the result that the ranks divide or chunk."""

    def cases() -> Iterator[Case]:
        count = 0
        for source, axes in itertools.product(placements(shape, world), ([0], [1], [2], [0, 2], [0, 1, 2])):
            rest = tuple(n for k, n in enumerate(shape) if k not in axes)
            for target in placements(rest, world):
                op = ("sum", "max", "mean", "min", "prod")[count % 5]
                count += 1
                with FusionDefinition() as fd:
                    x = fd.define_tensor(list(shape), dtype=DataType.Double)
                    y = getattr(fd.ops, op)(x, axes)
                    fd.add_output(y)
                shard(x, world_mesh(world), (X, source))
                shard(y, world_mesh(world), (X, target))
                yield Case(fd, [values(*shape).double().clamp(-2, 2)], name=f"{op} over {axes}, {source} to {target}")

    check_on_threads(world, list(cases()))


def layer_norm(fd: FusionDefinition, shape: tuple[int, ...]) -> None:
    x, w = fd.define_tensor(list(shape)), fd.define_tensor([shape[-1]])
    var, mean = fd.ops.var_mean(x, [-1], correction=0, keepdim=True)
    fd.add_output(fd.ops.mul(fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5))), w))


def softmax(fd: FusionDefinition, shape: tuple[int, ...]) -> None:
    x = fd.define_tensor(list(shape))
    e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [-1], keepdim=True)))
    fd.add_output(fd.ops.div(e, fd.ops.sum(e, [-1], keepdim=True)))


@pytest.mark.parametrize("shape", [(4, 6, 16), (3, 5, 7)], ids=names)
@pytest.mark.parametrize("norm", [layer_norm, softmax])
def test_norms_over_a_sharded_axis(norm: Callable[..., None], shape: tuple[int, ...]) -> None:
    """What is said of the input goes through: no activation is gathered, only statistics are exchanged."""
    cases: list[Case] = []
    for source in placements(shape, 2):
        with FusionDefinition() as fd:
            norm(fd, shape)
        x = fd.fusion.tensors()[0]
        shard(x, world_mesh(2), (X, source))
        inputs = [values(*shape), values(shape[-1], seed=1)][: len(fd.fusion.inputs)]
        cases.append(Case(fd, inputs, name=f"{source}"))
    check_on_threads(2, cases)
    for case in cases:
        sharded = x.ndim and case.name.startswith("(2")
        collectives = case.fd.explain().collectives
        assert (0 < len(collectives) <= 2) if sharded else not collectives
        assert all(c.bytes < 4 * shape[0] * shape[1] * shape[2] for c in collectives)


def test_a_variance_far_from_zero() -> None:
    """Mean 1e4, deviation 1, the reduced axis over 4 ranks, unevenly."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 1001])
        for out in fd.ops.var_mean(x, [1]):
            fd.add_output(out)
    shard(x, world_mesh(4), (X, (1, "outer")))
    data = torch.randn(4, 1001, generator=torch.Generator().manual_seed(0)) + 1e4
    check_on_threads(4, [Case(fd, [data], reference=lambda x: torch.var_mean(x, 1))])


# --- torch calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 12, 8), (5, 7, 3)], ids=names)
@pytest.mark.parametrize("world", [2, 4])
def test_matmul(world: int, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    cases: list[Case] = []
    for a_place, b_place, out_place in itertools.product((None, (0, "outer"), (1, "outer")), repeat=3):
        with FusionDefinition() as fd:
            a, b = fd.define_tensor([m, k]), fd.define_tensor([k, n])
            out = fd.ops.matmul(a, b)
            fd.add_output(out)
        for tv, place in ((a, a_place), (b, b_place), (out, out_place)):
            shard(tv, world_mesh(world), (X, place))
        cases.append(
            Case(fd, [values(m, k), values(k, n, seed=1)], reference=torch.matmul, name=f"{a_place} {b_place}")
        )
    check_on_threads(world, cases)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(2, 4, 12, 8), (3, 5, 7, 3)], ids=names)
def test_linear(sizes: tuple[int, int, int, int], with_bias: bool) -> None:
    """Rows, contracted and output axes sharded: tensor parallelism by columns, by rows, and sequence parallelism."""
    b, s, k, n = sizes
    cases: list[Case] = []
    spots: tuple[Placement, ...] = (None, (0, "outer"), (1, "outer"), (2, "outer"))
    for x_place, w_place, out_place in itertools.product(spots, spots[:3], spots):
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([b, s, k]), fd.define_tensor([n, k])
            bias = [fd.define_tensor([n])] if with_bias else []
            out = fd.ops.linear(x, w, *bias)
            fd.add_output(out)
        for tv, place in ((x, x_place), (w, w_place), (out, out_place)):
            shard(tv, world_mesh(2), (X, place))
        inputs = [values(b, s, k), values(n, k, seed=1), values(n, seed=2)][: 2 + with_bias]
        cases.append(Case(fd, inputs, reference=torch.nn.functional.linear, name=f"{x_place} {w_place} to {out_place}"))
    check_on_threads(2, cases)


def test_embedding() -> None:
    """The table may be sharded by its columns, or by its rows, which are gathered."""
    cases: list[Case] = []
    index = torch.tensor([[0, 4, 2], [9, 9, 1]])
    spots: tuple[Placement, ...] = (None, (0, "outer"), (1, "outer"))
    for i_place, w_place, out_place in itertools.product(spots, spots, (*spots, (2, "outer"))):
        with FusionDefinition() as fd:
            i, w = fd.define_tensor([2, 3], dtype=DataType.Int), fd.define_tensor([10, 6])
            out = fd.ops.embedding(i, w)
            fd.add_output(out)
        for tv, place in ((i, i_place), (w, w_place), (out, out_place)):
            shard(tv, world_mesh(2), (X, place))
        reference = torch.nn.functional.embedding
        cases.append(Case(fd, [index, values(10, 6)], reference=reference, name=f"{i_place} {w_place} to {out_place}"))
    check_on_threads(2, cases)
