"""Schedulers, in order of priority: each says why it does not take a segment, or takes it."""

from __future__ import annotations

from collections.abc import Callable

from ..device import Device
from . import communication, looped, mix_order, no_op, persistent, pointwise, reduction, torch_call, transpose
from .plan import KernelPlan, Params
from .segment import Segment

WhyNot = Callable[[Segment, Device], str | None]

ALONE = ("communication", "no_op", "torch_call")
"""Schedulers whose segments are never joined with others."""

SCHEDULERS: tuple[tuple[str, WhyNot], ...] = (
    ("communication", communication.why_not),
    ("no_op", no_op.why_not),
    ("torch_call", torch_call.why_not),  # before kernels: an op without Triton text can be nothing else
    ("mix_order", mix_order.why_not),
    ("persistent", persistent.why_not),  # before reduction: it reads its input once where the row fits
    ("reduction", reduction.why_not),
    ("transpose", transpose.why_not),
    ("pointwise", pointwise.why_not),
    ("looped", looped.why_not),  # last: it takes what is left, and reads its input again
)

_KERNELS: dict[
    str, tuple[Callable[[Segment, Device], Params], Callable[[Segment, Params, Device], tuple[KernelPlan, ...]]]
] = {
    "mix_order": (mix_order.propose, mix_order.schedule),
    "persistent": (persistent.propose, persistent.schedule),
    "reduction": (reduction.propose, reduction.schedule),
    "transpose": (transpose.propose, transpose.schedule),
    "pointwise": (pointwise.propose, pointwise.schedule),
    "looped": (looped.propose, looped.schedule),
}


def makes_kernels(scheduler: str) -> bool:
    return scheduler in _KERNELS


def kernels_of(
    scheduler: str, segment: Segment, device: Device, params: Params | None = None
) -> tuple[KernelPlan, ...]:
    """The kernels that ``segment`` comes to under a scheduler that took it; none where it runs no generated kernel.

    ``params``: instead of those that the scheduler proposes.
    """
    if scheduler not in _KERNELS:
        return ()
    propose, schedule = _KERNELS[scheduler]
    return schedule(segment, params or propose(segment, device), device)


def proposed(scheduler: str, segment: Segment, device: Device) -> Params:
    """What a scheduler that makes kernels proposes for a segment that it took."""
    return _KERNELS[scheduler][0](segment, device)
