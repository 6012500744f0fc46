"""How an input is declared: contiguity and stride order, said or taken from a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base_error import shown
from ..errors import DefinitionError
from ..ir.dtype import DataType
from ..ir.scalar import Number

Contiguity = bool | Sequence[bool | None] | None


def compute_tensor_descriptor(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[bool | None], list[int]]:
    """``(contiguity, stride_order)`` of a tensor.

    ``stride_order``: for each dim its place in memory, 0 innermost.  ``contiguity`` stands in stride order, outermost
    first: ``None`` for a size of 1 or a stride of 0, else whether the dim follows the next without a gap.
    """
    if len(sizes) != len(strides):
        raise DefinitionError("define_tensor", f"{len(sizes)} sizes and {len(strides)} strides", "as many of both")
    # outermost first by stride; a dim of stride 0 says nothing of its place and keeps its own
    order = sorted((d for d, s in enumerate(strides) if s), key=lambda d: -strides[d])
    for d in (d for d, s in enumerate(strides) if not s):
        order.insert(d, d)
    contiguity: list[bool | None] = []
    expected = 1
    for d in reversed(order):
        if sizes[d] == 1 or strides[d] == 0:
            contiguity.insert(0, None)
            continue
        contiguity.insert(0, strides[d] == expected)
        expected = strides[d] * sizes[d]
    places = [0] * len(sizes)
    for place, d in enumerate(reversed(order)):
        places[d] = place
    return contiguity, places


def like(
    sizes: Sequence[int] | None, strides: Sequence[int] | None, static_sizes: bool
) -> tuple[list[int], list[bool | None], list[int]]:
    """``(shape, contiguity, stride_order)`` for a tensor of these sizes and strides; 0 and 1 are static in any case."""
    if sizes is None or strides is None:
        raise DefinitionError(
            "define_tensor", "sizes without strides" if strides is None else "strides without sizes", "both"
        )
    if min(strides, default=0) < 0:
        raise DefinitionError("define_tensor", f"strides={list(strides)}", "strides of 0 or more, as torch has them")
    contiguity, order = compute_tensor_descriptor(sizes, strides)
    shape = [n if static_sizes or n in (0, 1) else -1 for n in sizes]
    return shape, contiguity, order if order != sorted(order, reverse=True) else []


def checked_layout(
    shape: Sequence[int], contiguity: Contiguity, stride_order: Sequence[int] | None
) -> tuple[tuple[bool | None, ...], tuple[int, ...]]:
    """Contiguity flags (none where nothing is said) and stride order.  Raises ``DefinitionError``."""
    ndim = len(shape)
    for k, n in enumerate(shape):
        if n < -1:
            raise DefinitionError("define_tensor", f"shape[{k}] = {n}", "a size, or -1 where it is symbolic")
    order = tuple(k % ndim if -ndim <= k < ndim else k for k in stride_order or ())
    if order and sorted(order) != list(range(ndim)):
        raise DefinitionError("define_tensor", f"stride_order={stride_order}", f"a permutation of {ndim} places")
    if contiguity is None:
        return (), order
    dims = sorted(range(ndim), key=lambda d: -order[d]) if order else list(range(ndim))
    if isinstance(contiguity, bool):
        return tuple(None if shape[d] == 1 else contiguity for d in dims), order
    if len(contiguity) != ndim:
        raise DefinitionError(
            "define_tensor", f"contiguity={list(contiguity)}", f"{ndim} entries, one for each dim, or a bool"
        )
    for d, flag in zip(dims, contiguity, strict=True):
        if flag is not None and shape[d] == 1:
            raise DefinitionError(
                "define_tensor", f"contiguity {flag} of dim {d}, of size 1", "None, as for every broadcast"
            )
    return tuple(contiguity), order


def check_data_type(method: str, dtype: object) -> None:
    """Raises ``DefinitionError`` for what is no DataType."""
    if not isinstance(dtype, DataType):
        raise DefinitionError(method, f"dtype {dtype!r}", DataType.expected(dtype))


def constant_of(number: Number, dtype: DataType, *, is_said: bool) -> str | None:
    """What a constant of ``dtype`` has to be, where ``number`` is not; floats round.  Else ``None``.

    ``is_said``: by the caller, who else has it by the number, which then goes by all 64 bits.
    """
    if isinstance(number, complex):
        return None if dtype.is_complex else f"a real number, as {dtype.name} has"
    if isinstance(number, int) and not -(2**63) <= number < 2**64:
        return "an integer of 64 bits, or a float"
    if not dtype.is_integral or not is_said:
        return None
    if dtype is DataType.Bool:
        return None if isinstance(number, int) and number in (0, 1) else "True or False"
    limits = torch.iinfo(dtype.torch)
    if isinstance(number, int) and limits.min <= number <= limits.max:
        return None
    return f"an integer from {limits.min} to {limits.max}, for {dtype}"


def data_type_of(tensor: torch.Tensor) -> DataType:
    """Raises ``DefinitionError`` for a dtype that shardfuse does not have."""
    try:
        return DataType.from_torch(tensor.dtype)
    except KeyError:
        known = ", ".join(str(d.torch) for d in DataType)
        raise DefinitionError("from_pytorch", f"a tensor of {tensor.dtype}", f"one of {known}") from None


def refused(method: str, argument: str, found: object, expected: str) -> DefinitionError:
    """An argument of a type that the method does not take."""
    wanted = DataType.expected(found) if "a DataType" in expected and argument == "dtype" else expected
    return DefinitionError(method, f"{argument} {shown(found)}", wanted)
