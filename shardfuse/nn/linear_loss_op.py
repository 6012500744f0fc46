"""The loss of a linear layer in training as an op of torch.library, for torch.compile.

    shardfuse::linear_cross_entropy_v1(Tensor x, Tensor weight, Tensor target, Tensor? bias, str settings, SymInt rows,
                                       ScalarType dtype, bool is_mean, bool[] wanted) -> Tensor[]

x: [rows, features], target: [rows].  The first result is the loss; the others are what its backward reads: of a mean
the number of targets, and the gradients of the sum by x, weight and bias as far as ``wanted``.  ``settings`` is the
text of a ``LossAndGradient``; ``rows`` of a chunk are multiplied in ``dtype``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from ..errors import SecondDerivativeError
from .inductor_fallback import with_fallback
from .library import module_of, name_family
from .linear_loss_call import note_call
from .linear_loss_gradients import Chunks, LossAndGradient, wide_of

_NAME = "linear_cross_entropy_v1"
_library: Any = Library("shardfuse", "FRAGMENT")
_torch_library: Any = torch.library


def _forward(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, settings: str, rows: int, dtype: torch.dtype,
    is_mean: bool, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    loss = cast("LossAndGradient", module_of(LossAndGradient.family, settings))
    note_call(loss, x.shape[0], rows, "mean" if is_mean else "sum", has_bias=bias is not None)
    with torch.no_grad():
        made, count, sums = Chunks(loss, rows, dtype, is_mean).sums(x, weight, target, bias, wanted)
    return [t for t in (made, count, *sums) if t is not None]


def _fake(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, settings: str, rows: int, dtype: torch.dtype,
    is_mean: bool, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    wide = wide_of(dtype)
    made = [x.new_empty((), dtype=torch.promote_types(dtype, torch.float32))]
    made += [x.new_empty((), dtype=torch.int64)] if is_mean else []
    likes = zip((x, weight, bias), (dtype, wide, wide), wanted, strict=True)
    return [*made, *(t.new_empty(t.shape, dtype=d) for t, d, is_wanted in likes if is_wanted and t is not None)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    """``setup_context`` of the forward."""
    x, weight, _, bias, *_, ctx.is_mean, ctx.wanted = inputs
    ctx.dtypes = [t.dtype for t, is_wanted in zip((x, weight, bias), ctx.wanted, strict=True) if is_wanted]
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    if any(g is not None for g in gradients[1:]):  # of the gradients that the op made
        raise SecondDerivativeError(f"shardfuse::{_NAME}")
    sums: list[Tensor] = list(ctx.saved_tensors)
    factor = cast("Tensor", gradients[0])
    if ctx.is_mean:
        factor = factor / sums.pop(0).clamp(min=1)  # with no target all sums are 0
    # A factor with dims is not rounded to the type of the sums.
    made = [(s * factor.view((1,) * s.ndim)).to(d) for s, d in zip(sums, ctx.dtypes, strict=True)]
    found = iter(made)
    of_x, of_weight, of_bias = (next(found) if is_wanted else None for is_wanted in ctx.wanted)
    return of_x, of_weight, None, of_bias, None, None, None, None, None


name_family(LossAndGradient)
_library.define(
    f"{_NAME}(Tensor x, Tensor weight, Tensor target, Tensor? bias, str settings, SymInt rows, ScalarType dtype, "
    "bool is_mean, bool[] wanted) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _device in ("CPU", "CUDA"):
    _library.impl(_NAME, _forward, _device)
    _library.impl(_NAME, fallthrough_kernel, f"Autocast{_device}")
_torch_library.register_fake(f"shardfuse::{_NAME}", with_fallback(_NAME, _fake), lib=_library)
_torch_library.register_autograd(f"shardfuse::{_NAME}", _backward, setup_context=_keep, lib=_library)
linear_loss_op: Any = getattr(torch.ops.shardfuse, _NAME).default
