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
from ..ir.expr import BoundTensor, Expr, Scalar, Value
from ..mesh import ParallelType

_MOST_WINDOWS = 8
"""Loads of one tensor in a statement of a kernel."""


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


def added_up(parts: BoundTensor, total: BoundTensor, at: int) -> list[Expr]:
    """``total`` from the ranks' addends along axis ``at`` of ``parts``: in float32, in the order of the ranks.

    Of few ranks an addend is a window of its own, so that a kernel that reduces another axis adds up as it reads.
    """
    ranks = extent(parts.domain.logical[at])
    if ranks > _MOST_WINDOWS:
        return [Expr("sum", (parts,), (total,), {"axes": (at,)})]
    exprs: list[Expr] = []

    def make(op: str, inputs: Sequence[Value], name: str, dtype: DataType, **attributes: object) -> BoundTensor:
        out = BoundTensor(f"{total.name}{name}", dtype, replace(total.domain, allocation=None))
        exprs.append(Expr(op, tuple(inputs), (out,), attributes))
        return out

    current: BoundTensor | None = None
    for k in range(ranks):
        index = Scalar(f"{total.name}k{k}", DataType.Int, k, is_literal=True)
        piece = make("select", (parts, index), f"r{k}", parts.dtype, dim=at)
        addend = make("cast", (piece,), f"f{k}", DataType.Float)
        current = addend if current is None else make("add", (current, addend), f"a{k}", DataType.Float)
    assert current is not None, "a mesh dimension has ranks"
    exprs.append(Expr("cast", (current,), (total,)))
    return exprs
