"""One way to compare a fusion with torch: the same ops on unsharded tensors, eager and in float64, on every rank.

Nothing here uses shardfuse's passes, digits or evaluator: ops are torch's own calls with torch's own promotion, and a
rank's piece is found element by element from the splits and merges that the definition recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardfuse import FusionDefinition
from shardfuse.ir.digits import Axis, Digit
from shardfuse.ir.domain import BoundDomain, IterDomain, Merge, TensorDomain
from shardfuse.ir.expr import Number, Scalar
from shardfuse.ir.fusion import Fusion, Record
from shardfuse.ir.tensor_view import TensorView
from shardfuse.mesh import current_rank
from shardfuse.ops.table import POINTWISE, Rule
from shardfuse.ops.torch_calls import TORCH_CALLS

Argument = torch.Tensor | Number
Reference = Callable[..., torch.Tensor | Sequence[torch.Tensor]]

ROUNDINGS = 64
"""How many units in the last place of the largest element an element may be off, beside what eager torch is off."""


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
        expected = [Expected(e.eager, v.to(e.wide.dtype)) for e, v in zip(expected, given, strict=True)]
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


# --- torch's answer ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """``eager``: what torch gives in the declared types; ``wide``: the same in float64 (complex128)."""

    eager: torch.Tensor
    wide: torch.Tensor


def widened(value: Any) -> Any:
    """A float or complex tensor in its category's widest type; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


Pair = tuple[Any, Any]


def evaluate(fusion: Fusion, inputs: Sequence[Argument]) -> list[Expected]:
    """Every output of a definition by torch, op by op, without any sharding."""
    env: dict[object, Pair] = {}
    for declared, value in zip(fusion.inputs, inputs, strict=True):
        env[declared.val] = value, widened(value)
    for record in fusion.records:
        pairs = [env[v] if v in env else (cast("Scalar", v).value,) * 2 for v in record.inputs]
        out = record.outputs[0]
        if isinstance(out, Scalar):
            env[out] = (_host(record, [p[0] for p in pairs]),) * 2
        elif record.op in POINTWISE:
            env[out] = _pointwise(record, pairs)
        else:
            shape = _shape(record, env)
            eager = _apply(record, [p[0] for p in pairs], shape, out.dtype.torch)
            env[out] = eager, _apply(record, [p[1] for p in pairs], shape, widened(eager).dtype)
    return [Expected(*env[tv]) for tv in fusion.outputs]


def _host(record: Record, values: Sequence[Any]) -> Number:
    """A number worked out before anything runs: Python's integers and floats."""
    if record.op == "size":
        return math.prod(values[0].shape[d] for d in cast("tuple[int, ...]", record.attributes["dims"]))
    if record.op == "cast":
        return torch.tensor(values[0]).to(record.outputs[0].dtype.torch).item()
    wide = [torch.tensor(v, dtype=torch.float64) if isinstance(v, float) else torch.tensor(v) for v in values]
    if POINTWISE[record.op].rule is Rule.FLOAT:
        wide = [v if v.is_complex() else v.double() for v in wide]
    return POINTWISE[record.op].torch(*wide).item()


def _pointwise(record: Record, pairs: Sequence[Pair]) -> Pair:
    op = POINTWISE[record.op]
    eager = op.torch(*_operands(record, [p[0] for p in pairs]))
    wide = [p[1] for p in pairs]
    if op.rule in (Rule.FLOAT, Rule.PROMOTE, Rule.WHERE) and (eager.is_floating_point() or eager.is_complex()):
        start = 1 if op.rule is Rule.WHERE else 0
        target = widened(eager).dtype
        wide[start:] = [torch.as_tensor(v).to(target) for v in wide[start:]]
    return eager, op.torch(*_operands(record, wide))


def _operands(record: Record, values: Sequence[Any]) -> list[Any]:
    """Python numbers as tensors of the type that torch promotes them to: most of its functions take tensors only."""
    if all(isinstance(v, torch.Tensor) for v in values):
        return list(values)
    if record.op == "where":
        return [torch.as_tensor(values[0]), *_promoted(values[1:])]
    return _promoted(values)


def _promoted(values: Sequence[Any]) -> list[torch.Tensor]:
    def strength(v: Any) -> int:
        return 2 if not isinstance(v, torch.Tensor) else 1 if v.ndim == 0 else 0

    ranked = sorted(values, key=strength)
    common = ranked[0]
    for v in ranked[1:]:
        dtype = torch.result_type(common, v)
        common = torch.empty((1,) if strength(common) == 0 else (), dtype=dtype)
    dtype = common.dtype if isinstance(common, torch.Tensor) else torch.as_tensor(common).dtype
    return [torch.as_tensor(v, dtype=dtype) for v in values]


def _shape(record: Record, env: Mapping[object, Pair]) -> list[int]:
    """The shape argument of a record that has one, host scalars filled in."""
    asked = cast("Sequence[int | Scalar]", record.attributes.get("shape", ()))
    return [
        int(env[n][0]) if isinstance(n, Scalar) and n in env else int(cast("Any", getattr(n, "value", n)))
        for n in asked
    ]


def _apply(record: Record, values: Sequence[Any], shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Any record but a pointwise one."""
    at = record.attributes
    axes = cast("tuple[int, ...]", at.get("axes", ()))
    x = values[0] if values else None
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "cast": lambda: x.to(dtype),
        "set": lambda: x.clone(),
        "sum": lambda: x.sum(axes, dtype=dtype),
        "prod": lambda: _one_by_one(lambda t, k: t.prod(k, dtype=dtype), x, axes),
        "max": lambda: x.amax(axes),
        "min": lambda: x.amin(axes),
        "any": lambda: _one_by_one(lambda t, k: t.any(k), x.bool(), axes),
        "all": lambda: _one_by_one(lambda t, k: t.all(k), x.bool(), axes),
        "broadcast": lambda: _unsqueezed(x, cast("tuple[bool, ...]", at["new"])),
        "expand": lambda: x.expand(shape),
        "squeeze": lambda: x.squeeze(axes),
        "permute": lambda: x.permute(cast("tuple[int, ...]", at["dims"])),
        "reshape": lambda: x.reshape(shape),
        "full": lambda: torch.full(shape, x, dtype=dtype),
        "iota": lambda: torch.arange(shape[0]).mul(cast("int", at["step"])).add(cast("int", at["start"])).to(dtype),
        "matmul": lambda: torch.matmul(*values),
        "linear": lambda: torch.nn.functional.linear(*values),
    }
    return calls[record.op]() if record.op in calls else _call(record, values)


def _call(record: Record, values: Sequence[Any]) -> torch.Tensor:
    """One function of torch's, of one output."""
    result = TORCH_CALLS[record.op].evaluate(values, record.attributes)
    assert isinstance(result, torch.Tensor), f"{record.op} has several outputs"
    return result


def _one_by_one(
    reduce: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor, axes: Sequence[int]
) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = reduce(x, axis)
    return x


def _unsqueezed(x: torch.Tensor, new: Sequence[bool]) -> torch.Tensor:
    for k, flag in enumerate(new):
        x = x.unsqueeze(k) if flag else x
    return x


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


# --- comparison --------------------------------------------------------------------------------------------


def compare(
    name: str,
    found: torch.Tensor | None,
    expected: Expected,
    place: Callable[[torch.Tensor], torch.Tensor | None] = lambda x: x,
) -> None:
    """``found`` is this rank's piece (``place`` cuts it) of what torch gives.

    Integers and booleans are equal; floats are as near to float64 as eager torch is, give or take roundings.
    """
    eager, wide = place(expected.eager), place(expected.wide)
    if eager is None or wide is None:
        assert found is None, f"{name}: a rank outside of the mesh was given {found}"
        return
    assert found is not None, f"{name}: nothing came, expected {list(eager.shape)}"
    assert found.dtype == eager.dtype, f"{name}: {found.dtype}, torch has {eager.dtype}"
    assert found.shape == eager.shape, f"{name}: {list(found.shape)}, torch has {list(eager.shape)}"
    if not (eager.is_floating_point() or eager.is_complex()):
        torch.testing.assert_close(found, eager, rtol=0, atol=0, msg=lambda m: f"{name}: {m}")
        return
    whole, exact = expected.eager.to(expected.wide.dtype), expected.wide
    finite = torch.isfinite(whole) & torch.isfinite(exact)
    off = (whole - exact)[finite].abs().max().item() if finite.any() else 0.0
    scale = exact[finite].abs().max().item() if finite.any() else 0.0
    tolerance = 8 * off + ROUNDINGS * torch.finfo(eager.dtype).eps * scale
    want = torch.where(torch.isfinite(eager), wide, eager.to(wide.dtype))
    torch.testing.assert_close(
        found.to(want.dtype), want, rtol=0, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )
