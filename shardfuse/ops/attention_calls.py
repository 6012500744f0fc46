"""Torch calls for attention: flash attention forward and backward.

Dropout has a seed and an offset that all ranks agree on.  A mask drawn here is a function of them and of the unsharded
index, and so is the same on any number of ranks, forward and backward.  Flash attention counts the rows that it is
given: its seed is moved by the first row that the rank has, so that replicas draw alike and shards do not.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch

from ..ir.call import Call
from . import random
from .call_extents import Fit, Place, Rule, fits_at_end
from .call_signature import DRAWN, Arguments, AxisNames, Rows, Shapes, Signature, TorchCall, axis_names
from .matmul_calls import roles_of


def _batch(ndim: int) -> AxisNames:
    """Leading axes: batches, and heads last of them."""
    return axis_names(ndim - 2, "n")


def _tensor_roles(call: Call, shapes: Shapes) -> list[tuple[str, int]]:
    names = [r for r in roles_of(call) if r not in _NUMBERS]
    return [(r, len(s)) for r, s in zip(names, shapes, strict=True)]


_NUMBERS = ("dropout_p", "is_causal", "scale", *DRAWN)
_WIDEST = 256
"""Features of a head that flash attention takes."""


def _axes(role: str, ndim: int, query: int) -> AxisNames:
    """``query``: dims of the query, which those of a bias or mask are aligned with at the end."""
    match role:
        case "query":
            return (*_batch(ndim), "l*", "e*")
        case "key":
            return (*_batch(ndim), "s*", "e*")
        case "value":
            return (*_batch(ndim), "s*", "v*")
        case "output" | "grad_output":
            return (*_batch(ndim), "l*", "v*")
        case "logsumexp":
            return (*_batch(ndim + 1), "l*")
        case "bias" | "mask":
            return (*_batch(query), "l*", "s*")[max(query - ndim, 0) :]
        case _:  # seeds
            return tuple(f"{role}{k}*" for k in range(ndim))


def _forward(shapes: Shapes, call: Call) -> Signature:
    roles = _tensor_roles(call, shapes)
    ndim = roles[0][1]
    inputs = tuple(_axes(role, n, ndim) for role, n in roles)
    seed: AxisNames = ("two*",)
    outputs = (_axes("output", ndim, ndim), _axes("logsumexp", ndim - 1, ndim), seed, ())
    return Signature(inputs, outputs, {"two*": 2}, fits=list(_fits(shapes, roles)))


def _backward(shapes: Shapes, call: Call) -> Signature:
    roles = _tensor_roles(call, shapes)
    ndim = next(n for role, n in roles if role == "query")
    inputs = tuple(_axes(role, n, ndim) for role, n in roles)
    outputs = tuple(_axes(role, ndim, ndim) for role in ("query", "key", "value"))
    return Signature(inputs, outputs, fits=list(_fits(shapes, roles)))


def _fits(shapes: Shapes, roles: list[tuple[str, int]]) -> Iterator[Fit]:
    """Batches and heads are the query's, or one for all of them; so are rows and columns of a bias or a mask."""
    at = {role: k for k, (role, _) in enumerate(roles)}
    query, key, value = at["query"], at["key"], at["value"]
    ndim = roles[query][1]
    length, features = (query, ndim - 2), (query, ndim - 1)
    ends: dict[str, tuple[Place, ...]] = {
        "key": ((value, ndim - 2), features),
        "value": ((key, ndim - 2),),
        "output": (length, (value, ndim - 1)),
        "grad_output": (length, (value, ndim - 1)),
        "logsumexp": (length,),
    }
    for role, k in at.items():
        if role in ("bias", "mask"):
            beside = (*((query, j) for j in range(ndim - 1)), (key, ndim - 2))
            yield from fits_at_end(k, shapes, beside, Rule.REPEATED)
        elif role in ends:
            yield from (Fit((k, j), (query, j)) for j in range(ndim - 2))
            yield from (Fit((k, ndim - 2 + j), other, Rule.EQUAL) for j, other in enumerate(ends[role]))


@dataclass(frozen=True)
class _Given:
    """Arguments by name; batches folded into one, as torch wants four axes."""

    tensors: dict[str, torch.Tensor]
    dropout_p: float
    is_causal: bool
    scale: float | None
    key: tuple[int, int]
    rows: Rows

    @staticmethod
    def of(values: Arguments, call: Call, rows: Rows | None) -> _Given:
        by_name = dict(zip(roles_of(call), values, strict=True))
        numbers = {k: v for k, v in by_name.items() if not isinstance(v, torch.Tensor)}
        tensors = {k: v for k, v in by_name.items() if isinstance(v, torch.Tensor)}
        scale = numbers.get("scale")
        query = tensors["query"]
        return _Given(
            tensors,
            float(numbers.get("dropout_p", 0.0).real),
            bool(numbers.get("is_causal", False)),
            None if scale is None else float(scale.real),
            (int(numbers.get(DRAWN[0], 0).real), int(numbers.get(DRAWN[1], 0).real)),
            rows or (lambda: torch.arange(prod(query.shape[:-2]), device=query.device)),
        )

    def four(self, role: str) -> torch.Tensor:
        """Its batches in one axis, broadcast to the query's."""
        x = self.tensors[role]
        trailing = 1 if role == "logsumexp" else 2
        x = x.expand(*self.batch, *x.shape[-trailing:])
        return x.reshape(prod(self.batch[:-1]), self.batch[-1] if self.batch else 1, *x.shape[-trailing:])

    @property
    def batch(self) -> torch.Size:
        """Batches, and heads last of them."""
        return self.tensors["query"].shape[:-2]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Undoes ``four``."""
        trailing = x.ndim - 2
        return x.reshape(*self.batch, *x.shape[-trailing:])

    def scaling(self) -> float:
        """The number that scores are multiplied by."""
        features = self.tensors["query"].shape[-1]
        return self.scale if self.scale is not None else features**-0.5 if features else 1.0

    def first_row(self) -> int:
        """By which flash attention's seed is moved on this rank."""
        return int(self.rows()[0]) if self.dropout_p > 0 and self.tensors["query"].numel() else 0

    def is_flash(self) -> bool:
        """Does torch's flash attention take it?  It aligns a causal mask of unequal lengths as no other kernel does."""
        q, k, v = (self.tensors[r] for r in ("query", "key", "value"))
        fits = q.shape[-1] == v.shape[-1] <= _WIDEST and not (self.is_causal and q.shape[-2] != k.shape[-2])
        is_masked = "bias" in self.tensors or "mask" in self.tensors
        return q.is_cuda and q.dtype.itemsize == 2 and fits and q.numel() > 0 and k.numel() > 0 and not is_masked


def _run_forward(values: Arguments, call: Call, rows: Rows | None = None) -> tuple[torch.Tensor, ...]:
    given = _Given.of(values, call, rows)
    q, k, v = (given.four(role) for role in ("query", "key", "value"))
    if not given.is_flash():
        output, lse = _attend(q, k, v, given)
        seed = torch.tensor(given.key, dtype=torch.int64, device=q.device).view(torch.uint64)
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    else:
        q, k, v = (_padded(x) for x in (q, k, v))
        row = given.first_row()
        with _drawing(given, row, q.device):
            output, lse, _, _, _, _, seed, offset, _ = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention(
                q, k, v, given.dropout_p, given.is_causal, False, scale=given.scaling()
            )
        seed = _moved(seed, -row)
        output = output[..., : given.tensors["value"].shape[-1]]
    return given.whole(output), given.whole(lse), seed, offset


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Flash attention takes head sizes that 8 divides; zeros change nothing."""
    short = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, short)) if short else x


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32 or float64, all of the scores at once: for what flash attention does not take."""
    scores = _scores(q, k, given)
    for role in ("bias", "mask"):
        if role in given.tensors:
            mask = given.tensors[role]
            mask = mask.expand(*given.batch, *scores.shape[-2:]).reshape(scores.shape)
            is_bool = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask.to(scores.dtype)
    lse = torch.logsumexp(scores, -1)
    weights = _weights(scores, lse) * _kept(scores, given, *given.key)
    return (weights @ v.to(scores.dtype)).to(v.dtype), lse.float()


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Softmax; of a row that sees nothing zeros, as torch has it."""
    rows = lse.to(scores.dtype).unsqueeze(-1)
    return torch.exp(scores - torch.where(rows == -torch.inf, 0, rows))


def _kept(scores: torch.Tensor, given: _Given, seed: int, offset: int) -> torch.Tensor | float:
    """What dropout multiplies weights by: a function of the unsharded index of each of the scores."""
    if given.dropout_p == 0:
        return 1.0
    within = torch.arange(prod(scores.shape[-2:]), device=scores.device)
    index = given.rows().unsqueeze(-1) * len(within) + within
    drawn = random.uniform(seed, offset, index.reshape(scores.shape), torch.float32)
    return (drawn >= given.dropout_p) / (1 - given.dropout_p)


@contextmanager
def _drawing(given: _Given, row: int, device: torch.device) -> Generator[None]:
    """Has torch's generator of the GPU draw from the agreed seed and offset, and leaves it as it was."""
    if given.dropout_p == 0:
        yield
        return
    generator = torch.cuda.default_generators[device.index]  # a tensor's device has an index
    before = generator.initial_seed(), generator.get_offset()
    seed, offset = given.key
    generator.manual_seed((seed + row + offset * _STRIDE) % 2**64)
    try:
        yield
    finally:
        generator.manual_seed(before[0])
        generator.set_offset(before[1])


_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of two draws of one generator; it counts heads on from the offset, so that theirs would overlap."""


def _moved(seed: torch.Tensor, rows: int) -> torch.Tensor:
    """The first word of ``seed`` changed by so many."""
    if rows == 0:
        return seed
    words = seed.reshape(-1).view(torch.int64).clone()
    words[0] += rows
    return words.view(torch.uint64).reshape(seed.shape)


def _scores(q: torch.Tensor, k: torch.Tensor, given: _Given) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * given.scaling()) @ k.to(wide).transpose(-1, -2)
    if given.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores


def _run_backward(values: Arguments, call: Call, rows: Rows | None = None) -> tuple[torch.Tensor, ...]:
    given = _Given.of(values, call, rows)
    q, k, v, out, grad = (given.four(r) for r in ("query", "key", "value", "output", "grad_output"))
    lse = given.four("logsumexp")
    if given.is_flash():
        padded = [_padded(x) for x in (grad, q, k, v, out)]
        grads = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention_backward(
            *padded, lse.contiguous(), None, None, q.shape[-2], k.shape[-2], given.dropout_p, given.is_causal,
            _moved(given.tensors["philox_seed"], given.first_row()), given.tensors["philox_offset"],
            scale=given.scaling(),
        )  # fmt: skip
        found = [g[..., : x.shape[-1]] for g, x in zip(grads, (q, k, v), strict=True)]
    else:
        found = _attend_backward(q, k, v, grad, given)
    return tuple(given.whole(g) for g in found)


def _attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, given: _Given
) -> list[torch.Tensor]:
    scores = _scores(q, k, given)
    wide = scores.dtype
    weights = _weights(scores, torch.logsumexp(scores, -1))
    words = given.tensors["philox_seed"].reshape(-1).view(torch.int64)
    seed, offset = (int(words[0]), int(words[1])) if given.dropout_p > 0 else (0, 0)
    kept = _kept(scores, given, seed, offset)
    g = grad.to(wide)
    dv = (weights * kept).transpose(-1, -2) @ g
    dweights = (g @ v.to(wide).transpose(-1, -2)) * kept
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * given.scaling()
    dq, dk = dscores @ k.to(wide), dscores.transpose(-1, -2) @ q.to(wide)
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]


ATTENTION_CALLS: dict[str, TorchCall] = {
    "sdpfa_fwd": TorchCall(
        _forward, _run_forward, "flash attention: output, log of sums, seed and offset of its dropout",
        evaluate_drawing=_run_forward,
    ),
    "sdpfa_bwd": TorchCall(
        _backward, _run_backward, "its gradients of query, key and value", evaluate_drawing=_run_backward
    ),
}  # fmt: skip
