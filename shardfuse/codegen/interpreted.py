"""CUDA's math library under Triton's interpreter, which has none of it: torch's functions on its arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch


def _erfcinv(x: torch.Tensor) -> torch.Tensor:
    return torch.erfinv(1 - x)


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "atan2": torch.atan2,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "erfcinv": _erfcinv,
    "lgamma": torch.lgamma,
    "hypot": torch.hypot,
    "pow": torch.pow,
    "fmod": torch.fmod,
    "mul_rn": torch.mul,
    "copysign": torch.copysign,
    "nextafter": torch.nextafter,
    "trunc": torch.trunc,
    "nearbyint": torch.round,
}


class Libdevice:
    """``libdevice.<name>(...)`` as generated kernels call it."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _FUNCTIONS[name]
        return lambda *operands: _apply(function, operands)


def _apply(function: Callable[..., torch.Tensor], operands: tuple[Any, ...]) -> Any:
    """A block of the interpreter from blocks and Python numbers."""
    tl = cast(Any, importlib.import_module("triton.language"))
    interpreter = cast(Any, importlib.import_module("triton.runtime.interpreter"))
    model = next(x for x in operands if isinstance(x, tl.tensor))
    arrays = [torch.as_tensor(x.handle.data if isinstance(x, tl.tensor) else x) for x in operands]
    dtype = arrays[operands.index(model)].dtype
    found = function(*(a.to(dtype) for a in arrays)).numpy()
    is_block = found.ndim and any(x.type.is_block() for x in operands if isinstance(x, tl.tensor))
    kind = tl.block_type(model.dtype, list(found.shape)) if is_block else model.dtype
    return tl.tensor(interpreter.TensorHandle(found, model.dtype), kind)


libdevice = Libdevice()
