"""Every pointwise op on zeros of both signs, infinities, NaN, extremes and ties: torch's values, NaN and signs.

Unary ops get each value, binary ones each pair, others a sample of tuples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from fusion_check import widened
from op_cases import FLOATS, answer, dtypes_of
from pointwise_references import REFERENCES

from shardfuse import DataType, FusionDefinition
from shardfuse.executor.options import Backend
from shardfuse.ops.table import POINTWISE, PointwiseOp, Rule

_TUPLES = 600
_FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 20.5, -20.5, 88.8, -88.8, 104.0, -104.0, 1e30, -1e30,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
_DIVISIONS = ("trunc_div", "floor_div", "fmod", "remainder")
SIGN_OF_ZERO = ("maximum", "minimum", "relu")
"""Of two zeros of different signs torch's CPU and GPU choose differently (docs/ops.md says so)."""
KEEP_DENORMALS = ("log", "log2", "log10", "pow", "fmod", "remainder", "atan2", "lgamma", "erfcinv", "nextafter")
"""Ops whose result is another one altogether where a denormal is taken for 0: on a GPU too they take it as it is."""
_FLUSHED = {"silu": 128}
"""In units of float32's smallest normal number, what may be 0: silu is x times a sigmoid that is one such number."""
ROUGH = {"lgamma": 64, "digamma": 64, "erfinv": 64, "erfcinv": 64, "pow": 32}
"""Roundings that are more than 16: torch's own functions differ by as much between a CPU and a GPU."""


def special_values(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        found = [0, 1, 2, 3, 7, info.max, info.max - 1, info.min, info.min + 1]
        return torch.tensor([*found, *((-1, -2, -7) if info.min else ())], dtype=dtype)
    info = torch.finfo(dtype)
    own = [info.smallest_normal, info.smallest_normal * info.eps, info.max]
    return torch.tensor([*_FLOATS, *own, *(-v for v in own)], dtype=torch.float64).to(dtype)


def operands(op: PointwiseOp, dtype: torch.dtype) -> list[torch.Tensor]:
    """A vector for each operand."""
    values = special_values(dtype)
    columns = [values] * op.arity
    if op.rule is Rule.WHERE:
        columns[0] = torch.tensor([False, True])
    if op.arity < 3:
        indices = torch.cartesian_prod(*(torch.arange(len(c)) for c in columns)).reshape(-1, op.arity)
        found = [c[k] for c, k in zip(columns, indices.unbind(1), strict=True)]
    else:
        g = torch.Generator().manual_seed(0)
        found = [c[torch.randint(0, len(c), (_TUPLES,), generator=g)] for c in columns]
    found = [x.reshape(-1).contiguous() for x in found]
    if op.name in _DIVISIONS and not dtype.is_floating_point and dtype is not torch.bool:
        # a division by 0 is an error on a CPU, and the smallest by -1 is no number of the type
        kept = (found[1] != 0) & ~((found[1] == -1) & (found[0] == torch.iinfo(dtype).min))
        found = [x[kept] for x in found]
    return found


def cases() -> list[tuple[str, torch.dtype]]:
    return [(name, dtype) for name, op in POINTWISE.items() for dtype in dtypes_of(op)]


def check_special(name: str, dtype: torch.dtype, backend: Backend, device: str = "cpu") -> None:
    """One op in one type, against torch on ``device``, in that type and in float32, and in float64."""
    op = POINTWISE[name]
    values = [v.to(device) for v in operands(op, dtype)]
    if backend == "triton" and device == "cpu" and dtype is torch.bfloat16:  # the interpreter reads denormals as 0
        is_denormal = [
            (v != 0) & (v.abs() < torch.finfo(dtype).smallest_normal) for v in values if v.is_floating_point()
        ]
        kept = ~torch.stack(is_denormal).any(0)
        values = [v[kept] for v in values]
    if device == "cuda":
        tiny = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).smallest_normal
        inside = [(v == 0) | ~(v.abs() < tiny) for v in values if v.is_floating_point()]
        if name in KEEP_DENORMALS:  # which the others may take for 0: docs/ops.md
            inside = []
        if name in _OWN_RANGE:
            inside += [(v == 0) | ((v.abs() > 1e-300) & (v.abs() < 1e300)) | ~torch.isfinite(v) for v in values]
        kept = torch.stack(inside).all(0) if inside else torch.ones_like(values[0], dtype=torch.bool)
        values = [v[kept] for v in values]
    expected = answer(name, values)
    if expected is None:
        return
    with FusionDefinition(backend=backend) as fd:
        fd.add_output(getattr(fd.ops, name)(*(fd.from_pytorch(v) for v in values)))
    (found,) = fd.execute(values)
    answers = [expected.eager]
    if dtype.itemsize == 2 and dtype.is_floating_point and op.rule is not Rule.NARROW:
        wider = [v.float() if v.is_floating_point() else v for v in values]
        answers.append(REFERENCES[name].call(*wider).to(expected.eager.dtype))
    if name in _REMAINDERS and dtype.is_floating_point:
        answers.append(_remainder(name, *values))
    if name == "gelu_tanh" and dtype == torch.float64:
        answers.append(_gelu_by_tanh(*values))
    smallest = _FLUSHED.get(name, 1) * torch.finfo(torch.float32).tiny if found.is_floating_point() else 0.0
    assert_special(f"{name} in {dtype}", found, answers, expected.wide, values, roundings=ROUGH.get(name, 16),
                   signs=name not in SIGN_OF_ZERO, smallest=smallest)  # fmt: skip


_REMAINDERS = ("fmod", "remainder")
_OWN_RANGE = ("lerp", "erfcinv")
"""Ops of which torch's own formula on a GPU leaves float64 earlier than the op does."""


def _remainder(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Exact: torch's own, computed in vectors on a CPU, is NaN where the quotient overflows."""
    with np.errstate(all="ignore"):
        rest = torch.from_numpy(np.fmod(a.double().cpu().numpy(), b.double().cpu().numpy())).to(a.device)
    turned = (rest != 0) & ((rest < 0) != (b < 0)) & (name == "remainder")
    return torch.where(turned, rest + b.double(), rest).to(a.dtype)


def _gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    """In 80 bits: torch's own adds 1 to a tanh near -1, and is 30 roundings of float64 off at -3."""
    with np.errstate(all="ignore"):
        wide = x.cpu().numpy().astype(np.longdouble)
        share = 1 / (
            1 + np.exp(-2 * np.sqrt(2 / np.longdouble(math.pi)) * (wide + wide**3 * np.longdouble("0.044715")))
        )
        return torch.from_numpy((wide * share).astype(np.float64)).to(x.device)


def assert_special(
    what: str, found: torch.Tensor, answers: Sequence[torch.Tensor], wide: torch.Tensor,
    values: Sequence[torch.Tensor], *, roundings: int = 0, signs: bool = True, smallest: float = 0.0,
) -> None:  # fmt: skip
    """NaN, infinities and signs of zero as torch has them, other floats within ``roundings`` of float64.

    answers: torch's, of which each element equals one, or float64's, where torch's float32 depends on how many elements
    there are or rounds between.  smallest: what is below may be 0.
    """
    eager = answers[0]
    assert found.dtype == eager.dtype, f"{what}: {found.dtype}, torch has {eager.dtype}"
    assert found.shape == eager.shape, f"{what}: {list(found.shape)}, torch has {list(eager.shape)}"
    if eager.is_complex():
        found, wide, *answers = (torch.view_as_real(t) for t in (found, wide, *answers))
        values = [v[:, None].expand(-1, 2) for v in values]
    if not eager.is_floating_point() and not eager.is_complex():
        bad = found != eager
    else:
        rounded = wide.to(found.dtype)
        accepted = [_accepted(found, t, wide, roundings, signs, smallest) for t in (*answers, rounded)]
        bad = ~torch.stack(accepted).any(0)
    eager = answers[0]
    if bad.any():
        at = bad.nonzero()[:6].tolist()
        lines = [
            f"{[v[k[: v.ndim]].item() for v in values]}: {found[k].item()}, torch {eager[k].item()}"
            for k in map(tuple, at)
        ]
        raise AssertionError(f"{what}: {int(bad.sum())} differ, as {'; '.join(lines)}")


def _accepted(
    found: torch.Tensor, answer: torch.Tensor, wide: torch.Tensor, roundings: int, signs: bool, smallest: float
) -> torch.Tensor:
    info, mine, theirs = torch.finfo(found.dtype), found.double(), answer.double()
    off = torch.where(theirs == wide, 0.0, (theirs - wide).abs())
    bound = roundings * info.eps * wide.abs() + 4 * off + (info.tiny if roundings else 0.0) + smallest
    near = (mine == theirs) | ((mine - wide).abs() <= bound)
    near &= torch.isfinite(mine) == torch.isfinite(theirs)
    near = torch.where(torch.isnan(theirs) | torch.isnan(mine), torch.isnan(theirs) == torch.isnan(mine), near)
    wrong_sign = (mine == 0) & (theirs == 0) & (torch.signbit(mine) != torch.signbit(theirs))
    return near & ~wrong_sign if signs else near


CASTS = [(a, b) for a, b in itertools.product((*FLOATS, torch.int64, torch.bool), repeat=2) if a is not b]


def check_cast(source: torch.dtype, target: torch.dtype, backend: Backend, device: str = "cpu") -> None:
    """Of floats to integers only what the integers hold: of the rest torch's CPU and GPU make different numbers."""
    x = special_values(source).to(device)
    if backend == "triton" and device == "cpu" and source is torch.bfloat16:
        x = x[~((x != 0) & (x.abs() < torch.finfo(source).smallest_normal))]
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
        x = x[x.abs().double() < 2.0**62]
    with FusionDefinition(backend=backend) as fd:
        fd.add_output(fd.ops.cast(fd.from_pytorch(x), DataType.from_torch(target)))
    (found,) = fd.execute([x])
    assert_special(f"{source} to {target}", found, [x.to(target)], widened(x.to(target)), [x])
