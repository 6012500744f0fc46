"""Where partial sums of 16-bit floats are added up: by the ranks, each its part, in a kernel like any other.

NCCL rounds such sums at every hop.  Given to the ranks unreduced, they are added in float32 and rounded once, at the
same bytes; and what follows is in the kernel that adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ..analysis.chain import ONE_STEP_BYTES
from ..analysis.resharding import local_bytes
from ..analysis.sharding import is_possible, ordered
from ..ir.digits import Axis, extent, split
from ..ir.domain import BoundDomain, without
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..mesh import ParallelType


def scattered(op: str, partial: BoundTensor, total: BoundDomain, dims: Sequence[ParallelType]) -> Axis:
    """What the ranks of a mesh dimension cut the sum of ``partial`` into to add it up; empty where a collective adds.

    ``total``: the sum as it is wanted, cut over that dimension or whole on every rank of it.
    """
    mesh = total.mesh
    if op != "sum" or partial.dtype not in (DataType.Half, DataType.BFloat16) or mesh is None or len(dims) != 1:
        return ()
    (p,) = dims
    ranks = mesh.extent(p)
    if ranks <= 2:  # two addends are rounded once by whoever adds them
        return ()
    wanted = total.digits_on(p)
    if wanted or (ranks - 2) * local_bytes(partial) <= ONE_STEP_BYTES:
        return wanted
    for axis in total.logical:
        here = without(axis, tuple(d for _, digits in total.sharding for d in digits))
        if extent(here) and extent(here) % ranks == 0 and here[0].extent % ranks == 0:
            digits, _ = split(here, prod(d.extent for d in here) // ranks)
            if is_possible({**dict(total.sharding), p: digits}, total.logical, mesh):
                return digits
    return ()


def with_entry(domain: BoundDomain, p: ParallelType, digits: Axis) -> BoundDomain:
    """``domain`` cut over ``p`` by ``digits``."""
    rest = [(q, found) for q, found in domain.sharding if q is not p]
    return replace(domain, sharding=ordered([*rest, (p, digits)]))
