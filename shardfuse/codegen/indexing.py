"""From a flat index over several atoms to the offset of one tensor, as text.

A tensor's atoms that follow one another in memory are one run ``(index // below % extent) * stride``; of the
outermost run ``%`` is left out, of the innermost ``//``.  So a contiguous tensor is read at the flat index itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from ..ir.digits import Digit
from ..schedulers.limits import INT32_LIMIT
from ..segments.space import place


def plus(text: str, *numbers: int) -> str:
    """``text`` and what is added to it, where that is anything."""
    number = sum(numbers)
    return f"{text} + {number}" if number else text


def address(terms: Iterable[str]) -> str:
    """Text of an address: a pointer and what is added to it.

    A negative number is subtracted, which reads better, unless its absolute value takes 32 bits: Triton has such a
    literal as uint32, whose negation wraps around.
    """
    first, *others = terms
    return first + "".join(
        f" - {term[1:]}" if term[1:].isdecimal() and term[0] == "-" and int(term[1:]) < INT32_LIMIT else f" + {term}"
        for term in others
    )


def promise(name: str, *values: int) -> list[str]:
    """The line by which the compiler learns what power of two divides ``name``: else it splits wide loads."""
    divisor = gcd(*values, 16)
    return [f"{name} = {name} // {divisor} * {divisor}"] if divisor > 1 else []


def integer(value: int, *, is_wide: bool = False) -> tuple[int, str]:
    """An argument of a kernel: its value and its type."""
    return value, "tl.int64" if is_wide or value >= INT32_LIMIT else "tl.int32"


Strides = Mapping[Digit, int]
"""How far one step of each atom, or of each digit, moves an index or an offset."""


@dataclass(frozen=True)
class Run:
    """Atoms that are one run of memory.  ``below``: elements of the flat index inside of it."""

    below: int
    extent: int
    stride: int
    is_outermost: bool


def runs(extents: Sequence[int], strides: Sequence[int]) -> list[Run]:
    """``strides`` in elements, 0 where the tensor is broadcast; outermost first."""
    out: list[Run] = []
    counts = [max(n, 1) for n in extents]  # a rank that has nothing runs no such loop, whose text divides all the same
    below, total = 1, prod(counts)
    for n, stride in zip(reversed(counts), reversed(strides), strict=True):
        if n != 1 and stride:
            last = out[-1] if out else None
            if last and last.below * last.extent == below and last.stride * last.extent == stride:
                out[-1] = Run(last.below, last.extent * n, last.stride, below * n == total)
            else:
                out.append(Run(below, n, stride, below * n == total))
        below *= n
    return out[::-1]


def row_major(digits: Iterable[Digit]) -> Strides:
    """Of the index that ``digits`` make, outermost first."""
    found: dict[Digit, int] = {}
    below = 1
    for d in reversed(list(digits)):
        found[d] = below
        below *= d.extent
    return found


def moved_by(atom: Digit, steps: Strides) -> int:
    """How far one step of ``atom`` moves what the digits that it is part of move so far."""
    places = ((place(atom, d), n) for d, n in steps.items())
    return sum(p * n for p, n in places if p is not None)


def dynamic_terms(index: str, parts: Sequence[Run]) -> list[str]:
    """Terms of an offset, for an index that is known at run time only."""
    return [_scaled(_digit(index, g), g.stride) for g in parts]


def loop_terms(index: str, size: int, parts: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Scalar terms, and terms with lanes.

    Of the indices ``r = start + c`` with ``c < size``, a divisor of ``start``; any other ``index`` is taken as it is.
    What does not change inside a turn of the loop is a scalar: the statistics of a sample where a turn is part of it.
    """
    if index != "r" or size == 1:
        return [], dynamic_terms(index, parts)
    scalars: list[str] = []
    terms: list[str] = []
    for g in parts:
        own = None if g.below == 1 and g.is_outermost else _in_blocks("start", size, "c", g)
        scalar, lanes = own or ([], dynamic_terms("r", [g]))
        scalars += scalar
        terms += lanes
    return scalars, terms


def chunk_terms(lane: str, start: int, size: int, parts: Sequence[Run]) -> tuple[int, list[str]]:
    """A constant and terms, for the indices ``start + lane`` with ``lane < size``.

    What does not change inside the chunk is folded: a weight of one channel is a scalar where a chunk is part of it.
    """
    constant = 0
    terms: list[str] = []
    stop = start + size - 1
    for g in parts:
        if start // g.below == stop // g.below:
            constant += start // g.below % g.extent * g.stride
            continue
        whole = g.below * g.extent
        if g.below == 1 and start // g.extent == stop // g.extent:
            constant += start % g.extent * g.stride
            terms.append(_scaled(lane, g.stride))
            continue
        index = f"({start} + {lane})" if start else lane
        text = index if g.below == 1 else f"{index} // {g.below}"
        if stop >= whole:
            text = f"{text} % {g.extent}"
        terms.append(_scaled(text, g.stride))
    return constant, terms


def member_terms(
    first: str, lane: str, start: int, size: int, step: int, parts: Sequence[Run]
) -> tuple[int, list[str], list[str]]:
    """A constant, scalar terms and terms with lanes, for the indices ``first + start + lane`` with ``lane < size``.

    ``first`` is a multiple of ``step`` that is known at run time only.  Without a size every index may be past the end,
    so that no term may be a scalar that is read without a mask.
    """
    constant = 0
    scalars: list[str] = []
    terms: list[str] = []
    base = f"({first} + {start})" if start else first
    aligned = size > 0 and start % size == 0 and step % size == 0
    for g in parts:
        if g.below == 1 and g.is_outermost:  # lanes, hence masked
            constant += start * g.stride
            scalar, lanes = [_scaled(first, g.stride)], [_scaled(lane, g.stride)]
        else:
            own = _in_blocks(base, size, lane, g) if aligned else None
            index = f"({first} + {start} + {lane})" if start else f"({first} + {lane})"
            scalar, lanes = own or ([], dynamic_terms(index, [g]))
        scalars += scalar
        terms += lanes
    return constant, scalars, terms


def _in_blocks(base: str, size: int, lane: str, g: Run) -> tuple[list[str], list[str]] | None:
    """Scalar terms, and terms with lanes, of the indices ``base + lane``, where ``base`` is a multiple of ``size``.

    ``None`` where a block of that size may begin inside of a run and end in another.
    """
    if g.below % size == 0:
        return [_scaled(_digit(base, g), g.stride)], []
    if g.below != 1 or g.extent % size:
        return None
    # Counted in blocks: what is multiplied by their size is known to be aligned.
    blocks = Run(size, g.extent // size, size * g.stride, g.is_outermost)
    return [_scaled(_digit(base, blocks), blocks.stride)], [_scaled(lane, g.stride)]


def _digit(index: str, g: Run) -> str:
    text = index if g.below == 1 else f"{index} // {g.below}"
    return text if g.is_outermost else f"{text} % {g.extent}"


def _scaled(text: str, stride: int) -> str:
    return text if stride == 1 else f"{text} * {stride}"
