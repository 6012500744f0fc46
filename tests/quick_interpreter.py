"""Triton's interpreter without what it does again and again.  Imported once it is settled that kernels are so run.

What kernels compute stays as it is, but for the order in which a reduction combines elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import triton.language
from triton.runtime import interpreter


def quick_parts() -> Iterator[tuple[object, str, object]]:
    """Objects, names of their attributes, and what these are set to."""
    options = interpreter.interpreter_builder.options
    yield interpreter, "_patch_lang", patched_once(interpreter._patch_lang)
    yield interpreter, "_get_np_dtype", looked_up_once(interpreter._get_np_dtype)
    yield interpreter.ReduceOps, "generic_reduce", reduced_by_halves
    yield triton.language.core.tensor, "__init__", with_shapes_made_once
    # It computes whether integers overflow by five operations of 64 bits, and only while debugging looks at the answer.
    sanitized = replace(options, sanitize_overflow=options.sanitize_overflow and options.debug)
    yield interpreter.interpreter_builder, "options", sanitized


class _NothingChanged:
    def restore(self) -> None: ...


def patched_once(patch: Callable[[Any], object]) -> Callable[[Any], object]:
    """What makes Triton's language an interpreted one, as it is done for a launch.

    Triton does it for each call of a function within a kernel again, where it changes nothing: 0.4 of all time.
    """
    language = triton.language
    is_builtin = language.core.is_builtin

    def patched(function: Any) -> object:
        seen = [m for m in function.__globals__.values() if m is language or m is language.core]
        is_done = seen and not any(is_builtin(m.load) for m in seen)
        return _NothingChanged() if is_done else patch(function)

    return patched


def looked_up_once(numpy_type: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """NumPy's type for one of Triton's, for which Triton makes a table of all of them in each call."""
    of_scalars = cache(numpy_type)
    pointer = triton.language.pointer_type

    def found(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        return numpy_type(scalar) if isinstance(scalar, pointer) else of_scalars(scalar)  # pointers have no hash

    return found


@cache
def _shape(sides: tuple[int, ...]) -> tuple[Any, Any]:
    """Of a block: its number of elements and its sides, as Triton has them."""
    core = triton.language.core
    return core.constexpr(prod(sides)), core.tuple([core.constexpr(n) for n in sides])


def with_shapes_made_once(self: Any, handle: object, type: Any) -> None:
    """Makes a tensor of Triton's as its own constructor does, which every operation calls."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(type.shape if type.is_block() else ())


def reduced_by_halves(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """What ``ReduceOps.generic_reduce`` makes of the tensors ``given``, each element combined with its neighbour.

    Triton combines what it has with one element after the other, in Python: 0.6 of all time, and no two parts of many
    elements ever meet.  On a GPU they do, as here.
    """
    tensors, axis = self.unravel(given, self.axis)
    parts = [np.moveaxis(t.handle.data, axis, 0) for t in tensors]
    while len(parts[0]) > 1:  # a power of two
        pairs = [self.to_tensor(p[k::2], t.dtype) for k in (0, 1) for p, t in zip(parts, tensors, strict=True)]
        made = self.combine_fn.fn(*pairs)
        made = made if isinstance(made, tuple) else (made,)
        parts = [m.handle.data.astype(p.dtype) for m, p in zip(made, parts, strict=True)]
    found = [p[0] for p in parts]
    if self.keep_dims:
        ndim = given[0].handle.data.ndim
        found = [f.reshape((1,) * ndim) if self.axis is None else np.expand_dims(f, axis) for f in found]
    return [self.to_tensor(f, t.dtype) for f, t in zip(found, tensors, strict=True)]
