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

OWN_BLOCK_TYPE = triton.language.core.block_type.__init__


def quick_parts() -> Iterator[tuple[object, str, object]]:
    """Objects, names of their attributes, and what these are set to."""
    options = interpreter.interpreter_builder.options
    yield interpreter, "_patch_lang", patched_once(interpreter._patch_lang)
    yield interpreter, "_get_np_dtype", looked_up_once(interpreter._get_np_dtype)
    yield interpreter.ReduceOps, "generic_reduce", reduced_by_halves
    yield interpreter, "_patch_attr", patched_directly
    core, semantic = triton.language.core, triton.language.semantic.TritonSemantic
    yield core.tensor, "__init__", with_shapes_made_once
    yield core.block_type, "__init__", with_sides_made_once
    yield core, "_unwrap_if_constexpr", unwrapped_by_type(core._unwrap_if_constexpr)
    yield core.tuple, "__eq__", equal_to_itself(core.tuple.__eq__)
    for kind in (core.dtype, core.pointer_type, core.block_type):
        yield kind, "__eq__", same_or_equal(kind.__eq__)
    yield semantic, "broadcast_impl_value", left_where_alike(semantic.broadcast_impl_value)
    yield semantic, "computation_type_impl", computed_with_once(semantic.computation_type_impl)
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


@cache
def _sides(sides: tuple[int, ...]) -> tuple[Any, int]:
    """Of a type of blocks: its sides, of which there is one object, and their product, as Triton finds them."""
    core = triton.language.core
    of_any_element = core.block_type.__new__(core.block_type)
    OWN_BLOCK_TYPE(of_any_element, core.float32, list(sides))
    return of_any_element.shape, of_any_element.numel


@cache
def _name(element: str, sides: tuple[int, ...]) -> str:
    return f"<{_sides(sides)[0]}, {element}>"


def with_sides_made_once(self: Any, element_ty: Any, shape: Any) -> None:
    """Makes a type of blocks as its own constructor does, which every operation that broadcasts calls twice."""
    core = triton.language.core
    assert isinstance(shape, list | core.tuple)
    sides = tuple([core._unwrap_if_constexpr(side) for side in shape])
    if not all(type(side) is int for side in sides):  # another number may be equal, and is refused
        OWN_BLOCK_TYPE(self, element_ty, shape)
        return
    self.element_ty, self.name = element_ty, _name(element_ty.name, sides)
    self.shape, self.numel = _sides(sides)


def unwrapped_by_type(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The value of a constant, or what is none; most are numbers, of which Triton asks three times what they are."""
    constant = triton.language.core.constexpr

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        if kind is int:
            return o
        return o.value if kind is constant else unwrap(o)

    return unwrapped


def equal_to_itself(equal: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Whether tuples are equal, which are most often the sides of one shape."""
    yes = triton.language.core.constexpr(True)
    return lambda self, other: yes if other is self else equal(self, other)


def same_or_equal(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Whether types are equal: there is one object of nearly every type."""
    return lambda self, other: other is self or equal(self, other)


def left_where_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Both operands with the sides of the wider one; most have the same sides already."""

    def made(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape is other.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return made


def computed_with_once(found: Callable[..., Any]) -> Callable[..., Any]:
    """The type that operands of two types, which a name tells apart, are converted to."""
    known: dict[object, Any] = {}

    def computed_with(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = found(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return computed_with


def patched_directly(obj: object, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Sets a function of Triton's language to one that computes, as Triton does, with two calls fewer each time."""
    semantic, inner = interpreter.TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def computed(*arguments: Any, _semantic: object = None, **named: Any) -> Any:
        return inner(*arguments, **named, _semantic=semantic)

    scope.set_attr(obj, name, computed)


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
