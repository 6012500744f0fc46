"""Lists of parameters for optimiser steps, and torch's own optimiser on the same numbers in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from benchmarks.roundings import assert_near
from shardfuse import optim

SHAPES = ((3,), (), (0,), (70, 101), (20_000,), (4, 1, 5), (33, 7, 2))
STEPS = 3
TORCH_ONLY = ("amsgrad", "maximize", "weight_decay", "betas", "eps", "lr")


@dataclass(frozen=True)
class Case:
    """name, dtypes of the parameters in turn, options of the optimiser."""

    name: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
CASES = (
    Case("float32"),
    Case("options", options={"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    Case("amsgrad", options={"amsgrad": True, "betas": (0.5, 0.6)}),
    Case("clip", options={"max_norm": 1.0}),
    Case("clip by the largest", options={"max_norm": 0.5, "norm_type": math.inf}),
    Case("clip by sums of powers", options={"max_norm": 2.0, "norm_type": 3.0}),
    Case("norm alone", options={"max_norm": math.inf, "norm_type": 1.0}),
    Case("bfloat16", (BF16,), {"max_norm": 1.0}),
    Case("masters", (BF16, F16), {"max_norm": 1.0, "master_weights": True, "lr": 1e-4}),
    Case("float16", (F16,)),
    Case("float64", (F64,), {"max_norm": 1.0}),
    Case("all types", (F32, BF16, F16, F64), {"max_norm": 1.0, "amsgrad": True, "master_weights": True}),
)


def parameters(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(tuple(s), generator=generator).to(device, dtype)) for s in shapes]


def gradients(tensors: Sequence[torch.Tensor], seed: int, leave_out: int | None = None) -> None:
    """New ones.  leave_out: every fifth from here has none."""
    generator = torch.Generator().manual_seed(100 + seed)
    for k, p in enumerate(tensors):
        drawn = torch.randn(p.shape, generator=generator)
        is_left_out = leave_out is not None and (k + leave_out) % 5 == 4
        p.grad = None if is_left_out else torch.empty_like(p).copy_(drawn)


def mixed(case: Case, device: torch.device) -> list[torch.nn.Parameter]:
    """The shapes in the case's types, one permuted, one with gaps, one misaligned."""
    listed = [
        parameters([s], case.dtypes[k % len(case.dtypes)], device)[0]
        for k, s in enumerate((*SHAPES, (30, 20), (30, 20)))
    ]
    listed[-2] = torch.nn.Parameter(listed[-2].detach().t())
    listed[-1] = torch.nn.Parameter(listed[-1].detach()[:, ::2])
    misaligned = parameters([(1001,)], case.dtypes[0], device)[0].detach()[1:]
    return [*listed, torch.nn.Parameter(misaligned)]


def compare(case: Case, device: torch.device, steps: int = STEPS) -> None:
    """Train both on the same gradients; each step begins with the same numbers, so that its own roundings are seen."""
    tensors = mixed(case, device)
    wide = [torch.nn.Parameter(p.detach().double().clone()) for p in tensors]
    own = optim.AdamW(tensors, **{"lr": 1e-2, **case.options})
    reference = torch.optim.AdamW(wide, **{"lr": 1e-2, **{k: v for k, v in case.options.items() if k in TORCH_ONLY}})
    for step in range(steps):
        gradients(tensors, step, leave_out=step)
        kept = [None if p.grad is None else p.grad.clone() for p in tensors]
        for q, gradient in zip(wide, kept, strict=True):
            q.grad = None if gradient is None else gradient.double().clone()
        before = [(p.detach().clone(), q.detach().clone()) for p, q in zip(tensors, wide, strict=True)]
        if "max_norm" in case.options:
            exponent = case.options.get("norm_type", 2.0)
            norm = torch.nn.utils.clip_grad_norm_([q for q in wide if q.numel()], case.options["max_norm"], exponent)
        own.step()
        reference.step()
        if "max_norm" in case.options:
            assert own.grad_norm.dtype == (F64 if F64 in case.dtypes else F32)
            is_exact = set(case.dtypes) == {F64}  # as the reference is: both round their sums
            assert_near(own.grad_norm if is_exact else own.grad_norm.float(), norm, n=32 if is_exact else 2)
        for k, (p, q, (narrow, old), gradient) in enumerate(zip(tensors, wide, before, kept, strict=True)):
            if gradient is None:
                assert torch.equal(p, narrow)
                continue
            assert torch.equal(p.grad, gradient), "gradients are not written"
            group = reference.param_groups[0]
            _check_and_align(p, q, own.state[p], reference.state[q], old, group, f"step {step}, parameter {k}")


def _check_and_align(
    p: torch.Tensor, q: torch.Tensor, found: dict[str, Any], wanted: dict[str, Any], old: torch.Tensor,
    group: dict[str, Any], what: str,
) -> None:  # fmt: skip
    """Parameter and moments against float64, in roundings of what was added up; the reference goes on from them."""
    g, step = q.grad, wanted["step"].item()
    assert found["step"].item() == step, what
    terms = {key: value.abs() for key, value in wanted.items() if key != "step"}
    terms["exp_avg"] = terms["exp_avg"] + g.abs()
    for key in terms.keys() & {"exp_avg_sq", "max_exp_avg_sq"}:
        terms[key] = terms[key] + g * g
    divisor = (wanted.get("max_exp_avg_sq", wanted["exp_avg_sq"]) / (1 - group["betas"][1] ** step)).sqrt()
    moved = group["lr"] / (1 - group["betas"][0] ** step) * terms["exp_avg"] / (divisor + group["eps"])
    with torch.no_grad():
        for key, term in terms.items():
            assert_near(found[key], wanted[key], n=4, terms=term, what=f"{what}, {key}")
            wanted[key].copy_(found[key])
        summands = 2 * (old.abs() + q.abs() + moved)
        if "master" in found:
            assert_near(found["master"], q.detach(), n=2, terms=summands, what=f"{what}, master")
            assert torch.equal(p, found["master"].to(p.dtype)), what
            q.copy_(found["master"])
        else:
            assert_near(p.detach(), q.detach(), n=2, terms=summands, what=what)
            q.copy_(p)


def check_moments_without_memory(device: torch.device) -> None:
    """With betas of 0 a step follows from its own gradient alone, however large the last one was."""
    (p,) = parameters([(64,)], F32, device)
    (q,) = parameters([(64,)], F32, device)
    options: dict[str, Any] = {"betas": (0.0, 0.0), "eps": 0.0, "lr": 0.5, "weight_decay": 0.0}
    mine, theirs = optim.AdamW([p], **options), torch.optim.AdamW([q], **options)
    for size in (1e4, 1e-4):
        gradients([p], 3)
        p.grad = cast(torch.Tensor, p.grad) * size
        q.grad = p.grad.clone()
        mine.step()
        theirs.step()
    assert torch.equal(mine.state[p]["exp_avg"], p.grad)
    torch.testing.assert_close(p, q)
