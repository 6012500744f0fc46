"""Torch calls for attention: flash attention forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from .matmul_calls import roles_of
from .torch_call import Arguments, Attributes, AxisNames, Shapes, Signature, TorchCall, axis_names


def _batch(ndim: int) -> AxisNames:
    """Leading axes: batches, and heads last of them."""
    return axis_names(ndim - 2, "n")


def _tensor_roles(attributes: Attributes, shapes: Shapes) -> list[tuple[str, int]]:
    names = [r for r in roles_of(attributes) if r not in _NUMBERS]
    return [(r, len(s)) for r, s in zip(names, shapes, strict=True)]


_NUMBERS = ("dropout_p", "is_causal", "scale")


def _axes(role: str, ndim: int) -> AxisNames:
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
        case _:  # bias and mask are broadcast; seeds are small
            return tuple(f"{role}{k}*" for k in range(ndim))


def _forward(shapes: Shapes, attributes: Attributes) -> Signature:
    roles = _tensor_roles(attributes, shapes)
    ndim = roles[0][1]
    inputs = tuple(_axes(role, n) for role, n in roles)
    seed: AxisNames = ("two*",)
    outputs = (_axes("output", ndim), _axes("logsumexp", ndim - 1), seed, ())
    return Signature(inputs, outputs, {"two*": 2})


def _backward(shapes: Shapes, attributes: Attributes) -> Signature:
    roles = _tensor_roles(attributes, shapes)
    inputs = tuple(_axes(role, n) for role, n in roles)
    ndim = next(n for role, n in roles if role == "query")
    return Signature(inputs, tuple(_axes(role, ndim) for role in ("query", "key", "value")))


@dataclass(frozen=True)
class _Given:
    """Arguments by name; batches folded into one, as torch wants four axes."""

    tensors: dict[str, torch.Tensor]
    dropout_p: float
    is_causal: bool
    scale: float | None

    @staticmethod
    def of(values: Arguments, attributes: Attributes) -> _Given:
        by_name = dict(zip(roles_of(attributes), values, strict=True))
        numbers = {k: v for k, v in by_name.items() if not isinstance(v, torch.Tensor)}
        tensors = {k: v for k, v in by_name.items() if isinstance(v, torch.Tensor)}
        scale = numbers.get("scale")
        return _Given(
            tensors,
            float(numbers.get("dropout_p", 0.0).real),
            bool(numbers.get("is_causal", False)),
            None if scale is None else float(scale.real),
        )

    def four(self, role: str) -> torch.Tensor:
        x = self.tensors[role]
        trailing = 1 if role == "logsumexp" else 2
        return x.reshape(-1, *x.shape[-trailing - 1 :]) if x.ndim != trailing + 2 else x


def _run_forward(values: Arguments, attributes: Attributes) -> tuple[torch.Tensor, ...]:
    given = _Given.of(values, attributes)
    q, k, v = (given.four(role) for role in ("query", "key", "value"))
    batch = given.tensors["query"].shape[:-2]
    masks = [given.tensors[r] for r in ("bias", "mask") if r in given.tensors]
    if masks or q.device.type != "cuda":
        output, lse = _attend(q, k, v, given, masks, batch)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    else:
        e = q.shape[-1]
        scale = given.scale if given.scale is not None else e**-0.5
        q, k, v = (_padded(x) for x in (q, k, v))
        output, lse, _, _, _, _, seed, offset, _ = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention(
            q, k, v, given.dropout_p, given.is_causal, False, scale=scale
        )
        output = output[..., : given.tensors["value"].shape[-1]]
    return output.reshape(*batch, *output.shape[-2:]), lse.reshape(*batch, lse.shape[-1]), seed, offset


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Flash attention takes head sizes that 8 divides; zeros change nothing."""
    short = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, short)) if short else x


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given, masks: list[torch.Tensor], batch: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32, all of the scores at once: for a CPU, and where scores have a bias or a mask."""
    scores = _scores(q, k, given)
    for mask in masks:
        whole = mask.expand(*batch, *scores.shape[-2:]).reshape(scores.shape)
        scores = scores.masked_fill(~whole, float("-inf")) if whole.dtype == torch.bool else scores + whole.float()
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    if given.dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, given.dropout_p)
    return (weights @ v.float()).to(v.dtype), lse


def _scores(q: torch.Tensor, k: torch.Tensor, given: _Given) -> torch.Tensor:
    scale = given.scale if given.scale is not None else q.shape[-1] ** -0.5
    scores = (q.float() * scale) @ k.float().transpose(-1, -2)
    if given.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def _run_backward(values: Arguments, attributes: Attributes) -> tuple[torch.Tensor, ...]:
    given = _Given.of(values, attributes)
    q, k, v, out, grad = (given.four(r) for r in ("query", "key", "value", "output", "grad_output"))
    lse = given.four("logsumexp")
    shapes = [given.tensors[r].shape for r in ("query", "key", "value")]
    if q.device.type == "cuda":
        empty = torch.empty(0, dtype=torch.int32, device=q.device)
        scale = given.scale if given.scale is not None else q.shape[-1] ** -0.5
        padded = [_padded(x) for x in (grad, q, k, v, out)]
        grads = cast(Any, torch.ops.aten)._scaled_dot_product_flash_attention_backward(
            *padded, lse.contiguous(), empty, empty, q.shape[-2], k.shape[-2], given.dropout_p, given.is_causal,
            given.tensors["philox_seed"], given.tensors["philox_offset"], scale=scale,
        )  # fmt: skip
        found = [g[..., : s[-1]] for g, s in zip(grads, shapes, strict=True)]
    else:
        found = _attend_backward(q, k, v, out, grad, lse, given)
    return tuple(g.reshape(s) for g, s in zip(found, shapes, strict=True))


def _attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor,
    given: _Given,
) -> list[torch.Tensor]:  # fmt: skip
    """Without dropout, whose mask is not known here."""
    scale = given.scale if given.scale is not None else q.shape[-1] ** -0.5
    weights = torch.exp(_scores(q, k, given) - lse.unsqueeze(-1))
    g = grad.float()
    dv = weights.transpose(-1, -2) @ g
    dweights = g @ v.float().transpose(-1, -2)
    dscores = weights * (dweights - (g * out.float()).sum(-1, keepdim=True))
    dq = dscores @ k.float() * scale
    dk = dscores.transpose(-1, -2) @ q.float() * scale
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]


ATTENTION_CALLS: dict[str, TorchCall] = {
    "sdpfa_fwd": TorchCall(
        _forward, _run_forward, "flash attention: output, log of sums, seed and offset of its dropout"
    ),
    "sdpfa_bwd": TorchCall(_backward, _run_backward, "its gradients of query, key and value"),
}
