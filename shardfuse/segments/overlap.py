"""In which order segments run, so that collectives run beside kernels: started early, waited for late.

Walking: a collective starts as soon as what it reads is made; next come kernels that read nothing that is on its way,
those that lead to another collective first; only where none is left one that has to wait for a collective, for the one
that started first.  The order follows from the plan alone, so that all ranks start their collectives in one order.

    kernel_a -> all_reduce -> kernel_b                kernel_a, start all_reduce, kernel_c, wait, kernel_b
    kernel_c

Only where that hides enough: a collective of its own stream costs events on the GPU and calls of the host.  Small ones,
and those that small kernels alone could run beside, stay where they are, and all run on one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod, sqrt

from ..analysis.communication_table import local_bytes
from ..device import Device
from ..ir.call import Call
from ..ir.expr import BoundTensor
from .recompute import moved_bytes
from .segment import Segment

Scheduled = tuple[Segment, str]
"""A segment and its scheduler."""

HIDDEN_US = 20.0
"""Microseconds that a collective has to hide at least: its start and its wait take two events on the GPU each, and four
calls of torch's streams on the host, of about 10 us."""
START_US = 10.0
"""What the smallest collective takes: two kernels with an all-reduce of one number a row take 13 in a graph."""

_PRODUCTS = (Call("matmul"), Call("linear"))
_LONG = ("grouped_mm", "scaled_grouped_mm", "block_scaled_mm", "sdpfa_fwd", "sdpfa_bwd")
"""Whose time does not follow from the sizes of their tensors, and mostly is more than a collective's."""


def overlap(segments: Sequence[Scheduled], device: Device) -> tuple[list[int], dict[int, None]]:
    """The order in which to run ``segments``, and which of them are collectives to start on a stream of their own.

    Where no collective has kernels to run beside that are worth it, the order is as it was and all run on one stream.
    """
    kept = list(range(len(segments)))
    if not any(name == "communication" for _, name in segments):
        return kept, {}
    order = _Walk(segments).run()
    beside = _beside([segments[k] for k in order], device)
    return (order, {order[at]: None for at in beside}) if beside else (kept, {})


class _Walk:
    def __init__(self, segments: Sequence[Scheduled]) -> None:
        self.segments = segments
        maker = {t: k for k, (s, _) in enumerate(segments) for t in s.outputs}
        self.needs = [dict.fromkeys(maker[t] for t in s.inputs if t in maker) for s, _ in segments]
        self.leads = self.leading()
        self.left = dict.fromkeys(range(len(segments)))
        self.started: dict[int, int] = {}
        """Collectives that nothing has waited for, and when each started."""

    def leading(self) -> list[bool]:
        """Does a collective depend on what each segment makes?"""
        leads = [False] * len(self.segments)
        todo = [k for k, (_, name) in enumerate(self.segments) if name == "communication"]
        while todo:
            for k in self.needs[todo.pop()]:
                if not leads[k]:
                    leads[k] = True
                    todo.append(k)
        return leads

    def run(self) -> list[int]:
        order: list[int] = []
        while self.left:
            k = min((k for k in self.left if not any(n in self.left for n in self.needs[k])), key=self.rank)
            if self.segments[k][1] == "communication":
                self.started[k] = len(order)
            else:
                last = max((self.started[n] for n in self.needs[k] if n in self.started), default=-1)
                self.started = {n: at for n, at in self.started.items() if at > last}
            order.append(k)
            del self.left[k]
        return order

    def rank(self, k: int) -> tuple[int, bool, int]:
        """The least comes first."""
        if self.segments[k][1] == "communication":
            return -2, False, k
        waits = max((self.started[n] for n in self.needs[k] if n in self.started), default=-1)
        return waits, not self.leads[k], k


def _beside(segments: Sequence[Scheduled], device: Device) -> list[int]:
    """The places of collectives between whose start and first reader there are kernels or torch calls for long enough.

    And of those that start meanwhile: on one stream they run in the order in which they start.
    """
    read = _first_reads(segments)
    works = [name not in ("communication", "no_op") for _, name in segments]
    found: dict[int, int] = {}
    for at, end in read.items():
        between = [segments[k][0] for k in range(at + 1, end) if works[k]]
        if between and min(_sent_us(segments[at][0], device), _worked_us(between, device)) >= HIDDEN_US:
            found[at] = end
    return [at for at in read if at in found or any(start < at < end for start, end in found.items())]


def _first_reads(segments: Sequence[Scheduled]) -> dict[int, int]:
    """For each collective the place of the first segment, other than a collective, that reads of it."""
    made: dict[BoundTensor, int] = {}
    read: dict[int, int] = {}
    for at, (segment, name) in enumerate(segments):
        if name == "communication":
            made.update(dict.fromkeys(segment.outputs, at))
            read[at] = len(segments)
            continue
        last = max((made[t] for t in segment.inputs if t in made), default=-1)
        for start, end in read.items():
            if start <= last and end == len(segments):  # whoever waits for one waits for those before it
                read[start] = at
    return read


def _sent_us(segment: Segment, device: Device) -> float:
    """About how long a collective takes; the same on every rank, as it follows from the largest piece."""
    return START_US + max(map(local_bytes, (*segment.inputs, *segment.outputs))) / device.rates.link


def _worked_us(segments: Sequence[Segment], device: Device) -> float:
    """About how long kernels take: those that wait for memory, and matmuls, by their operations."""
    exprs = [e for s in segments for e in s.exprs]
    if any(isinstance(e.op, Call) and e.op.name in _LONG for e in exprs):
        return inf
    products = [e for e in exprs if e.op in _PRODUCTS]
    operations = sum(2 * sqrt(prod(map(_elements, (*e.tensors[:2], e.output)))) for e in products)  # 2 m n k
    return max(moved_bytes(segments) / device.rates.memory, operations / device.rates.product)


def _elements(tensor: BoundTensor) -> int:
    return local_bytes(tensor) // tensor.dtype.itemsize
