"""Every function of shardfuse.nn.functional that can promise, as a call of rows alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardfuse.nn import functional


def vector(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, 32, device=x.device)


def targets(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device) % x.shape[-1]


CALLS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "rms_norm": lambda x, **kept: functional.rms_norm(x, (32,), vector(x), **kept),
    "layer_norm": lambda x, **kept: functional.layer_norm(x, (32,), vector(x), vector(x), **kept),
    "dropout_add_norm": lambda x, **kept: functional.dropout_add_norm(x, x + 1, (32,), vector(x), **kept),
    "add_layer_norm": lambda x, **kept: functional.add_layer_norm(x, x + 1, (32,), vector(x), **kept),
    "add_rms_norm": lambda x, **kept: functional.add_rms_norm(x, x + 1, (32,), vector(x), **kept),
    "group_norm": lambda x, **kept: functional.group_norm(x.unflatten(1, (8, 4)), 2, **kept),
    "batch_norm": lambda x, **kept: functional.batch_norm(x, torch.zeros(32), vector(x), **kept),
    "softmax": lambda x, **kept: functional.softmax(x, **kept),
    "log_softmax": lambda x, **kept: functional.log_softmax(x, **kept),
    "gelu": lambda x, **kept: functional.gelu(x, **kept),
    "geglu": lambda x, **kept: functional.geglu(x, **kept),
    "swiglu": lambda x, **kept: functional.swiglu(x, **kept),
    "rotary_embedding": lambda x, **kept: functional.rotary_embedding(
        x.view(-1, 1, 2, 16), x.view(-1, 1, 2, 16), torch.ones(2, 8), torch.zeros(2, 8), **kept
    ),
    "cross_entropy": lambda x, **kept: functional.cross_entropy(x, targets(x), reduction="none", **kept),
    "log_prob": lambda x, **kept: functional.log_prob(x, targets(x), **kept),
    "log_prob_and_entropy": lambda x, **kept: functional.log_prob_and_entropy(x, targets(x), **kept),
}


def with_gradient(call: Callable[[Tensor], Tensor | tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """The results, and the gradient of the sum of their sines: it differs from row to row."""
    own = x.detach().clone().requires_grad_()
    found = listed(call(own))
    (gradient,) = torch.autograd.grad([t.sin().sum() for t in found], own)
    return (*(t.detach() for t in found), gradient)


def listed(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found
