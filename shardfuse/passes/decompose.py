"""decompose_resharding: every change of sharding becomes an Expr of its own.

before (T0 is sharded on its columns, T1 and T2 were said to be replicated)::

    inputs: T0[i0, i1/2@mesh_x i1%2]:Float
    T1[i0]:Float = sum(T0, axes=(1,))
    T2[i0, i1]:Float = exp(T0)
    outputs: T1, T2

after (each rank's partial sums are a visible axis, which the all-reduce takes away; ``exp`` is computed where the data
is, and gathered)::

    inputs: T0[i0, i1/2@mesh_x i1%2]:Float
    T1p[mesh_x_of_T1@mesh_x, i0]:Float = sum(T0, axes=(1,), partial=1)
    T1[i0]:Float = sum(T1p, axes=(0,), mesh=mesh_x)
    T2l[i0, i1/2@mesh_x i1%2]:Float = exp(T0)
    T2[i0, i1]:Float = set(T2l, mesh=mesh_x)
    outputs: T1, T2

An Expr with the attribute ``mesh`` changes what that mesh dimension holds, or those; with ``exchange`` too it is an
all-to-all between any two shardings.  One with ``move`` takes a tensor from one mesh to another.  Replicated to sharded
is a free local slice.  Which steps a change of sharding takes, `cheapest_chain` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..analysis.chain import cheapest_chain, h200_nodes
from ..analysis.sharding import (
    allowed,
    computed_in,
    home_of,
    is_even,
    is_opaque,
    is_possible,
    join,
    mesh_of,
    needed_by,
    ordered,
    outermost,
    reduced_axes,
    restrict,
    restrict_to_inputs,
    with_sharding,
)
from ..analysis.sharding import carries as carries_digits
from ..ir.call import Call
from ..ir.digits import Axis, Root, axis_of
from ..ir.domain import BoundDomain, Sharding, without
from ..ir.dtype import DataType
from ..ir.expr import BoundFusion, BoundTensor, Expr, Value
from ..ir.op import Cast, Move, MoveKind, Pointwise, Reduce, Reshard, Set, Squeeze, is_reduction
from ..mesh import DeviceMesh, ParallelType
from .partial_sums import Summands, added_up, divided, in_rank_order, summands_of, with_entry
from .promise_checks import check_order, check_segments, has_order
from .statistics import find_statistics, merged

_LINEAR = Call("linear")


def decompose_resharding(fusion: BoundFusion) -> None:
    fusion.exprs = _Decomposer(fusion).run(fusion)


class _Decomposer:
    def __init__(self, fusion: BoundFusion) -> None:
        self.exprs: list[Expr] = []
        self.links = h200_nodes(fusion.ranks_per_node)
        self.is_cut = bool(fusion.streams)
        self.in_kernel, self.is_passed = fusion.has_cheap_sums, fusion.passes_sums
        self.promises = fusion.promises
        self.read = {t for e in fusion.exprs if not isinstance(e.op, Set | Call) for t in e.tensors}
        """What kernels read."""
        self.converted: dict[tuple[BoundTensor, DeviceMesh | None, Sharding], BoundTensor] = {}

    def run(self, fusion: BoundFusion) -> list[Expr]:
        statistics = {} if fusion.has_cheap_sums else find_statistics(fusion)
        done = dict.fromkeys(e for s in statistics.values() for e in s.sums)
        for expr in fusion.exprs:
            if expr in statistics:
                self.exprs += merged(statistics[expr])
            elif expr in done:
                continue
            elif mesh_of((*expr.tensors, *expr.outputs)) is None:
                self.exprs.append(expr)
            elif isinstance(expr.op, Set):
                self.change(expr.tensors[0], expr.output)
            else:
                self.compute(expr)
        return self.exprs

    # computing

    def compute(self, expr: Expr) -> None:
        out = expr.output
        mesh = home_of(expr) or out.domain.mesh
        sharding = _space(expr)
        reduced = reduced_axes(expr)
        partial = tuple((p, d) for p, d in sharding if carries_digits(reduced, d))
        if partial and expr.op == _LINEAR and len(expr.inputs) == 3:
            product = self.like(out, f"{out.name}x", replace(out.domain))  # the bias is added once, not by every rank
            self.compute(Expr(_LINEAR, expr.inputs[:2], (product,)))
            self.compute(Expr(Pointwise("add"), (product, expr.inputs[2]), (out,)))
            return
        needed = iter(needed_by(expr, sharding, mesh))
        check_segments(expr, sharding, self.promises)
        inputs: list[Value] = [
            self.having(v, mesh, next(needed)) if isinstance(v, BoundTensor) else v for v in expr.inputs
        ]
        if partial:
            self.reduce_over_mesh(expr, inputs, sharding, partial)
            return
        made = [self.computed(out, mesh, restrict(sharding, out.domain.logical, mesh)) for out in expr.outputs]
        self.exprs.append(replace(expr, inputs=tuple(inputs), outputs=tuple(made)))
        for local, out in zip(made, expr.outputs, strict=True):
            if local is not out:
                self.change(local, out)

    def computed(self, out: BoundTensor, mesh: DeviceMesh | None, here: Sharding) -> BoundTensor:
        """``out`` as it is computed; itself where that is how it is wanted."""
        if (out.domain.mesh, out.domain.sharding) == (mesh, here):
            return out
        return self.like(out, f"{out.name}l", replace(out.domain, mesh=mesh, sharding=here, allocation=None))

    def reduce_over_mesh(self, expr: Expr, inputs: list[Value], sharding: Sharding, partial: Sharding) -> None:
        out = expr.output
        mesh = mesh_of(v for v in inputs if isinstance(v, BoundTensor))
        assert mesh is not None, "partial sums are of a mesh"
        here = restrict(sharding, out.domain.logical, mesh)
        op = expr.op.kind if isinstance(expr.op, Reduce) else "sum"
        current, places = self.local_partial(expr, inputs, mesh, here, partial)
        visible = dict(zip((p for p, _ in partial), places, strict=True))
        wanted = out.domain.sharding if out.domain.mesh == mesh else ()
        steps = _reductions(tuple(visible), here, wanted, out.domain.logical, mesh)
        if self.promises.invariant:
            check_order(expr, partial, mesh, self.promises, is_cut=self.is_cut)
            steps = [((p,), digits) for dims, digits in steps for p in dims]
        if isinstance(expr.op, Reduce) and expr.op.in_pairs:  # those next to each other first
            digits_of = dict(partial)
            steps.sort(key=lambda step: digits_of[step[0][0]][0].weight)
        for k, (dims, digits) in enumerate(steps):
            gone = tuple(visible.pop(p) for p in dims)
            logical = tuple(a for j, a in enumerate(current.domain.logical) if j not in gone)
            rest = [(p, d) for p, d in current.domain.sharding if p not in dims]
            if digits:
                rest.append((dims[0], digits))
            domain = BoundDomain(logical, mesh, ordered(rest))
            exact = not visible and _same(domain, out.domain) and current.dtype is out.dtype
            target = out if exact else self.like(current, f"{out.name}s{k}", domain)
            parts = summands_of(current, gone[0], {t: e for e in self.exprs for t in e.outputs})
            is_read = out in self.read
            how = None
            if not self.is_cut:
                ways = {"is_read": is_read, "in_kernel": self.in_kernel, "is_passed": self.is_passed}
                how = divided(op, parts, domain, dims, **ways)
            if how is None and self.promises.invariant and has_order(expr) and mesh.extent(dims[0]) > 2:
                how = in_rank_order(parts, domain, dims[0])
            if how is not None:
                summed = with_entry(domain, dims[0], how) if how else domain
                self.add_up(parts, target, summed, in_pairs=self.promises.ranks)
            else:
                self.exprs.append(Expr(Reduce(op, tuple(sorted(gone)), dims), (current,), (target,)))
            visible = {p: v - sum(g < v for g in gone) for p, v in visible.items()}
            current = target
        if current is not out:
            self.finish(current, out)

    def add_up(self, parts: Summands, total: BoundTensor, summed: BoundDomain, *, in_pairs: bool) -> None:
        """Every rank is given what it adds up: its part of the sum, which is then gathered where it is wanted whole."""
        received = self.like(parts.sent, f"{total.name}x", replace(summed, logical=parts.sent.domain.logical))
        self.change(parts.sent, received)
        is_all = summed.sharding == total.domain.sharding
        part = total if is_all else self.like(total, f"{total.name}y", summed)
        beside = {t: self.without_ranks(t, parts.at, summed) for t in parts.beside()}
        self.exprs += added_up(parts, received, beside, part, in_pairs=in_pairs)
        if not is_all:
            self.change(part, total)

    def without_ranks(self, tensor: BoundTensor, at: int, summed: BoundDomain) -> BoundTensor:
        """``tensor`` without its axis ``at`` of one element, where a sum of this domain reads it."""
        logical = tuple(axis for k, axis in enumerate(tensor.domain.logical) if k != at)
        domain = replace(tensor.domain, logical=logical, allocation=None)
        squeezed = self.like(tensor, f"{tensor.name}z{len(self.exprs)}", domain)
        self.exprs.append(Expr(Squeeze((at,)), (tensor,), (squeezed,)))
        return self.having(squeezed, summed.mesh, restrict(summed.sharding, logical, summed.mesh))

    def local_partial(
        self, expr: Expr, inputs: list[Value], mesh: DeviceMesh | None, here: Sharding, partial: Sharding
    ) -> tuple[BoundTensor, list[int]]:
        """This rank's part of the reduction, and where its visible mesh axes stand."""
        out = expr.output
        gone = tuple(d for _, digits in partial for d in digits)
        reduced = reduced_axes(expr)
        source = inputs[0]
        is_wide = is_reduction(expr.op, "sum", "prod") and out.dtype.is_low_precision
        dtype = DataType.Float if is_wide else out.dtype
        whole = mesh is not None and all(is_even(d, mesh.extent(p)) for p, d in partial)
        as_it_is = isinstance(source, BoundTensor) and (source.dtype is dtype or source.dtype is out.dtype)
        if whole and as_it_is and isinstance(expr.op, Reduce) and not any(without(axis, gone) for axis in reduced):
            assert isinstance(source, BoundTensor)
            logical = source.domain.logical
            visible = [next((k for k, a in enumerate(logical) if a == d), None) for _, d in partial]
            places = [k for k in visible if k is not None]
            if len(places) == len(partial) == len(reduced):
                return source, places  # the partial sums are an axis that the user sees: nothing to do locally
        assert mesh is not None, "partial sums are of a mesh"
        # an axis of its own: of an uneven cut every rank has a partial sum, also one that holds no row
        ranks = [(p, axis_of(Root(f"{p}_of_{out.name}", mesh.extent(p)))) for p, _ in partial]
        logical = (*(axis for _, axis in ranks), *out.domain.logical)
        domain = BoundDomain(logical, mesh, ordered([*here, *ranks]))
        tensor = BoundTensor(f"{out.name}p", dtype, domain)
        self.exprs.append(replace(expr, inputs=tuple(inputs), outputs=(tensor,), partial=len(partial)))
        return tensor, list(range(len(partial)))

    def finish(self, current: BoundTensor, out: BoundTensor) -> None:
        """Reach ``out``'s type, then its sharding."""
        if current.dtype is not out.dtype:
            same = _same(current.domain, out.domain)
            narrow = out if same else self.like(out, f"{out.name}c", replace(current.domain))
            self.exprs.append(Expr(Cast(), (current,), (narrow,)))
            current = narrow
        if current is not out:
            self.change(current, out)

    # changing a sharding

    def having(self, tensor: BoundTensor, mesh: DeviceMesh | None, sharding: Sharding) -> BoundTensor:
        """``tensor`` on ``mesh`` with ``sharding``, made once."""
        if (tensor.domain.mesh, tensor.domain.sharding) == (mesh, sharding):
            return tensor
        if tensor.domain.mesh is None and not sharding:
            return tensor
        key = (tensor, mesh, sharding)
        if key not in self.converted:
            domain = BoundDomain(tensor.domain.logical, mesh, sharding)
            target = self.like(tensor, f"{tensor.name}h{len(self.converted)}", domain)
            self.converted[key] = target
            self.change(tensor, target)
        return self.converted[key]

    def change(self, source: BoundTensor, target: BoundTensor) -> None:
        """Emit the chain of Exprs that takes ``source`` to ``target``: the same logical axes, another home."""
        if target.domain.allocation is not None and not _local_copy(source, target):
            plain = self.like(target, f"{target.name}a", replace(target.domain, allocation=None))
            self.change(source, plain)
            self.exprs.append(Expr(Set(), (plain,), (target,)))
            return
        if source.domain.mesh != target.domain.mesh and source.domain.mesh and target.domain.mesh:
            self.move(source, target)
            return
        mesh = target.domain.mesh or source.domain.mesh
        before, after = source.domain.sharding, target.domain.sharding
        if mesh is None or before == after:
            self.exprs.append(Expr(Set(), (source,), (target,)))
            return
        steps = cheapest_chain(mesh, source.domain.logical, before, after, source.dtype.itemsize, self.links)
        for k, found in enumerate(steps):
            domain = with_sharding(replace(source.domain, allocation=None), mesh, found.sharding)
            step = target if k == len(steps) - 1 else self.like(target, f"{target.name}m{k}", domain)
            is_exchange = found.kind == "exchange"
            dims = found.mesh_dims if is_exchange else found.mesh_dims[:1]
            self.exprs.append(Expr(Reshard(dims, is_exchange), (source,), (step,)))
            source = step

    def move(self, source: BoundTensor, target: BoundTensor) -> None:
        """From one mesh to another: directly where one call does it, else by way of replicated tensors."""
        kind = _move_kind(source.domain, target.domain)
        if kind is not None:
            self.exprs.append(Expr(Move(kind), (source,), (target,)))
            return
        if source.domain.sharding:
            whole = self.like(target, f"{target.name}w", replace(source.domain, sharding=(), allocation=None))
            self.change(source, whole)
            self.change(whole, target)
            return
        whole = self.like(target, f"{target.name}v", replace(target.domain, sharding=(), allocation=None))
        self.change(source, whole)
        self.change(whole, target)

    @staticmethod
    def like(tensor: BoundTensor, name: str, domain: BoundDomain) -> BoundTensor:
        return BoundTensor(name, tensor.dtype, domain)


def _reductions(
    dims: Sequence[ParallelType], here: Sharding, wanted: Sharding, logical: Sequence[Axis], mesh: DeviceMesh | None
) -> list[tuple[tuple[ParallelType, ...], Axis]]:
    """Over which mesh dimensions to reduce, a collective each, and what it scatters to: then all others at once.

    A part of a part is scattered after the part that it is cut from.
    """
    assert mesh is not None, "partial sums are of a mesh"
    held, left, steps = dict(here), list(dims), list[tuple[tuple[ParallelType, ...], Axis]]()
    for _ in dims:
        found = next((e for e in wanted if e[0] in left and is_possible({**held, e[0]: e[1]}, logical, mesh)), None)
        if found is None:
            break
        held[found[0]] = found[1]
        left.remove(found[0])
        steps.append(((found[0],), found[1]))
    return [*steps, *([(tuple(left), ())] if left else [])]


def _same(a: BoundDomain, b: BoundDomain) -> bool:
    return (a.mesh, a.sharding, a.allocation) == (b.mesh, b.sharding, b.allocation)


def _local_copy(source: BoundTensor, target: BoundTensor) -> bool:
    a, b = source.domain, target.domain
    return a.mesh == b.mesh and a.sharding == b.sharding


def _space(expr: Expr) -> Sharding:
    """The sharding of the iteration space: what the inputs have, and free slices that the output asks for."""
    have = computed_in(expr)
    out = expr.output.domain
    if is_opaque(expr) or out.mesh != (home_of(expr) or out.mesh):
        return have
    kept = restrict(have, out.logical, out.mesh)
    if out.mesh is None or kept == out.sharding or not _within(kept, out.sharding):
        return have
    return join([have, restrict_to_inputs(allowed(expr, out.sharding), expr, out.mesh)])


def _within(kept: Sharding, wanted: Sharding) -> bool:
    return all(entry in wanted for entry in kept)


def _move_kind(source: BoundDomain, target: BoundDomain) -> MoveKind | None:
    """One call that takes a tensor between two meshes, or ``None``."""
    assert source.mesh is not None, "a move is from a mesh"
    assert target.mesh is not None, "a move is to a mesh"
    one_dim = target.mesh.ndim == 1 and source.mesh.ndim == 1
    if source.mesh.shape == target.mesh.shape and source.sharding == target.sharding:
        return "send"
    if not source.sharding:
        if target.mesh.size == 1:
            return "send"
        if not target.sharding:
            return "broadcast"
        return "scatter" if one_dim and _is_of_blocks(target) else None
    return "gather" if one_dim and target.mesh.size == 1 and not target.sharding and _is_of_blocks(source) else None


def _is_of_blocks(domain: BoundDomain) -> bool:
    """Does the only mesh dimension take the outermost part of an axis?"""
    return outermost(domain.logical, domain.sharding[0][1]) is not None
