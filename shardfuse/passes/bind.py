"""bind: a recorded fusion and sizes become Exprs over tensors whose axes are digits.

before::

    T0 = fd.define_tensor(shape=[-1, 4], dtype=DataType.Float, is_cpu=False)
    T1 = fd.define_tensor(shape=[4], dtype=DataType.Float, is_cpu=False)
    T2 = fd.ops.add(T0, T1)
    fd.add_output(T2)

after, for T0 of [8, 4]::

    inputs: T0[i0, i1]:Float, T1[i1]:Float
    T2[i0, i1]:Float = add(T0, T1)
    outputs: T2

An op's output reuses its inputs' axes.  Where an op makes two different axes meet, one side's free roots are rewritten
in digits of the other; where neither may be, and where an output would hold one index twice (``x[:, None] + x``), an
operand is read through a ``relabel``, the same storage under fresh roots, which is a segment edge.  So is a tensor
whose recorded splits do not fit the digits that it would have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import cast

from ..errors import PromiseError, ShapeError
from ..ir.base_op import numbers
from ..ir.call import Call
from ..ir.caller_lines import lines_named
from ..ir.digits import (
    Axis,
    CutError,
    Digit,
    Root,
    axis_of,
    extent,
    parted,
    root_of,
    roots_of_parts,
    substitute,
    unify,
    varies,
)
from ..ir.domain import BoundDomain
from ..ir.expr import BoundFusion, BoundTensor, Expr, Value
from ..ir.fusion import Fusion, Record, Val
from ..ir.op import (
    Full,
    HostOp,
    Iota,
    Op,
    Pointwise,
    Random,
    Relabel,
    RngOffset,
    RngSeed,
    SizeOf,
    Squeeze,
)
from ..ir.scalar import Number, Scalar
from ..ir.tensor_view import TensorView
from ..ops.call_extents import check_fits
from ..ops.torch_calls import TORCH_CALLS
from .aliases import settle_aliases
from .axes_of_one import axes_of_one, check_chosen, check_sizes, check_steps
from .recorded_domains import bound_domain, check_mesh_has, check_strides_say, fits, streams_of
from .scalar_values import HostScalars
from .shared_axes import axes_of_inputs, breadth, check_alike, extents_differ, holding_again


def bind(
    fusion: Fusion, sizes: Mapping[TensorView, Sequence[int]], numbers: Mapping[Scalar, Number] | None = None
) -> BoundFusion:
    """``sizes``: the unsharded shape of every input; an extent may be 0.  ``numbers``: the scalar inputs
    that shapes depend on.

    Raises ``ShapeError`` where operands do not fit, ``ShardingError`` where a recorded split does not fit the sizes,
    ``ScheduleError`` where an input or output of logical rank is to be stored as no strides say, or an axis is parallel
    on a mesh dimension that its tensor has not.
    """
    return _Binder(fusion, sizes, numbers or {}).run()


class _Binder:
    def __init__(
        self, fusion: Fusion, sizes: Mapping[TensorView, Sequence[int]], numbers: Mapping[Scalar, Number]
    ) -> None:
        self.fusion = fusion
        self.sizes = sizes
        self.tensors: dict[TensorView, BoundTensor] = {}
        self.views: dict[BoundTensor, TensorView] = {}
        self.scalars = HostScalars(numbers, fusion.held)
        self.live: list[BoundTensor] = []
        self.domains: dict[BoundDomain, BoundDomain] = {}
        self.exprs: list[Expr] = []
        self.roots = 0
        said = [n for i in fusion.inputs if isinstance(i.val, TensorView) for n in i.val.shape]
        self.is_open = any(n < 0 for n in said)
        """Are there extents that the definition does not say?  Where it says all, those of another may differ."""
        self.batches_of_one: set[Digit] = set()
        """Of axes whose extent the definition does not say, and that have one element: each may be a batch of one."""

    def run(self) -> BoundFusion:
        inputs: list[Value] = []
        for declared in self.fusion.inputs:
            if isinstance(declared.val, Scalar):
                inputs.append(declared.val)
            else:
                inputs.append(self.define(declared.val, self.fresh_for(declared.val, self.sizes[declared.val])))
        for record in self.fusion.records:
            with lines_named(self.fusion, record.outputs[0]):
                try:
                    self.bind_record(record)
                except ShapeError as error:
                    operands = [self.tensors[v] for v in record.inputs if isinstance(v, TensorView)]
                    given = {v.name: self.tensors[v] for v in self.sizes}
                    error.of_inputs = axes_of_inputs(error, operands, given)
                    raise
        for tv, tensor in self.tensors.items():
            check_mesh_has(tv)
            if tv.domain.mesh is not None or tv.domain.allocation is not None or tv.allocation_rank:
                tensor.domain = bound_domain(tv, tensor)
        settle_aliases(self.fusion, self.tensors)
        for tv in (*(i.val for i in self.fusion.inputs), *self.fusion.outputs):
            if isinstance(tv, TensorView):
                check_strides_say(tv, self.tensors[tv].domain)
        for declared in self.fusion.inputs:
            if isinstance(declared.val, TensorView) and declared.stride_order:
                tensor = self.tensors[declared.val]
                tensor.domain = replace(tensor.domain, dim_order=declared.dim_order)
        outputs = [self.tensors[tv] for tv in self.fusion.outputs]
        aliases = {self.tensors[out]: self.tensors[source] for out, source in self.fusion.aliases.items()}
        streams = [(tensor, stream) for tv, tensor in self.tensors.items() for stream in streams_of(tv, tensor)]
        left, promises = self.scalars.left, self.fusion.promises
        return BoundFusion(inputs, outputs, self.exprs, left, aliases, streams, promises=promises)

    # axes

    def fresh(self, n: int, singles: int = 0, *, said: int | Scalar = -1) -> Axis:
        """said: the extent as the definition has it, which every call has; -1 where it does not say it."""
        self.roots += 1
        invariant = self.fusion.promises.invariant
        is_said = isinstance(said, int) and said >= 0
        varies = not is_said or (said != 1 and (self.fusion.promises.ranks or not self.is_open))
        return axis_of(Root(f"i{self.roots - 1}", n, invariant, bool(invariant) and varies), singles)

    def fresh_for(self, tv: TensorView, shape: Sequence[int]) -> list[Axis]:
        """A fresh axis for each extent, with the single elements of it that ranks share out.

        A batch of one row is such an element too where its rows are promised the bits that they have among others.
        """
        singles = list(tv.domain.shared_singles(shape))
        if self.fusion.promises.invariant:
            own = [n == 1 and said < 0 for n, said in zip(shape, tv.shape, strict=True)]
            singles = [max(k, int(is_row)) for k, is_row in zip(singles, own, strict=True)]
            axes = [self.fresh(n, k, said=said) for n, k, said in zip(shape, singles, tv.shape, strict=True)]
            self.batches_of_one.update(d for axis, is_row in zip(axes, own, strict=True) if is_row for d in axis)
            return axes
        return [self.fresh(n, k) for n, k in zip(shape, singles, strict=True)]

    def define(self, tv: TensorView, axes: Sequence[Axis]) -> BoundTensor:
        tensor = BoundTensor(tv.name, tv.dtype, self.domain_of(axes))
        self.tensors[tv] = tensor
        self.views[tensor] = tv
        self.live.append(tensor)
        return tensor

    def domain_of(self, axes: Sequence[Axis]) -> BoundDomain:
        """One object for all tensors of these axes: what is asked of domains is then asked of few."""
        domain = BoundDomain(tuple(axes))
        return self.domains.setdefault(domain, domain)

    def value(self, val: Val) -> Value:
        return self.tensors[val] if isinstance(val, TensorView) else self.scalars.value(val)

    def meet_all(
        self,
        op: str,
        operands: list[BoundTensor],
        columns: Mapping[str, Sequence[tuple[int, int]]],
        apart: Collection[str] = (),
        contracted: Collection[str] = (),
    ) -> dict[str, Axis]:
        """The axis of each column of places; may replace operands by relabels, so that no index comes twice.

        ``apart``: columns that never stand in one tensor with another.  ``contracted``: of one extent in all operands,
        on every rank.
        """
        for _ in range(len(columns) + 1):
            self.meet_until_stable(op, operands, columns, contracted)
            found = {
                name: max((operands[j].domain.logical[at] for j, at in places), key=breadth, default=())
                for name, places in columns.items()
            }
            again = holding_again({n: a for n, a in found.items() if n not in apart}, operands, columns)
            if not again:
                return found
            for k in again:
                operands[k] = self.relabel(operands[k])
        raise AssertionError(f"{op} of {operands} holds an index twice")

    def meet_until_stable(
        self, op: str, operands: list[BoundTensor], columns: Mapping[str, Sequence[tuple[int, int]]],
        contracted: Collection[str],
    ) -> None:  # fmt: skip
        """Make the axes of each column one axis, again and again until no operand is relabelled.

        That has no end where two operands have one index along different columns, as ``x`` and ``x[:, None]`` in
        ``where(x > 0, x[:, None], x[:, None] + x)``: then all operands are relabelled, so that none shares an index.
        """
        for are_apart in (False, True):
            if are_apart:
                operands[:] = map(self.relabel, operands)
            for _ in range(2 * len(operands) + 1):
                before = list(operands)
                for name, places in columns.items():
                    self.meet(op, operands, places, is_contracted=name in contracted)
                if before == operands:
                    return
        raise AssertionError(f"{op} of {operands} has axes that no relabelling makes one")

    def meet(
        self, op: str, operands: list[BoundTensor], places: Sequence[tuple[int, int]], *, is_contracted: bool = False
    ) -> Axis:
        """Make the axes at ``places`` (operand, axis) one axis and return it.  May replace operands by relabels."""
        breadths = [breadth(operands[k].domain.logical[at]) for k, at in places]
        # An element that ranks share out is whole on each of them, to be repeated, or to meet one that is whole.
        if 1 in breadths and (2 in breadths or (is_contracted and 0 in breadths)):
            for (k, at), own in zip(places, breadths, strict=True):
                operands[k] = self.relabel(operands[k], repeated=at) if own == 1 else operands[k]
        seen = [(k, at) for k, at in places if operands[k].domain.logical[at]]
        if not seen:
            return ()
        first, at = seen[0]
        for k, other in seen[1:]:
            a, b = operands[first].domain.logical[at], operands[k].domain.logical[other]
            if a == b:
                continue
            if extent(a) != extent(b):
                advice = "equal extents, or 1", "broadcast one of them, or correct the sizes"
                raise extents_differ(op, operands, (first, at), (k, other), *advice)
            # What meets a batch is one too: where it has a single row, that is repeated.
            both = [two for two in ((a, b), (b, a)) if varies(two[0]) or not varies(two[1])]
            if not any(self.rewrite(*two, cut=cut) for cut in (False, True) for two in both):
                operands[k] = self.relabel(operands[k])
                assert self.rewrite(a, operands[k].domain.logical[other]), "a fresh axis can always be rewritten"
        return operands[first].domain.logical[at]

    def rewrite(self, a: Axis, b: Axis, *, cut: bool = False) -> bool:
        """Rewrite the roots of ``b`` in digits of ``a`` in every tensor, if that can be.

        ``cut``: roots of which a reshape put only a part in ``b`` are roots of their parts from there on.  Two tensors
        that were reshaped alike meet so, axis by axis: ``i1/512`` is ``i0/512``, what is left of ``i1`` ``i0%512``.
        """
        wanted = {root_of(d) for d in b}
        alike = dict.fromkeys(t.domain for t in self.live)
        domains = {d: None for d in alike if any(root_of(digit) in wanted for axis in d.logical for digit in axis)}
        touched = [t for t in self.live if t.domain in domains]
        try:
            parts = roots_of_parts(b, a, self.fresh) if cut else {}
            cut_up = {d: tuple(substitute(axis, parts) for axis in d.logical) for d in domains}
            rewritten = unify(a, substitute(b, parts), cut_up.values())
            made = {d: self.domain_of([substitute(axis, rewritten) for axis in cut_up[d]]) for d in domains}
        except CutError:
            return False
        for tensor in touched:
            tv, domain = self.views.get(tensor), tensor.domain
            if tv is not None and fits(tv, domain.logical) and not fits(tv, made[domain].logical):
                return False
        for tensor in touched:
            tensor.domain = made[tensor.domain]
        return True

    def relabel(self, tensor: BoundTensor, repeated: int | None = None) -> BoundTensor:
        """``repeated``: an axis of one element that is a broadcast axis from here on."""
        axes = self.fresh_like(axis if k != repeated else () for k, axis in enumerate(tensor.domain.logical))
        out = self.unnamed(f"{tensor.name}r{len(self.exprs)}", tensor, axes)
        self.exprs.append(Expr(Relabel(), (tensor,), (out,)))
        return out

    def unnamed(self, name: str, like: BoundTensor | TensorView, axes: Sequence[Axis]) -> BoundTensor:
        """A tensor that the definition does not have."""
        tensor = BoundTensor(name, like.dtype, self.domain_of(axes))
        self.live.append(tensor)
        return tensor

    def fresh_like(self, axes: Iterable[Axis]) -> list[Axis]:
        found: list[Axis] = []
        for axis in axes:
            n = extent(axis)
            found.append(self.fresh(n, len(parted(axis)[1]), said=-1 if varies(axis) else n))
        return found

    # records

    def bind_record(self, record: Record) -> None:
        if isinstance(record.op, SizeOf):
            self.bind_size(record.op, record)
            return
        values = [self.value(v) for v in record.inputs]
        out = record.outputs[0]
        if isinstance(out, Scalar):
            assert isinstance(record.op, HostOp), f"{record.op} makes no number"
            self.scalars.compute(record.op, cast(list[Scalar], values), out)
            return
        assert not isinstance(record.op, RngSeed | RngOffset), f"{record.op} makes a number"
        op = record.op.with_numbers(self.scalars.number)
        match op:
            case Pointwise():
                axes = [self.pointwise_axes(op.name, values)]
            case Call():
                check_chosen(op, cast("list[BoundTensor]", values))
                axes = self.call_axes(op, values)
            case Full() | Iota() | Random():
                check_steps(op)
                said = cast(Full | Iota | Random, record.op).shape
                sizes = check_sizes(op.name, numbers(op.shape))
                axes = [[self.fresh(n, said=own) for n, own in zip(sizes, said, strict=True)]]
            case _:
                if isinstance(op, Squeeze):
                    self.check_squeezed(op, cast(BoundTensor, values[0]))
                op, own = axes_of_one(op, cast(BoundTensor, values[0]), self.fresh, record.op)
                axes = [own]
        self.record_outputs(op, values, cast(tuple[TensorView, ...], record.outputs), axes)

    def check_squeezed(self, op: Squeeze, x: BoundTensor) -> None:
        """Raise PromiseError for an axis that may be a batch, which has one element in this call alone."""
        if any(d in self.batches_of_one for k in op.axes for d in x.domain.logical[k]):
            found = (
                f"{x} has an axis of one element that is squeezed, and that may be a batch, as its extent is not said"
            )
            raise PromiseError(str(self.fusion.promises), found, "declare the axis as 1")

    def record_outputs(
        self, op: Op, values: list[Value], outputs: Sequence[TensorView], axes: Sequence[Sequence[Axis]]
    ) -> None:
        """An output whose recorded splits its axes do not allow is the same storage under fresh roots."""
        made: list[BoundTensor] = []
        relabels: list[Expr] = []
        for out, own in zip(outputs, axes, strict=True):
            if fits(out, own):
                made.append(self.define(out, own))
                continue
            made.append(self.unnamed(f"{out.name}u", out, own))
            under = self.fresh_for(out, [extent(axis) for axis in own])
            relabels.append(Expr(Relabel(), (made[-1],), (self.define(out, under),)))
        self.exprs += [Expr(op, tuple(values), tuple(made)), *relabels]

    def bind_size(self, op: SizeOf, record: Record) -> None:
        tensor = self.tensors[cast(TensorView, record.inputs[0])]
        out = cast(Scalar, record.outputs[0])
        n = prod(extent(tensor.domain.logical[d]) for d in op.dims)
        self.scalars.define(out, n)

    def pointwise_axes(self, op: str, values: list[Value]) -> list[Axis]:
        where = [k for k, v in enumerate(values) if isinstance(v, BoundTensor)]
        operands = [cast(BoundTensor, values[k]) for k in where]
        ndim = max((t.ndim for t in operands), default=0)
        columns = {
            str(at): [(k, at - ndim + t.ndim) for k, t in enumerate(operands) if at - ndim + t.ndim >= 0]
            for at in range(ndim)
        }
        found = self.meet_all(op, operands, columns)
        for k, t in zip(where, operands, strict=True):
            values[k] = t
        return list(found.values())

    def call_axes(self, op: Call, values: list[Value]) -> list[list[Axis]]:
        where = [k for k, v in enumerate(values) if isinstance(v, BoundTensor)]
        operands = [cast(BoundTensor, values[k]) for k in where]
        shapes = [[extent(a) for a in t.domain.logical] for t in operands]
        signature = TORCH_CALLS[op.name].signature(shapes, op)
        places: dict[str, list[tuple[int, int]]] = {}
        for k, names in enumerate(signature.inputs):
            for at, name in enumerate(names):
                places.setdefault(name, []).append((k, at))
        check_alike(op.name, operands, [places[name] for name in signature.alike if name in places])
        check_fits(op.name, shapes, signature.fits, lambda k: str(operands[k]))
        # What no output has, and may not be sharded, is never walked with the other axes: the parts of a cat.
        kept = [name for names in signature.outputs for name in names]
        apart = [name for name in places if name.endswith("*") and name not in kept]
        contracted = [name for name in places if name not in kept]
        found = self.meet_all(op.name, operands, places, apart, contracted)
        for k, t in zip(where, operands, strict=True):
            values[k] = t
        for name in (name for names in signature.outputs for name in names if name not in found):
            n = signature.extents[name]
            if n < 0:
                raise ShapeError(
                    op.name, f"an axis of {n} in the result of {operands}", "0 or more", "correct the sizes"
                )
            found[name] = self.fresh(n)
        return [[found[name] for name in names] for names in signature.outputs]
