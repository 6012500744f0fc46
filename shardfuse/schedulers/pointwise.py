"""pointwise: every stored element is computed on its own; one flat walk over the kept elements."""

from __future__ import annotations

from .limits import PROGRAMS_PER_MULTIPROCESSOR, WARP, Target
from .plan import KernelPlan, Params, kernel_name
from .segment import Segment
from .space import analyse, analysed

_WARPS = 4


def why_not(segment: Segment) -> str | None:
    """Why ``segment`` is not pointwise; ``None`` where it is."""
    space = analyse(segment)
    if isinstance(space, str):
        return space
    return f"it reduces {', '.join(map(str, space.r))}" if space.r else None


def propose(segment: Segment, target: Target) -> Params:
    """Two 16-byte loads a thread of the widest streamed tensor; less where that would not fill the machine."""
    space = analysed(segment)
    streamed = [t for t in (*segment.loads, *segment.outputs) if space.is_streamed(t)]
    widest = max((t.dtype.itemsize for t in streamed), default=4)
    each = max(target.vector_bytes // widest, 1) * (2 if len(streamed) <= 4 else 1)
    block = _WARPS * WARP * each
    while block > _WARPS * WARP and space.kept < block * target.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR:
        block //= 2
    return Params(x_block=block, num_warps=_WARPS)


def schedule(segment: Segment, params: Params) -> tuple[KernelPlan, ...]:
    """One kernel."""
    space = analysed(segment)
    return (KernelPlan(kernel_name("pointwise", segment), segment, space, params),)
