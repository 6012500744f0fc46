"""Blocks of a row: reductions over every few consecutive elements of a row that is reduced as a whole as well.

    T4[row] = sum(T3[row, block, element])              the statistic of a norm
    T14[row, block] = max(T13[row, block, element])     the scale of 128 elements that are quantised
    T15[row] = sum(T14[row, block])                     of what there is one of for each block

Whoever holds a row in registers has its blocks: a reduction of each is one of the tile ``[blocks, elements]``.  It ends
no phase, as no element of another block has to be there before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.digits import Axis, Digit, extent, listed
from ..ir.expr import BoundTensor, Expr
from ..ir.layout import is_uneven
from ..ir.op import Cast, Pointwise, Reduce, Set, View
from .segment import Atoms, Segment

_OF_BLOCKS = Pointwise | Cast | Set | View | Reduce
"""Ops whose results may be one for each block."""


def split_reduced(
    lost: Mapping[frozenset[Digit], Expr], atoms: Atoms
) -> tuple[frozenset[Digit], frozenset[Digit]] | str:
    """What is reduced, and what of it is in each block; or why there is no such pair.

    ``lost``: every set of atoms that some reduction takes, with the first that does.  What blocks have been reduced to
    may be reduced along the row.
    """
    if len(lost) < 2:
        return next(iter(lost), frozenset[Digit]()), frozenset()
    (first, _), (second, other), *_ = lost.items()
    block = second if second < first else first
    whole = frozenset[Digit]().union(*lost)
    is_cut = set(lost) <= {block, whole, whole - block} and isinstance(lost[block].op, Reduce)
    if not is_cut or any(atoms[e.tensors[0]] & block for gone, e in lost.items() if gone == whole - block):
        return f"{other.output} reduces {listed(second)}, others {listed(first)}"
    return whole, block


def why_no_blocks(segment: Segment, r: Axis, inside: int, block: frozenset[Digit], atoms: Atoms) -> str | None:
    """Why a tile of ``r`` has no whole blocks; ``None`` where it has, and where there are no blocks.

    ``inside``: how many of r's atoms lie inside of all that is kept.
    """
    if not block:
        return None
    innermost = r[len(r) - len(block) :]
    if inside != len(r) or frozenset(innermost) != block:
        return f"{listed(block)} are no neighbours in the rows that others reduce"
    size = extent(innermost)
    if size & (size - 1):
        return f"blocks of {size} elements are not cut out of a tile, whose sides are powers of two"
    parallel = {d for t in segment.tensors for d in t.domain.mesh_digits}
    if any(is_uneven(a, parallel) for a in innermost):
        return "some rank has shorter blocks"
    ordered = next((e for e in segment.exprs if isinstance(e.op, Reduce) and e.op.in_pairs), None)
    if ordered is not None:
        return f"{ordered.output} is added up in pairs, as no kernel does beside blocks of a row"
    others, made = frozenset(r) - block, of_blocks(segment, atoms, r, innermost)
    for expr in segment.exprs:
        read = expr.tensors[0] if isinstance(expr.op, Reduce) else None
        if read is not None and read not in made and atoms[read] - atoms[expr.output] == others:
            return f"{read}, which {expr.output} reduces, is made of no blocks"
        found = next((t for t in expr.outputs if atoms[t] & others and atoms[t] & block != block), None)
        if found is not None and (atoms[found] & block or not isinstance(expr.op, _OF_BLOCKS)):
            return f"{found} = {expr.op.name} has a part of each block"
    return None


def of_blocks(segment: Segment, atoms: Atoms, r: Sequence[Digit], block: Sequence[Digit]) -> frozenset[BoundTensor]:
    """What is made of reductions of blocks, and has one element for each."""
    if not block:
        return frozenset()
    others, found = frozenset(r).difference(block), set[BoundTensor]()
    for e in segment.exprs:
        is_first = isinstance(e.op, Reduce) and not atoms[e.tensors[0]].isdisjoint(block)
        if is_first or not found.isdisjoint(e.tensors):
            found |= {t for t in e.outputs if atoms[t].isdisjoint(block) and not atoms[t].isdisjoint(others)}
    return frozenset(found)
