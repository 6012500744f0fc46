"""What a team fetches into L2 while it waits: its next row."""

from __future__ import annotations

from ..device import LINE_BYTES
from ..schedulers.limits import power_of_two
from ..schedulers.plan import KernelPlan
from .emitter import Emitter
from .indexing import dynamic_terms, member_terms
from .tile import Tile


def prefetch_next(e: Emitter) -> None:
    """The team's next row is fetched into L2 while this one waits for the others' words."""
    for line in [] if e.interpret else _lines(e.plan, e.tile):
        e.use("prefetch")
        e.out.line(line)


def _lines(plan: KernelPlan, tile: Tile) -> list[str]:
    """One line of text for each input that is read where it stands; none where there is no next row."""
    if not plan.schedule.prefetches or tile.is_alone or not tile.last_share:
        return []
    block, lanes = tile.x_block, tile.lanes(tile.x_block, reduced=False)
    following = f"(row + teams) * {block} + {lanes}" if tile.x_lanes else "row + teams"
    lines = [f"ahead = tl.minimum({following}, i0 - 1).to(tl.int64)"]
    own = f"tl.minimum({tile.share}, {tile.r_total} - first) - 1"
    last = str(tile.share - 1) if tile.last_share == tile.share else own
    for tensor in plan.segment.loads:
        window = tile.windows.get(tensor)
        if plan.space.is_streamed(tensor) and not (window and window.bounds):
            step = LINE_BYTES // tensor.dtype.itemsize
            count = power_of_two(-(-tile.share // step))
            text = f"{tile.lanes(count, reduced=True)} * {step}"
            if count * step > tile.share or tile.last_share < tile.share:
                text = f"tl.minimum({text}, {last})"
            strides = window.strides if window else tile.strides[tensor]
            _, scalars, lanes = member_terms("first", f"({text})", 0, 0, tile.share, tile.r_groups(strides))
            terms = [*dynamic_terms("ahead", tile.x_groups(strides)), *scalars, *lanes]
            terms += [str(window.first)] if window and window.first else []
            source = plan.segment.windows[tensor].tensors[0] if window else tensor
            lines.append(f"prefetch({' + '.join([f'{source}_ptr', *terms])})")
    return lines
