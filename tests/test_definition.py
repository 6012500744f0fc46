"""Definitions without a mesh: what they compute, what they refuse, and that they print as Python that rebuilds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_check import check

from shardfuse import DataType, FusionDefinition
from shardfuse.errors import (
    ShapeError,
)

Define = Callable[[FusionDefinition], None]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unary(name: str, *arguments: Any, shape: tuple[int, ...] = (-1, -1, -1), **keywords: Any) -> FusionDefinition:
    """One op of one tensor."""
    with FusionDefinition() as fd:
        fd.add_output(getattr(fd.ops, name)(fd.define_tensor(list(shape)), *arguments, **keywords))
    return fd


# --- what they compute -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "mean", "any", "all"])
@pytest.mark.parametrize("dims", [None, [0], [-1], [0, 2], [-2, 0], [0, 1, 2], 1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_reductions(op: str, dims: list[int] | int | None, keepdim: bool) -> None:
    torch_op = {"max": torch.amax, "min": torch.amin}.get(op)
    axes = (0, 1, 2) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)

    def reference(x: torch.Tensor) -> torch.Tensor:
        if torch_op is not None:
            return torch_op(x, axes, keepdim)
        if op in ("sum", "mean"):
            return getattr(torch, op)(x, axes, keepdim)
        for axis in sorted((a % 3 for a in axes), reverse=True):
            x = getattr(torch, op)(x, axis, keepdim)
        return x

    check(unary(op, dims, keepdim=keepdim), [values(3, 4, 5)], reference=reference)


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize(("dims", "keepdim"), [([1], False), ([0, 1], True), ([-1], True)])
def test_variance_far_from_zero(correction: int, dims: list[int], keepdim: bool) -> None:
    """A mean of 1e4 and a deviation of 1: E[x * x] - E[x] * E[x] would keep no digit in float32."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        for out in fd.ops.var_mean(x, dims, correction, keepdim):
            fd.add_output(out)
    data = values(8, 1000) + 1e4
    check(fd, [data], reference=lambda x: torch.var_mean(x, dims, correction=correction, keepdim=keepdim))


@pytest.mark.parametrize("shapes", [[(4, 5), (5,)], [(4, 1), (1, 5)], [(3, 1, 5), (4, 1)], [(), (4, 5)], [(1,), (4,)]])
@pytest.mark.parametrize("static", [False, True])
def test_broadcasting_as_numpy(shapes: list[tuple[int, ...]], static: bool) -> None:
    with FusionDefinition() as fd:
        a, b = (fd.define_tensor([n if static or n == 1 else -1 for n in shape]) for shape in shapes)
        fd.add_output(fd.ops.add(a, b))
        fd.add_output(fd.ops.sub(b, a))
    inputs = [values(*shape, seed=k) for k, shape in enumerate(shapes)]
    check(fd, inputs, reference=lambda a, b: (a + b, b - a))


def test_a_symbolic_size_may_be_one() -> None:
    with FusionDefinition() as fd:
        a, b = fd.define_tensor([-1, -1]), fd.define_tensor([-1])
        fd.add_output(fd.ops.mul(a, b))
    for shape in ((4, 5), (1, 5), (4, 1)):
        check(fd, [values(*shape), values(5 if shape[1] == 5 else 1)], reference=lambda a, b: a * b)


def transposed(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1])
    fd.add_output(fd.ops.add(x, fd.ops.permute(x, [1, 0])))


def outer(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1])
    fd.add_output(fd.ops.sub(fd.ops.unsqueeze(x, 1), x))


def row_and_column_sums(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1])
    fd.add_output(fd.ops.add(fd.ops.sum(x, [0]), fd.ops.sum(x, [1])))


def regrouped(fd: FusionDefinition) -> None:
    """[2, 6] and [3, 4] share no cut."""
    x = fd.define_tensor([2, 6])
    y = fd.ops.reshape(x, [3, 4])
    fd.add_output(fd.ops.mul(y, y))
    fd.add_output(fd.ops.sum(y, [0]))


def regrouped_and_added(fd: FusionDefinition) -> None:
    x, y = fd.define_tensor([2, 6]), fd.define_tensor([3, 4])
    fd.add_output(fd.ops.add(fd.ops.reshape(x, [3, 4]), y))
    fd.add_output(fd.ops.add(fd.ops.reshape(y, [12]), fd.ops.reshape(x, [12])))


def group_norm(fd: FusionDefinition) -> None:
    x, w = fd.define_tensor([-1, 8, -1, -1]), fd.define_tensor([8])
    n, _, h, v = fd.ops.shape(x)
    groups = fd.ops.reshape(x, [n, 2, 4, h, v])
    mean = fd.ops.mean(groups, [2, 3, 4], keepdim=True)
    off = fd.ops.reshape(fd.ops.sub(groups, mean), [n, 8, h, v])
    fd.add_output(fd.ops.mul(off, fd.ops.broadcast(w, [True, False, True, True])))


def x_times_its_transpose(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1])
    fd.add_output(fd.ops.matmul(x, fd.ops.permute(x, [1, 0])))


def reshaped_alike(fd: FusionDefinition) -> None:
    x, y = fd.define_tensor([6, 5]), fd.define_tensor([6, 5])
    parts = [fd.ops.reshape(t, [2, 3, 5]) for t in (x, y)]
    product = fd.ops.mul(parts[0], fd.ops.exp(parts[1]))
    fd.add_output(product)
    fd.add_output(fd.ops.sum(fd.ops.reshape(product, [6, 5]), [0]))


def reshaped_apart(fd: FusionDefinition) -> None:
    """Parts meet across each other, or beside what is whole: cuts of one tensor's rows that are not the other's."""
    x, y = fd.define_tensor([12, 5]), fd.define_tensor([12, 5])
    a, b = fd.ops.reshape(x, [3, 4, 5]), fd.ops.reshape(y, [4, 3, 5])
    fd.add_output(fd.ops.add(a, fd.ops.permute(b, [1, 0, 2])))
    c = fd.ops.reshape(y, [2, 6, 5])
    fd.add_output(fd.ops.add(fd.ops.reshape(a, [2, 6, 5]), c))
    fd.add_output(fd.ops.mul(x, y))


CLASHES: dict[str, tuple[Define, list[tuple[int, ...]], Callable[..., Any]]] = {
    "x + x.T": (transposed, [(5, 5)], lambda x: x + x.T),
    "x[:, None] - x": (outer, [(7,)], lambda x: x[:, None] - x),
    "x.sum(0) + x.sum(1)": (row_and_column_sums, [(4, 4)], lambda x: x.sum(0) + x.sum(1)),
    "[2, 6] as [3, 4]": (regrouped, [(2, 6)], lambda x: (x.reshape(3, 4) ** 2, x.reshape(3, 4).sum(0))),
    "[2, 6] + [3, 4]": (
        regrouped_and_added,
        [(2, 6), (3, 4)],
        lambda x, y: (x.reshape(3, 4) + y, y.reshape(12) + x.reshape(12)),
    ),
    "group norm": (
        group_norm,
        [(2, 8, 3, 5), (8,)],
        lambda x, w: (
            (x.reshape(2, 2, -1) - x.reshape(2, 2, -1).mean(-1, keepdim=True)).reshape(x.shape) * w[:, None, None]
        ),
    ),
    "[6] as [2, 3], both": (
        reshaped_alike,
        [(6, 5), (6, 5)],
        lambda x, y: ((x * y.exp()).reshape(2, 3, 5), (x * y.exp()).sum(0)),
    ),
    "[12] as [3, 4] and [4, 3]": (
        reshaped_apart,
        [(12, 5), (12, 5)],
        lambda x, y: (
            x.reshape(3, 4, 5) + y.reshape(4, 3, 5).transpose(0, 1),
            x.reshape(2, 6, 5) + y.reshape(2, 6, 5),
            x * y,
        ),
    ),
    "x @ x.T": (x_times_its_transpose, [(3, 4)], lambda x: x @ x.T),
}


@pytest.mark.parametrize("case", CLASHES)
def test_axes_that_meet(case: str) -> None:
    define, shapes, reference = CLASHES[case]
    with FusionDefinition() as fd:
        define(fd)
    check(fd, [values(*shape, seed=k) for k, shape in enumerate(shapes)], reference=reference)


def test_shape_changes() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 1, -1])
        n = fd.ops.size(x, 2)
        fd.add_output(fd.ops.squeeze(x, [1]))
        fd.add_output(fd.ops.expand(x, [2, 5, -1]))
        fd.add_output(fd.ops.permute(x, [2, 0, 1]))
        fd.add_output(fd.ops.reshape(x, [-1]))
        fd.add_output(fd.ops.broadcast_in_dim(x, [2, 3, 1, n], [0, 2, 3]))
        fd.add_output(fd.ops.reshape(x, [n, 2]))
    check(
        fd,
        [values(2, 1, 6)],
        reference=lambda x: (
            x.squeeze(1), x.expand(2, 5, 6), x.permute(2, 0, 1), x.reshape(-1), x[:, None].expand(2, 3, 1, 6),
            x.reshape(6, 2),
        ),
    )  # fmt: skip


def test_numbers_and_scalar_inputs() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        scale, count = fd.define_scalar(dtype=DataType.Double), fd.define_scalar(dtype=DataType.Int)
        half = fd.define_scalar(0.5)
        fd.add_output(fd.ops.mul(x, fd.ops.add(scale, half)))
        fd.add_output(fd.ops.div(x, count))
        fd.add_output(fd.ops.add(fd.ops.mul(2, x), True))
    for scale, count in ((3.0, 7), (-1.5, 2)):
        check(fd, [values(9), scale, count], reference=lambda x, s, n: (x * (s + 0.5), x / n, 2 * x + 1))


def test_inputs_and_outputs_that_are_one() -> None:
    """An input that is not used, one that is an output, one that comes twice; a tensor that is two outputs."""
    with FusionDefinition() as fd:
        x, y, _ = (fd.define_tensor([-1, -1]) for _ in range(3))
        total = fd.ops.add(x, y)
        for tv in (x, total, total, x):
            fd.add_output(tv)
    data = values(3, 4)
    outputs = check(fd, [data, data, values(9, 1)], reference=lambda x, y, _: (x, x + y, x + y, x))
    storages = [out.untyped_storage().data_ptr() for out in outputs if out is not None]
    assert len(dict.fromkeys([*storages, data.untyped_storage().data_ptr()])) == 5, "an output shares storage"


@pytest.mark.parametrize("name", ["permuted", "strided", "expanded", "offset"])
def test_inputs_that_are_not_contiguous(name: str) -> None:
    data = {
        "permuted": values(5, 4).t(),
        "strided": values(8, 10)[::2, ::2],
        "expanded": values(1, 5).expand(4, 5),
        "offset": values(21)[1:].reshape(4, 5),
    }[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.mul(x, 2.0))
        fd.add_output(fd.ops.sum(x, [0]))
        fd.add_output(fd.ops.permute(x, [1, 0]))
    check(fd, [data], reference=lambda x: (x * 2, x.sum(0), x.T))


def test_tensors_without_dims_and_sizes_of_one() -> None:
    with FusionDefinition() as fd:
        x, one = fd.define_tensor([]), fd.define_tensor([1, -1, 1])
        fd.add_output(fd.ops.exp(x))
        fd.add_output(fd.ops.sum(fd.ops.mul(one, x)))
        fd.add_output(fd.ops.sum(one, [0, 2]))
        fd.add_output(fd.ops.reshape(fd.ops.exp(x), [1, 1]))
    data = [values(), values(1, 1, 1, seed=1)]
    check(fd, data, reference=lambda x, o: (x.exp(), (o * x).sum(), o.sum((0, 2)), x.exp().reshape(1, 1)))
    check(fd, [values(), values(1, 4, 1, seed=1)])


def test_factories() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        rows, columns = fd.ops.shape(x)
        fd.add_output(fd.ops.add(x, fd.ops.iota(columns, 3, 2)))
        fd.add_output(fd.ops.mul(x, fd.ops.full([rows, 1], 2.5, DataType.Float)))
        fd.add_output(fd.ops.full([2, 3], 7, DataType.Int))
    check(
        fd,
        [values(4, 5)],
        reference=lambda x: (x + torch.arange(5) * 2 + 3, x * 2.5, torch.full((2, 3), 7)),
    )


def test_the_sizes_may_change_from_call_to_call() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.sub(x, fd.ops.mean(x, [1], keepdim=True)))
    for shape in ((3, 4), (5, 4), (3, 7), (1, 1), (3, 4)):
        check(fd, [values(*shape)], reference=lambda x: x - x.mean(1, keepdim=True))


# --- no elements -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (3, 4)])
def test_extents_of_zero(shape: tuple[int, int]) -> None:
    """Sums of nothing are 0, products 1, means and variances NaN, as torch has them."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        rows, columns = fd.ops.shape(x)
        var, mean = fd.ops.var_mean(x, [1])
        outputs = (
            fd.ops.exp(x), fd.ops.sum(x, [0]), fd.ops.sum(x), fd.ops.prod(x, [1], keepdim=True), mean, var,
            fd.ops.any(x, [0]), fd.ops.all(x, [1]), fd.ops.permute(x, [1, 0]), fd.ops.reshape(x, [-1]),
            fd.ops.add(fd.ops.iota(columns), x), fd.ops.matmul(fd.ops.permute(x, [1, 0]), x),
            fd.ops.expand(fd.ops.unsqueeze(fd.ops.sum(x, [1]), 1), [rows, 3]), fd.ops.cast(x, DataType.Half),
        )  # fmt: skip
        for out in outputs:
            fd.add_output(out)
    n, m = shape
    check(
        fd,
        [values(*shape)],
        reference=lambda x: (
            x.exp(), x.sum(0), x.sum(), x.prod(1, keepdim=True), x.mean(1), x.var(1), x.bool().any(0),
            x.bool().all(1), x.T, x.reshape(n * m), torch.arange(m) + x, x.T @ x, x.sum(1)[:, None].expand(n, 3), x,
        ),
    )  # fmt: skip


def test_nothing_is_computed_without_elements() -> None:
    fd = unary("exp", shape=(-1,))
    check(fd, [values(0)])
    assert fd.explain().kernels == 0
    check(fd, [values(3)])
    assert fd.explain().kernels == 1


def test_nothing_has_no_largest_element() -> None:
    fd = unary("max", [1])
    with pytest.raises(
        ShapeError, match=r"max: found T0 of \[3, 0, 5\] over axes \[1\], expected at least one element"
    ):
        fd.execute([values(3, 0, 5)])
    check(unary("max", [2]), [values(3, 0, 5)], reference=lambda x: x.amax(2))
