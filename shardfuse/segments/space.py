"""The iteration space of a segment: local digits cut into atoms, kept ones (x) and reduced ones (r), in storage order.

A tensor's value inside a tile is determined by the atoms that it holds; it is broadcast along those that it lacks, so
that broadcast, permute and reshape are no more than another name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from ..device import WARP
from ..ir.digits import Axis, CutError, Digit, Root, extent, listed, refine, root_of, varies
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Cast, Factory, OfRank, Pick, Pointwise, Random, Reduce, Set, Statistic, View, Window
from ..ir.scalar import Scalar
from ..ops.promotion import why_no_text
from ..ops.table import POINTWISE
from .block_reductions import of_blocks, split_reduced, why_no_blocks
from .pair_runs import all_pair_runs
from .segment import Atoms, Pieces, Segment

_OWN = (Statistic, Pick)
"""Ops that a scheduler writes, of which kernels have text in any case."""
_LONG_ROW = 4 * WARP
"""Elements of a row that may be reduced anew for others beside it: as many as a program has threads."""
INVARIANT_ROWS = 8192
"""Kept elements for which the schedules of an invariant space are made, whatever their number."""


@dataclass(frozen=True)
class Space:
    """Of ``segment``: ``x`` are atoms that every stored tensor keeps, ``r`` those that are reduced, outermost first.

    ``pieces``: every local digit as atoms.  ``phase``: how many reductions, one after the other, a tensor depends on.
    ``is_inner``: is the atom that is fastest in memory a reduced one?  ``walked``: the innermost of x, which a program
    walks, adding up columns as it goes (``mix_order``).  ``sides``: the innermost of x, as the two sides of a tile
    whose tensors are contiguous along the one or the other (``transpose``).
    ``inside``: how many of r's atoms lie inside of all of x.  ``grouped``: where those are walked as the innermost of
    x, columns side by side, how many of them are one kept element; else 0.
    ``block``: the innermost of r, where some reductions are of each block of a row; () where all are of the whole row.
    """

    segment: Segment
    x: Axis
    r: Axis
    atoms: Atoms
    pieces: Pieces
    phase: Mapping[BoundTensor, int]
    is_inner: bool
    walked: Axis = ()
    inside: int = 0
    grouped: int = 0
    sides: tuple[Axis, Axis] = ((), ())
    block: Axis = ()

    @property
    def kept(self) -> int:
        """Elements of x, nominal: of the rank that holds most; of an invariant space always as many."""
        return INVARIANT_ROWS if self.is_invariant else extent(self.x)

    @cached_property
    def is_invariant(self) -> bool:
        """May what becomes of a kept element not depend on how many there are?  Then no order of additions asks that.

        A sum over the batch itself, of columns of which every call has as many, follows it by definition.
        """
        if self.adds_in_pairs:
            return False  # they say the order themselves
        is_over_batch = varies(self.r) and not varies(self.x)
        return bool(self.r) and self.is_promised and ("ranks" in self.promised or not is_over_batch)

    @cached_property
    def adds_in_pairs(self) -> bool:
        """Are its sums in pairs, so that every form of a kernel whose programs hold rows gives the same bits?"""
        return bool(all_pair_runs(self.segment))

    @cached_property
    def promised(self) -> frozenset[str]:
        """With what results of the fusion that it is part of are promised not to change (``Root.invariant``)."""
        return frozenset(name for a in (*self.x, *self.r) for name in root_of(a).invariant)

    @property
    def is_promised(self) -> bool:
        """Is it part of a fusion that promises bits?  Then a product and a sum are two roundings, wherever they are."""
        return bool(self.promised)

    @property
    def reduced(self) -> int:
        """Elements of r, nominal."""
        return extent(self.r)

    @property
    def around(self) -> Axis:
        """The atoms of x that are in neither of its two sides."""
        return tuple(a for a in self.x if a not in (*self.sides[0], *self.sides[1]))

    @property
    def samples(self) -> int:
        """Elements of x that no program walks: each has rows of its own that are walked."""
        return extent(a for a in self.x if a not in self.walked)

    @property
    def run(self) -> int:
        """Elements of r that follow one another in memory: all of a row, or those of one piece."""
        return extent(self.r[len(self.r) - self.inside :])

    @property
    def phases(self) -> int:
        """1 + the longest chain of reductions."""
        return 1 + max(self.phase.values(), default=0)

    @property
    def block_size(self) -> int:
        """Elements of a block of a row; 1 where there are none."""
        return extent(self.block)

    def has_r(self, tensor: BoundTensor) -> bool:
        return not self.atoms[tensor].isdisjoint(self.r)

    @cached_property
    def of_blocks(self) -> frozenset[BoundTensor]:
        """What has one element for each block of a row."""
        return of_blocks(self.segment, self.atoms, self.r, self.block)

    def has_x(self, tensor: BoundTensor) -> bool:
        return not self.atoms[tensor].isdisjoint(self.x)

    def reduces(self, expr: Expr) -> bool:
        """Is it a reduction over elements of r?"""
        return isinstance(expr.op, Reduce) and self.has_r(expr.tensors[0]) and not self.has_r(expr.output)

    def is_walked(self, tensor: BoundTensor) -> bool:
        """Does it change as a program walks on?"""
        return not self.atoms[tensor].isdisjoint(self.walked)

    def is_streamed(self, tensor: BoundTensor) -> bool:
        """Is every element of it read once, in the one tile that needs it?"""
        return len(self.atoms[tensor]) == len(self.x) + len(self.r)

    @cached_property
    def streamed(self) -> list[BoundTensor]:
        """Inputs that each tile reads its own part of."""
        return [t for t in self.segment.loads if self.is_streamed(t)]

    @cached_property
    def beside(self) -> list[BoundTensor]:
        """Loads along the reduced elements that are the same for several kept ones, as the weight of a norm is."""
        return [t for t in self.segment.loads if self.has_r(t) and not self.is_streamed(t)]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of all inputs that each tile reads its own part of."""
        return sum(t.dtype.itemsize for t in self.streamed)

    @property
    def narrowest(self) -> int:
        """Bytes of an element of the narrowest of them; 4 where there is none."""
        return min((t.dtype.itemsize for t in self.streamed), default=4)

    @cached_property
    def rereads(self) -> bool:
        """Is something of the reduced extent used after a reduction?"""
        return any(phase and self.has_r(t) for t, phase in self.phase.items())


Spaces = TypeVar("Spaces", bound=Space)


def as_columns(space: Spaces, line: int) -> Spaces:
    """Where kept elements are short runs of memory (less than ``line`` elements), the runs as columns side by side.

    Groups of channels of a channels-last tensor, ``r = (h, w, c), x = (n, g)``, become ``r = (h, w), x = (n, g, c)``: a
    tile then reads whole lines, and the columns of a group are added up last.
    """
    cut = len(space.r) - space.inside
    if not (space.x and space.inside and cut) or space.run >= line or space.walked:
        return space
    return replace(space, x=space.x + space.r[cut:], r=space.r[:cut], is_inner=False, grouped=space.run)


@lru_cache(maxsize=64)  # every scheduler asks about the same segment in turn
def analyse(segment: Segment) -> Space | str:
    """The space of ``segment``, or why no single kernel can walk it."""
    if isinstance(cut := cut_into_atoms(segment), str):
        return cut
    lost = cut[2]
    taken: dict[frozenset[Digit], Expr] = {}
    for expr, gone in lost.items():
        if not isinstance(expr.op, Reduce | Statistic | Pick):
            return f"{expr.output} = {expr.op.name} lacks {listed(gone)}"
        taken.setdefault(gone, expr)
    found = split_reduced(taken, cut[1])
    if isinstance(found, str):
        return found
    if len(runs := all_pair_runs(segment)) > 1:
        return f"its sums in pairs have runs of {' and of '.join(sorted(map(str, runs)))}"
    reduced, block = found
    phase: dict[BoundTensor, int] = dict.fromkeys(segment.inputs, 0)
    for expr in segment.exprs:
        is_end = not isinstance(expr.op, Pick) and lost.get(expr) in (reduced, reduced - block)
        ends = max((phase[t] for t in expr.tensors), default=0) + is_end
        for t in expr.outputs:
            phase[t] = ends
    return _ordered(segment, cut, phase, reduced, block)


def run_below(tensor: BoundTensor, axis: Axis, space: Space) -> int:
    """Elements of ``axis``, which is x or r, that follow one another and are the same in ``tensor``."""
    run = 1
    for atom in reversed(axis):
        if atom in space.atoms[tensor]:
            break
        run *= atom.extent
    return run


def analysed(segment: Segment) -> Space:
    """The space of a segment that has one."""
    space = analyse(segment)
    assert not isinstance(space, str), space
    return space


def _lost(expr: Expr, atoms: Atoms) -> frozenset[Digit]:
    kept = atoms[expr.output]
    found = frozenset[Digit]()
    for t in expr.tensors if not isinstance(expr.op, Window) else ():
        if atoms[t] is not kept:  # mostly they are the same set
            found |= atoms[t] - kept
    return found


Lost = Mapping[Expr, frozenset[Digit]]
"""Of each Expr that has any, the atoms of what it reads that its output lacks; a window is read along its own."""


@lru_cache(maxsize=64)
def cut_into_atoms(segment: Segment) -> tuple[Pieces, Atoms, Lost] | str:
    """Every local digit of ``segment`` as atoms, those that each tensor holds and those that each Expr loses.

    A text says why there is no such kernel.
    """
    recorded = (e for e in segment.exprs if not isinstance(e.op, _OWN))
    refusal = next((r for e in recorded if (r := refusal_of(e)) is not None), None)
    if refusal is not None:
        return refusal
    for window in segment.windows.values():
        if window.tensors[0] not in segment.inputs:
            return f"{window.tensors[0]} is read at other places than it is made at"
    tensors = (*segment.loads, *(t for e in segment.exprs for t in e.outputs))
    cut = _cut_domains(tuple(dict.fromkeys([t.domain for t in tensors])))
    if isinstance(cut, str):
        return cut
    pieces, of_domain = cut
    atoms = {t: of_domain[t.domain] for t in tensors}
    return pieces, atoms, {e: gone for e in segment.exprs if (gone := _lost(e, atoms))}


def common_cuts(tensors: Iterable[BoundTensor]) -> Pieces | str:
    """Every digit that a rank walks in these tensors as atoms, or why there are none."""
    cut = _cut_domains(tuple(dict.fromkeys([t.domain for t in tensors])))
    return cut if isinstance(cut, str) else cut[0]


@lru_cache(maxsize=256)  # a fusion has few sets of domains, each of which many of its segments have
def _cut_domains(domains: tuple[BoundDomain, ...]) -> tuple[Pieces, Mapping[BoundDomain, frozenset[Digit]]] | str:
    """Every digit that a rank walks in these as atoms, and those that each has; or why there are none."""
    forms = dict.fromkeys(axes for d in domains for axes in (d.local_axes(), d.storage()))
    try:
        pieces = refine(d for axes in forms for axis in axes for d in axis)
    except CutError as error:
        return str(error)
    walked = {d: d.local_axes() for d in domains}
    atoms = {axes: frozenset(_split_up(axes, pieces)) for axes in dict.fromkeys(walked.values())}
    return pieces, {d: atoms[axes] for d, axes in walked.items()}


@lru_cache(maxsize=1024)  # asked about the same Expr in every segment that it is tried in
def refusal_of(expr: Expr) -> str | None:
    """Why ``expr`` has no Triton text."""
    if len(expr.outputs) != 1:
        return f"{expr.op.name} has {len(expr.outputs)} outputs"
    op = expr.op
    if not isinstance(op, Pointwise | Reduce | View | Factory | OfRank | Cast | Set | Window):
        return f"{expr.output} = {op.name} is no kernel's work"
    textless = why_no_text(POINTWISE[op.name], expr.inputs) if isinstance(op, Pointwise) else None
    if textless is not None:
        return textless
    if (
        isinstance(op, Random)
        and op.name == "uniform"
        and not all(isinstance(v, Scalar) and v.is_literal for v in expr.inputs[:2])
    ):
        return f"the bounds of {expr.output} are known in each call only"
    return next((r for t in (*expr.tensors, *expr.outputs) if (r := _refusal_of_tensor(t)) is not None), None)


def _refusal_of_tensor(tensor: BoundTensor) -> str | None:
    if tensor.dtype.is_complex or tensor.dtype is DataType.Float8_e8m0fnu:
        return f"{tensor} is {tensor.dtype.name}, which Triton does not have"
    if tensor.domain.is_empty:
        return f"{tensor} has no elements"
    return None


def _split_up(axes: Iterable[Axis], pieces: Pieces) -> Axis:
    return tuple(a for axis in axes for d in axis for a in pieces[d])


def stored_atoms(tensor: BoundTensor, pieces: Pieces) -> Axis:
    """Its atoms as they are stored, outermost first."""
    return _split_up(tensor.domain.in_memory(), pieces)


def _ordered(
    segment: Segment,
    cut: tuple[Pieces, Atoms, Lost],
    phase: Mapping[BoundTensor, int],
    reduced: frozenset[Digit],
    block: frozenset[Digit],
) -> Space | str:
    pieces, atoms, lost = cut
    distinct = dict.fromkeys(atoms.values())
    every = frozenset[Digit]().union(*distinct)
    kept = every - reduced
    for out in segment.outputs:
        missing = kept - atoms[out]
        if missing:
            return f"{out} lacks {listed(missing)}"
        if atoms[out] & reduced and not (reduced <= atoms[out] or (block and atoms[out] & reduced == reduced - block)):
            return f"{out} lacks {listed(reduced - atoms[out])}"
    if reduced and every not in distinct:
        return f"no tensor has all of {listed(every)}: what is reduced would be reduced anew for each"
    # Where nothing is reduced the order of the writes decides, else that of the reads.
    first = (segment.loads, segment.outputs) if reduced else (segment.outputs, segment.loads)
    candidates = (*first[0], *first[1])
    order = storage_order(candidates, atoms, pieces, reduced)
    order[:0] = sorted(every - frozenset(order), key=str)
    is_inner = bool(order) and order[-1] in reduced
    x, r = tuple(a for a in order if a in kept), tuple(a for a in order if a in reduced)
    anew = _reduced_anew(lost, atoms, kept) if reduced else frozenset[Digit]()
    if anew and not (is_inner and extent(r) >= _LONG_ROW):
        return f"what it reduces lacks {listed(anew)}, and would be reduced anew for each"
    inside = next((k for k, a in enumerate(reversed(order)) if a in kept), 0)
    refusal = why_no_blocks(segment, r, inside if x else len(r), block, atoms)
    if refusal is not None:
        return refusal
    return Space(segment, x, r, atoms, pieces, phase, is_inner, inside=inside, block=r[len(r) - len(block) :])


def _reduced_anew(lost: Lost, atoms: Atoms, kept: frozenset[Digit]) -> frozenset[Digit]:
    """Kept atoms that nothing of what is reduced has: a sum over channels of what pixels have been added up to, say.

    Long rows may be reduced anew for others beside them.  The sums of 10 channels behind those of 64 x 64 pixels, made
    anew for each pixel, took a group norm's gradient of 16 x 320 channels from 40 to 147 us on an H200.
    """
    return kept - frozenset[Digit]().union(*(atoms[t] for e in lost for t in e.tensors))


def storage_order(
    candidates: Sequence[BoundTensor],
    atoms: Atoms,
    pieces: Pieces,
    reduced: frozenset[Digit],
) -> list[Digit]:
    """The atoms of the largest tensor as it is stored; atoms that only others hold come outside of them.

    Of tensors that are as large, one whose storage order was asked for.
    """

    def rank(t: BoundTensor) -> tuple[int, int, bool]:
        is_logical = t.domain.allocation is None and not t.domain.dim_order
        return -len(atoms[t] & reduced), -extent(atoms[t]), is_logical

    first: dict[BoundDomain, BoundTensor] = {}
    for t in candidates:
        first.setdefault(t.domain, t)  # others of one domain are alike in all that is asked
    ranked = sorted(first.values(), key=rank)
    order: list[Digit] = []
    for tensor in ranked:
        own = _split_up(tensor.domain.in_memory(), pieces)
        order[:0] = [a for a in own if a not in order]
    return order


def place(atom: Digit, digit: Digit) -> int | None:
    """How far one step of ``atom`` moves ``digit``; ``None`` where ``atom`` is no part of it."""
    base: Root | Digit = atom.base
    if base == digit.base:
        inside = digit.weight <= atom.weight and (digit.is_top or atom.weight < digit.weight * digit.extent)
        return atom.weight // digit.weight if inside else None
    if isinstance(base, Digit):
        outer = place(base, digit)
        return None if outer is None else outer * atom.weight
    return None
