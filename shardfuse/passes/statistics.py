"""Statistics in two steps over a sharded axis become one exchange: (mean, M2) of a variance, (max, sum) of a softmax.

before (T0 is sharded on mesh_x along the reduced axis; two all-reduces, one after the other)::

    T1 = sum(T0, axes=(1,))
    T4 = sub(T0, div(broadcast(T1), N))
    T6 = sum(square(T4), axes=(1,))

after (each rank centres its rows on a mean of its own; the gathers are packed into one call)::

    m[ranks@mesh_x, i0] = sum(T0, axes=(1,), partial=1) / n
    r[ranks@mesh_x, i0] = sum(T0 - m, axes=(1,), partial=1)                 what the rounding of m left over
    q[ranks@mesh_x, i0] = sum(square(T0 - m), axes=(1,), partial=1)
    m, r, q = set(m), set(r), set(q)                                        all-gather
    e = (m - pivot) + r / n                                 pivot: about the mean, so that the difference is exact
    T1 = N * (pivot + sum(n * e) / N)
    T6 = sum(q - r * r / n) + sum(n * square(e - sum(n * e) / N))           Chan, Golub & LeVeque 1979

Where a sum overflows, so do the squares around it, as on the unsharded tensor: r is 0 where q is inf, and T6 is inf
where T1 is, or NaN where an element is inf.

``n`` is what a rank has of the axis: fewer elements on the last ranks of an uneven shard, maybe none.  Where several
mesh dimensions hold parts of what is reduced, each has an axis; one gather is over all of them.  A softmax goes alike,
with exp(T0 - m) summed, m the largest of a rank, and sum(q * exp(m - max(m))) at the end (Milakov & Gimelshein 2018).
With an entropy's w, the sum of exp(T0 - m) * (T0 - m), goes sum((w + q * (m - max(m))) * exp(m - max(m))).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from ..analysis.chain import Links, h200_nodes
from ..analysis.communication_table import PACKED_BYTES, local_bytes
from ..analysis.paired_reductions import first_of, sums_weighted
from ..analysis.sharding import carries, is_even, ordered, outermost, reduced_axes, restrict
from ..ir.digits import Axis, Root, axis_of, extent
from ..ir.domain import BoundDomain, Sharding, without
from ..ir.dtype import DataType
from ..ir.expr import BoundFusion, BoundTensor, Expr, Value
from ..ir.op import Broadcast, Iota, Pointwise, Reduce, Reshard, Squeeze
from ..ir.scalar import Number, Scalar
from ..mesh import DeviceMesh, ParallelType


@dataclass(frozen=True)
class Statistic:
    """``first``: the sum or the max; ``second``: the sum that needs it; ``held``: the parts of the reduced axes.

    ``third``: of a softmax the sum of distances times their exponentials, where it is wanted.
    """

    first: Expr
    second: Expr
    held: Sharding
    third: Expr | None = None

    @property
    def sums(self) -> tuple[Expr, ...]:
        """All but ``first``."""
        return (self.second,) if self.third is None else (self.second, self.third)

    @property
    def x(self) -> BoundTensor:
        return self.first.tensors[0]

    @property
    def reduction(self) -> Reduce:
        """The op of ``first``."""
        assert isinstance(self.first.op, Reduce), "a statistic is of reductions"
        return self.first.op

    @property
    def mesh(self) -> DeviceMesh:
        mesh = self.x.domain.mesh
        assert mesh is not None, "a statistic is of a sharded tensor"
        return mesh

    @property
    def mesh_dims(self) -> tuple[ParallelType, ...]:
        return tuple(p for p, _ in self.held)

    def pieces(self) -> tuple[int, list[_Cut]] | None:
        """How many elements every rank has of the axes that are cut evenly, and in order the cuts of the others.

        ``None`` where a part is neither outermost of what the cuts before it left, nor of one size on all ranks.
        """
        left = reduced_axes(self.first)
        todo, cuts = list(self.held), list[_Cut]()
        while todo:
            even = next((e for e in todo if is_even(e[1], self.mesh.extent(e[0]))), None)
            p, digits = even or next((e for e in todo if outermost(left, e[1]) is not None), (None, ()))
            if p is None:
                return None
            rest = tuple(without(axis, digits) for axis in left)
            at = None if even else outermost(left, digits)
            if at is not None:
                cuts.append(_Cut(p, at, extent(left[at]), extent(rest[at])))
            todo.remove((p, digits))
            left = rest
        uneven = [cut.axis for cut in cuts]
        return prod(extent(axis) for k, axis in enumerate(left) if k not in uneven), cuts


@dataclass(frozen=True)
class _Cut:
    """``p`` gives each rank ``chunk`` of the ``most`` elements of a reduced ``axis``, the last ones what is left."""

    p: ParallelType
    axis: int
    most: int
    chunk: int


def find_statistics(fusion: BoundFusion) -> dict[Expr, Statistic]:
    """By their first Expr.  Shardings are settled.

    None where results are the same on any number of ranks: what is merged here has as many parts as there are ranks.
    """
    if fusion.promises.ranks:
        return {}
    maker = fusion.producer_of()
    found: dict[Expr, Statistic] = {}
    seconds: dict[Expr, None] = {}
    for second in fusion.exprs:
        first = first_of(second, maker)
        if first is None or first in found or first in seconds:  # a variance of exponentials: their sum is made once
            continue
        third = next((e for e in fusion.exprs if sums_weighted(e, second, maker)), None)
        if third is not None and third.output.domain != second.output.domain:
            third = None
        statistic = Statistic(first, second, _held(first, second), third)
        links = h200_nodes(fusion.ranks_per_node)
        if not (statistic.held and statistic.pieces()):
            continue
        if fusion.promises.batch or _is_cheaper(statistic, links):  # whatever the batch, where that is promised
            found[first] = statistic
            seconds |= dict.fromkeys(statistic.sums)
    return found


def _held(first: Expr, second: Expr) -> Sharding:
    """What mesh dimensions hold of the reduced axes; nothing where the merge does not fit the shardings and dtypes."""
    x, a, b = first.tensors[0], first.output, second.output
    if x.domain.mesh is None or not (x.dtype is a.dtype is b.dtype) or x.dtype not in (DataType.Float, DataType.Double):
        return ()
    here = restrict(x.domain.sharding, a.domain.logical, x.domain.mesh)
    if any((t.domain.mesh, t.domain.sharding, t.domain.allocation) != (x.domain.mesh, here, None) for t in (a, b)):
        return ()
    reduced = reduced_axes(first)
    return tuple(entry for entry in x.domain.sharding if carries(reduced, entry[1]))


def _is_cheaper(statistic: Statistic, links: Links) -> bool:
    """One gather of the numbers of every rank, against two all-reduces of one."""
    team = statistic.mesh.box(statistic.mesh.ranks[0], statistic.mesh_dims)
    n, size = len(team), local_bytes(statistic.first.output)
    reductions = 1 + len(statistic.sums)
    numbers = reductions if statistic.reduction.kind == "max" else 3
    gathered = links.seconds(team, numbers * size * (n - 1), 2 * numbers * size * n)
    reduced = reductions * links.seconds(team, 2 * size * (n - 1) / n, 2 * size)
    return numbers * size * n <= PACKED_BYTES and gathered < reduced


def merged(statistic: Statistic) -> list[Expr]:
    """The Exprs of one statistic, each of which computes on a rank or communicates."""
    return _Builder(statistic).build()


@dataclass
class _Builder:
    statistic: Statistic
    exprs: list[Expr] = field(default_factory=list[Expr])

    def __post_init__(self) -> None:
        s = self.statistic
        self.ranks = {p: axis_of(Root(f"{p}_of_{s.first.output.name}", s.mesh.extent(p))) for p in s.mesh_dims}
        self.places = tuple(range(len(self.ranks)))

    def build(self) -> list[Expr]:
        if self.statistic.reduction.kind == "max":
            self.exponentials()
        else:
            self.moments()
        return self.exprs

    def exponentials(self) -> None:
        first, second, x = self.statistic.first, self.statistic.second, self.statistic.x
        largest = self.partial(first, x)
        centre = self.on_this_rank(largest)
        # a rank whose rows are all -inf, or that has none, adds nothing, and no NaN
        lowest = self.op("eq", centre, self.number(float("-inf")))
        apart = self.op("sub", x, self.along_rows(self.op("where", lowest, self.number(0.0), centre)))
        weight = self.op("exp", apart)
        total, third = self.partial(second, weight), self.statistic.third
        parts = [largest, total]
        if third is not None:
            parts.append(self.partial(third, self.unless_zero(weight, self.op("mul", weight, apart))))
        m, q, *more = map(self.gather, parts)
        self.exprs.append(Expr(Reduce("max", self.places), (m,), (first.output,)))
        away = self.op("sub", m, self.over_ranks(first.output))
        share = self.op("exp", away)
        self.exprs.append(Expr(Reduce("sum", self.places), (self.op("mul", q, share),), (second.output,)))
        if third is not None:
            moved = self.op("mul", self.op("add", more[0], self.op("mul", q, away)), share)
            self.exprs.append(Expr(Reduce("sum", self.places), (self.unless_zero(share, moved),), (third.output,)))

    def unless_zero(self, weight: BoundTensor, product: BoundTensor) -> BoundTensor:
        """``product``, which has the factor ``weight``: 0 where that is, however far away."""
        zero = self.number(0.0)
        return self.op("where", self.op("eq", weight, zero), zero, product)

    def moments(self) -> None:
        first, second, x = self.statistic.first, self.statistic.second, self.statistic.x
        own = self.op("div", self.partial(first, x), self.counts(least=1, is_local=True))
        apart = self.op("sub", x, self.along_rows(self.on_this_rank(own)))
        rest, squares = self.partial(second, apart), self.partial(second, self.op("mul", apart, apart))
        m, r, q = self.gather(own), self.gather(rest), self.gather(squares)
        whole = self.number(float(prod(extent(axis) for axis in reduced_axes(first))))
        infinity, zero = self.number(float("inf")), self.number(0.0)
        weight, at_least_one = self.counts(least=0, is_local=False), self.counts(least=1, is_local=False)
        r = self.op("where", self.op("eq", q, infinity), zero, r)  # what is left over of it may be NaN
        pivot = self.total(self.op("div", self.op("mul", m, weight), whole))
        e = self.op("add", self.op("sub", m, self.over_ranks(pivot)), self.op("div", r, at_least_one))
        shift = self.op("div", self.total(self.op("mul", e, weight)), whole)
        is_number = self.op("isfinite", shift)  # else pivot is infinite, or a difference to it
        shift = self.op("where", is_number, shift, zero)
        self.exprs.append(Expr(Pointwise("mul"), (self.op("add", pivot, shift), whole), (first.output,)))
        away = self.op("sub", e, self.over_ranks(shift))
        within = self.op("sub", q, self.op("div", self.op("mul", r, r), at_least_one))
        between = self.op("mul", self.op("mul", away, weight), away)  # 0 of a rank that has none, however far away
        # Of a sum that overflowed all are infinitely far, but for the infinite ones: their q is NaN.
        is_over = self.over_ranks(self.op("eq", self.op("abs", first.output), infinity))
        addend = self.op("where", is_over, self.op("add", q, infinity), self.op("add", within, between))
        self.exprs.append(Expr(Reduce("sum", self.places), (addend,), (second.output,)))

    # pieces

    def like(self, dtype: DataType, domain: BoundDomain) -> BoundTensor:
        return BoundTensor(f"{self.statistic.second.output.name}m{len(self.exprs)}", dtype, domain)

    def number(self, value: Number) -> Scalar:
        return Scalar(
            f"{self.statistic.second.output.name}s{len(self.exprs)}", self.statistic.x.dtype, value, is_literal=True
        )

    def op(self, op: str, *operands: Value) -> BoundTensor:
        """Pointwise, on all that the operands walk."""
        tensors = [v for v in operands if isinstance(v, BoundTensor)]
        columns = zip(*(t.domain.logical for t in tensors), strict=True)
        logical = tuple(next((axis for axis in column if axis), ()) for column in columns)
        sharding = ordered(dict(entry for t in tensors for entry in t.domain.sharding).items())
        dtype = DataType.Bool if op in ("eq", "isfinite") else self.statistic.x.dtype
        out = self.like(dtype, BoundDomain(logical, self.statistic.mesh, sharding))
        self.exprs.append(Expr(Pointwise(op), operands, (out,)))
        return out

    def view(self, op: Squeeze | Broadcast, tensor: BoundTensor, logical: tuple[Axis, ...]) -> BoundTensor:
        out = self.like(
            tensor.dtype, BoundDomain(logical, self.statistic.mesh, self.without_ranks(tensor.domain.sharding))
        )
        self.exprs.append(Expr(op, (tensor,), (out,)))
        return out

    def without_ranks(self, sharding: Sharding) -> Sharding:
        return tuple(entry for entry in sharding if entry[0] not in self.ranks)

    def partial(self, reduction: Expr, tensor: BoundTensor) -> BoundTensor:
        """This rank's part, on a visible axis for each mesh dimension."""
        kept = reduction.output.domain
        sharding = ordered([*kept.sharding, *self.ranks.items()])
        out = self.like(tensor.dtype, BoundDomain((*self.ranks.values(), *kept.logical), self.statistic.mesh, sharding))
        self.exprs.append(replace(reduction, inputs=(tensor,), outputs=(out,), partial=len(self.ranks)))
        return out

    def on_this_rank(self, tensor: BoundTensor) -> BoundTensor:
        """Without the axes of the ranks: another value on each of them."""
        return self.view(Squeeze(self.places), tensor, tensor.domain.logical[len(self.ranks) :])

    def along_rows(self, tensor: BoundTensor) -> BoundTensor:
        """The same value for all that was reduced."""
        x, axes = self.statistic.x, self.statistic.reduction.axes
        logical = tuple(() if k in axes else axis for k, axis in enumerate(x.domain.logical))
        return self.view(Broadcast(tuple(k in axes for k in range(x.ndim))), tensor, logical)

    def over_ranks(self, tensor: BoundTensor) -> BoundTensor:
        """The same value for every rank."""
        new = (*(True for _ in self.ranks), *(False for _ in tensor.domain.logical))
        return self.view(Broadcast(new), tensor, (*(() for _ in self.ranks), *tensor.domain.logical))

    def gather(self, tensor: BoundTensor) -> BoundTensor:
        out = self.like(tensor.dtype, replace(tensor.domain, sharding=self.without_ranks(tensor.domain.sharding)))
        self.exprs.append(Expr(Reshard(self.statistic.mesh_dims), (tensor,), (out,)))
        return out

    def total(self, tensor: BoundTensor) -> BoundTensor:
        logical = tensor.domain.logical[len(self.ranks) :]
        out = self.like(tensor.dtype, BoundDomain(logical, self.statistic.mesh, tensor.domain.sharding))
        self.exprs.append(Expr(Reduce("sum", self.places), (tensor,), (out,)))
        return out

    def counts(self, *, least: int, is_local: bool) -> Value:
        """How many elements of the reduced axes each rank has, or ``least``: a number, or one for each rank."""
        found = self.statistic.pieces()
        assert found is not None, "a statistic is of pieces that can be counted"
        whole, cuts = found
        left: dict[int, Value] = {}
        for cut in cuts:
            begin = self.op("mul", self.coordinate(cut.p, is_local=is_local), self.number(float(cut.chunk)))
            rest = self.op("sub", left.get(cut.axis, self.number(float(cut.most))), begin)
            left[cut.axis] = self.op(
                "minimum", self.op("maximum", rest, self.number(0.0)), self.number(float(cut.chunk))
            )
        count: Value = self.number(float(whole))
        for n in left.values():
            count = self.op("mul", n, count)
        return self.op("maximum", count, self.number(float(least))) if left else count

    def coordinate(self, p: ParallelType, *, is_local: bool) -> BoundTensor:
        """Each rank's place along ``p``, to be broadcast to its statistics."""
        s, own = self.statistic, self.ranks[p]
        sharding: Sharding = ((p, own),) if is_local else ()
        index = self.like(s.x.dtype, BoundDomain((own,), s.mesh, sharding))
        self.exprs.append(Expr(Iota((s.mesh.extent(p),), 0, 1), (), (index,)))
        new = (*(q is not p for q in self.ranks), *(True for _ in s.first.output.domain.logical))
        out = self.like(index.dtype, BoundDomain(tuple(() if flag else own for flag in new), s.mesh, sharding))
        self.exprs.append(Expr(Broadcast(new), (index,), (out,)))
        return out
