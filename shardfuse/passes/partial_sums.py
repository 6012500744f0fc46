"""How ranks add up what each of them has, where a kernel can do better than the collective.

A sum over a mesh dimension is an all-reduce or a reduce-scatter of the summands: of float32 ones where 16-bit partial
sums were cast before they were added, and of 16-bit ones rounded by NCCL at every hop.  Here the 16-bit tensor from
which pointwise ops make the summand travels unreduced, and the kernel that reads it computes each rank's summand and
adds them up in float32.

before (T0 holds a partial sum of each rank)::

    T1[mesh_x@mesh_x, i0]:Float = cast(T0)
    T2[i0]:Float = sum(T1, axes=(0,), mesh=mesh_x)

after, on two ranks::

    T2x[mesh_x, i0]:BFloat16 = set(T0, mesh=mesh_x)                         all-gather, of 16 bits
    T2[i0]:Float = add(cast(select(T2x, 0)), cast(select(T2x, 1)))

Where more ranks have much to add up, each adds its part (an all-to-all), and what is wanted whole is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.chain import ONE_STEP_BYTES, PAIR_BYTES
from ..analysis.communication_table import local_bytes
from ..analysis.sharding import is_possible, ordered
from ..ir.call import Select
from ..ir.digits import Axis, extent, split
from ..ir.domain import BoundDomain, without
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr, Value
from ..ir.op import Cast, Op, Pointwise, Reduce, ReductionKind
from ..ir.scalar import Scalar
from ..mesh import ParallelType

_ADD = Pointwise("add")
_MOST_WINDOWS = 8
"""Loads of one tensor in a statement of a kernel."""


@dataclass(frozen=True)
class Summands:
    """What each rank has of a sum: ``summand``, which ``chain`` makes of ``sent``; axis ``at`` is that of the ranks."""

    summand: BoundTensor
    at: int
    sent: BoundTensor
    chain: tuple[Expr, ...]

    @property
    def accumulator(self) -> DataType:
        return DataType.Float if self.summand.dtype.is_low_precision else self.summand.dtype

    def beside(self) -> list[BoundTensor]:
        """What ``chain`` reads apart from the ranks' own: tensors that have no axis of the ranks."""
        read = (t for expr in self.chain for t in expr.tensors if not t.domain.logical[self.at])
        return list(dict.fromkeys(read))


def summands_of(summand: BoundTensor, at: int, producers: Mapping[BoundTensor, Expr]) -> Summands:
    """``summand``, or the 16-bit tensor from which pointwise ops make it with tensors that all ranks have alike."""
    chain: list[Expr] = []
    sent = summand
    while sent.dtype not in _NARROW:
        expr = producers.get(sent)
        if expr is None or not isinstance(expr.op, Cast | Pointwise):
            return Summands(summand, at, summand, ())
        own = [t for t in expr.tensors if t.ndim == summand.ndim and t.domain.logical[at]]
        if len(dict.fromkeys(own)) != 1 or any(t.ndim != summand.ndim for t in expr.tensors):
            return Summands(summand, at, summand, ())
        chain.insert(0, expr)
        sent = own[0]
    parts = Summands(summand, at, sent, tuple(chain))
    if parts.beside() and extent(summand.domain.logical[at]) > _MOST_WINDOWS:
        return Summands(summand, at, summand, ())  # added up as one tensor, which those are not beside
    return parts


def divided(
    op: ReductionKind,
    parts: Summands,
    total: BoundDomain,
    dims: Sequence[ParallelType],
    *,
    is_read: bool,
    in_kernel: bool,
    is_passed: bool,
) -> Axis | None:
    """By which digits the ranks of a mesh dimension divide the sum between them, to add up each its part.

    None: a collective adds up.  No digits: every rank is given all summands.  The rule is the bytes that a rank is
    given; up to ``ONE_STEP_BYTES`` more are taken for one call instead of two.
    total: the sum as it is wanted, cut over that dimension or whole on every rank of it.
    is_read: does a kernel read the sum, in which it can be added up?  in_kernel: may ranks send one another the
    summands inside of it?  is_passed: and pass on there what each has added up, if the sum is of 16 bits?
    """
    mesh, sent = total.mesh, parts.sent
    if op != "sum" or sent.dtype not in _NARROW or mesh is None or len(dims) != 1:
        return None
    (p,) = dims
    ranks, wanted = mesh.extent(p), total.digits_on(p)
    is_large = local_bytes(sent) > PAIR_BYTES and not in_kernel
    if not parts.chain and ranks == 2 and (wanted or is_large or not is_read):
        return None  # a collective of 16-bit numbers, of which two are rounded once by whoever adds them
    if wanted:
        return wanted
    # A rank is given all summands, or (ranks - 1) / ranks of a summand and of the sum.
    in_two = 1 + parts.summand.dtype.itemsize / sent.dtype.itemsize
    more = (ranks - in_two) * local_bytes(sent)
    if more > ONE_STEP_BYTES and not (is_passed and is_read and not parts.chain):
        return _even_part(total, p, ranks)
    return () if parts.chain or is_read else None


def in_rank_order(parts: Summands, total: BoundDomain, p: ParallelType) -> Axis:
    """As ``divided``, where only a kernel may add up: NCCL's order follows sizes, and the place of an element."""
    assert total.mesh is not None, "partial sums are of a mesh"
    wanted, ranks = total.digits_on(p), total.mesh.extent(p)
    if wanted or (ranks - 2) * local_bytes(parts.sent) <= ONE_STEP_BYTES:
        return wanted
    return _even_part(total, p, ranks) or ()


def _even_part(total: BoundDomain, p: ParallelType, ranks: int) -> Axis | None:
    """The outermost part of some axis by which ``ranks`` share it evenly."""
    for axis in total.logical:
        here = without(axis, tuple(d for _, digits in total.sharding for d in digits))
        if extent(here) and extent(here) % ranks == 0 and here[0].extent % ranks == 0:
            digits, _ = split(here, extent(here) // ranks)
            if total.mesh is not None and is_possible({**dict(total.sharding), p: digits}, total.logical, total.mesh):
                return digits
    return None


def with_entry(domain: BoundDomain, p: ParallelType, digits: Axis) -> BoundDomain:
    """``domain`` cut over ``p`` by ``digits``."""
    rest = [(q, found) for q, found in domain.sharding if q is not p]
    return replace(domain, sharding=ordered([*rest, (p, digits)]))


def added_up(
    parts: Summands,
    received: BoundTensor,
    beside: Mapping[BoundTensor, BoundTensor],
    total: BoundTensor,
    *,
    in_pairs: bool,
) -> list[Expr]:
    """``total`` from what came of ``parts.sent``, in the order of the ranks, or in pairs of them, rounded once.

    received: as ``parts.sent``, with all ranks along axis ``parts.at``.  beside: for each of ``parts.beside()`` the
    same without that axis.  Of few ranks a summand is a window of its own, so that a kernel that reduces another axis
    adds up as it reads.
    """
    ranks = extent(received.domain.logical[parts.at])
    build = _Builder(total)
    if ranks > _MOST_WINDOWS:
        whole = build.applied(parts.chain, parts.sent, received, {}, "w", received.domain)
        build.exprs.append(Expr(Reduce("sum", (parts.at,)), (whole,), (total,)))
        return build.exprs
    held: list[BoundTensor] = []
    for k in range(ranks):
        index = Scalar(f"{total.name}k{k}", DataType.Int, k, is_literal=True)
        piece = build.make(Select(parts.at), (received, index), f"r{k}", received.dtype)
        summand = build.applied(parts.chain, parts.sent, piece, beside, f"r{k}", total.domain)
        if summand.dtype is not parts.accumulator:
            summand = build.make(Cast(), (summand,), f"f{k}", parts.accumulator)
        held.append(summand)
        while len(held) > 1 and (not in_pairs or _is_pair(k + 1, len(held), ranks)):
            second, first = held.pop(), held.pop()
            if k == ranks - 1 and not held and parts.accumulator is total.dtype:
                build.exprs.append(Expr(_ADD, (first, second), (total,)))
                return build.exprs
            held.append(build.make(_ADD, (first, second), f"a{k}_{len(held)}" if held else f"a{k}", parts.accumulator))
    build.exprs.append(Expr(Cast(), (held[0],), (total,)))
    return build.exprs


def _is_pair(seen: int, held: int, ranks: int) -> bool:
    """Are the last two of the sums that are held of equally many of the summands that were seen, or is none to come?

    As in a binary counter: of six summands, a sum of four and one of two are held.
    """
    return seen == ranks or held > seen.bit_count()


class _Builder:
    """Exprs on the way to ``total``."""

    def __init__(self, total: BoundTensor) -> None:
        self.total = total
        self.exprs: list[Expr] = []

    def make(
        self, op: Op, inputs: Sequence[Value], name: str, dtype: DataType, like: BoundDomain | None = None
    ) -> BoundTensor:
        domain = replace(like or self.total.domain, allocation=None)
        out = BoundTensor(f"{self.total.name}{name}", dtype, domain)
        self.exprs.append(Expr(op, tuple(inputs), (out,)))
        return out

    def applied(
        self, chain: Sequence[Expr], sent: BoundTensor, piece: BoundTensor,
        beside: Mapping[BoundTensor, BoundTensor], name: str, like: BoundDomain,
    ) -> BoundTensor:  # fmt: skip
        """What ``chain`` makes of ``piece``, which stands for ``sent``."""
        own = {**beside, sent: piece}
        for j, expr in enumerate(chain):
            inputs = [own[v] if isinstance(v, BoundTensor) else v for v in expr.inputs]
            own[expr.output] = self.make(expr.op, inputs, f"{name}c{j}", expr.output.dtype, like)
        return own[chain[-1].output] if chain else piece


_NARROW = (DataType.Half, DataType.BFloat16)
