"""Pieces of a tensor one behind the other, as collectives give and take them: in one copy, or none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

_WORDS = (torch.complex128, torch.int64, torch.int32)
"""Of 16, 8 and 4 bytes: torch's strided copies take as long for an element of any size."""


def cut(x: Tensor, dim: int, members: int) -> Tensor:
    """`[members, piece]`, contiguous, of equal pieces along `dim`."""
    x = plain(x).contiguous()
    before, piece = prod(x.shape[:dim]), x.numel() // members
    if before <= 1 or piece == 0:
        return x.view(members, piece)
    rows = x.view(before, members, piece // before)
    return rows.view(_word(rows)).transpose(0, 1).contiguous().view(x.dtype).view(members, piece)


def cut_by(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The pieces of these extents along `dim`, one behind the other, flat: a copy for each run of equal extents."""
    x = plain(x).contiguous()
    before, after = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    if before <= 1 or x.numel() == 0:
        return x.view(-1)
    flat = x.new_empty(x.numel())
    row, start = x.shape[dim] * after, 0
    for size, pieces in groupby(sizes):
        shape = (len(list(pieces)), before, size * after)
        stride, begin = (size * after, row, 1), x.storage_offset() + start
        flat.narrow(0, start * before, prod(shape)).view(shape).copy_(x.as_strided(shape, stride, begin))
        start += shape[0] * shape[2]
    return flat


def plain(x: Tensor) -> Tensor:
    """The values as they lie in memory: conjugation and negation are bits of a view otherwise."""
    return x.detach().resolve_conj().resolve_neg() if x.requires_grad or x.is_conj() or x.is_neg() else x


def join(pieces: Tensor, dim: int) -> Tensor:
    """`[members, *shape]` put together along `dim` of the shape."""
    members, *shape = pieces.shape
    shape[dim] *= members
    if prod(shape[:dim]) <= 1:
        return pieces.view(shape)
    return torch.cat(pieces.unbind(0), dim)


def join_into(whole: Tensor, pieces: Tensor, dim: int) -> None:
    """As ``join``, into ``whole``, of any shape with as many elements."""
    members, *shape = pieces.shape
    shape[dim] *= members
    torch.cat(pieces.unbind(0), dim, out=whole.view(shape))


def join_by(flat: Tensor, shapes: Sequence[torch.Size], dim: int) -> Tensor:
    """Pieces of these shapes, one behind the other in `flat`, put together along `dim`."""
    shape = list(shapes[0])
    shape[dim] = sum(s[dim] for s in shapes)
    if prod(shape[:dim]) <= 1:
        return flat.view(shape)
    pieces = flat.split_with_sizes([s.numel() for s in shapes])
    return torch.cat([p.view(s) for p, s in zip(pieces, shapes, strict=True)], dim)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each source to its target: rows of pieces are runs of memory, where one transposed copy of all has none."""
    if targets:
        cast("Any", torch)._foreach_copy_(list(targets), list(sources))


def _word(rows: Tensor) -> torch.dtype:
    """The widest type in which the rows can be read."""
    run, size = rows.shape[-1] * rows.element_size(), rows.element_size()
    for word in _WORDS:
        if all(n % word.itemsize == 0 for n in (run, rows.storage_offset() * size, rows.data_ptr())):
            return word if word.itemsize > size else rows.dtype
    return rows.dtype
