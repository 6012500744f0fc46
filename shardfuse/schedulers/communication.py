"""One collective, or one move between two meshes; several small all-reduces are one."""

from __future__ import annotations

from ..analysis.communication_table import communication_of, packed
from ..device import Device
from .segment import Segment


def why_not(segment: Segment, device: Device) -> str | None:
    if len(segment.exprs) != 1:
        return None if packed(segment.exprs) else "a collective stands alone"
    found = communication_of(segment.exprs[0])
    if found is None:
        return "it changes no sharding"
    return "a slice moves nothing" if found.is_free else None
