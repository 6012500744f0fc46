"""How a kernel reads misaligned rows on one rank: what its plan asks for, as far as the strides of the tensors let it.

A plan is made for all ranks and knows no strides.  Rows are read in the aligned words that contain them only where each
row is one run of memory, and begins at the same place in every tensor that has rows.  This is the one place that
decides so, before any text is written; ``KernelSource.schedule`` says what was decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.expr import BoundTensor
from ..ir.layout import Coordinates, Layout
from ..schedulers.plan import KernelPlan
from ..schedulers.schedule import Access
from .indexing import Group
from .tile import Tile


def with_access(plan: KernelPlan, layouts: Mapping[BoundTensor, Layout], coordinates: Coordinates) -> KernelPlan:
    """``plan`` with rows read element by element where ``layouts`` do not let their aligned words be read."""
    if not plan.schedule.is_aligned_down or _begin_alike(Tile(plan, layouts, coordinates)):
        return plan
    return replace(plan, schedule=replace(plan.schedule, access=Access.NATIVE))


def _begin_alike(tile: Tile) -> bool:
    """Is each row one run of memory, and does it begin at one place in all tensors that have rows?"""
    plan = tile.plan
    rows = [tile.strides[t] for t in (*plan.segment.inputs, *plan.segment.outputs) if plan.space.is_streamed(t)]
    along = [Group(1, tile.r_total, 1, True)]
    places = [tile.x_groups(strides) for strides in rows]
    is_run = all(tile.r_groups(strides) == along for strides in rows)
    return is_run and bool(places[0]) and all(place == places[0] for place in places)
