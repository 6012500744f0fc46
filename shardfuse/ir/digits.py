"""Axes as digits: the index algebra that everything else rests on.

Every axis of every tensor is a tuple of digits of *root* iteration variables::

    Digit(base, weight, extent)   is the number   (index(base) // weight) % extent

outermost first.  Splitting an axis cuts its tuple, merging concatenates, a permute reorders, a reshape regroups, a
broadcast axis is the empty tuple.  Two axes walk the same elements exactly when their tuples are equal, so no map
between axes of different tensors is kept.  Sharding gives digits to mesh dimensions; storage gives them strides.

A base is a root, or a digit that was cut unevenly (``torch.chunk`` of a ``torch.chunk``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod


@dataclass(frozen=True, eq=False)
class Root:
    """An iteration variable; compared by identity.

    invariant: with what results of its fusion are promised not to change, "batch" or "ranks" (``ir/promises.py``).
    varies: may another call, whose results that promise compares with this one's, have another extent of it?
    """

    name: str
    extent: int
    invariant: tuple[str, ...] = ()
    varies: bool = False

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Digit:
    """The number ``(index(base) // weight) % extent``."""

    base: Root | Digit
    weight: int
    extent: int

    def __hash__(self) -> int:
        """Kept: digits are looked up far more often than made."""
        kept: dict[str, int] = self.__dict__
        if "_hash" not in kept:
            kept["_hash"] = hash((self.base, self.weight, self.extent))
        return kept["_hash"]

    @cached_property
    def is_top(self) -> bool:
        return self.weight * self.extent >= self.base.extent

    def __repr__(self) -> str:
        base = self.base.name if isinstance(self.base, Root) else f"({self.base})"
        return base + ("" if self.weight == 1 else f"/{self.weight}") + ("" if self.is_top else f"%{self.extent}")


Axis = tuple[Digit, ...]


class CutError(ValueError):
    """Two axes share no common cut, or meet where neither may be rewritten: the caller decides what gives way."""


def axis_of(root: Root, singles: int = 0) -> Axis:
    """The whole of ``root`` as one axis; a root of extent 1 has nothing to walk and is a broadcast axis.

    The digit of a root of extent 0 is never cut: it stands in an axis to make it empty.
    ``singles``: as many mesh dimensions hold a single element of it, on their first rank, as 3 rows over 4 ranks leave
    it to a second mesh dimension.  Each has a digit of extent 1, innermost, that is never cut, and never joined.
    """
    if root.extent < 0:
        raise ValueError(f"{root} has extent {root.extent}")
    alone = tuple(Digit(Root(f"{root.name}.{k}", 1, root.invariant, root.varies), 1, 1) for k in range(singles))
    return (Digit(root, 1, root.extent), *alone) if root.extent != 1 else alone


def extent(axis: Iterable[Digit]) -> int:
    """Number of elements; an upper bound where one of two unevenly cut digits stands alone."""
    return prod(d.extent for d in axis)


def listed(digits: Iterable[Digit]) -> str:
    """For a message."""
    return ", ".join(sorted(map(str, digits)))


def merge(*axes: Axis) -> Axis:
    """Concatenate, joining neighbours that are one digit: ``i/4 , i%4 -> i``."""
    out: list[Digit] = []
    for d in (d for axis in axes for d in axis):
        while out and out[-1].base == d.base and out[-1].weight == d.weight * d.extent:
            up = out.pop()
            d = Digit(d.base, d.weight, min(up.extent * d.extent, -(-d.base.extent // d.weight)))
            if d.weight == 1 and d.extent == d.base.extent and isinstance(d.base, Digit):
                d = d.base  # an uneven cut, rejoined
        if d.extent != 1 or d.base.extent == 1:
            out.append(d)
    return tuple(out)


def parted(axis: Axis) -> tuple[Axis, Axis]:
    """``axis`` less its single elements, and these."""
    singles = tuple(d for d in axis if d.base.extent == 1)
    return (tuple(d for d in axis if d not in singles), singles) if singles else (axis, ())


def joined(axes: Iterable[Axis]) -> Axis:
    """All that ``axes`` walk as one axis: single elements are left out."""
    return merge(*(parted(axis)[0] for axis in axes))


def split(axis: Axis, inner: int, *, uneven: bool = False) -> tuple[Axis, Axis]:
    """Cut ``axis`` so that its inner part has extent ``inner``.

    Only the outermost digit may be cut unevenly (the last outer index is then short): below another digit the
    indices would no longer be digits.  Raises ``CutError`` where there is no such cut.
    """
    if extent(axis) == 0:
        return _split_empty(axis, inner)
    if inner == 0:
        raise CutError(f"cannot cut {axis} at 0")
    digits = list(axis)
    low: list[Digit] = []
    need = inner
    while need != 1:
        if not digits:
            raise CutError(f"cannot cut {axis} at {inner}")
        d = digits.pop()
        if need % d.extent == 0:
            low.insert(0, d)
            need //= d.extent
            continue
        if d.extent % need == 0:
            digits.append(Digit(d.base, d.weight * need, d.extent // need))
            low.insert(0, Digit(d.base, d.weight, need))
        elif uneven and not digits and need < d.extent:
            base, weight = (d.base, d.weight) if d.is_top else (d, 1)
            digits.append(Digit(base, weight * need, -(-d.extent // need)))
            low.insert(0, Digit(base, weight, need))
        else:
            raise CutError(f"cannot cut {axis} at {inner}: {need} and {d.extent} share no cut")
        need = 1
    return merge(tuple(digits)), merge(tuple(low))


def _split_empty(axis: Axis, inner: int) -> tuple[Axis, Axis]:
    """An axis without elements is cut below the innermost digit that empties it, or just above that."""
    last = max(k for k, d in enumerate(axis) if d.extent == 0)
    if inner == 0:
        return axis[:last], axis[last:]
    upper, low = split(axis[last + 1 :], inner)
    return axis[: last + 1] + upper, low


def reshape(axes: Iterable[Axis], shape: Sequence[int], unsaid: Sequence[int] = ()) -> tuple[Axis, ...]:
    """Regroup; the shapes must have equal products.  Uneven cuts stay inside the axis that has them, rejoined.

    A single element goes to an axis of 1 if it was one, else to the axis that has what stood outside of it.  A batch of
    one row goes to an axis of 1, or to where another went, or to an axis beside which it stood; of these first to one
    of ``unsaid``, the axes whose extent may follow the batch.
    """
    given = list(axes)
    rest = joined(given)
    out: list[Axis] = []
    for n in reversed(shape):
        rest, low = split(rest, n)
        out.insert(0, low)
    if rest:
        raise CutError(f"{shape} leaves {rest}")
    free = [k for k, axis in enumerate(out) if not axis]
    rows: list[int] = []
    for place, (plain, singles) in enumerate(map(parted, given)):
        if not singles:
            continue
        is_row = all(root_of(d).varies for d in singles)
        around = (*joined(given[:place])[-1:], *joined(given[place + 1 :])[:1]) if is_row else ()
        near = plain[-1:] or around
        beside = [k for d in near for k, axis in enumerate(out) if cut_out(axis, d) is not None]
        where = [*free, *rows[-1:], *beside] if is_row else [*beside, *free]
        where.sort(key=lambda k: is_row and k not in unsaid)
        if not where:
            raise CutError(f"{shape} leaves {singles}")
        free = [k for k in free if k != where[0]]
        rows += where[:1] if is_row else []
        out[where[0]] += singles
    return tuple(out)


def cut_out(axis: Axis, digit: Digit) -> tuple[Axis, Axis] | None:
    """What stands above and below ``digit`` in ``axis``; ``None`` where the axis does not hold it whole.

    ``cut_out((i,), i/4%2)`` is ``((i/8,), (i%4,))``.  What stands above may be cut unevenly where it is outermost.
    """
    for k, d in enumerate(axis):
        if d == digit:
            return axis[:k], axis[k + 1 :]
        if d == digit.base:  # an uneven cut of a digit: of the whole of it
            below = Digit(d, 1, digit.weight)
            above = (
                ()
                if digit.is_top
                else (Digit(d, digit.weight * digit.extent, -(-d.extent // (digit.weight * digit.extent))),)
            )
            return merge(axis[:k], above), merge((below,), axis[k + 1 :])
        if d.base == digit.base and _within(digit, d, outermost=k == 0):
            below = Digit(d.base, d.weight, digit.weight // d.weight)
            top = digit.weight * digit.extent
            above = Digit(d.base, top, -(-d.weight * d.extent // top))
            return merge(axis[:k], (above,)), merge((below,), axis[k + 1 :])
    if isinstance(digit.base, Digit):  # of a part that is itself not cut out yet
        whole, part = cut_out(axis, digit.base), cut_out((digit.base,), digit)
        if whole is not None and part is not None:
            return merge(whole[0], part[0]), merge(part[1], whole[1])
    return None


def _within(inner: Digit, outer: Digit, *, outermost: bool) -> bool:
    """Is ``inner`` a part of ``outer`` (of one base) with exact cuts, or with an uneven one where that may be?"""
    if inner.weight % outer.weight:
        return False
    top, whole = inner.weight * inner.extent, outer.weight * outer.extent
    return (top <= whole and (whole % top == 0 or (outermost and outer.is_top))) or (inner.is_top and outer.is_top)


def roots(axis: Axis) -> set[Root]:
    return {root_of(d) for d in axis}


def root_of(d: Digit) -> Root:
    return d.base if isinstance(d.base, Root) else root_of(d.base)


def varies(axis: Iterable[Digit]) -> bool:
    """May another call, whose results a promise compares with this one's, have another extent of it?"""
    return any(root_of(d).varies for d in axis)


def overlaps(axes: Iterable[Axis]) -> bool:
    """Does one tensor hold the same part of an index twice (``x[i, i]``)?  Digits of one base must be disjoint."""
    spans: dict[Root | Digit, list[tuple[int, int]]] = {}

    def taken(d: Digit) -> bool:
        if isinstance(d.base, Digit) and d.base not in spans and taken(d.base):
            return True
        low, high = d.weight, d.weight * d.extent + (d.extent == 1)
        if any(a < high and low < b for a, b in spans.setdefault(d.base, [])):
            return True
        spans[d.base].append((low, high))
        return False

    return any(taken(d) for axis in axes for d in axis)


def unify(a: Axis, b: Axis, live: Iterable[Sequence[Axis]]) -> dict[Root, Axis]:
    """Roots of ``b`` rewritten in digits of ``a``, so that both name the same elements.

    ``live``: the axes of every tensor that the rewriting will reach.  Raises ``CutError`` where the two share no cut,
    or where a tensor would come to hold one index twice (``x + x.T``; ``x.sum(0) + x.sum(1)`` of a square x), and
    ``ValueError`` where the extents differ.
    """
    if a == b or not a or not b:
        return {}
    if extent(a) != extent(b):
        raise ValueError(f"extents differ: {extent(a)} and {extent(b)}")
    (a, mine), (b, theirs) = parted(a), parted(b)
    out = _paired(mine, theirs)
    # Those that stand alone go with an element beside them, or with the innermost digit.
    alone = mine[len(theirs) :]
    if alone and theirs and not b:
        out[root_of(theirs[-1])] = mine[len(theirs) - 1 :]
        alone = ()
    rest = (*a, *alone)
    for d in reversed(b):
        rest, low = split(rest, d.extent)
        if low == (d,):
            continue
        if d.weight != 1 or d.extent != d.base.extent or isinstance(d.base, Digit) or root_of(d) in roots(a):
            raise CutError(f"{d} of {b} is not free")
        out[root_of(d)] = low
    if any(overlaps([substitute(axis, out) for axis in axes]) for axes in live):
        raise CutError(f"{a} and {b} are indices of one tensor")
    return out


def roots_of_parts(b: Axis, a: Axis, fresh: Callable[[int], Axis]) -> dict[Root, Axis]:
    """Roots that are cut, of which a digit stands in ``b``, rewritten as fresh ones: above it, itself, below it.

    Raises ``CutError`` where that is no such digit, or is one of a root that ``a`` or ``b`` has more of.
    """
    found: dict[Root, Axis] = {}
    for d in b:
        root = root_of(d)
        is_free = not isinstance(d.base, Digit) and root not in found and root not in roots(a)
        if not is_free or not d.extent or root.extent % (d.weight * d.extent):
            raise CutError(f"{d} of {b} is no part of a root alone")
        found[root] = merge(*map(fresh, (root.extent // (d.weight * d.extent), d.extent, d.weight)))
    return found


def _paired(mine: Axis, theirs: Axis) -> dict[Root, Axis]:
    """The roots of single elements rewritten as those at the same places; left out where there are fewer of these."""
    places = [mine[k : k + 1] for k in range(len(theirs))]
    return {root_of(d): own for d, own in zip(theirs, places, strict=True) if own != (d,)}


def substitute(axis: Axis, rewritten: Mapping[Root, Axis]) -> Axis:
    """``axis`` with every root in ``rewritten`` replaced by the digits it stands for."""
    if not any(root_of(d) in rewritten for d in axis):
        return axis
    return merge(*(_substitute(d, rewritten) for d in axis))


def _substitute(d: Digit, rewritten: Mapping[Root, Axis]) -> Axis:
    if isinstance(d.base, Digit):
        base = _substitute(d.base, rewritten)
        if len(base) != 1:
            raise CutError(f"{d} is a part of {base}, which is no digit")
        return (Digit(base[0], d.weight, d.extent),)
    if d.base not in rewritten:
        return (d,)
    whole = rewritten[d.base]
    if len(whole) == 1:  # one digit for another: its uneven cuts come along
        (w,) = whole
        exact = w.is_top or w.extent % (d.weight * d.extent) == 0
        return merge((Digit(w.base, w.weight * d.weight, d.extent) if exact else Digit(w, d.weight, d.extent),))
    upper, _ = split(whole, d.weight)
    return upper if extent(upper) <= d.extent else split(upper, d.extent)[1]


def refine(digits: Iterable[Digit]) -> dict[Digit, Axis]:
    """Each digit as a tuple of *atoms*: the coarsest digits such that any two given ones share atoms or are disjoint.

    Raises ``CutError`` where two digits of one base share no common cut (``i%4`` and ``i%6``).
    """
    given = tuple(dict.fromkeys(digits))
    wanted = tuple(d for d in given if d.extent != 0)
    cuts: dict[Root | Digit, list[int]] = {}
    for d in wanted:
        marks = cuts.setdefault(d.base, [])
        marks.append(d.weight)
        marks.append(d.base.extent if d.is_top else d.weight * d.extent)
    for base, marks in cuts.items():
        marks[:] = sorted(dict.fromkeys(marks))
        for low, high in pairwise(marks):
            if high % low and high != base.extent:
                raise CutError(f"cuts of {base} at {low} and {high} share no common cut")
    return {d: (d,) if d.extent == 0 or is_single_row(d) else _atoms(d, cuts[d.base]) for d in given}


def is_single_row(d: Digit) -> bool:
    """Is it a batch of one, which is walked as any other batch?"""
    return isinstance(d.base, Root) and d.base.extent == 1 and d.base.varies


def _atoms(d: Digit, marks: Sequence[int]) -> Axis:
    top = d.base.extent if d.is_top else d.weight * d.extent
    inside = [m for m in marks if d.weight <= m <= top]
    pairs = list(pairwise(inside))
    return tuple(Digit(d.base, low, -(-high // low)) for low, high in reversed(pairs))


def value(axis: Axis, index: Mapping[Root, int]) -> int:
    v = 0
    for d in axis:
        v = v * d.extent + digit_value(d, index)
    return v


def digit_value(d: Digit, index: Mapping[Root, int]) -> int:
    base = index[d.base] if isinstance(d.base, Root) else digit_value(d.base, index)
    return (base // d.weight) % d.extent
