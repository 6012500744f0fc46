"""Which plan a call runs: the one whose kernels exchange statistics with other ranks, or the one with collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ..analysis.communication_table import local_bytes
from ..compiler import Plan, sent
from ..errors import KernelCompileError
from ..executor.agreement import agreed, failures_told
from ..executor.launch import index_of
from ..executor.options import CompileOptions
from ..executor.symmetric_slots import (
    decide,
    hand_out_from,
    handed_out,
    is_crowded,
    is_decided,
    is_in_reach,
    offsets,
    room,
    tables_for,
    why_no_exchange,
    why_out_of_reach,
    why_refused,
)
from ..in_kernel import exchanging, may_pass_on, with_exchanges
from ..mesh.groups import default_group, stages_through_host, world_size
from ..mesh.own_device import own_gpu
from ..passes.promise_checks import are_in_pairs
from ..schedulers.exchange_room import LEFT_FREE
from .bound_call import BoundCall

_NEVER = 1 << 62
"""Where slots begin, in words, of a program of which some kernel does not compile."""
_NOWHERE = _NEVER + 1
"""Of one whose tensors are not where kernels reach the memory of other ranks."""
_CROWDED = _NEVER + 2
"""Of one that would run on too few multiprocessors."""
_WHY = {
    _CROWDED: "kernels of NCCL may need too many multiprocessors of some rank's GPU, with so many process groups",
    _NEVER: "a kernel does not compile on some rank",
    _NOWHERE: "tensors of some rank are on another device than the one that shares memory",
}


def with_exchanges_here(plan: Plan, ranks: Sequence[int], options: CompileOptions, again: Callable[..., Plan]) -> Plan:
    """``plan`` with exchanges in kernels, where its ranks have symmetric memory.

    again: makes the plan in another way, by keyword.  has_cheap_sums: a mean and a variance are two sums, which a
    kernel exchanges one after the other, instead of one gather.  passes_sums: ranks pass on inside of a kernel what
    each has added up, of whatever size.  Each is taken where fewer collectives are left, by which a rank is given no
    more bytes.
    """
    why_none = why_no_exchange(ranks, options)
    if plan.fusion.promises.invariant and not are_in_pairs(plan.fusion):
        why_none = f"{plan.fusion.promises}: which kernels exchange depends on the number of rows"
    is_by_default = options.exchange == "auto"
    found = with_exchanges(_planned_for(plan, options), why_none, why_out_of_reach, is_by_default=is_by_default)
    ways = [{"has_cheap_sums": True}]
    if may_pass_on(is_by_default=is_by_default) and _has_further_ranks(plan):
        ways.append({"has_cheap_sums": True, "passes_sums": True})
    for way in ways:
        if why_none is not None or not collectives(found):
            break
        other = with_exchanges(_planned_for(again(**way), options), None, why_out_of_reach, is_by_default=is_by_default)
        if collectives(other) < collectives(found) and _given(other) <= _given(found):
            found = replace(other, apart=plan)
    return found


def _has_further_ranks(plan: Plan) -> bool:
    """Do more than two ranks communicate?"""
    meshes = (t.domain.mesh for t in plan.fusion.tensors())
    return any(n > 2 for mesh in meshes if mesh is not None for n in mesh.shape)


def _planned_for(plan: Plan, options: CompileOptions) -> Plan:
    """Under Triton's interpreter, programs of a rank run one after the other: none must wait for another of them."""
    if not options.interpret:
        return plan
    return replace(plan, device=replace(plan.device, multiprocessors=LEFT_FREE + 1))


def collectives(plan: Plan) -> int:
    """How many collectives it has that stand by themselves."""
    return len([s for s in plan.segments if s.scheduler == "communication"])


def _given(plan: Plan) -> int:
    """Bytes that a rank has from its collectives."""
    given = [s.segment.outputs for s in plan.segments if s.scheduler == "communication"]
    return sum(local_bytes(t) for outputs in given for t in outputs)


def plan_on(plan: Plan, text: str, device: torch.device, options: CompileOptions) -> Plan:
    """``plan``, or the one with collectives by themselves, where no kernel can exchange on ``device``.

    text: of its program, whose ranks may have agreed on those.
    """
    if plan.apart is None:
        return plan
    why = why_refused(text) if _has_kernels(device, options) else f"tensors are on {device}"
    return plan if why is None else replace(plan.apart, in_kernel=(f"none: {why}",))


def _has_kernels(device: torch.device, options: CompileOptions) -> bool:
    """Can kernels that run there exchange?"""
    return options.backend_for(device) == "triton" and is_in_reach(device)


def agree_on_memory(
    call: BoundCall,
    options: CompileOptions,
    plan: Callable[[], Plan],
    compiled: Callable[[Plan], object],
    within: AbstractContextManager[None],
) -> None:
    """Have the ranks of ``call`` agree, once for its text, on whether its kernels exchange, and where its slots begin.

    Slots begin behind what any of them handed out, so that all have as much left: whether there is room is decided
    here, and not asked again.  A rank that binds the program anew is alone, and there may be room by then.
    Where no kernels were asked for and one does not compile on a rank, all ranks have collectives.  What a rank may
    lack memory for is made before they agree: where one has none, all of them raise, and ask again in the next call.
    compiled: makes the kernels of a plan.  within: what names the caller's lines in errors.
    """
    ranks, text = call.ranks, call.text
    if call.rank not in ranks or why_no_exchange(ranks, options) is not None or is_decided(text):
        return
    tables: Mapping[Hashable, torch.Tensor] = {}
    with agreed(ranks, f"{text}\nmemory that ranks share", text) as told, within:
        planned = plan()
        kernels = [kernel for _, kernel in exchanging(planned)]
        told += sent(planned)  # a rank that waits here is known to call a program in which ranks communicate
        if kernels and not _has_kernels(call.bound.device, options):
            told.number = _NOWHERE
        elif kernels and is_crowded(kernels):
            told.number = _CROWDED
        else:
            is_tried = bool(kernels) and options.exchange == "auto" and room(kernels) is None
            told.number = _NEVER if is_tried and not _compiles(planned, compiled) else handed_out()
            tables = tables_for(kernels) if kernels and told.number != _NEVER else tables
    if told.most is None or not kernels:
        return
    with failures_told(ranks), within:
        if told.most in _WHY:
            decide(text, _WHY[told.most])
        else:
            hand_out_from(told.most)
            decide(text, None, kernels, tables)


def _compiles(plan: Plan, compiled: Callable[[Plan], object]) -> bool:
    try:
        compiled(plan)
    except KernelCompileError as error:
        warnings.warn(f"{error}\nthe ranks of the program exchange by collectives instead", stacklevel=2)
        return False
    return True


def told_elsewhere(call: BoundCall, options: CompileOptions, plan: Callable[[], Plan]) -> BoundCall:
    """``call`` with the GPU in its text, where ranks communicate in it and that is not the one of this rank.

    Communicators and shared memory belong to one GPU of each rank.  A rank that alone takes a program that was agreed
    on to another GPU would wait there for ranks that do not come; a program of another text is compared again.
    """
    device = call.bound.device
    if device.type != "cuda" or call.rank not in call.ranks or len(call.ranks) < 2 or world_size() < 2:
        return call
    number = index_of(device)
    own = torch.device("cuda", own_gpu(number))
    is_bound_to_it = is_in_reach(own) or not stages_through_host(default_group(), own)
    if own.index == number or not is_bound_to_it:
        return call
    with failures_told(call.ranks):
        is_quiet = not sent_in(plan(), options)
    return call if is_quiet else replace(call, text=f"{call.text}\ntensors are on another GPU than this rank's own")


def sent_in(plan: Plan, options: CompileOptions) -> list[str]:
    """What the ranks of several send one another in a run of ``plan``, in order, a line each."""
    return [*["sends: digests of all inputs"] * options.check_replicas, *sent(plan)]


def promises(plan: Plan, call: BoundCall) -> list[str]:
    """What followed from a text, and has to be the same on all ranks: what they send one another, and where to.

    A rank that is on none of the program's meshes has no slots, and no other rank to compare them with.
    """
    return [*sent(plan), *offsets(exchanging(plan))] if call.rank in call.ranks else []
