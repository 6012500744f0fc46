# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Storage that a program makes, of the layout that was agreed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch._C._dynamo import guards

from ..allocation.layouts import strides_of
from ..ir.expr import BoundTensor

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""``empty(shape, strides, dtype)``"""
LITTLE = 16 << 20
"""Bytes.  Above, kernels take longer than what allocates for them, and it matters that memory is given back early."""
_ALIGNMENT = 512
_OF_A_CALL = ("stream", "queue", "workspace", "base")
"""Names that live as long as a call."""


def storage_text(like: torch.Tensor, device: torch.device, names: dict[str, object]) -> str:
    """What makes storage of this layout; what it calls is put in ``names``."""
    dtype = str(like.dtype).removeprefix("torch.")
    names["empty"], names[dtype] = empty_on(device), like.dtype
    return f"empty({tuple(like.shape)}, {like.stride()}, {dtype})"


def over_text(target: BoundTensor, like: torch.Tensor, names: dict[str, object]) -> str:
    """A tensor of this layout in the memory of ``target``."""
    names["over"] = over
    return f"over({target}, {tuple(like.shape)}, {like.stride()})"


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


def result_text(tensor: BoundTensor, strides: Sequence[int], rank: int, is_own: bool, names: dict[str, object]) -> str:
    """``tensor``, of these strides, as it is returned: not a view, so that the caller may change it in place.

    A view of another tensor has that one's strides: where others were asked for it is copied. ``is_own``: it is none.
    """
    wanted = strides_of(tensor.domain, rank) if tensor.domain.allocation is not None else None
    shape = tensor.domain.local_shape(rank)
    if wanted and 0 not in shape and any(n > 1 and a != b for n, a, b in zip(shape, strides, wanted, strict=True)):
        names["stored"] = stored
        return f"stored({tensor}, {shape}, {wanted}, ())"
    if is_own:
        return tensor.name
    names["no_view"] = no_view
    return f"no_view({tensor})"


def are_fresh(results: Sequence[str], made: Mapping[str, torch.Tensor]) -> bool:
    """Are the results of a program contiguous, each in its own storage?  made: the layouts of those that are new."""
    return len(set(results)) == len(results) and all(r in made and made[r].is_contiguous() for r in results)


def freed(lines: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """``lines`` with a ``del`` behind the last use of each tensor made on the way, which may be where it is made."""
    words = [re.findall(r"\w+", line) for line in lines]
    made = [name for line in lines if " = " in line for name in re.findall(r"\w+", line.split(" = ")[0])]
    last: dict[int, list[str]] = {}
    for name in dict.fromkeys(made):
        if name not in outputs and name not in _OF_A_CALL:
            last.setdefault(max(k for k, line in enumerate(words) if name in line), []).append(name)
    out: list[str] = []
    for k, line in enumerate(lines):
        out.append(line)
        if k in last:
            out.append(f"del {', '.join(last[k])}")
    return out


_ADDRESSED = re.compile(r"(kernel_\w+\(stream, |collective_\w+\(queue, |\w+ = over\(|if current_device)")


def only_addressed(name: str, lines: Sequence[str]) -> bool:
    """Do the ``lines`` of a program do no more with a tensor than hand its address to kernels and collectives?"""
    return all(_ADDRESSED.match(line.strip()) for line in lines if re.search(rf"\b{name}\b", line))


@dataclass(frozen=True)
class _Piece:
    """``size`` bytes from ``offset`` on, in use from line ``first`` to line ``last``."""

    offset: int
    size: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def share_workspace(
    lines: Sequence[str], made: Mapping[str, torch.Tensor], kept: Collection[str], names: dict[str, object]
) -> list[str]:
    """``lines`` of a program with one piece of memory for all that kernels hand to one another, where that is little.

    Nobody but kernels sees such a tensor: an address is all there need be of it, and its bytes are another's once its
    last kernel has been launched, as launches of one stream follow one another.  An allocation takes as long as half a
    launch.

    made: the layout of each tensor that kernels write.  kept: the names of those that the program returns.
    """
    words = [set(re.findall(r"\w+", line)) for line in lines]
    pieces: dict[str, _Piece] = {}
    for name, like in made.items():
        places = [k for k, line in enumerate(words) if name in line]
        first, *uses = places
        is_plain = lines[first].startswith(f"{name} = empty(")
        if name in kept or not is_plain or not all(lines[k].startswith("kernel_") for k in uses):
            continue
        size = -(-like.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        pieces[name] = _placed(size, first, places[-1], list(pieces.values()))
    total = max((piece.end for piece in pieces.values()), default=0)
    if len(pieces) < 2 or total > LITTLE:
        return list(lines)
    names["uint8"] = torch.uint8
    begin = min(piece.first for piece in pieces.values())
    out = list(lines)
    for name, piece in pieces.items():
        out[piece.first] = f"{name} = base + {piece.offset}"
    workspace = [f"workspace = empty(({total},), (1,), uint8)", "base = workspace.data_ptr()"]
    return [*out[:begin], *workspace, *out[begin:]]


def _placed(size: int, first: int, last: int, others: Sequence[_Piece]) -> _Piece:
    """The first gap among those that are in use at the same time."""
    offset = 0
    for other in sorted((o for o in others if o.first <= last and first <= o.last), key=lambda o: o.offset):
        if offset + size <= other.offset:
            break
        offset = max(offset, other.end)
    return _Piece(offset, size, first, last)
