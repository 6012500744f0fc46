"""How an input of a fusion is declared to have a DTensor's layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, cast

from ..errors import InputError, PlacementError
from ..ir.digits import Root, axis_of
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.fusion import Fusion, FusionInput, Record
from ..ir.op import Cast, Pointwise, Reduce, ReductionKind
from ..ir.tensor_view import TensorView
from ..mesh import DeviceMesh
from ..passes.recorded_domains import bound_domain
from .given import Given
from .pieces import place

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_REDUCTIONS: dict[str, ReductionKind] = {"sum": "sum", "avg": "sum", "max": "max", "min": "min", "product": "prod"}


def take(fusion: Fusion, k: int, given: Given, mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    """Have input ``k`` come as ``given`` says, or check that it does.

    Raises InputError where the definition contradicts it or writes over partial values, PlacementError for partial
    values that no reduction joins.
    """
    declared = fusion.inputs[k]
    tv, partial = declared.val, given.partial
    if not isinstance(tv, TensorView):
        raise InputError(k, tv.name, "a DTensor", f"a {tv.dtype.name} scalar", "pass a Python number")
    _check_summands(k, given)
    whole = (*(mesh.shape[d] for d in partial), *shape)
    if tv.domain.mesh is not None and tv.ndim == len(whole):
        _check(k, tv, given, mesh, whole)
        return
    if partial and tv.ndim == len(shape):
        if tv in fusion.aliases.values():  # each rank would write the whole value where only a part of it belongs
            raise InputError(
                k, tv.name, f"a DTensor of {given.placements}",
                "one without partial values, since an output is written over it",
                "redistribute it first, or leave alias_input out",
            )  # fmt: skip
        tv = _with_partial_values(fusion, k, given, mesh)
    if tv.ndim != len(whole):
        raise InputError(
            k,
            tv.name,
            f"a DTensor of shape {list(shape)}",
            f"a tensor of {tv.ndim} dims",
            "pass one of the declared rank",
        )
    place(tv, mesh, given.partial, given.cuts)


def _check_summands(k: int, given: Given) -> None:
    """Raise PlacementError for what torch does more to than reduce, as to a vocabulary-parallel embedding's result."""
    from torch.distributed.tensor import Partial

    if any(type(given.placements[d]) is not Partial for d in given.partial):
        advice = "redistribute it to Replicate(), or to a Shard, first, since torch masks or changes it as it does so"
        raise PlacementError(f"input {k}", given.placements, "a fusion", advice)


def _check(k: int, tv: TensorView, given: Given, mesh: DeviceMesh, whole: Sequence[int]) -> None:
    """Is the DTensor sharded as the definition says that ``tv`` is?"""
    assert tv.domain.mesh is not None, "only what was said is checked"
    expected = TensorView(tv.name, tv.shape, tv.dtype)
    place(expected, tv.domain.mesh, given.partial, given.cuts)
    singles = map(max, *(t.domain.shared_singles(whole) for t in (tv, expected)))
    axes = tuple(axis_of(Root(f"i{d}", n), k) for (d, n), k in zip(enumerate(whole), singles, strict=True))
    said, comes = (bound_domain(t, BoundTensor(tv.name, tv.dtype, BoundDomain(axes))) for t in (tv, expected))
    is_same_mesh = (mesh.ranks, mesh.shape) == (tv.domain.mesh.ranks, tv.domain.mesh.shape)
    if not is_same_mesh or said.sharding != comes.sharding:
        raise InputError(
            k, tv.name, f"a DTensor of {given.placements} on {mesh}", f"sharded as {tv} on {tv.domain.mesh}",
            "redistribute it, or leave the sharding of this input to the DTensor",
        )  # fmt: skip


def _with_partial_values(fusion: Fusion, k: int, given: Given, mesh: DeviceMesh) -> TensorView:
    """Put an input with one more axis for each partial mesh dimension, and its reduction, in place of input ``k``."""
    declared = fusion.inputs[k]
    tv = cast(TensorView, declared.val)
    extents = [mesh.shape[d] for d in given.partial]
    each = [_reduce_op(given.placements[d]) for d in given.partial]
    ops = set(each)
    if not ops <= set(_REDUCTIONS) or (len(ops) > 1 and ops != {"sum", "avg"}):
        raise PlacementError(
            f"input {k}", given.placements, "a fusion", f"reduce it first, or use one of {', '.join(_REDUCTIONS)}"
        )
    if "avg" in ops and tv.dtype.is_integral:
        found = [f"{placement} of {tv.dtype.name}" for placement in given.placements]
        raise PlacementError(f"input {k}", found, "a fusion", "integers have no average: cast it to floats first")
    n = len(extents)
    stacked = fusion.new_tensor([*extents, *tv.shape], tv.dtype)
    order = (*range(tv.ndim + n - 1, tv.ndim - 1, -1), *declared.stride_order) if declared.stride_order else ()
    fusion.inputs[k] = FusionInput(stacked, (True,) * n + declared.contiguity if declared.contiguity else (), order)
    axes = tuple(range(n))
    if "avg" not in ops:
        fusion.records.insert(0, Record(Reduce(_REDUCTIONS[each[0]], axes), (stacked,), (tv,)))
        return stacked
    averaged = [ranks for ranks, op in zip(extents, each, strict=True) if op == "avg"]
    count = fusion.new_scalar(DataType.Double, float(prod(averaged)), is_literal=True)
    wide = tv.dtype.compute  # what is divided is not rounded: a sum of 16-bit values may be none
    total = fusion.new_tensor(tv.shape, wide)
    mean = tv if wide is tv.dtype else fusion.new_tensor(tv.shape, wide)
    made = [
        Record(Reduce("sum", axes), (stacked,), (total,)),
        Record(Pointwise("div"), (total, count), (mean,)),
    ]
    if mean is not tv:
        made.append(Record(Cast(tv.dtype), (mean,), (tv,)))
    fusion.records[:0] = made
    return stacked


def _reduce_op(placement: Placement) -> str:
    return cast(str, placement.reduce_op)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
