"""Outputs that replace an input and can be written where it is read, element by element: the input needs no copy.

An optimiser's step writes its parameter and moments so, a norm the residual stream that it adds to.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..device import WARP
from ..ir.expr import BoundFusion, BoundTensor
from ..segments.segment import Segment
from .plan import KernelPlan


def replaceable(
    fusion: BoundFusion, segments: Sequence[tuple[Segment, str, Sequence[KernelPlan]]]
) -> dict[BoundTensor, BoundTensor]:
    """Outputs and the inputs that they may be written over.  ``segments``: with their schedulers and kernels, in order.

    Only one kernel reads the input, which is no output itself; each of its elements is the program's that writes it,
    and a thread's own, as a tile has no fewer elements than threads.
    """
    found: dict[BoundTensor, BoundTensor] = {}
    for out, target in fusion.aliases.items():
        readers = [s for s, _, _ in segments if target in s.inputs]
        made = next(((s, name, kernels) for s, name, kernels in segments if out in s.outputs), None)
        if made is None or target in fusion.outputs or fusion.outputs.count(out) > 1:
            continue
        segment, name, kernels = made
        if readers not in ([], [segment]) or name not in ("pointwise", "persistent") or len(kernels) != 1:
            continue
        if _is_each_threads_own(kernels[0], target if readers else out, out):
            found[out] = target
    return found


def _is_each_threads_own(kernel: KernelPlan, read: BoundTensor, written: BoundTensor) -> bool:
    space, schedule = kernel.space, kernel.schedule
    everything = frozenset((*space.x, *space.r))
    return (
        not kernel.stages
        and schedule.is_held
        and schedule.parts == 1
        and not schedule.lag  # it reads a row while it writes the one before
        and all(read is not w.tensors[0] for w in kernel.segment.windows.values())  # at other places than it writes
        and read.domain.local_axes() == written.domain.local_axes()
        and space.atoms[read] == everything
        and space.atoms[written] == everything
        and schedule.kept * schedule.reduced >= WARP * schedule.launch.warps
    )
