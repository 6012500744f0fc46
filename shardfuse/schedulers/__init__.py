"""Schedulers, in order of priority: each says why it does not take a segment, or takes it."""

from __future__ import annotations

from collections.abc import Callable

from ..device import Device
from ..segments.segment import Segment
from . import looped, mix_order, persistent, pointwise, reduction, transpose
from .plan import KernelPlan
from .schedule import Schedule
from .without_kernel import why_no_call, why_no_communication, why_not_nothing

WhyNot = Callable[[Segment, Device], str | None]

ALONE = ("communication", "no_op", "torch_call")
"""Schedulers whose segments are never joined with others."""

SCHEDULERS: tuple[tuple[str, WhyNot], ...] = (
    ("communication", why_no_communication),
    ("no_op", why_not_nothing),
    ("torch_call", why_no_call),  # before kernels: an op without Triton text can be nothing else
    ("mix_order", mix_order.why_not),
    ("persistent", persistent.why_not),  # before reduction: it reads its input once where the row fits
    ("reduction", reduction.why_not),
    ("transpose", transpose.why_not),
    ("pointwise", pointwise.why_not),
    ("looped", looped.why_not),  # last: it takes what is left, and reads its input again
)

_KERNELS: dict[
    str, tuple[Callable[[Segment, Device], Schedule], Callable[[Segment, Schedule, Device], tuple[KernelPlan, ...]]]
] = {
    "mix_order": (mix_order.propose, mix_order.kernels),
    "persistent": (persistent.propose, persistent.kernels),
    "reduction": (reduction.propose, reduction.kernels),
    "transpose": (transpose.propose, transpose.kernels),
    "pointwise": (pointwise.propose, pointwise.kernels),
    "looped": (looped.propose, looped.kernels),
}


def makes_kernels(scheduler: str) -> bool:
    return scheduler in _KERNELS


def kernels_of(
    scheduler: str, segment: Segment, device: Device, schedule: Schedule | None = None
) -> tuple[KernelPlan, ...]:
    """The kernels that ``segment`` comes to under a scheduler that took it; none where it runs no generated kernel.

    ``schedule``: instead of what the scheduler proposes.  Raises ScheduleError where it is none for ``segment``.
    """
    if scheduler not in _KERNELS:
        return ()
    propose, kernels = _KERNELS[scheduler]
    return kernels(segment, schedule or propose(segment, device), device)


def proposed(scheduler: str, segment: Segment, device: Device) -> Schedule:
    """What a scheduler that makes kernels proposes for a segment that it took."""
    return _KERNELS[scheduler][0](segment, device)
