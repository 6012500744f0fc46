# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Storage that a program makes, of the layout that was agreed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch._C._dynamo import guards

from ..allocation.layouts import strides_of
from ..ir.expr import BoundTensor
from .steps import QUEUE, STREAM, Address, Allocate, Call, Free, Guard, Issue, LaunchKernel, Over, Step

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""``empty(shape, strides, dtype)``"""
LITTLE = 16 << 20
"""Bytes.  Above, kernels take longer than what allocates for them, and it matters that memory is given back early."""
_ALIGNMENT = 512
_WORKSPACE, _BASE = "workspace", "base"
_OF_A_CALL = (STREAM, QUEUE, _WORKSPACE, _BASE)
"""Names that live as long as a call."""


over = cast("Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...]], torch.Tensor]", guards._reinterpret_tensor)


def empty_on(device: torch.device) -> Empty:
    """Memory on ``device``, a GPU being the current one: what Inductor allocates by, two thirds of torch's own time."""
    if device.type == "cuda":
        return cast(Empty, guards._empty_strided_cuda)
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def stored(
    result: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None, inputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``result`` with these strides, in storage that no input has, and not as a view."""
    result = result if result.shape == shape else result.expand(shape)
    strides = strides or torch.empty(shape, device="meta").stride()
    shared = any(result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in inputs)
    if result.stride() == strides and not shared:
        return no_view(result)
    return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def no_view(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself, or another tensor of its storage where autograd takes ``x`` for a view of a tensor.

    Autograd refuses to change such a view in place, as one made without a graph or within an autograd.Function.
    """
    return x.detach() if x._is_view() else x


def result_of(tensor: BoundTensor, strides: Sequence[int], rank: int, *, is_own: bool) -> str | Call:
    """``tensor``, of these strides, as it is returned: not a view, so that the caller may change it in place.

    A view of another tensor has that one's strides: where others were asked for it is copied. ``is_own``: it is none.
    """
    wanted = strides_of(tensor.domain, rank) if tensor.domain.allocation is not None else None
    shape = tensor.domain.local_shape(rank)
    if wanted and 0 not in shape and any(n > 1 and a != b for n, a, b in zip(shape, strides, wanted, strict=True)):
        return Call((), "stored", stored, (tensor.name, str(shape), str(wanted), "()"))
    return tensor.name if is_own else Call((), "no_view", no_view, (tensor.name,))


def are_fresh(results: Sequence[str | Call | None], made: Mapping[str, torch.Tensor]) -> bool:
    """Are the results of a program contiguous, each in its own storage?  made: the layouts of those that are new."""
    names = {r for r in results if isinstance(r, str) and r in made and made[r].is_contiguous()}
    return len(names) == len(results)


def freed(steps: Sequence[Step], outputs: Collection[str]) -> list[Step]:
    """``steps`` that also free each tensor made on the way behind its last use, which may be where it is made."""
    last = {name: k for k, step in enumerate(steps) for name in (*step.defines, *step.uses)}
    ends: dict[int, list[str]] = {}
    for name in dict.fromkeys(name for step in steps for name in step.defines):
        if name not in outputs and name not in _OF_A_CALL:
            ends.setdefault(last[name], []).append(name)
    out: list[Step] = []
    for k, step in enumerate(steps):
        out += [step, Free(tuple(ends[k]))] if k in ends else [step]
    return out


def only_addressed(names: Sequence[str], steps: Sequence[Step]) -> frozenset[int]:
    """Of which of these tensors do the ``steps`` no more than hand the address to kernels and collectives?"""
    others = [step for step in steps if not isinstance(step, Issue | Over | Guard)]
    touched = {name for step in others for name in (*step.defines, *step.uses)}
    return frozenset(k for k, name in enumerate(names) if name not in touched)


@dataclass(frozen=True)
class _Piece:
    """``size`` bytes from ``offset`` on, in use from step ``first`` to step ``last``."""

    offset: int
    size: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def share_workspace(steps: Sequence[Step], made: Mapping[str, torch.Tensor], kept: Collection[str]) -> list[Step]:
    """``steps`` with one piece of memory for all that kernels hand to one another, where that is little.

    Nobody but kernels sees such a tensor: an address is all there need be of it, and its bytes are another's once its
    last kernel has been launched, as launches of one stream follow one another.  An allocation takes as long as half a
    launch.

    made: the layout of each tensor that kernels write.  kept: the names of those that the program returns.
    """
    places: dict[str, list[int]] = {name: [] for name in made}
    for k, step in enumerate(steps):
        for name in dict.fromkeys((*step.defines, *step.uses)):
            if name in places:
                places[name].append(k)
    pieces: dict[str, _Piece] = {}
    for name, like in made.items():
        first, *uses = places[name]
        allocated = steps[first]
        is_plain = isinstance(allocated, Allocate) and not allocated.own
        if name in kept or not is_plain or not all(isinstance(steps[k], LaunchKernel) for k in uses):
            continue
        size = -(-like.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        pieces[name] = _placed(size, first, max(uses, default=first), list(pieces.values()))
    total = max((piece.end for piece in pieces.values()), default=0)
    if len(pieces) < 2 or total > LITTLE:
        return list(steps)
    begin = min(piece.first for piece in pieces.values())
    out = list(steps)
    for name, piece in pieces.items():
        out[piece.first] = Address(name, _BASE, piece.offset)
    return [*out[:begin], Allocate(_WORKSPACE, (total,), (1,), torch.uint8), Address(_BASE, _WORKSPACE), *out[begin:]]


def _placed(size: int, first: int, last: int, others: Sequence[_Piece]) -> _Piece:
    """The first gap among those that are in use at the same time."""
    offset = 0
    for other in sorted((o for o in others if o.first <= last and first <= o.last), key=lambda o: o.offset):
        if offset + size <= other.offset:
            break
        offset = max(offset, other.end)
    return _Piece(offset, size, first, last)
