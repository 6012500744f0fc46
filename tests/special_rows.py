"""Reductions, softmaxes and statistics of rows with infinities, NaN and zeros of both signs, and of rows of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from special_values import assert_special

from shardfuse import DataType, FusionDefinition
from shardfuse.executor.options import Backend

INF, NAN = float("inf"), float("nan")


def special_rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, with something else at the beginning, in the middle or everywhere."""
    x = torch.randn(18, columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float64)
    middle = columns // 2
    x[1, middle], x[2], x[3, -1], x[4] = NAN, NAN, -INF, -INF
    x[5, 0], x[6] = INF, INF
    x[7, 0], x[7, -1] = INF, -INF
    x[8, 0], x[8, middle] = -INF, NAN
    x[9], x[10] = 0.0, -0.0
    x[11] = -0.0
    x[11, middle] = 0.0
    x[12, : middle + 1], x[13, middle:] = -INF, -INF
    x[14, middle], x[15, middle] = 0.0, -0.0
    x[16, middle], x[17, 0] = 104.0, -104.0
    return x.to(dtype)


def softmax(ops: Any, x: Any, dim: int) -> Any:
    e = ops.exp(ops.sub(x, ops.max(x, [dim], keepdim=True)))
    return ops.truediv(e, ops.sum(e, [dim], keepdim=True))


def log_softmax(ops: Any, x: Any, dim: int) -> Any:
    shifted = ops.sub(x, ops.max(x, [dim], keepdim=True))
    return ops.sub(shifted, ops.log(ops.sum(ops.exp(shifted), [dim], keepdim=True)))


def layer_norm(ops: Any, x: Any, dim: int) -> Any:
    var, mean = ops.var_mean(x, [dim], 0, keepdim=True)
    return ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, 1e-5)))


def _layer_norm(x: torch.Tensor, dim: int) -> torch.Tensor:
    var, mean = torch.var_mean(x, dim, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5)


Pair = tuple[Callable[[Any, Any, int], Any], Callable[[torch.Tensor, int], torch.Tensor]]

ROWS: dict[str, Pair] = {
    "sum": (lambda o, x, d: o.sum(x, [d]), lambda x, d: x.sum(d)),
    "prod": (lambda o, x, d: o.prod(o.sign(x), [d]), lambda x, d: x.sgn().prod(d)),
    "amax": (lambda o, x, d: o.amax(x, [d]), lambda x, d: x.amax(d)),
    "amin": (lambda o, x, d: o.amin(x, [d]), lambda x, d: x.amin(d)),
    "any": (lambda o, x, d: o.any(x, [d]), lambda x, d: (x != 0).any(d)),
    "all": (lambda o, x, d: o.all(x, [d]), lambda x, d: (x != 0).all(d)),
    "mean": (lambda o, x, d: o.mean(x, [d]), lambda x, d: x.mean(d)),
    "var": (lambda o, x, d: o.var(x, [d]), lambda x, d: x.var(d)),
    "argmax": (lambda o, x, d: o.argmax(x, d), lambda x, d: x.argmax(d)),
    "argmin": (lambda o, x, d: o.argmin(x, d), lambda x, d: x.argmin(d)),
    "softmax": (softmax, lambda x, d: x.softmax(d)),
    "log_softmax": (log_softmax, lambda x, d: x.log_softmax(d)),
    "layer_norm": (layer_norm, _layer_norm),
}
UNSIGNED_ZEROS = ("amax", "amin", "sum", "mean", "layer_norm")
"""The sign of a zero that is the largest of zeros, or a sum of zeros, depends on the order."""


def check_rows(name: str, columns: int, dtype: torch.dtype, dim: int, backend: Backend, device: str = "cpu") -> None:
    """``name`` of rows, along either dim."""
    build, reference = ROWS[name]
    x = special_rows(columns, dtype)
    x = (x if dim else x.t().contiguous()).to(device)
    composed = name in ("softmax", "log_softmax", "layer_norm")
    with FusionDefinition(backend=backend) as fd:
        t = fd.from_pytorch(x)
        wide = fd.ops.cast(t, _compute(dtype)) if composed else t
        fd.add_output(build(fd.ops, wide, dim))
    (found,) = fd.execute([x])
    source = x.to(_compute(dtype).torch) if composed else x
    eager, exact = reference(source, dim), reference(x.double(), dim)
    assert_special(
        f"{name} of {columns} columns in {dtype} along {dim}", found, [eager], exact,
        [torch.arange(n, device=device).reshape([-1 if k == 0 else 1 for k in range(found.ndim)]).expand(found.shape)
         for n in found.shape[:1]],
        roundings=4 * max(columns, 16), signs=name not in UNSIGNED_ZEROS, smallest=1e-38 if composed else 0.0,
    )  # fmt: skip


def _compute(dtype: torch.dtype) -> DataType:
    return DataType.from_torch(dtype).compute
