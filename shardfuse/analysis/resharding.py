"""Which communication an Expr is: one decision table over what its mesh dimension held and holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..ir.digits import extent
from ..ir.expr import REDUCTIONS, BoundTensor, Expr
from ..mesh import ParallelType


@dataclass(frozen=True)
class Communication:
    """``kind``: all_gather, all_reduce, reduce_scatter, all_to_all, slice (free), or broadcast, scatter, gather, send
    between two meshes.  ``mesh_dim``: the mesh dimension that it runs over, ``None`` between meshes.
    ``bytes``: of the larger of what one rank gives and gets, on an even sharding.
    """

    kind: str
    mesh_dim: ParallelType | None
    bytes: int
    team: int

    def __str__(self) -> str:
        over = f" over {self.mesh_dim}" if self.mesh_dim else ""
        return f"{self.kind}{over} of {self.team} ranks, {self.bytes} bytes"


def communication_of(expr: Expr) -> Communication | None:
    """The communication that ``expr`` is, or ``None`` where it computes."""
    source, target = (expr.tensors[0], expr.output) if expr.tensors else (expr.output, expr.output)
    size = max(local_bytes(source), local_bytes(target))
    move = expr.attributes.get("move")
    if isinstance(move, str):
        ranks = dict.fromkeys((*_ranks(source), *_ranks(target)))
        return Communication(move, None, size, 2 if move == "send" else len(ranks))
    parallel_type = expr.attributes.get("mesh")
    if not isinstance(parallel_type, ParallelType):
        return None
    mesh = target.domain.mesh
    assert mesh is not None, f"{expr.op} communicates without a mesh"
    had, has = source.domain.digits_on(parallel_type), target.domain.digits_on(parallel_type)
    match expr.op in REDUCTIONS, bool(had), bool(has):
        case True, True, True:
            kind = "reduce_scatter"
        case True, True, False:
            kind = "all_reduce"
        case False, True, False:
            kind = "all_gather"
        case False, True, True:
            kind = "all_to_all"
        case False, False, True:
            kind = "slice"
        case _:
            raise AssertionError(f"{expr.op} on {parallel_type}: {source} had {had}, {target} has {has}")
    return Communication(kind, parallel_type, size, mesh.extent(parallel_type))


def _ranks(tensor: BoundTensor) -> tuple[int, ...]:
    return tensor.domain.mesh.ranks if tensor.domain.mesh else ()


def local_bytes(tensor: BoundTensor) -> int:
    """Bytes of one rank's piece; of the largest where shards are uneven."""
    return prod(extent(axis) for axis in tensor.domain.local_axes()) * tensor.dtype.itemsize
