"""Cases of attention: torch's own, and its gradients by autograd, in the inputs' type and in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from op_cases import Draw, OpCase, called
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_answers import Expected

from benchmarks.roundings import spacing

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: Sequence[torch.Tensor] = (),
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """torch's, by its plain kernel; it takes one mask, and none beside ``is_causal``."""
    whole = None
    for mask in [*masks, *([torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()] if is_causal else [])]:
        added = (
            torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            if not mask.is_floating_point()
            else mask
        )
        whole = added if whole is None else whole + added
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, whole, scale=scale)


def log_sums(
    q: torch.Tensor, k: torch.Tensor, masks: Sequence[torch.Tensor], is_causal: bool, scale: float | None
) -> torch.Tensor:
    """The logarithm of the sum of exponentials of each row of scores, Float as shardfuse's."""
    wide = q.double() @ k.double().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    for mask in masks:
        wide = wide + mask if mask.is_floating_point() else wide.masked_fill(~mask, -torch.inf)
    if is_causal:
        wide = wide.masked_fill(~torch.ones(wide.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return torch.logsumexp(wide, -1).to(torch.float64 if q.dtype is torch.float64 else torch.float32)


def _shapes(d: Draw) -> list[list[int]]:
    """Of query, key and value: batches, heads, a length, features."""
    batch = d.shape(1, 3, 0, 1, 2, 2, 3)
    length, context, features, last = d.pick(1, 3, 5), d.pick(1, 4, 5), d.pick(1, 4, 8), d.pick(2, 3, 8)
    return [[*batch, length, features], [*batch, context, features], [*batch, context, last]]


def _options(d: Draw) -> dict[str, Any]:
    options: dict[str, Any] = {"is_causal": d.pick(False, True), "scale": d.pick(None, 0.25)}
    return {**options, "dropout_p": d.pick(None, 0.0)}


def _forward(d: Draw) -> OpCase:
    shapes, dtype, options = _shapes(d), d.pick(*DTYPES), _options(d)
    values = [d.tensor(s, dtype) for s in shapes]
    scores = [*shapes[0][:-1], shapes[1][-2]]
    roles: list[str] = []
    if d.pick(True, False):
        roles.append("bias")
        values.append(d.tensor([n if d.pick(True, False) else 1 for n in scores], dtype))
    if d.pick(True, False):
        roles.append("mask")  # a row that sees nothing gives 0
        values.append(d.tensor([n if d.pick(True, False) else 1 for n in scores], torch.int64) > 1)

    def build(o: Any, t: list[Any]) -> Any:
        given = dict(zip(roles, t[3:], strict=True))
        return o.sdpfa_fwd(*t[:3], **given, **options)[:2]

    def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        causal, scale = options["is_causal"], options["scale"]
        return attention(q, k, v, masks, causal, scale), log_sums(q, k, masks, causal, scale)

    case = called(build, torchs, values)
    out, sums = case.expected
    case.expected[:] = [
        Expected(
            out.eager, out.wide, lambda: [*out.moved(), _by_their_sums(out.wide, values[2], sums.wide)], signed=False
        ),
        Expected(sums.eager.float(), sums.wide, sums.moved),
    ]
    return case


def _by_their_sums(out: torch.Tensor, v: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """The result of probabilities that are exponentials of scores less their ``sums``, which are rounded to float32."""
    off = spacing(sums.double(), torch.float32).nan_to_num(0).unsqueeze(-1)
    return out + off * v.double().abs().amax(-2, keepdim=True) if v.shape[-2] else out


def _backward(d: Draw) -> OpCase:
    shapes, dtype, options = _shapes(d), d.pick(*DTYPES), _options(d)
    values = [d.tensor(s, dtype) for s in (*shapes, [*shapes[0][:-1], shapes[2][-1]])]

    def build(o: Any, t: list[Any]) -> Any:
        q, k, v, grad = t
        out, sums, seed, offset = o.sdpfa_fwd(q, k, v, **options)
        given = options["dropout_p"], options["is_causal"], seed, offset
        return o.sdpfa_bwd(grad, q, k, v, out, sums, *given, options["scale"])

    def torchs(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, grad = (x.detach().requires_grad_() for x in given)
        out = attention(q, k, v, (), options["is_causal"], options["scale"])
        return torch.autograd.grad(out, (q, k, v), grad)

    case = called(build, torchs, values)
    for k, found in enumerate(case.expected):
        case.expected[k] = Expected(found.eager, found.wide, partial(_by_terms, found, values), signed=False)
    return case


def _by_terms(found: Expected, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Also moved by two roundings to float32 of the products that a gradient adds up, which may cancel."""
    q, k, v, grad = (x.double().abs().amax() if x.numel() else torch.tensor(0.0).double() for x in values)
    most = grad * v * torch.maximum(q, k) * max(values[1].shape[-1], 1)
    return [*found.moved(), found.wide + 2 * spacing(most, torch.float32)]


ATTENTION: dict[str, Callable[[Draw], OpCase]] = {"sdpfa_fwd": _forward, "sdpfa_bwd": _backward}
