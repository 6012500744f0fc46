"""Outputs that can be written where an input is read, element by element.

They replace that input, which then needs no copy, or take the memory of one that its caller gives up.

An optimiser's step writes its parameter and moments so, a norm the residual stream that it adds to, and the backward of
a loss the gradient of the logits over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..device import WARP
from ..ir.expr import BoundFusion, BoundTensor, Value, reads_of
from ..segments.segment import Segment
from . import ALONE
from .plan import KernelPlan
from .schedule_parts import Access

Planned = Sequence[tuple[Segment, str, Sequence[KernelPlan]]]


def replaceable(
    fusion: BoundFusion, segments: Planned, given_up: Sequence[Value] = ()
) -> dict[BoundTensor, list[BoundTensor]]:
    """Outputs and the inputs that each may be written over.  ``segments``: with their schedulers and kernels, in order.

    ``given_up``: inputs that outputs which replace none may be stored over.  No kernel is another one for it.

    No kernel reads the input behind the one that writes the output, and it is no output itself; each of its elements is
    the program's that writes it, and a thread's own, as a tile has no fewer elements than threads.
    """
    found: dict[BoundTensor, list[BoundTensor]] = {}
    for out, target in _pairs(fusion, given_up):
        if target in fusion.outputs or fusion.outputs.count(out) > 1 or _is_seen(target, segments):
            continue
        at = next((k for k, (s, name, _) in enumerate(segments) if out in s.outputs and name not in ALONE), None)
        if at is None or any(target in s.inputs for s, _, _ in segments[at + 1 :]):
            continue
        segment, _, kernels = segments[at]
        last = next((k for k, kernel in enumerate(kernels) if out in kernel.segment.outputs), None)
        is_known = target not in segment.inputs or any(target in kernel.segment.inputs for kernel in kernels)
        if last is None or not is_known:  # a kernel has this rank's rows of it, and writes or reads the others' too
            continue
        if any(target in kernel.segment.inputs for kernel in kernels[last + 1 :]):
            continue
        if _is_each_threads_own(kernels[last], target if target in kernels[last].segment.inputs else out, out):
            found.setdefault(out, []).append(target)
    return found


def _pairs(fusion: BoundFusion, given_up: Sequence[Value]) -> Iterator[tuple[BoundTensor, BoundTensor]]:
    """An output that replaces an input, and any other with each input of its dtype that is given up."""
    yield from fusion.aliases.items()
    for out in fusion.outputs:
        if out not in fusion.aliases:
            yield from ((out, t) for t in given_up if isinstance(t, BoundTensor) and t.dtype is out.dtype)


def _is_seen(target: BoundTensor, segments: Planned) -> bool:
    """May something else than a kernel have a view of it?"""
    return any(target in s.inputs and name in ALONE for s, name, _ in segments)


def _is_each_threads_own(kernel: KernelPlan, read: BoundTensor, written: BoundTensor) -> bool:
    """That the kernel loads it once tells its text.

    A group that reads rows ahead reads rows of its own: at the end the last row of all, and drops it.  What is stored
    has to be made of what is read there: the compiler may give the elements of a load to other threads than those of a
    store, and only what a thread hands on is known to be loaded.
    """
    space, schedule = kernel.space, kernel.schedule
    everything = frozenset((*space.x, *space.r))
    loaded = _loaded_in_place(read, kernel.segment)
    return (
        loaded is not None
        and _is_made_of(written, loaded, kernel.segment)
        and not any(read in stage.segment.inputs for stage in kernel.stages[1:])
        and schedule.access is Access.NATIVE
        and space.atoms.get(loaded) == everything
        and space.atoms.get(written) == everything
        and schedule.kept * schedule.reduced >= WARP * schedule.launch.warps
    )


def _loaded_in_place(read: BoundTensor, segment: Segment) -> BoundTensor | None:
    """As what the kernel loads ``read``, where each element is at its own index: as itself, or as one window that adds
    elements behind the ends of its axes.  Else ``None``."""
    windows = [e for e in segment.windows.values() if e.tensors[0] is read]
    if not windows:
        return read
    if len(windows) > 1 or read in segment.loads:
        return None
    (window,) = windows
    is_in_place = all((r.offset, r.step, r.start) == (0, 1, 0) for r in reads_of(window))
    return window.output if is_in_place else None


def _is_made_of(made: BoundTensor, read: BoundTensor, segment: Segment) -> bool:
    """Does ``made`` follow from ``read``?  Expressions of a segment stand in order."""
    following = {read}
    for e in segment.exprs:
        if not following.isdisjoint(e.tensors):
            following.update(e.outputs)
    return made in following
