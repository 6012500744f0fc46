"""Which plan a call runs: the one whose kernels exchange statistics with other ranks, or the one with collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..compiler import Plan, sent
from ..executor.options import CompileOptions
from ..executor.regions import offsets, room, why_no_exchange
from ..in_kernel import exchanging, with_exchanges


def with_exchanges_here(plan: Plan, ranks: Sequence[int], options: CompileOptions) -> Plan:
    """``plan`` with exchanges in kernels, where its ranks have symmetric memory."""
    return with_exchanges(plan, why_no_exchange(ranks, options))


def plan_on(plan: Plan, text: str, device: torch.device, options: CompileOptions) -> Plan:
    """``plan``, or the one with collectives by themselves, where no kernel can exchange on ``device``."""
    if plan.apart is None:
        return plan
    has_kernels = device.type == "cuda" and options.backend_for(device) == "triton"
    why = room(text, exchanging(plan)) if has_kernels else f"tensors are on {device.type}"
    return plan if why is None else replace(plan.apart, in_kernel=(f"none: {why}",))


def promises(plan: Plan, text: str) -> list[str]:
    """What followed from ``text``, and has to be the same on all ranks: what they send one another, and where to."""
    return [*sent(plan), *offsets(text, exchanging(plan))]
