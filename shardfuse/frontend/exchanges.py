"""Which plan a call runs: the one whose kernels exchange statistics with other ranks, or the one with collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ..compiler import Plan, sent
from ..errors import KernelCompileError
from ..executor.agreement import agreed
from ..executor.options import CompileOptions
from ..executor.symmetric_slots import (
    hand_out_from,
    handed_out,
    is_in_reach,
    offsets,
    room,
    taken_back,
    why_no_exchange,
    why_out_of_reach,
)
from ..in_kernel import exchanging, with_exchanges
from ..schedulers.rank_exchange import LEFT_FREE

_NEVER = 1 << 62
"""Where slots begin, in words, of a program that has none."""


def with_exchanges_here(plan: Plan, ranks: Sequence[int], options: CompileOptions, by_sums: Callable[[], Plan]) -> Plan:
    """``plan`` with exchanges in kernels, where its ranks have symmetric memory.

    by_sums: gives the plan in which a mean and a variance are two sums, which a kernel exchanges one after the other,
    instead of one gather.  It is taken where fewer collectives are left.
    """
    why_none = why_no_exchange(ranks, options)
    if plan.fusion.promises.invariant:
        why_none = f"{plan.fusion.promises}: which kernels exchange depends on the number of rows"
    found = with_exchanges(_planned_for(plan, options), why_none, why_out_of_reach)
    if why_none is not None or not collectives(found):
        return found
    other = with_exchanges(_planned_for(by_sums(), options), None, why_out_of_reach)
    return replace(other, apart=plan) if collectives(other) < collectives(found) else found


def _planned_for(plan: Plan, options: CompileOptions) -> Plan:
    """Under Triton's interpreter, programs of a rank run one after the other: none must wait for another of them."""
    if not options.interpret:
        return plan
    return replace(plan, device=replace(plan.device, multiprocessors=LEFT_FREE + 1))


def collectives(plan: Plan) -> int:
    """How many collectives it has that stand by themselves."""
    return len([s for s in plan.segments if s.scheduler == "communication"])


def plan_on(plan: Plan, is_refused: bool, device: torch.device, options: CompileOptions) -> Plan:
    """``plan``, or the one with collectives by themselves, where no kernel can exchange on ``device``.

    is_refused: have its ranks agreed on those?
    """
    if plan.apart is None:
        return plan
    if is_refused:
        return replace(plan.apart, in_kernel=("none: a kernel does not compile on some rank",))
    has_kernels = options.backend_for(device) == "triton" and is_in_reach(device)
    why = room([kernel for _, kernel in exchanging(plan)]) if has_kernels else f"tensors are on {device}"
    return plan if why is None else replace(plan.apart, in_kernel=(f"none: {why}",))


def agree_on_memory(
    ranks: Sequence[int],
    text: str,
    options: CompileOptions,
    plan: Callable[[], Plan],
    build: Callable[[], object],
    refused: set[str],
    within: AbstractContextManager[None],
) -> None:
    """Where slots of the program of ``text`` begin, whose kernels exchange: behind what any of its ranks handed out.

    Where no kernels were asked for and one does not compile on a rank, all ranks have ``text`` among the ``refused``.
    build: makes the program.  within: what names the caller's lines in errors.
    """
    if why_no_exchange(ranks, options) is not None:
        return
    with agreed(ranks, f"{text}\nmemory that ranks share", text) as told, within:
        has_slots = plan().apart is not None
        is_tried = has_slots and options.exchange == "auto"
        told.number = _NEVER if is_tried and not _compiles(build) else handed_out()
    if told.most is None or not has_slots:
        return
    if told.most == _NEVER:
        refused.add(text)
    else:
        hand_out_from(told.most)


def _compiles(build: Callable[[], object]) -> bool:
    try:
        with taken_back():
            build()
    except KernelCompileError as error:
        warnings.warn(f"{error}\nthe ranks of the program exchange by collectives instead", stacklevel=2)
        return False
    return True


def promises(plan: Plan) -> list[str]:
    """What has to be the same on all ranks: what they send one another, and where to."""
    return [*sent(plan), *offsets(exchanging(plan))]
