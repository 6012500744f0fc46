"""Sums over the ranks of a process group that add 16-bit numbers in float32 and send 16 bits of each.

``torch.distributed``'s own round a bfloat16 or float16 sum at every hop, or take twice the bytes for float32.  Here
each rank is given the pieces that it adds up, as they are, adds them in float32, rounds once, and hands the piece on:
the bytes of an all-reduce of 16 bits, and the same bits on every rank.  Fusions do the same.

Each call is noted in the ranks' record of calls, as those of fusions are: ranks whose calls differ in kind, op, dim,
shape or dtype are ended by a line that names the call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import CollectiveArgumentError
from .executor import collective_calls
from .executor.collective_arguments import check_dim, check_op
from .executor.rank_reduction import Reduction
from .mesh.calls import Call
from .mesh.groups import Team, default_group
from .mesh.process import ledger_of

__all__ = ["all_reduce", "reduce_scatter"]

_TEXTS = 256
"""Calls whose lines in the record of calls are kept: a program repeats a few; any other line is made again."""
_Call = Callable[..., torch.Tensor]
_left_alone: dict[_Call, _Call] = {}  # of two calls


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: Reduction = "sum") -> torch.Tensor:
    """The reduction over ``group`` (left out, all ranks) of every rank's ``x``, on each of them, bitwise the same.

    x: of one shape and dtype on all ranks.  Floats of 16 bits are added in float32 and rounded once; max and min keep
    NaN.  op: "sum", "prod", "max", "min"; "any" and "all" of booleans.
    Returns a new contiguous tensor, outside of autograd.  Every rank of the group calls it, in one order with its other
    collectives.  Under torch.compile it breaks the graph.  Raises CollectiveArgumentError.
    """
    if torch.compiler.is_compiling():
        return _out_of_graphs(_all_reduce)(x, group, op)
    return _all_reduce(x, group, op)


def reduce_scatter(
    x: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None, *, op: Reduction = "sum"
) -> torch.Tensor:
    """This rank's piece along ``dim`` of the reduction over ``group`` of every rank's ``x``.

    Pieces are cut as ``torch.chunk`` cuts: where ranks do not divide the axis, the last ones have less, or nothing.
    Otherwise as ``all_reduce``.
    """
    if torch.compiler.is_compiling():
        return _out_of_graphs(_reduce_scatter)(x, dim, group, op)
    return _reduce_scatter(x, dim, group, op)


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None, op: Reduction) -> torch.Tensor:
    _check_tensor("all_reduce", x)
    check_op("all_reduce", op, x.dtype)
    team = _team("all_reduce", group)
    _note(team, "all_reduce", op, None, x)
    return collective_calls.all_reduce(x.detach(), op, team)


def _reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, op: Reduction) -> torch.Tensor:
    _check_tensor("reduce_scatter", x)
    dim = _checked_dim("reduce_scatter", dim, x)
    check_op("reduce_scatter", op, x.dtype)
    team = _team("reduce_scatter", group)
    sizes = collective_calls.chunk_sizes(x.shape[dim], team.size)
    _note(team, "reduce_scatter", op, dim, x)
    return collective_calls.reduce_scatter(x.detach(), dim, op, team, sizes)


def _out_of_graphs(call: _Call) -> _Call:
    """``call``, which torch.compile leaves alone.  Made here, as to import its tracer takes more than a second."""
    if call not in _left_alone:
        reason = "shardfuse.collectives communicate outside of graphs"
        _left_alone[call] = cast("Any", torch.compiler).disable(call, reason=reason)
    return _left_alone[call]


def _check_tensor(kind: str, x: object) -> None:
    """Raises CollectiveArgumentError for what is no plain tensor that has its elements in memory."""
    expected = "a dense torch.Tensor on a CPU or GPU"
    if not isinstance(x, torch.Tensor):
        raise CollectiveArgumentError(kind, "x", f"a {type(x).__name__}", expected)
    if is_traceable_wrapper_subclass(x):
        advice = ", as its to_local() is" if hasattr(x, "to_local") else ""
        raise CollectiveArgumentError(kind, "x", f"a {type(x).__name__}", f"{expected}{advice}")
    if x.layout != torch.strided:
        raise CollectiveArgumentError(kind, "x", f"a tensor of layout {x.layout}", expected)
    if x.is_meta:
        raise CollectiveArgumentError(kind, "x", "a tensor on device meta", expected)


def _checked_dim(kind: str, dim: object, x: torch.Tensor) -> int:
    try:
        number = operator.index(cast("Any", dim))
    except TypeError:
        expected = f"a dimension of a tensor of {x.ndim}"
        raise CollectiveArgumentError(kind, "dim", repr(dim), expected) from None
    return check_dim(kind, "dim", number, x.ndim)


def _team(kind: str, group: object) -> Team:
    expected = "a group that this rank is in, or None for all ranks"
    if group is None:
        group = default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() returns on the other ranks
        raise CollectiveArgumentError(kind, "group", "a group of other ranks", expected)
    if not isinstance(group, dist.ProcessGroup):
        raise CollectiveArgumentError(kind, "group", f"{group!r}, a {type(group).__name__}", expected)
    ranks = _ranks_of(kind, group, expected)
    if dist.get_rank() not in ranks:
        raise CollectiveArgumentError(kind, "group", f"one of the ranks {ranks}", expected)
    return Team.of(ranks)


def _ranks_of(kind: str, group: dist.ProcessGroup, expected: str) -> list[int]:
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        raise CollectiveArgumentError(kind, "group", "a group that was destroyed", expected) from None


def _note(team: Team, kind: str, op: Reduction, dim: int | None, x: torch.Tensor) -> None:
    """The ranks' call of this kind now, for the comparison with other ranks."""
    ledger = ledger_of(sorted(team.ranks))
    if ledger is not None:
        ledger.note(_call_of(kind, op, dim, tuple(x.shape), x.dtype))


@functools.lru_cache(maxsize=_TEXTS)
def _call_of(kind: str, op: str, dim: int | None, shape: Sequence[int], dtype: torch.dtype) -> Call:
    along = "" if dim is None else f" along dim {dim}"
    return Call.of(f"shardfuse.collectives: {kind} of {list(shape)} {dtype}{along}, op {op}")
