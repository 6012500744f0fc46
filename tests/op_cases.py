"""Cases of single ops on random shapes, types and values: how a fusion says the op, and torch's answers.

``run_case`` runs one by shardfuse, unsharded and on two ranks that are threads, and compares every element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fusion_check import bound_piece, local_piece
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from pointwise_references import REFERENCES
from torch_answers import RUNS, Expected, compare, expected_of, moved_operands, widened

import shardfuse
from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh, FusionDefinition, ParallelType
from shardfuse.executor.options import Backend
from shardfuse.ops.table import POINTWISE, PointwiseOp

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
FLOATS = DTYPES[:4]

DETERMINISTIC = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


Place = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class OpCase:
    """``build(ops, inputs)`` on tensors like ``values``.

    roundings: how many each element may be off, beside twice what torch's own is off there, and of float64, where that
    cannot be seen, as far as the result moves when operands move by a rounding (see ``Expected.slack``); 0 for torch's
    own bits, None for ops that are compared by ``compare``, as whole fusions are.
    terms: of a result that is a difference, how large its terms are: it may be off by as many of their roundings.
    signed: has a zero the sign that torch gives it?
    """

    build: Callable[[Any, list[Any]], Any]
    values: list[torch.Tensor]
    expected: list[Expected]
    roundings: int | None = None
    terms: torch.Tensor | None = None
    signed: bool = True

    def define(self, backend: Backend) -> FusionDefinition:
        with FusionDefinition(backend=backend) as fd:
            found = self.build(fd.ops, [fd.from_pytorch(v) for v in self.values])
            for out in found if isinstance(found, tuple) else (found,):
                fd.add_output(out)
        return fd

    def compare(self, found: Sequence[torch.Tensor], places: Sequence[Place] | None = None) -> None:
        """``places`` cuts this rank's piece of each output; left out, the whole is here."""
        for k, (out, want) in enumerate(zip(found, self.expected, strict=True)):
            place = places[k] if places is not None else lambda x: x
            if self.roundings is None:
                compare(f"output {k}", out, want, place)
                continue
            eager, wide = place(want.eager), place(want.wide)
            assert eager is not None
            assert wide is not None
            if self.roundings == 0:  # torch's own bits, or those of float64 where it has other ones
                wide = torch.where(out.to(wide.dtype) == wide, wide, eager.to(wide.dtype))
            slack = (lambda w=want, p=place: p(w.slack())) if out.dtype in (torch.float64, torch.complex128) else None
            terms = None if self.terms is None else place(self.terms)
            assert_near(
                out, wide, eager, n=self.roundings, rows=None, terms=terms, slack=slack, signed=self.signed,
                what=f"of {self.values}",
            )  # fmt: skip


def called(
    build: Callable[[Any, list[Any]], Any], reference: Callable[..., Any], values: Sequence[torch.Tensor]
) -> OpCase:
    """The case of an op that torch has as ``reference``, called with the values as they are and in float64."""
    return OpCase(build, list(values), expected_of(reference, *values))


class Draw:
    """What a case is made of, drawn by hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def shape(self, low: int, high: int, *sizes: int) -> list[int]:
        """Between ``low`` and ``high`` dims."""
        return [self.pick(*(sizes or (1, 2, 3, 4, 6, 7))) for _ in range(self.integer(low, high))]

    def subset(self, count: int) -> list[int]:
        """Some of ``count`` axes, one at least."""
        return sorted(self.draw(st.sets(st.integers(0, count - 1), min_size=1)))

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.integer(0, 1 << 20))

    def tensor(self, shape: Sequence[int], *dtypes: torch.dtype) -> torch.Tensor:
        """Small numbers, most of them no integers."""
        dtype = self.pick(*(dtypes or (*FLOATS[:3], torch.int64)))
        x = torch.randn(tuple(shape), generator=self.generator(), dtype=torch.float64) * 3
        return x.to(dtype) if dtype.is_floating_point else x.abs().round().to(dtype)

    def distinct(self, shape: Sequence[int], *dtypes: torch.dtype) -> torch.Tensor:
        """No number twice, so that an order is the only one."""
        count = torch.Size(shape).numel()
        order = torch.randperm(count, generator=self.generator()).reshape(tuple(shape)) - count // 2
        return order.to(self.pick(*(dtypes or (torch.float64, torch.float32, torch.int64))))

    def index(self, shape: Sequence[int], high: int) -> torch.Tensor:
        dtype = self.pick(torch.int64, torch.int32)
        return torch.randint(0, high, tuple(shape), generator=self.generator()).to(dtype)


# --- pointwise ops, by the table ---------------------------------------------------------------------------

_SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, float("inf"), float("-inf"), float("nan"), 1e-6, 60.0, -60.0, 300.0)
_NOT_ZERO = (
    "trunc_div", "floor_div", "fmod", "remainder", "bitwise_left_shift", "bitwise_right_shift",
    "logical_right_shift", "pow",
)  # fmt: skip
"""Divided by zero and shifted too far, integers have no answer of torch's that is the same everywhere."""


def answer(name: str, values: Sequence[torch.Tensor]) -> Expected | None:
    """Torch's own result and the one in float64; None where torch has no such function for the type."""
    reference = REFERENCES[name]
    if reference.kind == "complex" and values[0].dtype.itemsize < 4:
        return None  # complex numbers of two half floats are none of shardfuse's types
    eager = [v.bool() for v in values] if reference.kind == "logical" else list(values)
    if reference.kind == "float":
        eager = [v if v.is_floating_point() else v.float() for v in values]
    try:
        reference.call(*values)
        return Expected(
            reference.call(*eager),
            reference.call(*(widened(v) for v in eager)),
            lambda: [reference.call(*moved_operands(eager, run)) for run in range(RUNS)],
        )
    except (RuntimeError, TypeError):  # torch's refusals; `test_torch_has_the_types_that_are_said` counts them
        return None


def _operand(op: PointwiseOp, k: int, shape: Sequence[int], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Special values and random ones."""
    if dtype is torch.bool or (REFERENCES[op.name].kind == "where" and k == 0):
        return torch.rand(tuple(shape), generator=g) < 0.5
    if dtype.is_floating_point:
        at = torch.randint(0, len(_SPECIAL), tuple(shape), generator=g)
        special = torch.tensor(_SPECIAL, dtype=torch.float64)[at]
        normal = torch.randn(tuple(shape), generator=g, dtype=torch.float64) * 2
        return torch.where(torch.rand(tuple(shape), generator=g) < 0.7, special, normal).to(dtype)
    x = torch.randint(0 if dtype is torch.uint8 else -9, 10, tuple(shape), generator=g).to(dtype)
    return x.clamp(min=1) if k and op.name in _NOT_ZERO else x


def dtypes_of(op: PointwiseOp) -> list[torch.dtype]:
    """The types that torch has ``op`` for."""
    g = torch.Generator()
    return [t for t in DTYPES if answer(op.name, [_operand(op, k, (1,), t, g) for k in range(op.arity)]) is not None]


def _terms_of_gelu_slope(x: torch.Tensor) -> torch.Tensor:
    """cdf(x) + x pdf(x), of which near -0.75 little is left of each."""
    return torch.special.ndtr(x.double())


_TERMS = {"gelu_slope": _terms_of_gelu_slope}
_SIGNED_BY_CHANCE = ("gelu",)
"""Torch's float32 GELU of -0.0 is 0.0 in vectors of CPUs without AVX-512, and -0.0 of a few elements."""


@st.composite
def pointwise(draw: st.DrawFn, name: str, roundings: int) -> OpCase:
    """``name`` on operands that are broadcast with each other."""
    op, d = POINTWISE[name], Draw(draw)
    dtype, g = d.pick(*dtypes_of(op)), d.generator()
    shape = d.shape(0, 3, 1, 2, 3, 4, 5, 8, 97)
    whole = d.integer(0, op.arity - 1)
    values: list[torch.Tensor] = []
    for k in range(op.arity):
        kept = shape if k == whole or not shape else shape[d.integer(0, len(shape)) :]
        values.append(_operand(op, k, [n if k == whole or d.pick(True, True, False) else 1 for n in kept], dtype, g))
    expected = answer(name, values)
    assert expected is not None
    return OpCase(
        lambda ops, t: getattr(ops, name)(*t),
        values,
        [expected],
        0 if op.exact else roundings,
        _TERMS[name](*values) if name in _TERMS else None,
        name not in _SIGNED_BY_CHANCE,
    )


# --- running a case ----------------------------------------------------------------------------------------


def run_case(case: OpCase, backend: Backend, placement: int) -> None:
    """Unsharded, and with one axis of one input over two ranks; ``placement`` chooses it, uneven ones too."""
    case.compare(case.define(backend).execute(case.values))
    places = [(k, d) for k, v in enumerate(case.values) for d, n in enumerate(v.shape) if n > 1]
    if places:
        which, dim = places[placement % len(places)]
        shardfuse.simulate(lambda: _run_sharded(case, backend, which, dim), 2)


def _run_sharded(case: OpCase, backend: Backend, which: int, dim: int) -> None:
    rank = shardfuse.initialize().rank
    fd = case.define(backend)
    inputs = fd.fusion.inputs
    tv = inputs[which].val
    tv.set_device_mesh(DeviceMesh([0, 1]))
    tv.outer_split(dim, 2, uneven=True)
    tv.axis(dim).parallelize(ParallelType.mesh_x)
    fd.fec  # noqa: B018 closes the definition: the others get their sharding
    pieces = [local_piece(i.val, v, rank) for i, v in zip(inputs, case.values, strict=True)]
    sizes = {i.val: tuple(v.shape) for i, v in zip(inputs, case.values, strict=True)}
    found = fd.execute(pieces, sizes=sizes)
    plan = fd.fec.last_plan
    assert plan is not None

    case.compare(found, [lambda x, d=t.domain: bound_piece(d, x, rank) for t in plan.fusion.outputs])
