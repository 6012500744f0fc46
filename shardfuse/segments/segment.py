"""What a segment is: Exprs that one schedule runs, with what goes in and what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..ir.digits import Axis, Digit
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Iota, Op, Random, Window
from ..ir.scalar import Scalar

Pieces = Mapping[Digit, Axis]
"""Every digit that a rank walks, as atoms."""
Atoms = Mapping[BoundTensor, frozenset[Digit]]
"""Those that each tensor holds."""


@dataclass(frozen=True)
class Segment:
    """``exprs`` in an order in which they can run; ``outputs`` are what others read of what the segment makes."""

    exprs: tuple[Expr, ...]
    inputs: tuple[BoundTensor, ...]
    outputs: tuple[BoundTensor, ...]
    scalars: tuple[Scalar, ...]

    @cached_property
    def windows(self) -> Mapping[BoundTensor, Expr]:
        """What is loaded from other places than its own: each with the Expr that says from where."""
        return {e.output: e for e in self.exprs if isinstance(e.op, Window)}

    @cached_property
    def loads(self) -> tuple[BoundTensor, ...]:
        """What a kernel loads: inputs that are read where they stand, and windows."""
        direct = dict.fromkeys(t for e in self.exprs if not isinstance(e.op, Window) for t in e.tensors)
        return (*(t for t in self.inputs if t in direct), *self.windows)

    @cached_property
    def tensors(self) -> tuple[BoundTensor, ...]:
        """What goes in, and all that is made, also where nothing else reads it."""
        return (*self.inputs, *(t for e in self.exprs for t in e.outputs))

    @cached_property
    def maker(self) -> Mapping[BoundTensor, Expr]:
        """What makes each tensor that is made here."""
        return {t: e for e in self.exprs for t in e.outputs}

    def readers(self, tensor: BoundTensor) -> list[Expr]:
        """What reads ``tensor``, in order."""
        return [e for e in self.exprs if tensor in e.tensors]

    @cached_property
    def has_indices(self) -> bool:
        """Does it compute with the indices of elements, or draw numbers by them?  They are 64 bits each."""
        return any(isinstance(e.op, Iota | Random) for e in self.exprs)

    @staticmethod
    def of(exprs: Sequence[Expr], needed: Iterable[BoundTensor]) -> Segment:
        """``needed``: tensors that are read outside of the segment, the fusion's outputs among them."""
        made = dict.fromkeys(out for e in exprs for out in e.outputs)
        read = dict.fromkeys(t for e in exprs for t in e.tensors)
        wanted = frozenset(needed)
        scalars = dict.fromkeys(v for e in exprs for v in e.inputs if isinstance(v, Scalar))
        return Segment(
            tuple(exprs), tuple(t for t in read if t not in made), tuple(t for t in made if t in wanted), tuple(scalars)
        )

    def doing(self, exprs: Sequence[Expr]) -> Segment:
        """What does the same by ``exprs``, with its arguments in the order that they have."""
        again = Segment.of(exprs, self.outputs)
        return replace(again, inputs=tuple(t for t in self.inputs if t in again.inputs), outputs=self.outputs)

    def __str__(self) -> str:
        lines = [f"{', '.join(map(str, e.outputs))} = {e.op.name}({', '.join(map(str, e.inputs))})" for e in self.exprs]
        return "\n".join(lines)


def renaming(a: Segment, b: Segment) -> dict[BoundTensor, BoundTensor] | None:
    """For each tensor of ``a`` the one of ``b`` in its place, where both do the same to like tensors; else ``None``.

    Which chunk of a stream they work on makes no difference.
    """
    if len(a.exprs) != len(b.exprs) or a.scalars != b.scalars:
        return None
    found: dict[BoundTensor, BoundTensor] = {}
    for x, y in zip(a.exprs, b.exprs, strict=True):
        if _apart_from_chunks(x) != _apart_from_chunks(y):
            return None
        for s, t in zip((*x.inputs, *x.outputs), (*y.inputs, *y.outputs), strict=True):
            if isinstance(s, Scalar) or isinstance(t, Scalar):
                if s is not t:
                    return None
            elif (s.dtype, s.domain) != (t.dtype, t.domain) or found.setdefault(s, t) is not t:
                return None
    is_alike = all(
        [found[t] for t in own] == list(other) for own, other in ((a.inputs, b.inputs), (a.outputs, b.outputs))
    )
    return found if is_alike else None


def _apart_from_chunks(expr: Expr) -> tuple[Op, int, int, int]:
    return expr.op, expr.partial, len(expr.inputs), len(expr.outputs)


def touches_empty(expr: Expr) -> bool:
    """Has some tensor that ``expr`` reads or makes no elements?"""
    return any(t.domain.is_empty for t in (*expr.tensors, *expr.outputs))


def leading_to(exprs: Iterable[Expr], wanted: Iterable[BoundTensor]) -> list[Expr]:
    """The exprs that ``wanted`` rests on, in order."""
    needed = set(wanted)
    found: list[Expr] = []
    for expr in reversed(list(exprs)):
        if needed.intersection(expr.outputs):
            needed.update(expr.tensors)
            found.append(expr)
    return found[::-1]


def in_running_order(exprs: Iterable[Expr]) -> list[Expr]:
    """``exprs`` so that what one of them makes is read behind it, otherwise in the order given."""
    exprs = list(exprs)
    maker = {t: e for e in exprs for t in e.outputs}
    done: dict[Expr, None] = {}
    for expr in exprs:
        todo = [expr]
        while todo:
            before = [m for t in todo[-1].tensors if (m := maker.get(t)) is not None and m not in done]
            if before:
                todo += before
            else:
                done[todo.pop()] = None
    return list(done)


def segment_of(exprs: Iterable[Expr], outputs: Sequence[BoundTensor]) -> Segment:
    """What of ``exprs`` leads to ``outputs``."""
    return Segment.of(leading_to(exprs, outputs), outputs)


def read_once(segments: Iterable[Segment], outputs: Iterable[BoundTensor]) -> frozenset[BoundTensor]:
    """What one of the segments alone reads, and no caller: its storage may be written over by that segment."""
    times = Counter(t for segment in segments for t in segment.inputs)
    returned = frozenset(outputs)
    return frozenset(t for t, n in times.items() if n == 1 and t not in returned)
