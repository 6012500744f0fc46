"""What a collective's arguments have to be; each check raises CollectiveArgumentError."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardfuse.errors import CollectiveArgumentError
from shardfuse.mesh.groups import Team, current_rank

_ADVICE = "pass one of these; a mean is the sum divided by the number of ranks"


def check_op(kind: str, op: str, dtype: torch.dtype) -> None:
    if op not in ("sum", "prod", "max", "min", "any", "all"):
        raise CollectiveArgumentError(kind, "op", repr(op), "sum, prod, max, min, any or all", _ADVICE)
    if op in ("any", "all") and dtype != torch.bool:
        raise CollectiveArgumentError(kind, "op", f"{op!r} of {dtype}", "any and all of torch.bool")
    if op in ("max", "min") and dtype.is_complex:
        raise CollectiveArgumentError(kind, "op", f"{op!r} of {dtype}", "an ordered dtype")


def check_dim(kind: str, argument: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise CollectiveArgumentError(kind, argument, str(dim), *expected_dim(ndim))
    return dim % ndim


def expected_dim(ndim: int) -> tuple[str, str]:
    """What is expected of a dimension, and the advice."""
    advice = f"pass one from {-ndim} to {ndim - 1}" if ndim else "it is a single number, pass its unsqueeze(0)"
    return f"a dimension of a tensor of {ndim} dims", advice


def check_sizes(kind: str, argument: str, sizes: Sequence[int], team: Team) -> list[int]:
    if len(sizes) != team.size or any(size < 0 for size in sizes):
        raise CollectiveArgumentError(kind, argument, str(list(sizes)), f"{team.size} extents of 0 or more")
    return list(sizes)


def check_own(kind: str, argument: str, sizes: Sequence[int], team: Team, extent: int) -> None:
    if sizes[team.index] != extent:
        raise CollectiveArgumentError(
            kind, argument, str(list(sizes)), f"this rank's extent {extent} in place {team.index}"
        )


def check_split(kind: str, argument: str, sizes: Sequence[int] | None, team: Team, extent: int) -> list[int]:
    if sizes is None:
        if extent % team.size:
            raise CollectiveArgumentError(
                kind, argument, f"left out for an extent of {extent}", f"{team.size} extents, as it does not divide"
            )
        return [extent // team.size] * team.size
    if sum(sizes) != extent:
        raise CollectiveArgumentError(kind, argument, str(list(sizes)), f"{team.size} extents with a sum of {extent}")
    return check_sizes(kind, argument, sizes, team)


def check_root(kind: str, root: int, team: Team) -> None:
    if root not in team.ranks:
        raise CollectiveArgumentError(kind, "root", str(root), f"one of the ranks {list(team.ranks)}")


def check_given(kind: str, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if x is None or tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        found = "None" if x is None else f"{tuple(x.shape)} of {x.dtype}"
        raise CollectiveArgumentError(kind, "x on the root", found, f"{tuple(shape)} of {dtype}")
    return x


def check_pair(kind: str, argument: str, other: int) -> tuple[int, int]:
    rank = current_rank()
    if other == rank:
        raise CollectiveArgumentError(kind, argument, f"{other}, this rank", "another rank")
    return rank, other


def with_extent(shape: Sequence[int], dim: int, extent: int) -> list[int]:
    """The shape with another extent in one dimension."""
    return [*shape[:dim], extent, *shape[dim + 1 :]]


def moved_first(shape: Sequence[int], dim: int) -> list[int]:
    """The shape with one dimension moved to the front."""
    return [shape[dim], *shape[:dim], *shape[dim + 1 :]]
