"""Where an error of a result is lost in the rounding of what is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from ..analysis.paired_reductions import SUB, first_of, guarded_first_of, made_by
from ..ir.digits import root_of
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Broadcast, Cast, Expand, Pointwise, Set, View, is_pointwise, is_reduction, is_statistic
from ..ir.scalar import Scalar
from .segment import Segment

_KEEP = ("mul", "div", "neg", "abs", "where", "maximum", "minimum")
"""Ops that leave a relative error of an operand what it is, as copies do."""
_ADD, _MUL, _NEG = map(Pointwise, ("add", "mul", "neg"))


def may_be_rough(segment: Segment, expr: Expr) -> bool:
    """May a kernel take the rough text of ``expr``, as no result shows that?

    A fusion that promises the same bits on any number of ranks has decided it for each of its ops
    (``passes/roughness.py``): on another number of ranks, what is made of a result may be in another kernel.
    """
    if isinstance(expr.op, Pointwise) and expr.op.is_rough is not None:
        return expr.op.is_rough
    if any("ranks" in root_of(d).invariant for axis in expr.output.domain.logical for d in axis):
        return False  # an op that a later pass has added, on several ranks only
    return is_lost(segment, expr) or is_of_statistic(segment, expr)


def is_lost(segment: Segment, expr: Expr) -> bool:
    """Is an error of 1e-6 lost in the rounding of all that ``segment`` makes of what ``expr`` gives?

    The rough exponential keeps to 1e-6 down to exp(-20). Below it is off by up to 3e-6, which is lost in any sum that
    contains a 1.

    A quotient is a product with the reciprocal then, which must be a normal number: of a sum of exponentials, 1 and
    more, or of a scale, which is no less than a number that is written down.
    An error function is right to 1e-7 then, but not to 1e-7 of itself: no more than that is left of it beside 1.
    """
    if is_pointwise(expr.op, "erf"):
        return _is_only_added_to_one(segment, expr.output)
    is_fit = (
        not is_pointwise(expr.op, "div") or _divides_by_exponentials(segment, expr) or _divides_by_scale(segment, expr)
    )
    return is_fit and expr.output in ends_narrow(segment)


def is_of_statistic(segment: Segment, expr: Expr) -> bool:
    """Is ``expr`` the exponential of the distance to the largest of a row, which the sum over that row reads?

    As the statistics of a softmax have it (``codegen/running_statistics.py``), it is right to 1e-6 there.  What else
    reads it must lose that error too.
    """
    if not is_pointwise(expr.op, "exp") or expr.output in segment.outputs:
        return False  # asked for each pointwise op of a kernel: the readers of most are not looked up
    readers = segment.readers(expr.output)
    sums = [e for e in readers if is_reduction(e.op, "sum") and _has_maximum(e, segment.maker)]
    narrow = ends_narrow(segment)
    return bool(sums) and all(e in sums or (_keeps_error(segment, e) and e.output in narrow) for e in readers)


def _has_maximum(total: Expr, maker: Mapping[BoundTensor, Expr]) -> bool:
    """Does the sum ``total`` add up exponentials of distances to the maximum of its row?"""
    return first_of(total, maker) is not None or guarded_first_of(total, maker) is not None


def _is_only_added_to_one(segment: Segment, tensor: BoundTensor) -> bool:
    readers = segment.readers(tensor)
    others = [v for e in readers for v in e.inputs if v is not tensor]
    is_one = [isinstance(v, Scalar) and v.is_literal and v.value in (1, -1) for v in others]
    is_sum = bool(readers) and all(e.op in (_ADD, SUB) and len(e.inputs) == 2 for e in readers)
    return is_sum and len(others) == len(readers) and all(is_one) and tensor not in segment.outputs


def _keeps_error(segment: Segment, expr: Expr) -> bool:
    """Is an error of 1e-6 of an operand of ``expr`` one of its result, or of a target's weight on the other side of it?

    The gradient of a cross entropy is the difference of a probability and 1 or 0, or what smoothing makes of these.
    """
    if expr.op != SUB:
        return (
            is_pointwise(expr.op, *_KEEP)
            or isinstance(expr.op, Cast | Set | View)
            or is_reduction(expr.op, "max", "min")
        )
    return any(_is_weight(v, segment.maker) for v in expr.tensors)


def _is_weight(tensor: BoundTensor, maker: Mapping[BoundTensor, Expr]) -> bool:
    """Is it 1 or 0 by a truth value, times a number, or one of its row, and that plus a number?"""
    made = maker.get(tensor)
    if made is None or made.op not in (_MUL, _ADD):
        return made is not None and isinstance(made.op, Cast) and made.tensors[0].dtype is DataType.Bool
    others = [t for t in made.tensors if not _is_weight(t, maker)]
    is_of_row = made.op == _MUL and all(not all(t.domain.logical) for t in others)
    return len(others) < len(made.tensors) and (is_of_row or not others)


def _is_scale(segment: Segment, tensor: BoundTensor) -> bool:
    """Is ``tensor`` what divides a result of 8 bits, and ``maximum(x, a) / b``?

    Whoever reads that multiplies with the scale again: what the scale is off by is no error of the product.  Any other
    divisor that is a result, an exponential say, is as near as results of its dtype are.
    """
    same = _same_values(segment, tensor)
    quotients = (e for e in segment.exprs if is_pointwise(e.op, "div") and e.inputs[1] in same)
    found = {e.output for e in quotients if _divides_by_scale(segment, e)}
    for e in segment.exprs:
        if e.op in _CHOICES[:2] and e.inputs[0] in found:
            found.add(e.output)
    return any(isinstance(e.op, Cast) and e.tensors[0] in found and e.output.dtype.itemsize == 1 for e in segment.exprs)


def _divides_by_exponentials(segment: Segment, expr: Expr) -> bool:
    divisor = expr.inputs[1]
    made = made_by(divisor, segment.maker) if isinstance(divisor, BoundTensor) else None
    if made is None:
        return False
    if is_statistic(made.op, "online_softmax"):
        return divisor.dtype is DataType.Float
    first = first_of(made, segment.maker)
    return first is not None and is_reduction(first.op, "max")


def _divides_by_scale(segment: Segment, expr: Expr) -> bool:
    """Is the divisor ``maximum(x, a) / b``, whose reciprocal is neither infinite nor a denormal?

    128 elements that are quantised are multiplied so by one number, where a division of each takes two products more.
    """
    quotient = _behind_views(expr.inputs[1], segment.maker)
    if quotient is None or not is_pointwise(quotient.op, "div") or quotient.output.dtype is not DataType.Float:
        return False
    largest = _behind_views(quotient.inputs[0], segment.maker)
    if largest is None or largest.op != _CHOICES[0]:
        return False
    a, b = _positive(largest.inputs[1]), _positive(quotient.inputs[1])
    return 4 <= b < math.inf and 2.0**-125 <= a / b < 2.0**125


def _behind_views(value: BoundTensor | Scalar, maker: Mapping[BoundTensor, Expr]) -> Expr | None:
    made = maker.get(value) if isinstance(value, BoundTensor) else None
    while made is not None and isinstance(made.op, View | Set):
        made = maker.get(made.tensors[0])
    return made


def _positive(value: BoundTensor | Scalar) -> float:
    """The number that is written down; 0 where it is none above 0."""
    found = value.value if isinstance(value, Scalar) and value.is_literal else None
    return max(float(found), 0.0) if isinstance(found, int | float) else 0.0


@lru_cache(maxsize=64)
def saturated(segment: Segment) -> frozenset[BoundTensor]:
    """Tensors of float8_e4m3fn whose source is cut off at their largest number, and what cuts it off.

    A GPU's conversion does that by itself: NaN stays NaN, and all else is no more than the largest.
    """
    maker, found = segment.maker, set[BoundTensor]()
    for cast in segment.exprs:
        if not isinstance(cast.op, Cast) or cast.output.dtype is not DataType.Float8_e4m3fn:
            continue
        chain = [t for t in (cast.tensors[0],) if t.dtype is DataType.Float]
        for _ in range(2):
            cut = maker.get(chain[-1]) if chain else None
            source = cut.inputs[0] if cut is not None and cut.op in _CHOICES[:2] else None
            if not isinstance(source, BoundTensor) or source.dtype is not DataType.Float:
                break  # an integer is converted to float32 by what cuts it off, not by the conversion to 8 bits
            chain.append(source)
        cuts = [maker[t] for t in chain[:-1]]
        limits = {e.op.name: e.inputs[1].value for e in cuts if isinstance(e.inputs[1], Scalar)}
        is_whole = limits == {"maximum": -448.0, "minimum": 448.0}
        if is_whole and all(_is_read_once(segment, t) for t in chain[:-1]):
            found.update((cast.output, *chain[:-1]))
    return frozenset(found)


def _is_read_once(segment: Segment, tensor: BoundTensor) -> bool:
    return tensor not in segment.outputs and len(segment.readers(tensor)) == 1


def is_rounded_apart(segment: Segment, expr: Expr) -> bool:
    """Is the product ``expr`` chosen among others, and a difference made of it as well, as in ``p - max(p)``?

    What is chosen is rounded.  A compiler would contract product and difference to one operation, which does not round
    the product, so that the largest is not 0 from itself, but off by as much as the product was rounded: exponentials
    of that are wrong from products of 1e5 on.  Of sums, a mean say, no element is expected back.

    A kernel that has the choice from another one reads it beside rows, as something broadcast.
    """
    if expr.op not in _PRODUCTS or expr.output.dtype not in (DataType.Float, DataType.Double) or _is_exact(expr):
        return False
    same = _same_values(segment, expr.output)
    readers = [e for e in segment.exprs if any(t in same for t in e.tensors)]
    if any(is_statistic(e.op, "online_softmax") for e in readers):
        return True
    apart = [e for e in readers if e.op in (SUB, _ADD)]
    return bool(apart) and (
        any(map(_chooses, readers))
        or any(_is_from_elsewhere(segment, t) for e in apart if e.op == SUB for t in e.tensors if t not in same)
    )


_PRODUCTS = tuple(map(Pointwise, ("mul", "square")))
_CHOICES = tuple(map(Pointwise, ("maximum", "minimum", "floor", "ceil", "round", "trunc")))


def _chooses(expr: Expr) -> bool:
    return expr.op in _CHOICES or is_reduction(expr.op, "max", "min")


def _is_exact(expr: Expr) -> bool:
    """A product with a power of two is a float itself, and contracted to the same."""
    factors = [v.value for v in expr.inputs if isinstance(v, Scalar) and v.is_literal]
    return any(isinstance(f, int | float) and f != 0 and abs(math.frexp(f)[0]) == 0.5 for f in factors)


def _same_values(segment: Segment, tensor: BoundTensor) -> set[BoundTensor]:
    """``tensor``, its views, and the negative of it, which a compiler takes into a difference."""
    found = {tensor}
    for e in segment.exprs:
        if (isinstance(e.op, View | Set) or e.op == _NEG) and e.tensors[0] in found:
            found.add(e.output)
    return found


def _is_from_elsewhere(segment: Segment, tensor: BoundTensor) -> bool:
    """Does the segment read it, and broadcast it?"""
    made, is_broadcast = segment.maker.get(tensor), False
    while made is not None and isinstance(made.op, View | Set):
        is_broadcast |= isinstance(made.op, Broadcast | Expand)
        made = segment.maker.get(made.tensors[0])
    return made is None and is_broadcast


@lru_cache(maxsize=64)
def ends_narrow(segment: Segment) -> frozenset[BoundTensor]:
    """Tensors of which products and quotients alone are made, or 1 is subtracted, and which end in narrow floats.

    A scale by which these are divided may be a result as well.
    """
    found: set[BoundTensor] = set()
    for made in reversed(segment.exprs):
        for t in made.outputs:
            readers = segment.readers(t)
            is_passed_on = bool(readers) and t.dtype.is_floating
            is_passed_on &= t not in segment.outputs or _is_scale(segment, t)
            if t.dtype.is_low_precision or (
                is_passed_on and all(_keeps_error(segment, e) and e.output in found for e in readers)
            ):
                found.add(t)
    return frozenset(found)
