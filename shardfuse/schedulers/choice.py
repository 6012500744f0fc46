"""Which scheduler takes a segment: the first in order of priority that has nothing against it."""

from __future__ import annotations

from functools import lru_cache

from ..analysis.sharding import is_even
from ..device import Device
from ..ir.expr import BoundTensor
from ..segments.segment import Segment
from ..segments.space import analyse
from . import ALONE, SCHEDULERS


@lru_cache(maxsize=256)  # one Expr, or a join that was tried before, is asked about again
def choose_scheduler(segment: Segment, device: Device) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The first scheduler that takes ``segment``, and the refusals of those before it."""
    refusal = _why_apart(segment)
    if refusal is not None:
        return None, (("any", refusal),)
    refusals: list[tuple[str, str]] = []
    for name, why_not in SCHEDULERS:
        reason = why_not(segment, device)
        if reason is None:
            return name, tuple(refusals)
        refusals.append((name, reason))
    return None, tuple(refusals)


def _why_apart(segment: Segment) -> str | None:
    """Why no scheduler may take ``segment``, whatever it computes."""
    if len(segment.exprs) == 1:
        return None
    if len([k for k in dict.fromkeys(e.chunk for e in segment.exprs) if k is not None]) > 1:
        return "a chunk of a stream is done by itself"
    if len(dict.fromkeys(map(_ranks, segment.outputs))) > 1:
        return "its outputs are on different ranks, some of which lack what others read"
    if _mixes_replicas(segment):
        return "replicas of an output would be of other kernels, by ranks whose shards differ"
    return None


def is_one_kernel(segment: Segment, device: Device) -> bool:
    """As ``is_taken``, of several Exprs that none of ``ALONE`` takes.

    What has one space is taken by the last scheduler that is asked, or by one before it: which one makes no difference
    to what is joined.  Blocks of rows and sums in pairs are taken by some only, and what reduces both ways has no one
    space.
    """
    space = analyse(segment)
    if isinstance(space, str) or space.block or space.adds_in_pairs:
        return is_taken(segment, device)
    return _why_apart(segment) is None


def lone_scheduler(segment: Segment, device: Device) -> str | None:
    """The scheduler of ``segment`` if it is one whose segments are joined with no other: these are asked first."""
    return next((name for name, why_not in SCHEDULERS if name in ALONE and why_not(segment, device) is None), None)


def _ranks(tensor: BoundTensor) -> tuple[int, ...] | None:
    """Those that hold ``tensor``; ``None`` for all."""
    mesh = tensor.domain.mesh
    return None if mesh is None else tuple(sorted(mesh.ranks))


def _mixes_replicas(segment: Segment) -> bool:
    """Does it make what ranks have alike beside what they have more or less of?

    A kernel is made for the shapes of one rank, and where there is nothing of a tensor torch runs the segment: each may
    add up in another order, and replicas are to be bitwise equal.
    """
    uneven = {
        (mesh, p)
        for t in segment.tensors
        for p, digits in t.domain.sharding
        if (mesh := t.domain.mesh) is not None and not is_even(digits, mesh.extent(p))
    }
    return any(t.domain.mesh == mesh and not t.domain.digits_on(p) for mesh, p in uneven for t in segment.outputs)


def named(segment: Segment, device: Device) -> tuple[str, tuple[tuple[str, str], ...]]:
    """As ``choose_scheduler``, of a segment that one is known to take."""
    name, refusals = choose_scheduler(segment, device)
    assert name is not None, f"no scheduler takes\n{segment}\n{refusals}"
    return name, refusals


def is_taken(segment: Segment, device: Device) -> bool:
    """Is there a kernel for ``segment``?"""
    return choose_scheduler(segment, device)[0] not in (None, *ALONE)


def takes_over(before: Segment, after: Segment, device: Device) -> bool:
    """Is there a kernel for ``after``, one of no lower a scheduler than that of ``before``?

    What had to turn a stored tensor may walk flat once it computes that tensor again.
    """
    names = [name for name, _ in SCHEDULERS]
    old, new = choose_scheduler(before, device)[0], choose_scheduler(after, device)[0]
    if (old, new) == ("transpose", "pointwise"):
        return True
    return new is not None and new not in ALONE and old is not None and names.index(new) <= names.index(old)
