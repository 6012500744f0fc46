"""One way to compare a fusion with torch: the same ops on unsharded tensors, eager and in float64, on every rank.

Nothing here uses shardfuse's passes, digits or evaluator: ops are torch's own calls with torch's own promotion, and a
rank's piece is found element by element from the splits and merges that the definition recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch_answers import Argument, Expected, compare, evaluate, widened

from shardfuse import FusionDefinition
from shardfuse.ir.digits import Axis, Digit
from shardfuse.ir.domain import BoundDomain, IterDomain, Merge, TensorDomain
from shardfuse.ir.fusion import Fusion
from shardfuse.ir.tensor_view import TensorView
from shardfuse.mesh import current_rank

Reference = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


def check(
    fd: FusionDefinition,
    inputs: Sequence[Argument],
    *,
    reference: Reference | None = None,
    sizes: Mapping[TensorView, Sequence[int]] | None = None,
    expected: Sequence[Expected] | None = None,
    device: torch.device | str = "cpu",
) -> list[torch.Tensor | None]:
    """Run ``fd`` on this rank's pieces of the unsharded ``inputs`` and compare every output with torch.

    reference: torch's own way to compute the outputs, called with the inputs in float64; left out, the definition's ops
    one by one.  expected: what ``evaluate`` gave, where several ranks share it.  device: where the pieces are put.
    Returns what ``fd.execute`` gave.
    """
    rank = current_rank()
    fd.fec  # noqa: B018 closes the definition: inputs about which nothing was said get their sharding
    arguments = [v.to(device) if isinstance(v, torch.Tensor) else v for v in local_arguments(fd.fusion, inputs, rank)]
    found = cast("list[torch.Tensor | None]", fd.execute(arguments, sizes=sizes))
    expected = evaluate(fd.fusion, inputs) if expected is None else expected
    if reference is not None:
        values = reference(*(widened(v) for v in inputs))
        given = [values] if isinstance(values, torch.Tensor) else list(values)
        assert len(given) == len(expected), f"the reference gives {len(given)} outputs, the fusion {len(expected)}"
        expected = [
            Expected(e.eager, v.to(e.wide.dtype), e.moved, e.signed) for e, v in zip(expected, given, strict=True)
        ]
    plan = fd.fec.last_plan
    assert plan is not None
    assert len(found) == len(expected)
    for tv, bound, value, want in zip(fd.fusion.outputs, plan.fusion.outputs, found, expected, strict=True):
        said = tv.domain.mesh is not None or tv.allocation_rank
        place: Callable[[torch.Tensor], torch.Tensor | None] = (
            (lambda x, tv=tv: local_piece(tv, x, rank)) if said else (lambda x, b=bound: bound_piece(b.domain, x, rank))
        )
        compare(tv.name, None if value is None else value.cpu(), want, place)
    return found


def local_arguments(fusion: Fusion, inputs: Sequence[Argument], rank: int) -> list[Argument]:
    """What ``rank`` hands to ``execute``; a rank outside of an input's mesh hands over the first rank's piece."""
    out: list[Argument] = []
    for declared, value in zip(fusion.inputs, inputs, strict=True):
        if not isinstance(declared.val, TensorView):
            out.append(value)
            continue
        assert isinstance(value, torch.Tensor)
        piece = local_piece(declared.val, value, rank)
        mesh = declared.val.domain.mesh
        if piece is None:
            assert mesh is not None
            piece = local_piece(declared.val, value, mesh.ranks[0])
        assert piece is not None
        out.append(piece)
    return out


# --- a rank's piece ----------------------------------------------------------------------------------------


def local_piece(tv: TensorView, x: torch.Tensor, rank: int) -> torch.Tensor | None:
    """``rank``'s piece of the unsharded ``x`` as the splits and merges of ``tv`` say; None outside of its mesh.

    By allocation rank where the definition has it so.
    """
    domain = tv.domain
    if domain.mesh is not None and rank not in domain.mesh.ranks:
        return None
    index = _indices(domain, x.shape)
    kept = [torch.ones(n, dtype=torch.bool) for n in x.shape]
    for parallel_type, axis in domain.mesh_axes().items():
        assert domain.mesh is not None
        here = index[axis][0] == domain.mesh.index(rank, parallel_type)
        walked = [k for k in range(x.ndim) if here.shape[k] > 1]
        for k in walked or [_outermost(domain, axis)]:
            others = [d for d in range(x.ndim) if d != k]
            along = here.any(dim=others) if others else here
            kept[k] = kept[k] & along if along.numel() == x.shape[k] else kept[k] & along.reshape(())
    if tv.allocation_rank:
        return _stored(domain, x, index, kept)
    for k, flags in enumerate(kept):
        x = x[(slice(None),) * k + (flags,)]
    return x


Index = tuple[torch.Tensor, int]
"""The index along one axis at every element (dims that it does not depend on are 1), and its extent."""


def _indices(domain: TensorDomain, shape: Sequence[int]) -> dict[IterDomain, Index]:
    found: dict[IterDomain, Index] = {}
    for k, (axis, n) in enumerate(zip(domain.logical, shape, strict=True)):
        found[axis] = torch.arange(n).reshape([n if d == k else 1 for d in range(len(shape))]), n
    for t in domain.transforms:
        if isinstance(t, Merge):
            (a, n), (b, m) = (found[axis] for axis in t.axes)
            found[t.out] = a * m + b, n * m
        else:
            index, n = found[t.axis]
            inner = max(t.factor if t.inner else -(-n // t.factor), 1)
            found[t.out[0]] = index // inner, -(-n // inner)
            found[t.out[1]] = index % inner, inner
    return found


def _outermost(domain: TensorDomain, axis: IterDomain) -> int:
    """The logical axis that holds ``axis``, where no element tells (an extent of 1)."""
    for t in reversed(domain.transforms):
        if axis in ((t.out,) if isinstance(t, Merge) else t.out):
            axis = t.axes[0] if isinstance(t, Merge) else t.axis
    return domain.logical.index(axis)


def _stored(
    domain: TensorDomain, x: torch.Tensor, index: Mapping[IterDomain, Index], kept: Sequence[torch.Tensor]
) -> torch.Tensor:
    """One dim for each allocation axis, 1 for one on the mesh."""
    order = domain.allocation or domain.loop
    on_mesh = list(domain.mesh_axes().values())
    rank_of = torch.zeros((), dtype=torch.int64)
    for axis in order:
        if axis not in on_mesh:
            rank_of = rank_of * index[axis][1] + index[axis][0]
    rank_of = rank_of.expand(x.shape)
    for k, flags in enumerate(kept):
        at = (slice(None),) * k + (flags,)
        x, rank_of = x[at], rank_of[at]
    shape = [int(bool(kept[_outermost(domain, a)].any())) if a in on_mesh else _count(*index[a], kept) for a in order]
    return x.reshape(-1)[rank_of.reshape(-1).argsort()].reshape(shape)


def _count(index: torch.Tensor, whole: int, kept: Sequence[torch.Tensor]) -> int:
    """How many values an axis takes on a rank; one of a single value is never cut."""
    if whole == 1:
        return 1
    for k, flags in enumerate(kept):
        if index.shape[k] == len(flags):
            index = index[(slice(None),) * k + (flags,)]
    return len(index.unique())


def bound_piece(domain: BoundDomain, x: torch.Tensor, rank: int) -> torch.Tensor | None:
    """As ``local_piece``, for an output whose sharding shardfuse chose."""
    if domain.mesh is None:
        return x
    place = domain.mesh.coordinate(rank)
    if place is None:
        return None
    kept = [torch.arange(n) for n in x.shape]
    for parallel_type, digits in domain.sharding:
        at = place[domain.mesh.mesh_dim(parallel_type)]
        for d in reversed(digits):
            at, value = divmod(at, d.extent) if d is not digits[0] else (0, at)
            k, along = next(
                (k, index) for k, axis in enumerate(domain.logical) if (index := _along(axis, d, kept[k])) is not None
            )
            kept[k] = kept[k][along == value]
    for k, indices in enumerate(kept):
        x = x.index_select(k, indices.to(x.device))
    return x


def _along(axis: Axis, digit: Digit, index: torch.Tensor) -> torch.Tensor | None:
    """The value of ``digit`` at each of these indices along ``axis``; None where the axis does not hold it."""
    if isinstance(digit.base, Digit):
        base = _along(axis, digit.base, index)
        return None if base is None else base // digit.weight % digit.extent
    below = 1
    for k, d in reversed(list(enumerate(axis))):
        if d == digit or (d.base == digit.base and d.weight <= digit.weight < d.weight * d.extent):
            value = index // below if k == 0 else index // below % d.extent
            return value // (digit.weight // d.weight) % digit.extent
        below *= d.extent
    return None
