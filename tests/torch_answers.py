"""What torch makes of a program: op by op on unsharded tensors, eager and in float64, and how far roundings move it.

Nothing here uses shardfuse's passes, digits or evaluator: ops are torch's own calls with torch's own promotion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from pointwise_references import REFERENCES

from benchmarks.roundings import EAGER, accumulator, assert_near, spacing
from shardfuse.ir.call import Call
from shardfuse.ir.expr import Expr
from shardfuse.ir.fusion import Fusion, Record
from shardfuse.ir.op import (
    Broadcast,
    Cast,
    Expand,
    Full,
    Iota,
    Permute,
    Pointwise,
    Random,
    Reduce,
    Reshape,
    Set,
    SizeOf,
    Squeeze,
)
from shardfuse.ir.scalar import Number, Scalar
from shardfuse.ops.torch_calls import TORCH_CALLS

Argument = torch.Tensor | Number

ROUNDINGS = 2
"""Of each element: the last op's own, and the one of what it was computed of."""
DOUBLE = 64
"""Roundings of the largest operand or result, of float64: torch's own sums, the reference, are as far off."""
RUNS = 8
"""How often a program is run with its intermediate results moved, where roundings of the result alone do not do."""


@dataclass(frozen=True)
class Expected:
    """``eager``: what torch gives in the declared types; ``wide``: the same in float64 (complex128).

    ``moved`` gives ``wide`` again, some times, with every intermediate result moved by a rounding of its type.
    """

    eager: torch.Tensor
    wide: torch.Tensor
    moved: Callable[[], Sequence[torch.Tensor]] = tuple
    signed: bool = True
    """Has a zero the sign that torch gives it?  Of sums of products it has that of the order of summation."""

    def slack(self) -> torch.Tensor:
        """What each element may be off beside its own roundings.

        Twice the largest error of eager torch's in its row, and as far as the element moves when each intermediate
        result (of a sum: its partial sums) moves by a rounding of its type: another order of summation, or sums of
        each rank's part, do no more than that. Of a sum near 0 this is roundings of its terms. In float64 torch's own
        error cannot be seen: ``DOUBLE`` roundings of the row's largest element stand for it.
        """
        off = [(self.eager.to(self.wide.dtype) - self.wide).abs()]
        off = [torch.where(o.isfinite(), o, 0.0) for o in off]
        off = [EAGER * (o.amax(-1, keepdim=True) if o.ndim and o.numel() else o) for o in off]
        if self.eager.dtype in (torch.float64, torch.complex128) and self.wide.numel():
            size = self.wide.abs().nan_to_num(0, 0, 0)
            off[0] = off[0] + DOUBLE * spacing(size.amax(-1, keepdim=True) if size.ndim else size, torch.float64)
        for other in self.moved():
            apart = (other - self.wide).abs()
            off.append(torch.where(apart.isfinite(), apart, 0.0))
        return off[0] + (torch.stack(off[1:]).amax(0) if len(off) > 1 else 0.0)


def widened(value: Any) -> Any:
    """A float or complex tensor in its category's widest type; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


Pair = tuple[Any, Any]


Move = Callable[[Record | Expr, Sequence[Any], torch.Tensor, torch.Tensor], torch.Tensor]
"""From a record, its operands in float64, its result in its own type and in float64: the latter, moved."""


def evaluate(fusion: Fusion, inputs: Sequence[Argument]) -> list[Expected]:
    """Every output of a definition by torch, op by op, without any sharding."""
    given = {declared.val: value for declared, value in zip(fusion.inputs, inputs, strict=True)}
    return answers(given, fusion.records, fusion.outputs)


def answers(
    given: Mapping[Any, Any], records: Sequence[Record | Expr], outputs: Sequence[Any], rank: int = 0
) -> list[Expected]:
    """What torch makes of ``given`` by ``records``, of a definition or (of local tensors of ``rank``) of a segment."""

    unsigned: set[object] = set()

    def run(move: Move) -> list[Pair]:
        env: dict[object, Pair] = {v: (value, widened(value)) for v, value in given.items()}
        for record in records:
            _run(record, env, move, rank, unsigned)
        return [env[out] for out in outputs]

    @cache
    def moved() -> list[list[Pair]]:
        return [run(_mover(torch.Generator().manual_seed(k))) for k in range(RUNS)]

    return [
        Expected(eager, wide, lambda k=k: [pairs[k][1] for pairs in moved()], outputs[k] not in unsigned)
        for k, (eager, wide) in enumerate(run(lambda record, values, eager, wide: wide))
    ]


def _run(record: Record | Expr, env: dict[object, Pair], move: Move, rank: int, unsigned: set[object]) -> None:
    pairs = [env[v] if v in env else (cast("Scalar", v).value,) * 2 for v in record.inputs]
    out = record.outputs[0]
    if isinstance(out, Scalar):
        env[out] = (_host(cast("Record", record), [p[0] for p in pairs]),) * 2
        return
    if isinstance(record.op, Pointwise):
        eager, wide = _pointwise(record, pairs)
    else:
        shape = _shape(record, env) if isinstance(record, Record) else list(record.output.domain.local_shape(rank))
        eager = _apply(record, [p[0] for p in pairs], shape, out.dtype.torch)
        wide = _apply(record, [p[1] for p in pairs], shape, widened(eager).dtype)
    env[out] = eager, move(record, [p[1] for p in pairs], eager, wide)
    if record.op in PRODUCTS or any(v in unsigned for v in record.inputs):
        unsigned.add(out)


PRODUCTS = (Call("matmul"), Call("linear"))
EXACT = frozenset(
    ("neg", "abs", "relu", "maximum", "minimum", "where", "set", "max", "min", "broadcast", "expand", "squeeze",
     "permute", "reshape", "full", "iota", "slice", "pad", "cat", "flip", "select")
)  # fmt: skip
"""Ops that round nothing."""


def _mover(generator: torch.Generator) -> Move:
    def move(record: Record | Expr, values: Sequence[Any], eager: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        if record.op.name in EXACT or not (eager.is_floating_point() or eager.is_complex()) or not wide.numel():
            return wide
        size = wide.abs()
        if isinstance(record.op, Reduce) and record.op.kind == "sum":
            size = torch.maximum(size, _terms(values[0].abs(), record.op.axes, eager.dtype))
        real = torch.empty(0, dtype=eager.dtype).real.dtype
        step = _signs(wide, generator) * spacing(size, real)
        return torch.where(step.isfinite(), wide + step, wide)

    return move


def _terms(x: torch.Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """How large the partial sums of magnitudes ``x`` are: of terms of either sign about the root of their squares.

    Of float64 it is the sum of the magnitudes, since torch's own sum, which it is compared with, is as far off.
    """
    return x.sum(axes) if dtype in (torch.float64, torch.complex128) else x.square().sum(axes).sqrt()


def _host(record: Record, values: Sequence[Any]) -> Number:
    """A number worked out before anything runs: Python's integers and floats."""
    if isinstance(record.op, SizeOf):
        return math.prod(values[0].shape[d] for d in record.op.dims)
    if isinstance(record.op, Cast):
        return torch.tensor(values[0]).to(record.outputs[0].dtype.torch).item()
    wide = [torch.tensor(v, dtype=torch.float64) if isinstance(v, float) else torch.tensor(v) for v in values]
    if REFERENCES[record.op.name].kind == "float":
        wide = [v if v.is_complex() else v.double() for v in wide]
    return REFERENCES[record.op.name].call(*wide).item()


def _pointwise(record: Record | Expr, pairs: Sequence[Pair]) -> Pair:
    op = REFERENCES[record.op.name]
    eager = op.call(*_operands(record, [p[0] for p in pairs]))
    wide = [p[1] for p in pairs]
    if op.kind in ("float", "same", "where") and (eager.is_floating_point() or eager.is_complex()):
        start = 1 if op.kind == "where" else 0
        target = widened(eager).dtype
        wide[start:] = [torch.as_tensor(v).to(target) for v in wide[start:]]
    return eager, op.call(*_operands(record, wide))


def _operands(record: Record | Expr, values: Sequence[Any]) -> list[Any]:
    """Python numbers as tensors of the type that torch promotes them to: most of its functions take tensors only."""
    if all(isinstance(v, torch.Tensor) for v in values):
        return list(values)
    if record.op == Pointwise("where"):
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
    asked = record.op.shape if isinstance(record.op, Expand | Reshape | Full | Iota | Random) else ()
    return [
        int(env[n][0]) if isinstance(n, Scalar) and n in env else int(cast("Any", getattr(n, "value", n)))
        for n in asked
    ]


def _apply(record: Record | Expr, values: Sequence[Any], shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Any record but a pointwise one."""
    op, x = record.op, values[0] if values else None
    match op:
        case Cast():
            return x.to(dtype)
        case Set():
            return x.clone()
        case Reduce():
            return _reduced(op, x, dtype)
        case Broadcast():
            return _unsqueezed(x, op.new)
        case Expand():
            return x.expand(shape)
        case Squeeze():
            return x.squeeze(op.axes)
        case Permute():
            return x.permute(op.dims)
        case Reshape():
            return x.reshape(shape)
        case Full():
            return torch.full(shape, x, dtype=dtype)
        case Iota():
            return torch.arange(shape[0]).mul(op.step).add(op.start).to(dtype)
        case Call():
            return _call(op, values)
        case _:
            raise AssertionError(f"torch has no word on {op.name}")


def _reduced(op: Reduce, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    match op.kind:
        case "sum":
            return x.sum(op.axes, dtype=dtype)
        case "prod":
            return _one_by_one(lambda t, k: t.prod(k, dtype=dtype), x, op.axes)
        case "max":
            return x.amax(op.axes)
        case "min":
            return x.amin(op.axes)
        case "any":
            return _one_by_one(lambda t, k: t.any(k), x.bool(), op.axes)
        case "all":
            return _one_by_one(lambda t, k: t.all(k), x.bool(), op.axes)


def _call(op: Call, values: Sequence[Any]) -> torch.Tensor:
    """One function of torch's, of one output."""
    match op.name:
        case "matmul":
            return torch.matmul(*values)
        case "linear":
            return torch.nn.functional.linear(*values)
    result = TORCH_CALLS[op.name].evaluate(values, op)
    assert isinstance(result, torch.Tensor), f"{op.name} has several outputs"
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


# --- torch's own functions ---------------------------------------------------------------------------------


def expected_of(reference: Callable[..., Any], *values: torch.Tensor) -> list[Expected]:
    """What a function of torch's gives of unsharded ``values``, as they are and in float64.

    ``moved`` moves every operand by a rounding of the type in which its sums are accumulated, float32 for 16 bits.
    """

    def answers(given: Sequence[Any]) -> list[torch.Tensor]:
        found = reference(*given)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    @cache
    def moved() -> list[list[torch.Tensor]]:
        runs = [answers(moved_operands(values, run)) for run in range(RUNS)]
        if any(isinstance(v, torch.Tensor) and v.dtype is torch.float64 for v in values):
            runs.append([_as_torch_in_double(values, x) for x in wide])
        return runs

    eager, wide = answers(values), answers([widened(v) for v in values])
    return [
        Expected(a, b, lambda k=k: [found[k] for found in moved()], signed=False)
        for k, (a, b) in enumerate(zip(eager, wide, strict=True))
    ]


def assert_beside(found: torch.Tensor, eager: torch.Tensor, what: str = "") -> None:
    """``found`` is as eager torch computed it, where nothing in float64 is at hand.

    4 roundings of each element, and 2 of the largest of its row (in float64 ``DOUBLE``): both it and eager torch may be
    off by half of that.
    """
    wide = widened(eager)
    real = eager.abs() if eager.is_complex() else eager

    def slack() -> torch.Tensor:
        size = wide.abs().nan_to_num(0, 0, 0)
        most = size.amax(-1, keepdim=True) if size.ndim and size.numel() else size
        return (DOUBLE if real.dtype is torch.float64 else 2) * spacing(most, real.dtype)

    assert_near(found, wide, eager, n=4, signed=False, slack=slack, what=what)


def assert_like(
    found: Any,
    reference: Callable[..., Any],
    *values: Any,
    place: Place = lambda x: x,
    n: float = ROUNDINGS,
    relative: bool = False,
) -> None:
    """``found``, a tensor or several, is this rank's piece (``place`` cuts it) of what ``reference`` gives."""
    mine = [found] if isinstance(found, torch.Tensor) else list(found)
    for k, (got, want) in enumerate(zip(mine, expected_of(reference, *values), strict=True)):
        compare(f"result {k}", got, want, place, n, relative=relative)


def _as_torch_in_double(values: Sequence[torch.Tensor], wide: torch.Tensor) -> torch.Tensor:
    """``wide`` moved by ``DOUBLE``."""
    finite = [
        v.double().nan_to_num(0, 0, 0).abs().amax() for v in (*values, wide) if v.is_floating_point() and v.numel()
    ]
    return wide + DOUBLE * spacing(torch.stack(finite).amax(), torch.float64) if finite else wide


def moved_operands(values: Sequence[torch.Tensor], run: int) -> list[torch.Tensor]:
    """In float64, each element moved by a rounding of the type in which sums of its own type are accumulated."""
    generator = torch.Generator().manual_seed(run)
    return [
        moved_by_a_rounding(widened(v), accumulator(v.dtype), generator)
        if isinstance(v, torch.Tensor) and v.is_floating_point()
        else widened(v)
        for v in values
    ]


def moved_by_a_rounding(
    wide: torch.Tensor, dtype: torch.dtype, generator: torch.Generator, size: torch.Tensor | None = None
) -> torch.Tensor:
    """Each element up or down by a rounding of ``dtype``, of the magnitude ``size`` where it is given; NaN stays."""
    step = _signs(wide, generator) * spacing(wide if size is None else size, dtype)
    return torch.where(step.isfinite(), wide + step, wide)


def _signs(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """1 or -1 for each element; on a GPU by a generator there, as a CPU's takes seconds for what a GPU holds."""
    if like.device.type != "cpu":
        seed = int(torch.randint(2**62, (), generator=generator))
        generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randint(0, 2, like.shape, generator=generator, device=like.device).mul(2).sub(1)


# --- comparison --------------------------------------------------------------------------------------------


Place = Callable[[torch.Tensor], torch.Tensor | None]
"""Cuts a rank's piece of an unsharded tensor; None where it has none."""


def compare(
    name: str,
    found: torch.Tensor | None,
    expected: Expected,
    place: Place = lambda x: x,
    n: float = ROUNDINGS,
    *,
    relative: bool = False,
) -> None:
    """``found`` is this rank's piece (``place`` cuts it) of what torch gives, by the rule of ``benchmarks.roundings``.

    A row is one of the unsharded tensor: eager torch's largest error in it is allowed on each rank that has a part.
    """
    eager, wide = place(expected.eager), place(expected.wide)
    if eager is None or wide is None:
        assert found is None, f"{name}: a rank outside of the mesh was given {found}"
        return
    assert found is not None, f"{name}: nothing came, expected {list(eager.shape)}"

    def slack() -> torch.Tensor:
        part = place(expected.slack())
        assert part is not None
        return part

    if relative:  # rows are whole here
        assert_near(found, wide, eager, n=n, relative=True, what=name)
        return
    assert_near(found, wide, eager, n=n, rows=None, signed=expected.signed, slack=slack, what=name)
