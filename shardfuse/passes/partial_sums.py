"""Where partial sums of 16-bit floats are added up: by the ranks, each its part, in a kernel like any other.

NCCL rounds such sums at every hop.  Given to the ranks unreduced, they are added in float32 and rounded once, at the
same bytes; and what follows is in the kernel that adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..analysis.chain import CHUNK_BYTES
from ..analysis.resharding import local_bytes
from ..analysis.sharding import is_even
from ..ir.digits import extent
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr, Scalar, Value
from ..mesh import ParallelType

_MOST_WINDOWS = 8
"""Loads of one tensor in a statement of a kernel."""


def is_added_in_kernel(op: str, partial: BoundTensor, total: BoundDomain, dims: Sequence[ParallelType]) -> bool:
    """Do ranks exchange what they have of the sum ``total`` unreduced, and a kernel adds up?  Else a collective does.

    Of many bytes a collective adds up one chunk while the next is on its way.
    """
    mesh = total.mesh
    if op != "sum" or partial.dtype not in (DataType.Half, DataType.BFloat16) or mesh is None or len(dims) != 1:
        return False
    (p,) = dims
    digits = total.digits_on(p)
    if not digits or mesh.extent(p) <= 2:  # two addends are rounded once by whoever adds them
        return False
    return not is_even(digits, mesh.extent(p)) or local_bytes(partial) < 2 * CHUNK_BYTES


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
