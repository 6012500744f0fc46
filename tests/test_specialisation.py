"""Sizes that a kernel was written for: what ``explain`` says of them holds for the text of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from thread_check import X, shard, world_mesh

from shardfuse import DataType, FusionDefinition
from shardfuse.codegen import generate
from shardfuse.compiler import Plan
from shardfuse.ir.tensor_view import TensorView

BF16 = DataType.BFloat16
Axes = Sequence[tuple[int, int]]
"""Axes of inputs, as pairs of input and dim, that are equal."""


def softmax(fd: FusionDefinition, x: TensorView) -> TensorView:
    e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [-1], keepdim=True)))
    return fd.ops.div(e, fd.ops.sum(e, [-1], keepdim=True))


def norm(fd: FusionDefinition, x: TensorView, w: TensorView) -> TensorView:
    wide = fd.ops.cast(x, DataType.Float)
    var, mean = fd.ops.var_mean(wide, [-1], correction=0, keepdim=True)
    return fd.ops.cast(fd.ops.mul(fd.ops.mul(fd.ops.sub(wide, mean), fd.ops.rsqrt(var)), w), BF16)


def bias_sums(fd: FusionDefinition, x: TensorView, w: TensorView) -> TensorView:
    return fd.ops.sum(fd.ops.cast(fd.ops.mul(x, w), DataType.Float), [0])


def halves(fd: FusionDefinition, x: TensorView) -> TensorView:
    n = fd.ops.size(x, 1)
    half = fd.ops.floor_div(n, 2)
    first, second = fd.ops.slice(x, [0, 0], [1 << 40, half]), fd.ops.slice(x, [0, half], [1 << 40, n])
    return fd.ops.cat([fd.ops.neg(second), first], 1)


ROWS, COLUMNS = [(0, 0)], [(0, 1)]
SHARED = [(0, 1), (1, 0)]
CASES: dict[str, tuple[Callable[..., TensorView], Sequence[tuple[int, ...]], Sequence[Axes]]] = {
    "one run": (lambda fd, x: fd.ops.mul(fd.ops.tanh(x), 2.0), [(4096, 1024)], [ROWS, COLUMNS]),
    "a bias": (lambda fd, x, b: fd.ops.gelu(fd.ops.add(x, b)), [(4096, 1024), (1024,)], [ROWS, SHARED]),
    "norm": (norm, [(4096, 1024), (1024,)], [ROWS, SHARED]),
    "softmax": (softmax, [(4096, 2048)], [ROWS, COLUMNS]),
    "softmax of three dims": (softmax, [(64, 32, 2048)], [ROWS, COLUMNS, [(0, 2)]]),
    "rows by a team": (softmax, [(1024, 262144)], [ROWS, COLUMNS]),
    "sums of columns": (bias_sums, [(8192, 1024), (1024,)], [SHARED]),
    "turned": (lambda fd, x: fd.ops.set(fd.ops.permute(x, [1, 0])), [(4096, 8192)], []),
    "index": (lambda fd, x: fd.ops.add(x, fd.ops.iota(fd.ops.size(x, 1))), [(4096, 1024)], [ROWS, COLUMNS]),
    "halves": (halves, [(4096, 1024)], [ROWS, COLUMNS]),
    "columns put together": (
        lambda fd, x, y: fd.ops.cat([x, fd.ops.neg(y)], 1),
        [(1 << 16, 64), (1 << 16, 32)],
        [[(0, 0), (1, 0)], COLUMNS, [(1, 1)]],
    ),
    "dropout": (lambda fd, x: fd.ops.dropout(x, 0.5), [(4096, 1024)], [ROWS, COLUMNS]),
}


def defined(define: Callable[..., TensorView], shapes: Sequence[tuple[int, ...]], world: int) -> FusionDefinition:
    """Sizes are symbolic; on more than one rank the first input is sharded by rows."""
    with FusionDefinition() as fd:
        inputs = [fd.define_tensor([-1] * len(s), dtype=BF16) for s in shapes]
        fd.add_output(define(fd, *inputs))
    if world > 1:
        shard(inputs[0], world_mesh(world), (X, (0, "outer")))
    return fd


def planned(fd: FusionDefinition, shapes: Sequence[tuple[int, ...]]) -> Plan:
    return fd.fec.plan(dict(zip(fd.fec.tensors(), shapes, strict=True)))


def texts(plan: Plan) -> list[str]:
    """Of the first rank's kernels."""
    kernels = [k for s in plan.segments for k in s.kernels]
    found: list[str] = []
    for k in kernels:
        tensors = [t for p in k.stages or (k,) for t in (*p.segment.inputs, *p.segment.outputs)]
        found.append(generate(k, {t: t.domain.layout(0) for t in tensors}, 0).text)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_size_that_may_be_any_is_no_part_of_the_text(case: str, world: int) -> None:
    define, shapes, groups = CASES[case]
    fd = defined(define, shapes, world)
    explained = fd.explain(sizes=dict(zip(fd.fec.tensors(), shapes, strict=True)))
    sizes = [size for s in explained.segments for k in s.sizes for size in k.sizes]
    literal = {(size.tensor, size.axis) for size in sizes if size.literal is not None}
    free = {(size.tensor, size.axis) for size in sizes if size.literal is None}
    before = texts(planned(fd, shapes))
    assert before
    names = [tv.name for tv in fd.fec.tensors()]
    for axes in groups:
        doubled = [[2 * n if (k, d) in axes else n for d, n in enumerate(s)] for k, s in enumerate(shapes)]
        after = texts(planned(fd, [tuple(s) for s in doubled]))
        members = {(names[k], d) for k, d in axes}
        assert bool(members & literal) != bool(members & free), f"{axes} is told once\n{explained}"
        assert (after == before) == bool(members & free), f"{axes} doubled\n{explained}"


@pytest.mark.parametrize("batches", [(1024, 1040, 2000, 4096, 100000), (1001, 4097, 99999)], ids=["even", "odd"])
@pytest.mark.parametrize("case", ["one run", "a bias", "norm", "softmax", "index", "dropout"])
def test_a_new_batch_size_has_the_same_kernel(case: str, batches: Sequence[int]) -> None:
    """Hence costs no compile; where the last block is not full there is one more kernel, for all such sizes."""
    define, shapes, _ = CASES[case]
    fd = defined(define, shapes, 1)
    assert len({tuple(texts(planned(fd, [(n, *shapes[0][1:]), *shapes[1:]]))) for n in batches}) == 1


def test_it_is_printed() -> None:
    fd = defined(norm, [(64, 512), (512,)], 1)
    text = str(fd.explain(sizes=dict(zip(fd.fec.tensors(), [(64, 512), (512,)], strict=True))))
    assert "literal: 512 (axis 1 of T0); any: axis 0 of T0" in text
