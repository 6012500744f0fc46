"""How an input is declared: contiguity and stride order, said or taken from a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import DefinitionError
from ..ir.dtype import DataType

Contiguity = bool | Sequence[bool | None] | None


def compute_tensor_descriptor(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[bool | None], list[int]]:
    """``(contiguity, stride_order)`` of a tensor.

    ``stride_order``: for each dim its place in memory, 0 innermost.  ``contiguity`` stands in stride order, outermost
    first: ``None`` for a size of 1 or a stride of 0, else whether the dim follows the next without a gap.
    """
    if len(sizes) != len(strides):
        raise DefinitionError("define_tensor", f"{len(sizes)} sizes and {len(strides)} strides", "as many of both")
    # outermost first; equal strides keep the order of the dims, and expanded dims stay where they are
    order = _outermost_first(sizes, strides)
    contiguity: list[bool | None] = []
    expected = 1
    for d in reversed(order):
        if sizes[d] == 1 or (strides[d] == 0 and sizes[d] != 0):
            contiguity.insert(0, None)
            continue
        contiguity.insert(0, strides[d] == expected)
        expected = strides[d] * sizes[d]
    places = [0] * len(sizes)
    for place, d in enumerate(reversed(order)):
        places[d] = place
    return contiguity, places


def _outermost_first(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dims by falling stride; a dim of stride 0 or size 1 stays behind the dim before it."""
    order: list[int] = []
    for d in range(len(sizes)):
        at = len(order)
        if strides[d] != 0 and sizes[d] != 1:
            while at and (strides[order[at - 1]] < strides[d] or sizes[order[at - 1]] == 1 or strides[order[at - 1]] == 0):
                if not any(0 < strides[e] < strides[d] and sizes[e] != 1 for e in order[:at]):
                    break
                at -= 1
        order.insert(at, d)
    return order


def like(
    sizes: Sequence[int] | None, strides: Sequence[int] | None, static_sizes: bool
) -> tuple[list[int], list[bool | None], list[int]]:
    """``(shape, contiguity, stride_order)`` for a tensor of these sizes and strides; 0 and 1 are static in any case."""
    if sizes is None or strides is None:
        raise DefinitionError("define_tensor", "sizes without strides" if strides is None else "strides without sizes", "both")
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
    if isinstance(contiguity, bool):
        return (contiguity,) * ndim, order
    if len(contiguity) != ndim:
        raise DefinitionError(
            "define_tensor", f"contiguity={list(contiguity)}", f"{ndim} entries, one for each dim, or a bool"
        )
    dims = sorted(range(ndim), key=lambda d: -order[d]) if order else list(range(ndim))
    for d, flag in zip(dims, contiguity, strict=True):
        if flag is not None and shape[d] == 1:
            raise DefinitionError("define_tensor", f"contiguity {flag} of dim {d}, of size 1", "None, as for every broadcast")
    return tuple(contiguity), order


def data_type_of(tensor: torch.Tensor) -> DataType:
    """Raises ``DefinitionError`` for a dtype that shardfuse does not have."""
    try:
        return DataType.from_torch(tensor.dtype)
    except KeyError:
        known = ", ".join(str(d.torch) for d in DataType)
        raise DefinitionError("from_pytorch", f"a tensor of {tensor.dtype}", f"one of {known}") from None
