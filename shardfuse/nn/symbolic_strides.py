"""Strides of DTensors that torch 2.11's graphs return are wrong where they, and sizes, are symbols.

    a gradient of [2, 9, 6], of strides that are read where the sizes are: (2, 9, 1) in place of (54, 6, 1)

Autograd copies a gradient whose strides are not its leaf's, and torch 2.11 replicates such a copy where shards differ
in size.  torch 2.13 reads them right.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast


@cache
def mend_symbolic_strides() -> None:
    """Put a function that reads strides behind sizes in the place of torch's, where that does not."""
    from torch._functorch._aot_autograd import schemas  # torch.compile has imported it

    kind = cast(Any, schemas.SubclassCreationMeta)
    if reads_sizes_as_strides(kind.compute_outer_size_and_stride):
        kind.compute_outer_size_and_stride = _size_and_stride


def reads_sizes_as_strides(read: Any) -> bool:
    """Does ``read`` take for the first stride what is given for the first size?"""
    symbolic = SimpleNamespace(outer_size=(None, 2), outer_stride=(None, 1))
    _, stride = read(symbolic, [3, 5], curr_start_idx=0)
    return tuple(stride) != (5, 1)


def _size_and_stride(
    meta: Any, all_args: Sequence[Any], *, curr_start_idx: int
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The sizes and strides of a tensor that a graph returns: those that are known, others from ``all_args``."""
    given = iter(all_args[curr_start_idx:])
    return _filled(meta.outer_size, given), _filled(meta.outer_stride, given)


def _filled(known: Iterable[int | None], given: Iterator[Any]) -> tuple[int | None, ...]:
    return tuple(next(given) if value is None else value for value in known)
