"""Gradients of a model's first step, parameter by parameter, against the same model in float32 without autocast.

A loss over steps tells little of a kernel that is wrong: where rates are high enough for a model to learn in a few
steps, two runs that differ by a rounding drift apart.  The gradients of one step have no time to.  A parameter's error
is ``||g - g32|| / ||g32||``, where the model in float32 runs by eager torch.  It is right where it is no larger than
twice that of eager torch or of Inductor, or where it is below one rounding of bfloat16.

Compiled dropout draws other masks than eager torch, but the same ones under both backends.  There shardfuse's
gradients are held against Inductor's, at the error that eager torch has without dropout, twice: each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from .model_cases import ModelCase

ROUNDING = 2.0**-8
"""Of bfloat16, relatively."""
FARTHER = 2.0
NOTHING = 1e-3
"""Of the median parameter's gradient.  What is smaller is nothing but rounding errors, as that of a bias which a
softmax or a norm takes out again: errors are relative to this much at least."""


@dataclass(frozen=True)
class GradientError:
    """Of one parameter.  ``size``: the root mean square of its gradient in float32, over that of the median one."""

    name: str
    size: float
    own: float
    peer: float
    eager: float

    @property
    def allowed(self) -> float:
        return max(FARTHER * max(self.peer, self.eager), ROUNDING)

    @property
    def over(self) -> float:
        """The error over what is allowed: right up to 1."""
        return self.own / self.allowed


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the parameter's name.  What the model computes in is no part of it."""
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def eager_gradients(case: ModelCase, device: torch.device, *, exact: bool) -> dict[str, Tensor]:
    """Of the first step by eager torch, without dropout.  ``exact``: in float32, from the same weights and inputs."""
    model, inputs = case.model(device), case.inputs(device)
    for module in model.modules():
        for name in ("p", "dropout"):  # of torch's modules, and of those that drop by a function
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    if exact:
        model = model.float()
        inputs = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast and not exact), _precise(exact):
        loss = model(*inputs)
    with _precise(exact):
        loss.backward()
    return gradients_of(model)


class _precise:  # noqa: N801 - used as a statement
    """Convolutions in full float32, where asked for, by the first algorithm that cuDNN names."""

    def __init__(self, is_asked: bool) -> None:
        self.is_asked = is_asked
        self.before = (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)

    def __enter__(self) -> None:
        if self.is_asked:
            torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = False

    def __exit__(self, *error: object) -> None:
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = self.before


def gradient_errors(
    case: ModelCase,
    own: dict[str, Tensor],
    peer: dict[str, Tensor],
    eager: dict[str, Tensor],
    exact: dict[str, Tensor],
) -> list[GradientError]:
    """By how far each is over what is allowed, the farthest first."""
    sizes = {n: float(g.double().square().mean().sqrt()) for n, g in exact.items()}
    middle = median(sizes.values())
    found: list[GradientError] = []
    for name, right in exact.items():
        least = NOTHING * middle * right.numel() ** 0.5
        beside = relative(eager[name], right, least)
        if case.dropout:
            given = relative(own[name], peer[name], least), beside
        else:
            given = relative(own[name], right, least), relative(peer[name], right, least)
        found.append(GradientError(name, sizes[name] / middle, *given, beside))
    return sorted(found, key=lambda e: -e.over)


def relative(found: Tensor, right: Tensor, least: float = 0.0) -> float:
    """Of the whole tensor, in float64: ``||found - right|| / ||right||``, or over ``least`` where that is more."""
    a, b = found.double(), right.double()
    return float((a - b).norm()) / max(float(b.norm()), least, torch.finfo(torch.float64).tiny)


def why_gradients_wrong(errors: Sequence[GradientError]) -> str:
    """ "" where all are right."""
    over = [e for e in errors if not e.over <= 1]
    if not over:
        return ""
    worst = over[0]
    said = f"{worst.name} {worst.own:.1e} off, Inductor's {worst.peer:.1e}, eager's {worst.eager:.1e}"
    return f"WRONG: {len(over)} of {len(errors)} gradients, {said}"
