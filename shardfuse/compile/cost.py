"""What a region takes, as shardfuse's kernels and as Inductor's: an estimate from bytes, launches and passes.

Figures, with what was measured, are in ``device/region_costs.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..device.region_costs import (
    BYTES_PER_US,
    COLUMN_GROUP_PROGRAMS,
    COLUMN_GROUP_SHARE,
    CONFIRMED_USE,
    GROUP_ACCESSES_PER_US,
    GROUP_BESIDE_SHARE,
    GROUP_SHARE,
    GROUP_TENSORS,
    HEAVY,
    HOST_US,
    INDUCTOR_TURNED_SHARE,
    KERNEL_US,
    LEAST_US,
    OPS_PER_US,
    PERSISTENT_ROW,
    SCATTERED_SHARES,
    SHARE_OF_COPY,
    STATISTICS_SHARE,
    TURNED_SHARE,
    TURNING_SUM_SHARE,
    UNCONFIRMED_SHARE,
)
from ..frontend.explain import Explanation, SegmentExplanation
from ..schedulers.schedule_parts import Immediate
from .aten_reductions import scattered_axes
from .inductor_cost import beside, computed_by, drawn_in_blocks, inductor_us, is_drawn, is_grouped
from .reduction_kernel import kernel_of
from .region_border import border_bytes
from .regions import Region
from .translation import hinted, tensor_of

MARGIN = 0.95
"""A region is taken where it is expected to take less than this of Inductor's time, and to gain ``LEAST_US``."""


@dataclass(frozen=True)
class Cost:
    """Microseconds.  ``border``: of tensors that the op makes Inductor store and load; ``host``: see ``HOST_US``."""

    ours: float
    inductor: float
    border: float
    host: float

    @property
    def gains(self) -> bool:
        own = self.ours + self.border + self.host
        return own < MARGIN * self.inductor and self.inductor - own >= LEAST_US

    def __str__(self) -> str:
        at_border = f" + {self.border:.1f} at its border" if self.border else ""
        on_host = f" + {self.host:.1f} of the host" if self.host else ""
        return f"expected {self.ours:.1f} us{at_border}{on_host} against {self.inductor:.1f} us of Inductor's kernels"


def cost_of(region: Region, plan: Explanation, *, is_host_hidden: bool, is_mix_order: bool) -> Cost:
    """``is_host_hidden``: by CUDA graphs, or behind what the GPU has to do.  ``is_mix_order``: of Inductor's
    configuration."""
    inductor, kernels = inductor_us(region, is_mix_order=is_mix_order)
    if _is_turned(region) and any(s.scheduler == "mix_order" for s in plan.segments):
        inductor = max(inductor, plan.bytes / (BYTES_PER_US * INDUCTOR_TURNED_SHARE))
    launches = max(plan.kernels, 1) + 1 - kernels
    host = 0.0 if is_host_hidden else HOST_US * max(launches, 0)
    moved = border_bytes(region)
    border = KERNEL_US + moved / BYTES_PER_US if moved else 0.0
    return Cost(_ours(plan, region), inductor, border, host)


def why_never(plan: Explanation) -> str | None:
    """A plan that is no match for Inductor's whatever the sizes."""
    calls = [s.text.split("\n")[0] for s in plan.segments if s.scheduler == "torch_call"]
    if calls:
        return f"a part of it is a call of torch: {calls[0]}"
    return None


def _ours(plan: Explanation, region: Region) -> float:
    total, launches, rows = 0.0, 0, 0
    for s in plan.segments:
        if s.scheduler in ("no_op", "communication"):
            continue
        launches += max(len(s.kernels), 1)
        share = _share(s, region)
        if s.scheduler == "looped" and 10 * s.bytes < 9 * plan.bytes and not _is_confirmed(s, region):
            share = UNCONFIRMED_SHARE
        moved = s.bytes / (BYTES_PER_US * share)
        total += max(moved, _waited_us(s, region)) if 2 * s.bytes > plan.bytes else moved
        rows += s.bytes if (s.scheduler, share) == ("persistent", SHARE_OF_COPY["persistent"]) else 0
    roots = [*region.reductions, *region.outputs]
    blocks = [schedule.reduced for s in plan.segments for stages in s.schedules for schedule in stages]
    heavy: Mapping[str, int] = HEAVY
    if region.reductions and blocks:
        heavy = drawn_in_blocks(HEAVY, kernel_of(region.reductions[0]).reduced, blocks[0])
    computed = computed_by(region, roots, heavy) / OPS_PER_US
    if is_drawn(region) and rows == plan.bytes:
        return launches * KERNEL_US + beside(rows / BYTES_PER_US, computed)
    return launches * KERNEL_US + max(total, computed)


def _waited_us(segment: SegmentExplanation, region: Region) -> float:
    """What programs take that wait for two sums and more, of rows that they share and hold, whatever their elements'
    width: rows of several axes, or of more tensors than registers have room for; 0 of others."""
    group = segment.schedules[0][0].group if segment.schedules else None
    sums = [n for n in region.reductions if n.target is torch.ops.aten.sum.dim_IntList]
    is_at_once = segment.scheduler == "persistent" and group is not None and isinstance(group.exchange, Immediate)
    sizes = [math.prod(map(hinted, tensor_of(n).shape)) for n in (*region.inputs, *region.outputs)]
    large = sum(2 * n > max(sizes) for n in sizes)
    is_apart = large > GROUP_TENSORS or any(is_grouped(n, region) for n in sums)
    if not (is_at_once and len(sums) > 1 and is_apart):
        return 0.0
    return sum(sizes) / GROUP_ACCESSES_PER_US * max(large / GROUP_TENSORS, 1.0)


def _share(segment: SegmentExplanation, region: Region) -> float:
    share = _share_by_rows(segment.scheduler, region)
    if share == COLUMN_GROUP_SHARE:
        share *= _used(segment, kernel_of(region.reductions[0]).kept)
    if segment.turns:
        return min(share, TURNING_SUM_SHARE)
    return min(share, TURNED_SHARE) if _is_turned(region) else share


def _is_confirmed(segment: SegmentExplanation, region: Region) -> bool:
    """Has a loop like it been measured beside another kernel?"""
    if _is_in_two_steps(region):
        return True
    is_of_columns = _share_by_rows(segment.scheduler, region) == COLUMN_GROUP_SHARE
    return is_of_columns and _used(segment, kernel_of(region.reductions[0]).kept) >= CONFIRMED_USE


def _used(segment: SegmentExplanation, kept: int) -> float:
    """What share of the machine loops over ``kept`` columns have: less where there are fewer programs than
    multiprocessors, and where the last tile of columns is part empty."""
    schedule = segment.schedules[0][0]
    tiles = schedule.blocks(kept)
    columns = schedule.columns or schedule.kept
    filled = kept / (tiles * columns) if tiles > 1 else 1.0
    return filled * min(schedule.grid(tiles) / COLUMN_GROUP_PROGRAMS, 1.0)


def _is_turned(region: Region) -> bool:
    """Are tensors of one shape, the largest, contiguous along different axes?"""
    found = [tensor_of(n) for n in (*region.inputs, *region.outputs)]
    sizes = [tuple(map(hinted, t.shape)) for t in found]
    largest = max(map(math.prod, sizes), default=0)
    inmost: dict[tuple[int, ...], set[int]] = {}
    for t, size in zip(found, sizes, strict=True):
        fastest = [d for d, n in enumerate(size) if n > 1 and hinted(t.stride(d)) == 1]
        if 2 * math.prod(size) >= largest and fastest:
            inmost.setdefault(size, set()).add(fastest[-1])
    return any(len(axes) > 1 for axes in inmost.values())


def _is_in_two_steps(region: Region) -> bool:
    """Are all rows whose elements lie apart those of variances, taken by channel first (``scattered_axes``)?"""
    found = [n for n in region.reductions if kernel_of(n).is_scattered]
    return bool(found) and all(n.target is torch.ops.aten.var_mean.correction and scattered_axes(n)[0] for n in found)


def _share_by_rows(scheduler: str, region: Region) -> float:
    if _is_in_two_steps(region):
        return STATISTICS_SHARE if scheduler in SCATTERED_SHARES else SHARE_OF_COPY[scheduler]
    if any(kernel_of(n).is_scattered for n in region.reductions):
        return SCATTERED_SHARES.get(scheduler, SHARE_OF_COPY[scheduler])
    if scheduler == "looped" and not any(kernel_of(n).is_inner for n in region.reductions):
        return COLUMN_GROUP_SHARE
    grouped = [k for n in region.reductions if is_grouped(n, region) and (k := kernel_of(n)).reduced > PERSISTENT_ROW]
    if scheduler != "persistent" or not grouped:
        return SHARE_OF_COPY[scheduler]
    kept = grouped[0].kept
    sizes = [math.prod(map(hinted, tensor_of(n).shape)) for n in region.inputs]
    beside = [n for n in sizes if kept < n < max(sizes) and n % kept == 0 and kept > 1]
    return GROUP_BESIDE_SHARE if any(4 * n < max(sizes) for n in beside) else GROUP_SHARE
