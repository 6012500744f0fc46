"""Pointwise chains computed again by those who read their result, where that moves fewer bytes than storing it.

    A: T4 = mul(T0, T1); T5 = sum(T4, rows)      stores T4, T5
    B: T6 = sum(T4, columns)                     reads T4

becomes, T0 and T1 being narrower than T4, or read by B in any case::

    A: T4 = mul(T0, T1); T5 = sum(T4, rows)      stores T5
    B: T4 = mul(T0, T1); T6 = sum(T4, columns)   reads T0, T1
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..analysis.communication_table import local_bytes
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Reduce
from .segment import Segment, segment_of

Takes = Callable[[Segment, Segment], bool]
"""Is the second segment as good a kernel as the first, less or more a chain?"""


def recompute(
    segments: Sequence[Segment],
    outputs: Collection[BoundTensor],
    position: Mapping[Expr, int],
    is_kernel: Callable[[Segment], bool],
    takes: Takes,
    slack: float = 1.0,
) -> list[Segment]:
    """``segments``, in the order given, after every exchange of a stored tensor for its chain that pays.

    outputs: of the fusion.  position: of each Expr in it.  slack: how many times as many bytes a chain may read as it
    saves, more than 1 where several readers may share them.
    """
    found = list(segments)
    free = [is_kernel(s) for s in segments]
    for b in range(len(found)):
        for t in found[b].inputs:
            a = next((k for k, s in enumerate(found) if free[k] and free[b] and k != b and t in s.outputs), None)
            if a is None:
                continue
            exchanged = _exchanged(found, a, b, t, outputs, position, slack)
            if exchanged is not None and all(takes(found[k], s) for k, s in exchanged.items() if s.outputs):
                for k, s in exchanged.items():
                    found[k] = s
    return _live(found, free, outputs)


def _live(segments: Sequence[Segment], free: Sequence[bool], outputs: Collection[BoundTensor]) -> list[Segment]:
    """``segments`` without what nothing reads any more."""
    found: list[Segment] = []
    read = set(outputs)
    for segment, is_free in reversed(list(zip(segments, free, strict=True))):
        kept = [t for t in segment.outputs if t in read] if is_free else segment.outputs
        if kept:
            segment = segment if len(kept) == len(segment.outputs) else segment_of(segment.exprs, kept)
            found.append(segment)
            read.update(segment.inputs)
    return found[::-1]


def _exchanged(
    segments: Sequence[Segment],
    a: int,
    b: int,
    tensor: BoundTensor,
    outputs: Collection[BoundTensor],
    position: Mapping[Expr, int],
    slack: float,
) -> dict[int, Segment] | None:
    """``a`` and ``b`` after ``b`` has taken the chain of ``tensor`` over; ``None`` where that moves too many bytes."""
    maker, reader = segments[a], segments[b]
    chain, leaves = _chain(maker, tensor, frozenset(reader.inputs))
    if not chain:
        return None
    others = {t for k, s in enumerate(segments) if k not in (a, b) for t in s.inputs}
    is_stored = tensor in outputs or tensor in others
    cost = sum(local_bytes(t) for t in leaves if t not in reader.inputs)
    cost += sum(local_bytes(t) for t in leaves if t not in maker.inputs and t not in maker.outputs)
    if cost >= slack * local_bytes(tensor) * (1 if is_stored else 2):
        return None
    exprs = sorted(dict.fromkeys((*reader.exprs, *chain)), key=position.__getitem__)
    kept = [t for t in maker.outputs if t is not tensor or is_stored]
    kept += [t for t in leaves if t not in maker.inputs and t not in kept]
    return {a: segment_of(maker.exprs, kept), b: Segment.of(exprs, reader.outputs)}


def _chain(
    segment: Segment, tensor: BoundTensor, there: Collection[BoundTensor]
) -> tuple[list[Expr], list[BoundTensor]]:
    """The pointwise Exprs of ``segment`` behind ``tensor``, and the tensors that they begin with.

    A chain ends at the inputs of ``segment``, at reduced values, and at what the reader reads in any case (``there``).
    """
    chain: dict[Expr, None] = {}
    leaves: dict[BoundTensor, None] = {}
    todo = [tensor]
    while todo:
        t = todo.pop()
        expr = segment.maker.get(t)
        if expr is None or isinstance(expr.op, Reduce) or (t is not tensor and t in there):
            leaves[t] = None
        elif expr not in chain:
            chain[expr] = None
            todo += expr.tensors
    return ([], []) if tensor in leaves else (list(chain), list(leaves))


def moved_bytes(segments: Sequence[Segment]) -> int:
    """What ``segments`` read and write."""
    return sum(local_bytes(t) for s in segments for t in (*s.inputs, *s.outputs))


def join(
    segments: Sequence[Segment],
    position: Mapping[Expr, int],
    is_kernel: Callable[[Segment], bool],
    takes: Callable[[Segment], bool],
) -> list[Segment]:
    """``segments`` with those made one that read the same wide tensor and that a kernel takes together."""
    found = list(segments)
    free = [is_kernel(s) for s in found]
    b = 0
    while b < len(found):
        for a in range(b):
            at = _place(found, a, b) if free[a] and free[b] and share_wide(found[a], found[b]) else None
            if at is not None and takes(both := _both(found[a], found[b], position)):
                found[at] = both
                del found[a + b - at], free[a + b - at]
                b -= 1
                break
        b += 1
    return found


def _place(segments: Sequence[Segment], a: int, b: int) -> int | None:
    """Where the two may stand as one, ``a < b``, so that all who read them come later; ``None`` where nowhere."""
    if any(t in segments[k].inputs for k in range(a + 1, b + 1) for t in segments[a].outputs):
        made = [t for k in range(a, b) for t in segments[k].outputs]
        return None if any(t in made for t in segments[b].inputs) else a
    return b


def _both(a: Segment, b: Segment, position: Mapping[Expr, int]) -> Segment:
    exprs = sorted(dict.fromkeys((*a.exprs, *b.exprs)), key=position.__getitem__)
    return Segment.of(exprs, (*a.outputs, *b.outputs))


def share_wide(a: Segment, b: Segment) -> bool:
    """Do both read a tensor of two axes or more?  A weight is not worth a kernel that does two things."""
    return any(t in b.inputs and sum(1 for axis in t.domain.logical if axis) > 1 for t in a.inputs)
