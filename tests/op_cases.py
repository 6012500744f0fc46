"""Operands for every pointwise op, and torch's answer: in the operands' type, and in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfuse.ops.table import POINTWISE, PointwiseOp, Rule

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip

_SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, float("inf"), float("-inf"), float("nan"), 1e-6, 60.0, -60.0, 300.0)


def operands(op: PointwiseOp, dtype: torch.dtype) -> list[torch.Tensor]:
    """One tensor for each operand: every pair of special values, and random ones."""
    generator = torch.Generator().manual_seed(len(op.name))
    count = len(_SPECIAL) ** 2 + 64
    out: list[torch.Tensor] = []
    for k in range(op.arity):
        if dtype is torch.bool or (op.rule is Rule.WHERE and k == 0):
            out.append(torch.rand(count, generator=generator) < 0.5)
        elif dtype.is_floating_point:
            special = torch.tensor(_SPECIAL, dtype=torch.float64)
            pairs = special.repeat(len(_SPECIAL)) if k == 0 else special.repeat_interleave(len(_SPECIAL))
            out.append(torch.cat([pairs, torch.randn(64, generator=generator, dtype=torch.float64) * 2]).to(dtype))
        else:
            low = 0 if dtype is torch.uint8 else -9
            x = torch.randint(low, 10, (count,), generator=generator).to(dtype)
            # divided by zero and shifted too far, integers have no answer of torch's that is the same everywhere
            out.append(x.clamp(min=1) if k and _INTEGER_DIVISION.get(op.name) else x)
    return out


_INTEGER_DIVISION = dict.fromkeys(
    ("trunc_div", "floor_div", "mod", "fmod", "remainder", "bitwise_left_shift", "bitwise_right_shift",
     "logical_right_shift", "pow"), True,
)  # fmt: skip


def answers(op: PointwiseOp, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Torch's own result and the one in float64; None where torch has no such function for the type."""
    if op.rule is Rule.COMPLEX and values[0].dtype.itemsize < 4:
        return None  # complex numbers of two half floats are none of shardfuse's types
    eager = wide = [v.bool() for v in values] if op.rule is Rule.LOGICAL else list(values)
    if op.rule is Rule.FLOAT:
        eager = [v if v.is_floating_point() else v.float() for v in values]
    wide = [v.double() if v.is_floating_point() else v for v in eager]
    try:
        op.torch(*values)
        return op.torch(*eager), op.torch(*wide)
    except (RuntimeError, TypeError):
        return None


def cases() -> list[tuple[str, torch.dtype]]:
    """Every op with every type that torch has it for."""
    return [
        (name, dtype)
        for name, op in POINTWISE.items()
        for dtype in DTYPES
        if answers(op, [v[:1] for v in operands(op, dtype)]) is not None
    ]


def assert_answer(found: torch.Tensor, op: PointwiseOp, values: Sequence[torch.Tensor], roundings: int) -> None:
    """``found`` has torch's type; integers are equal, floats as near to float64 as torch's and a few roundings."""
    answer = answers(op, values)
    assert answer is not None
    eager, wide = answer
    assert found.dtype == eager.dtype, f"{op.name}: {found.dtype}, torch has {eager.dtype}"
    if not (eager.is_floating_point() or eager.is_complex()):
        assert torch.equal(found, eager), f"{op.name}: {found} where torch has {eager}"
        return
    if op.exact:
        roundings = 0
    mine, theirs = found.to(wide.dtype), eager.to(wide.dtype)
    same = (mine == wide) | (mine == theirs) | (torch.isnan(mine) & (torch.isnan(wide) | torch.isnan(theirs)))
    bound = roundings * torch.finfo(eager.dtype).eps * wide.abs() + (0 if op.exact else 4) * (theirs - wide).abs()
    bad = ~same & ~((mine - wide).abs() <= bound + (0 if op.exact else torch.finfo(eager.dtype).tiny))
    if bad.any():
        k = int(bad.nonzero()[0])
        raise AssertionError(
            f"{op.name} of {[v[k].item() for v in values]} is {found[k].item()}, torch has {eager[k].item()} "
            f"({wide[k].item()} in float64)"
        )
