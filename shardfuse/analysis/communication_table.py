"""Which communication an Expr is: one decision table over what its mesh dimension held and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from ..ir.digits import extent
from ..ir.domain import BoundDomain
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Move, Reduce, Reshard
from ..mesh import ParallelType


class Collective(StrEnum):
    """What ranks do: the collectives of a mesh dimension, then what is between two meshes or of a chunk of a stream."""

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SLICE = "slice"
    """Of what a rank has already: free."""
    BROADCAST = "broadcast"
    """Between meshes; of a chunk, from the rank of a mesh dimension that has it."""
    SCATTER = "scatter"
    GATHER = "gather"
    SEND = "send"
    COLLECTIVE_PERMUTE = "collective_permute"
    """Every rank gives its own chunk to one other."""


@dataclass(frozen=True)
class Communication:
    """``mesh_dims``: the mesh dimensions that it runs over, none between meshes.

    ``bytes``: of the larger of what one rank gives and gets, on an even sharding.
    """

    kind: Collective
    mesh_dims: tuple[ParallelType, ...]
    bytes: int
    team: int

    @property
    def is_free(self) -> bool:
        """Does nothing move?"""
        return self.kind is Collective.SLICE

    @property
    def mesh_dim(self) -> ParallelType | None:
        """The only mesh dimension."""
        return self.mesh_dims[0] if len(self.mesh_dims) == 1 else None

    def __str__(self) -> str:
        over = f" over {', '.join(map(str, self.mesh_dims))}" if self.mesh_dims else ""
        return f"{self.kind}{over} of {self.team} ranks, {self.bytes} bytes"


def communication_of(expr: Expr) -> Communication | None:
    """The communication that ``expr`` is, or ``None`` where it computes."""
    if not isinstance(expr.op, Move) and not mesh_dims_of(expr):
        return None
    source, target = expr.tensors[0], expr.output
    size = max(local_bytes(source), local_bytes(target))
    match expr.op:
        case Move(move):
            ranks = dict.fromkeys((*_ranks(source), *_ranks(target)))
            return Communication(Collective(move), (), size, 2 if move == "send" else len(ranks))
        case Reshard(over) | Reduce(mesh_dims=over):
            mesh = target.domain.mesh
            assert mesh is not None, f"{expr.op.name} communicates without a mesh"
            kind = _kind_of(expr.op, source.domain, target.domain)
            size = local_bytes(target) if isinstance(expr.op, Reshard) and expr.op.stream is not None else size
            return Communication(kind, over, size, prod(mesh.extent(p) for p in over))
        case _:
            return None


def _kind_of(op: Reshard | Reduce, source: BoundDomain, target: BoundDomain) -> Collective:
    """The collective that takes ``source`` to ``target``."""
    if isinstance(op, Reshard) and op.is_exchange:
        return Collective.ALL_TO_ALL
    if len(op.mesh_dims) != 1:
        return Collective.ALL_REDUCE if isinstance(op, Reduce) else Collective.ALL_GATHER
    (parallel_type,) = op.mesh_dims
    if isinstance(op, Reshard) and op.stream is not None:
        swizzle = op.stream.swizzle
        is_ring = swizzle is not None and swizzle.parallel_type is parallel_type
        return Collective.COLLECTIVE_PERMUTE if is_ring else Collective.BROADCAST
    had, has = source.digits_on(parallel_type), target.digits_on(parallel_type)
    match isinstance(op, Reduce), bool(had), bool(has):
        case True, True, True:
            return Collective.REDUCE_SCATTER
        case True, True, False:
            return Collective.ALL_REDUCE
        case False, True, False:
            return Collective.ALL_GATHER
        case False, True, True:
            return Collective.ALL_TO_ALL
        case False, False, True:
            return Collective.SLICE
        case _:
            raise AssertionError(f"{op.name} on {parallel_type}: {source} had {had}, {target} has {has}")


PACKED_BYTES = 8 * 2**20
"""Up to here a collective's latency is longer than the copies that pack its argument with another's."""


def packed(exprs: Sequence[Expr]) -> Communication | None:
    """The one call that independent collectives over the same ranks come to; ``None`` where they do not.

    All-reduces; and all-gathers of an axis of its own, one number of each rank.
    """
    first = exprs[0]
    if communication_of(first) is None:
        return None
    found = [communication_of(e) for e in exprs]
    kinds = [(c.kind, c.mesh_dims) for c in found if c is not None]
    if len(kinds) < len(exprs) or any(kind != kinds[0] for kind in kinds):
        return None
    if kinds[0][0] is not Collective.ALL_REDUCE and not all(_gathers_ranks(e) for e in exprs):
        return None
    same = (first.op.name, first.output.dtype, first.output.domain.mesh, first.chunk)
    if any((e.op.name, e.output.dtype, e.output.domain.mesh, e.chunk) != same for e in exprs):
        return None
    size = sum(c.bytes for c in found if c is not None)
    if size > PACKED_BYTES or found[0] is None:
        return None
    return Communication(kinds[0][0], kinds[0][1], size, found[0].team)


def _gathers_ranks(expr: Expr) -> bool:
    """Is it an all-gather of outermost axes, each all on a mesh dimension, one number for every rank?"""
    found = communication_of(expr)
    if found is None or found.kind is not Collective.ALL_GATHER:
        return False
    source = expr.tensors[0].domain
    digits = tuple(source.digits_on(p) for p in found.mesh_dims)
    walked = prod(extent(axis) for axis in digits)
    return source.logical[: len(digits)] == digits and walked == found.team and source.allocation is None


def mesh_dims_of(expr: Expr) -> tuple[ParallelType, ...]:
    """The mesh dimensions that ``expr`` changes."""
    return expr.op.mesh_dims if isinstance(expr.op, Reshard | Reduce) else ()


def _ranks(tensor: BoundTensor) -> tuple[int, ...]:
    return tensor.domain.mesh.ranks if tensor.domain.mesh else ()


def local_bytes(tensor: BoundTensor) -> int:
    """Bytes of one rank's piece; of the largest where shards are uneven."""
    return tensor.domain.local_elements * tensor.dtype.itemsize
