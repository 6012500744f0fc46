"""CUDA's math library under Triton's interpreter, which has none of it: torch's functions on its arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch

from ..ops.table import erfcinv


def _in_float64(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Where torch's float32, computed in vectors, overflows on the way, as CUDA's does not."""
    return lambda x: function(x.double()).to(x.dtype)


def _fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Exact, as C's and CUDA's; torch's vectors give NaN where the quotient overflows."""
    numpy = cast(Any, importlib.import_module("numpy"))
    return torch.as_tensor(numpy.fmod(a.numpy(), b.numpy()), device="cpu")


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "sinh": _in_float64(torch.sinh),
    "cosh": _in_float64(torch.cosh),
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
    "erfcinv": erfcinv,
    "lgamma": torch.lgamma,
    "hypot": torch.hypot,
    "pow": torch.pow,
    "fmod": _fmod,
    "mul_rn": torch.mul,
    "copysign": torch.copysign,
    "nextafter": torch.nextafter,
    "trunc": torch.trunc,
    "nearbyint": torch.round,
}


class Libdevice:
    """``libdevice.<name>(...)`` as generated kernels call it."""

    @staticmethod
    def float64(value: float) -> Any:
        """An argument of a kernel, which the interpreter hands over as Python's float; -0.0 stays what it is."""
        tl, interpreter = _modules()
        array = torch.tensor([value], dtype=torch.float64, device="cpu").numpy()
        return tl.tensor(interpreter.TensorHandle(array, tl.float64), tl.float64)

    @staticmethod
    def int1(value: Any) -> Any:
        """Is the one value not zero?  The interpreter's own comparisons keep the type of what was compared."""
        tl, interpreter = _modules()
        return tl.tensor(interpreter.TensorHandle(value.handle.data != 0, tl.int1), tl.int1)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _FUNCTIONS[name]
        return lambda *operands: _apply(function, operands)


def _apply(function: Callable[..., torch.Tensor], operands: tuple[Any, ...]) -> Any:
    """A block of the interpreter from blocks and Python numbers."""
    tl, interpreter = _modules()
    model = next(x for x in operands if isinstance(x, tl.tensor))
    arrays = [torch.as_tensor(x.handle.data if isinstance(x, tl.tensor) else x, device="cpu") for x in operands]
    dtype = arrays[operands.index(model)].dtype
    found = function(*(a.to(dtype) for a in arrays)).numpy()
    is_block = found.ndim and any(x.type.is_block() for x in operands if isinstance(x, tl.tensor))
    kind = tl.block_type(model.dtype, list(found.shape)) if is_block else model.dtype
    return tl.tensor(interpreter.TensorHandle(found, model.dtype), kind)


def _modules() -> tuple[Any, Any]:
    """``triton.language`` and the interpreter, which are imported once a kernel runs."""
    names = ("triton.language", "triton.runtime.interpreter")
    language, interpreter = (cast(Any, importlib.import_module(name)) for name in names)
    return language, interpreter


def index_by_arrays() -> None:
    """Have the interpreter take its arrays of one element as bounds of loops, whatever Triton and NumPy are installed.

    Triton 3.6 calls ``int`` on them, which NumPy 2.4 and later do for arrays without dims alone.
    """
    _, interpreter = _modules()
    patch = interpreter._patch_lang_tensor
    if patch.__module__ == __name__:
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: value.handle.data.item())  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]

    interpreter._patch_lang_tensor = patched


libdevice = Libdevice()
