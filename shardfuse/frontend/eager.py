"""A fusion by torch, op by op, on unsharded tensors: what its kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..executor.binding import Argument
from ..executor.host_scalars import host_values
from ..ir.domain import BoundDomain
from ..ir.expr import BoundTensor
from ..ir.fusion import Fusion
from ..ir.scalar import Number, Scalar
from ..ir.tensor_view import TensorView
from ..ops.evaluate import evaluate_all
from ..passes.bind import bind


def evaluate_eager(fusion: Fusion, inputs: Sequence[Argument], device: torch.device) -> list[torch.Tensor]:
    """The outputs that ``execute`` returns, in order; random numbers from the generator as it stands."""
    given = dict(zip((i.val for i in fusion.inputs), inputs, strict=True))
    sizes = {v: tuple(x.shape) for v, x in given.items() if isinstance(v, TensorView) and isinstance(x, torch.Tensor)}
    numbers = {v: x for v, x in given.items() if isinstance(v, Scalar) and not isinstance(x, torch.Tensor)}
    shapes = fusion.shape_scalars()
    bound = bind(fusion, sizes, {s: numbers[s] for s in shapes})
    env: dict[BoundTensor, torch.Tensor] = {}
    values: dict[Scalar, Number] = {}
    for value, x in zip(bound.inputs, inputs, strict=True):
        if isinstance(value, BoundTensor) and isinstance(x, torch.Tensor):
            env[value] = x.to(device)
        elif isinstance(value, Scalar) and not isinstance(x, torch.Tensor):
            values[value] = x
    for tensor in bound.tensors():
        tensor.domain = BoundDomain(tensor.domain.logical)
    values.update(host_values(bound, values, device))
    for expr in bound.exprs:
        env.update(zip(expr.outputs, evaluate_all(expr, env, values, 0, device), strict=True))
    return [env[t] for t in bound.outputs if t not in bound.aliases]
