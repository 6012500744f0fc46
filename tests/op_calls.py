"""Ops that are no pointwise ones: how a fusion says each, inputs for it, and what torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardfuse import FusionDefinition

Build = Callable[[Any, list[Any]], Any]
Reference = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """``build(ops, inputs)``; ``reference`` on the same tensors; ``make`` gives the inputs."""

    name: str
    build: Build
    reference: Reference
    make: Callable[[torch.Generator], list[torch.Tensor]]


def floats(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], list[torch.Tensor]]:
    return lambda g: [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def indexed(shape: tuple[int, ...], index: tuple[int, ...], high: int, *more: tuple[int, ...]):
    """A float tensor, an index tensor with values below ``high``, and more float tensors."""

    def make(g: torch.Generator) -> list[torch.Tensor]:
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        rest = [torch.randn(s, generator=g, dtype=torch.float64) for s in more]
        return [x, torch.randint(0, high, index, generator=g), *rest]

    return make


def distinct(x: tuple[int, ...], dim: int, count: int, src: bool):
    """As ``indexed``, no index twice along ``dim``: what a scatter writes is then the same in any order."""

    def make(g: torch.Generator) -> list[torch.Tensor]:
        order = torch.argsort(torch.rand(x, generator=g), dim).narrow(dim, 0, count).contiguous()
        values = [torch.randn(order.shape, generator=g, dtype=torch.float64)] if src else []
        return [torch.randn(x, generator=g, dtype=torch.float64), order, *values]

    return make


def _index_select(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x.index_select(1, k)


CALLS = (
    # views and copies
    Call("slice", lambda o, t: o.slice(t[0], [1, 0, 2], [5, 4, 6]), lambda x: x[1:5, :, 2:6], floats((6, 4, 8))),
    Call("slice_steps", lambda o, t: o.slice(t[0], [0, 1], [6, 8], [2, 3]), lambda x: x[0:6:2, 1:8:3], floats((6, 8))),
    Call("slice_negative", lambda o, t: o.slice(t[0], [-3, 0], [-1, 99]), lambda x: x[-3:-1], floats((6, 8))),
    Call(
        "pad",
        lambda o, t: o.pad(t[0], [1, 2, 0, 3], 7.5),
        lambda x: torch.nn.functional.pad(x, [1, 2, 0, 3], value=7.5),
        floats((4, 3, 5)),
    ),
    Call("pad_less", lambda o, t: o.pad(t[0], [-1, 2]), lambda x: torch.nn.functional.pad(x, [-1, 2]), floats((4, 6))),
    Call("cat", lambda o, t: o.cat(t, 1), lambda *x: torch.cat(x, 1), floats((4, 2, 6), (4, 3, 6), (4, 1, 6))),
    Call("cat_same", lambda o, t: o.cat([t[0], t[0]], 0), lambda x: torch.cat([x, x]), floats((4, 6))),
    Call("flip", lambda o, t: o.flip(t[0], [0, 2]), lambda x: x.flip(0, 2), floats((4, 3, 6))),
    Call("select", lambda o, t: o.select(t[0], 2, 1), lambda x: x.select(1, 2), floats((4, 3, 6))),
    Call("select_last", lambda o, t: o.select(t[0], -1, 0), lambda x: x.select(0, -1), floats((4, 6))),
    Call(
        "reshape",
        lambda o, t: o.mul(o.reshape(t[0], [4, -1, 3]), 2.0),
        lambda x: x.reshape(4, -1, 3) * 2,
        floats((4, 6)),
    ),
    Call(
        "permute",
        lambda o, t: o.mul(o.permute(t[0], [2, 0, 1]), 2.0),
        lambda x: x.permute(2, 0, 1) * 2,
        floats((4, 3, 6)),
    ),
    Call("squeeze", lambda o, t: o.mul(o.squeeze(t[0], [1]), 2.0), lambda x: x.squeeze(1) * 2, floats((4, 1, 6))),
    Call(
        "expand",
        lambda o, t: o.mul(o.expand(t[0], [4, 3, -1]), 2.0),
        lambda x: x.expand(4, 3, 6) * 2,
        floats((4, 1, 6)),
    ),
    Call("triu", lambda o, t: o.triu(t[0], 1), lambda x: x.triu(1), floats((2, 4, 6))),
    Call("tril", lambda o, t: o.tril(t[0], -1), lambda x: x.tril(-1), floats((4, 6))),
    Call(
        "rotary", lambda o, t: _rotary(o, *t), lambda x, c, s: _torch_rotary(x, c, s), floats((4, 6, 8), (6, 8), (6, 8))
    ),
    # reductions
    Call("mean", lambda o, t: o.mean(t[0], [0, 2]), lambda x: x.mean((0, 2)), floats((4, 3, 6))),
    Call("var", lambda o, t: o.var(t[0], [1]), lambda x: x.var(1), floats((4, 6))),
    Call(
        "var_mean",
        lambda o, t: o.var_mean(t[0], [0], 0, True),
        lambda x: torch.var_mean(x, 0, correction=0, keepdim=True),
        floats((4, 6)),
    ),
    Call(
        "welford",
        lambda o, t: o.welford(t[0], [1]),
        lambda x: (x.mean(1), x.var(1, correction=0) * 6, torch.full((4,), 6)),
        floats((4, 6)),
    ),
    Call("argmax", lambda o, t: o.argmax(t[0], 1), lambda x: x.argmax(1), floats((4, 6))),
    Call("argmin", lambda o, t: o.argmin(t[0]), lambda x: x.argmin(), floats((4, 6))),
    # along one axis
    Call("cumsum", lambda o, t: o.cumsum(t[0], 1), lambda x: x.cumsum(1), floats((4, 6))),
    Call("cumprod", lambda o, t: o.cumprod(t[0], -1), lambda x: x.cumprod(-1), floats((4, 6))),
    Call("cummax", lambda o, t: o.cummax(t[0], 0), lambda x: x.cummax(0).values, floats((4, 6))),
    Call("cummin", lambda o, t: o.cummin(t[0], 0), lambda x: x.cummin(0).values, floats((4, 6))),
    Call("argsort", lambda o, t: o.argsort(t[0], 1, True), lambda x: x.argsort(1, True), floats((4, 6))),
    Call("topk", lambda o, t: o.topk(t[0], 3, 1), lambda x: tuple(x.topk(3, 1)), floats((4, 6))),
    # indices
    Call("index_select", lambda o, t: o.index_select(t[0], t[1], 1), _index_select, indexed((4, 5, 6), (8,), 5)),
    Call("gather", lambda o, t: o.gather(t[0], t[1], 1), lambda x, k: x.gather(1, k), indexed((4, 5, 6), (4, 2, 6), 5)),
    Call("gather_part", lambda o, t: o.gather(t[0], t[1], 0), lambda x, k: x.gather(0, k), indexed((4, 5), (6, 3), 4)),
    Call(
        "take_along_axis",
        lambda o, t: o.take_along_axis(t[0], t[1], 1),
        lambda x, k: torch.take_along_dim(x, k, 1),
        indexed((4, 5, 6), (1, 8, 6), 5),
    ),
    Call(
        "scatter",
        lambda o, t: o.scatter(t[0], t[1], t[2], 1),
        lambda x, k, v: x.scatter(1, k, v),
        distinct((4, 6), 1, 3, True),
    ),
    Call(
        "scatter_number",
        lambda o, t: o.scatter(t[0], t[1], 3.5, 0),
        lambda x, k: x.scatter(0, k, 3.5),
        distinct((6, 4), 0, 2, False),
    ),
    Call(
        "index_put_accumulate",
        lambda o, t: o.index_put_accumulate(*t),
        lambda x, k, v: x.index_put((k,), v, accumulate=True),
        indexed((4, 6), (8,), 4, (8, 6)),
    ),
    Call(
        "embedding",
        lambda o, t: o.embedding(t[1], t[0]),
        lambda w, k: torch.nn.functional.embedding(k, w),
        indexed((10, 6), (4, 8), 10),
    ),
    # matrices
    Call("matmul", lambda o, t: o.matmul(*t), lambda a, b: a @ b, floats((2, 4, 6), (6, 8))),
    Call("matmul_vector", lambda o, t: o.matmul(*t), lambda a, b: a @ b, floats((4, 6), (6,))),
    Call("linear", lambda o, t: o.linear(*t), torch.nn.functional.linear, floats((2, 4, 6), (8, 6), (8,))),
    Call(
        "grouped_mm", lambda o, t: o.grouped_mm(t[0], t[2], t[1]), lambda a, e, b: _grouped(a, b), lambda g: _groups(g)
    ),
)


def _rotary(o: Any, x: Any, cosine: Any, sine: Any) -> Any:
    first, second = o.slice(x, [0, 0, 0], [4, 6, 4]), o.slice(x, [0, 0, 4], [4, 6, 8])
    return o.add(o.mul(x, cosine), o.mul(o.cat([o.neg(second), first], 2), sine))


def _torch_rotary(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    return x * cosine + torch.cat([-x[..., 4:], x[..., :4]], -1) * sine


def _groups(g: torch.Generator) -> list[torch.Tensor]:
    a, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((8, 6), (3, 6, 4)))
    return [a, torch.tensor([2, 2, 8], dtype=torch.int32), b]


def _grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a[i:j] @ b[k] for k, (i, j) in enumerate([(0, 2), (2, 2), (2, 8)])])


def define(fd: FusionDefinition, call: Call, values: list[torch.Tensor]) -> list[Any]:
    """Records ``call`` with symbolic sizes; returns the inputs."""
    inputs = [fd.from_pytorch(v) for v in values]
    found = call.build(fd.ops, inputs)
    for out in found if isinstance(found, tuple) else (found,):
        fd.add_output(out)
    return inputs


def expected(call: Call, values: list[torch.Tensor]) -> list[torch.Tensor]:
    found = call.reference(*values)
    return list(found) if isinstance(found, tuple) else [found]
