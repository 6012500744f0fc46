"""Cases of the ops that are no pointwise ones: views, reductions, scans and indices."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from op_cases import DTYPES, FLOATS, Draw, OpCase, called
from op_matrices import MATRICES

from shardfuse import DataType
from shardfuse.ops.reductions import REDUCTION_TABLE

Make = Callable[[Draw], OpCase]


@st.composite
def call(draw: st.DrawFn, name: str) -> OpCase:
    return CALLS[name](Draw(draw))


# --- views, copies and factories ---------------------------------------------------------------------------


def _slice(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3), *DTYPES)
    bounds = [(d.integer(-n - 1, n), d.integer(-n - 1, n + 2), d.pick(1, 1, 2, 3)) for n in x.shape]
    starts, stops, steps = (list(b) for b in zip(*bounds, strict=True))
    at = tuple(slice(*slice(*b).indices(n)) for b, n in zip(bounds, x.shape, strict=True))
    at = tuple(slice(s.start, max(s.start, s.stop), s.step) for s in at)
    return called(lambda o, t: o.slice(t[0], starts, stops, steps), lambda x: x[at], [x])


def _pad(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3))
    pairs = [(d.integer(-(n // 2), 3), d.integer(-(n // 2), 3)) for n in reversed(x.shape)]
    widths = [w for pair in pairs[: d.integer(1, x.ndim)] for w in pair]
    value = d.pick(0.0, -1.5, 7.0) if x.is_floating_point() else d.integer(-2, 3)
    torchs = torch.nn.functional.pad
    return called(lambda o, t: o.pad(t[0], widths, value), lambda x: torchs(x, widths, value=value), [x])


def _cat(d: Draw) -> OpCase:
    shape, dtype = d.shape(1, 3), d.pick(*DTYPES)
    dim = d.integer(0, len(shape) - 1)
    parts = [[*shape[:dim], d.integer(1, 5), *shape[dim + 1 :]] for _ in range(d.integer(1, 3))]
    values = [d.tensor(part, dtype) for part in parts]
    if d.pick(True, False):
        return called(lambda o, t: o.cat([*t, t[0]], dim), lambda *x: torch.cat([*x, x[0]], dim), values)
    return called(lambda o, t: o.cat(t, dim - len(shape)), lambda *x: torch.cat(x, dim), values)


def _flip(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3), *DTYPES)
    dims = d.subset(x.ndim)
    return called(lambda o, t: o.flip(t[0], dims), lambda x: x.flip(dims), [x])


def _select(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3), *DTYPES)
    dim = d.integer(0, x.ndim - 1)
    index = d.integer(-x.shape[dim], x.shape[dim] - 1)
    return called(lambda o, t: o.select(t[0], index, dim), lambda x: x.select(dim, index), [x])


def _reshape(d: Draw) -> OpCase:
    x = d.tensor(d.shape(0, 3))
    rest, new = x.numel(), []
    while rest > 1 and len(new) < 3:
        new.append(d.pick(*(n for n in range(1, rest + 1) if rest % n == 0)))
        rest //= new[-1]
    new.append(rest)
    asked = list(new)
    asked[d.integer(0, len(new) - 1)] = -1
    return called(lambda o, t: o.mul(o.reshape(t[0], asked), 2), lambda x: x.reshape(new) * 2, [x])


def _permute(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 4))
    order = d.draw(st.permutations(range(x.ndim)))
    return called(lambda o, t: o.add(o.permute(t[0], order), 1), lambda x: x.permute(order) + 1, [x])


def _transpose(d: Draw) -> OpCase:
    x = d.tensor(d.shape(2, 4))
    a, b = d.integer(0, x.ndim - 1), d.integer(-x.ndim, -1)
    return called(lambda o, t: o.add(o.transpose(t[0], a, b), 1), lambda x: x.transpose(a, b) + 1, [x])


def _squeeze(d: Draw) -> OpCase:
    shape = d.shape(0, 2)
    at = d.integer(0, len(shape))
    x = d.tensor([*shape[:at], 1, *shape[at:]])
    return called(lambda o, t: o.add(o.squeeze(t[0], [at]), 1), lambda x: x.squeeze(at) + 1, [x])


def _unsqueeze(d: Draw) -> OpCase:
    x = d.tensor(d.shape(0, 3))
    at = d.integer(-x.ndim - 1, x.ndim)
    return called(lambda o, t: o.add(o.unsqueeze(t[0], at), 1), lambda x: x.unsqueeze(at) + 1, [x])


def _broadcast(d: Draw) -> OpCase:
    x = d.tensor(d.shape(0, 2))
    new = d.draw(st.permutations([*[False] * x.ndim, *[True] * d.integer(0, 2)]))
    rest = iter(x.shape)
    shape = [1 if n else next(rest) for n in new]
    return called(lambda o, t: o.add(o.broadcast(t[0], new), 1), lambda x: x.reshape(shape) + 1, [x])


def _expand(d: Draw) -> OpCase:
    shape = d.shape(1, 3)
    x = d.tensor([n if d.pick(True, False) else 1 for n in shape])
    asked = [d.pick(-1, n) if m == n else n for n, m in zip(shape, x.shape, strict=True)]
    return called(lambda o, t: o.add(o.expand(t[0], asked), 1), lambda x: x.expand(shape) + 1, [x])


def _broadcast_in_dim(d: Draw) -> OpCase:
    shape = d.shape(1, 3)
    dims = d.subset(len(shape))
    x = d.tensor([shape[k] if d.pick(True, True, False) else 1 for k in dims])
    own = iter(x.shape)
    wide = [next(own) if k in dims else 1 for k in range(len(shape))]
    return called(
        lambda o, t: o.add(o.broadcast_in_dim(t[0], shape, dims), 1),
        lambda x: x.reshape(wide).expand(shape) + 1,
        [x],
    )


def _stride_order(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 4))
    order = d.draw(st.permutations(range(x.ndim)))
    return called(lambda o, t: o.stride_order(o.neg(t[0]), order), lambda x: -x, [x])


def _copy(name: str) -> Make:
    def make(d: Draw) -> OpCase:
        return called(lambda o, t: getattr(o, name)(t[0]), torch.clone, [d.tensor(d.shape(0, 3), *DTYPES)])

    return make


def _cast(d: Draw) -> OpCase:
    x, dtype = d.tensor(d.shape(0, 3), *DTYPES), d.pick(*DTYPES)
    wide = torch.float64 if dtype.is_floating_point else dtype
    case = called(lambda o, t: o.cast(t[0], DataType.from_torch(dtype)), lambda x: x.to(wide), [x])
    case.expected[0] = type(case.expected[0])(x.to(dtype), x.to(wide))
    return case


def _full(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3))
    shape, dtype, fill = list(x.shape), d.pick(*DTYPES[:6]), d.integer(-2, 4)
    return called(
        lambda o, t: o.add(t[0], o.full(shape, fill, DataType.from_torch(dtype))),
        lambda x: x + torch.full(shape, fill, dtype=dtype if x.dtype is not torch.float64 else torch.float64),
        [x if x.dtype is torch.float64 else x.to(dtype)],
    )


def _full_like(d: Draw) -> OpCase:
    x = d.tensor(d.shape(0, 3))
    return called(lambda o, t: o.full_like(t[0], 3), lambda x: torch.full_like(x, 3), [x])


def _iota(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 2), torch.float64, torch.int64)
    n, start, step = x.shape[-1], d.integer(-3, 3), d.pick(-2, 1, 3)
    return called(lambda o, t: o.add(t[0], o.iota(n, start, step)), lambda x: x + (start + step * torch.arange(n)), [x])


def _triangle(name: str) -> Make:
    def make(d: Draw) -> OpCase:
        x, k = d.tensor(d.shape(2, 3)), d.integer(-3, 3)
        return called(lambda o, t: getattr(o, name)(t[0], k), lambda x: getattr(torch, name)(x, k), [x])

    return make


def _clamp(name: str) -> Make:
    def make(d: Draw) -> OpCase:
        x, bounds = d.tensor(d.shape(0, 3)), d.pick((-1, 2), (None, 1), (0, None))
        return called(lambda o, t: getattr(o, name)(t[0], *bounds), lambda x: x.clamp(*bounds), [x])

    return make


# --- reductions and scans ----------------------------------------------------------------------------------


def _one_by_one(name: str) -> Callable[..., torch.Tensor]:
    def reduce(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
        for k in reversed(dims):
            x = getattr(x.bool() if name != "prod" else x, name)(k, keepdim=keepdim)
        return x

    return reduce


TORCH_REDUCTION: dict[str, Callable[..., Any]] = {
    "sum": lambda x, dims, keepdim: x.sum(dims, keepdim=keepdim),
    "max": lambda x, dims, keepdim: x.amax(dims, keepdim=keepdim),
    "min": lambda x, dims, keepdim: x.amin(dims, keepdim=keepdim),
    "mean": lambda x, dims, keepdim: (x if x.is_floating_point() else x.float()).mean(dims, keepdim=keepdim),
    **{name: _one_by_one(name) for name in ("prod", "any", "all")},
}


def _reduction(name: str) -> Make:
    torchs = TORCH_REDUCTION[{"amax": "max", "amin": "min"}.get(name, name)]

    def make(d: Draw) -> OpCase:
        x = d.tensor(d.shape(1, 3, 1, 2, 3, 5, 40), *FLOATS[:3], torch.int64, torch.int32, torch.bool)
        x = x.sign() + (x == 0) if name == "prod" and x.dtype is not torch.bool else x
        if x.is_floating_point() and d.integer(0, 5) == 0:
            x.view(-1)[d.integer(0, x.numel() - 1)] = float("nan")
        dims, keepdim = d.subset(x.ndim), d.pick(False, True)
        given = None if len(dims) == x.ndim else dims
        return called(lambda o, t: getattr(o, name)(t[0], given, keepdim), lambda x: torchs(x, dims, keepdim), [x])

    return make


def _var(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3, 2, 3, 5, 40), *FLOATS[:3]) + d.pick(0, 100)
    dims, keepdim, correction = d.subset(x.ndim), d.pick(False, True), d.pick(0, 1)
    return called(
        lambda o, t: o.var(t[0], dims, correction, keepdim),
        lambda x: x.var(dims, correction=correction, keepdim=keepdim),
        [x],
    )


def _var_mean(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3, 2, 3, 5, 40), *FLOATS[:3])
    dims, keepdim, correction = d.subset(x.ndim), d.pick(False, True), d.pick(0, 1)
    return called(
        lambda o, t: o.var_mean(t[0], dims, correction, keepdim),
        lambda x: tuple(torch.var_mean(x, dims, correction=correction, keepdim=keepdim)),
        [x],
    )


def _welford(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3, 2, 3, 5, 40), *FLOATS[:3])
    dims = d.subset(x.ndim)
    n = prod(x.shape[k] for k in dims)

    def torchs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean = x.mean(dims)
        return mean, x.var(dims, correction=0) * n, torch.full(mean.shape, n)

    return called(lambda o, t: o.welford(t[0], dims), torchs, [x])


def _scan(name: str) -> Make:
    def make(d: Draw) -> OpCase:
        x = d.tensor(d.shape(1, 3))
        dim = d.integer(-x.ndim, x.ndim - 1)

        def torchs(x: torch.Tensor) -> torch.Tensor:
            found = getattr(x, name)(dim)
            return found if isinstance(found, torch.Tensor) else found.values

        return called(lambda o, t: getattr(o, name)(t[0], dim), torchs, [x])

    return make


def _argsort(d: Draw) -> OpCase:
    x = d.distinct(d.shape(1, 3))
    dim, falling = d.integer(-x.ndim, x.ndim - 1), d.pick(True, False)
    return called(lambda o, t: o.argsort(t[0], dim, falling), lambda x: x.argsort(dim, falling), [x])


def _topk(d: Draw) -> OpCase:
    x = d.distinct(d.shape(1, 3))
    dim, largest = d.integer(-x.ndim, x.ndim - 1), d.pick(True, False)
    k = d.integer(1, x.shape[dim])
    return called(lambda o, t: o.topk(t[0], k, dim, largest), lambda x: tuple(x.topk(k, dim, largest)), [x])


def _extremum(name: str) -> Make:
    def make(d: Draw) -> OpCase:
        x = d.distinct(d.shape(1, 3))
        dim, keepdim = d.pick(None, *range(-x.ndim, x.ndim)), d.pick(True, False)
        keepdim = keepdim and dim is not None
        return called(
            lambda o, t: getattr(o, name)(t[0], dim, keepdim), lambda x: getattr(x, name)(dim, keepdim=keepdim), [x]
        )

    return make


# --- indices -----------------------------------------------------------------------------------------------


def _index_select(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3), *DTYPES)
    dim = d.integer(0, x.ndim - 1)
    k = d.index(d.shape(1, 1), x.shape[dim])
    return called(lambda o, t: o.index_select(*t, dim), lambda x, k: x.index_select(dim, k), [x, k])


def _gather(d: Draw) -> OpCase:
    """The index is as long as the source along other axes, or shorter."""
    x = d.tensor(d.shape(1, 3))
    dim = d.integer(0, x.ndim - 1)
    shape = [d.integer(1, 7) if j == dim else d.pick(n, n, d.integer(1, n)) for j, n in enumerate(x.shape)]
    k = d.index(shape, x.shape[dim])
    return called(lambda o, t: o.gather(*t, dim), lambda x, k: x.gather(dim, k.long()), [x, k])


def _take_along_axis(d: Draw) -> OpCase:
    shape = d.shape(1, 3)
    dim = d.integer(0, len(shape) - 1)
    x = d.tensor([n if j == dim else d.pick(n, n, 1) for j, n in enumerate(shape)])
    k = d.index([d.integer(1, 7) if j == dim else d.pick(n, n, 1) for j, n in enumerate(shape)], shape[dim])
    return called(lambda o, t: o.take_along_axis(*t, dim), lambda x, k: torch.take_along_dim(x, k.long(), dim), [x, k])


def _scatter(d: Draw) -> OpCase:
    """No index twice along the axis: what is written is then the same in any order."""
    x = d.tensor(d.shape(1, 3))
    dim = d.integer(0, x.ndim - 1)
    order = torch.argsort(torch.rand(x.shape, generator=d.generator()), dim)
    order = order.narrow(dim, 0, d.integer(1, x.shape[dim])).contiguous()
    if d.pick(True, False):
        return called(lambda o, t: o.scatter(*t, 2, dim), lambda x, k: x.scatter(dim, k, 2), [x, order])
    values = [x, order, d.tensor(order.shape, x.dtype)]
    return called(lambda o, t: o.scatter(*t, dim), lambda x, k, v: x.scatter(dim, k, v), values)


def _index_put(d: Draw) -> OpCase:
    x = d.tensor(d.shape(1, 3), torch.float64, torch.float32)
    k = d.index(d.shape(1, 1), x.shape[0])
    values = [x, k, d.tensor([len(k), *x.shape[1:]], x.dtype)]
    torchs: Callable[..., Any] = lambda x, k, v: x.index_put((k.long(),), v, accumulate=True)  # noqa: E731
    return called(lambda o, t: o.index_put_accumulate(*t), torchs, values)


def _embedding(d: Draw) -> OpCase:
    rows = d.integer(1, 9)
    k, w = d.index(d.shape(1, 3), rows), d.tensor([rows, d.integer(1, 6)], *FLOATS[:3])
    torchs = torch.nn.functional.embedding
    return called(lambda o, t: o.embedding(t[1], t[0]), lambda w, k: torchs(k, w), [w, k])


CALLS: dict[str, Make] = {
    "slice": _slice, "pad": _pad, "cat": _cat, "flip": _flip, "select": _select,
    "reshape": _reshape, "permute": _permute, "transpose": _transpose, "squeeze": _squeeze, "unsqueeze": _unsqueeze,
    "broadcast": _broadcast, "expand": _expand, "broadcast_in_dim": _broadcast_in_dim, "stride_order": _stride_order,
    "set": _copy("set"), "segment_set": _copy("segment_set"), "cast": _cast, "full": _full, "full_like": _full_like,
    "iota": _iota, "triu": _triangle("triu"), "tril": _triangle("tril"),
    "clamp": _clamp("clamp"), "clip": _clamp("clip"),
    **{name: _reduction(name) for name in (*REDUCTION_TABLE, "amax", "amin", "mean")},
    "var": _var, "var_mean": _var_mean, "welford": _welford,
    **{name: _scan(name) for name in ("cumsum", "cumprod", "cummax", "cummin")},
    "argsort": _argsort, "topk": _topk, "argmax": _extremum("argmax"), "argmin": _extremum("argmin"),
    "index_select": _index_select, "gather": _gather, "take_along_axis": _take_along_axis, "scatter": _scatter,
    "index_put_accumulate": _index_put, "embedding": _embedding,
    **MATRICES,
}  # fmt: skip
