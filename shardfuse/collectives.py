"""Collectives of plain tensors, as fusions have them: over NVLink by kernels, and sums that are rounded once.

``torch.distributed``'s own sums round a bfloat16 or float16 number at every hop, or take twice the bytes for float32.
Here each rank is given the pieces that it adds up, as they are, adds them in float32, rounds once, and hands the piece
on: the bytes of an all-reduce of 16 bits, and the same bits on every rank.

Where ``shardfuse.initialize()`` has found that ranks reach each other's memory over NVLink, kernels do the work, in 0.4
to 0.8 of NCCL's time (``docs/exchange.md``): of equal pieces that are whole words of 16 bytes.

Each call is noted in the ranks' record of calls, as those of fusions are: ranks whose calls differ in kind, op, dim,
shape or dtype are ended by a line that names the call.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, ParamSpec, cast

import torch
import torch.distributed as dist

from .codegen.collective_moves import all_reduced, exchanged, gathered, scattered
from .errors import CollectiveArgumentError, NotInitializedError
from .executor import collective_calls
from .executor.collective_arguments import check_dim, check_op, expected_dim, with_extent
from .executor.plain_arguments import waited, warn_of_collective
from .executor.rank_reduction import Reduction
from .executor.refusals import note_refusal
from .executor.symmetric_collectives import result_by_kernel, turn_for
from .mesh.calls import FAILED_RUN, Call
from .mesh.groups import Team, default_group
from .mesh.process import ledger_of
from .rank_errors import ExchangeTimeoutError
from .source_line import caller_line

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

_TEXTS = 256
"""Calls whose lines in the record of calls are kept: a program repeats a few; any other line is made again."""
_TRACER = "torch.fx.experimental.proxy_tensor"
"""What records ops for make_fx.  Looked for where it is loaded: to import it takes time."""
_core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_functorch: Any = _core._functorch
_Call = Callable[..., torch.Tensor]
P = ParamSpec("P")
_left_alone: dict[_Call, _Call] = {}  # of two calls


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: Reduction = "sum") -> torch.Tensor:
    """The reduction over ``group`` (left out, all ranks) of every rank's ``x``, on each of them, bitwise the same.

    x: of one shape and dtype on all ranks.  Floats of 16 bits are added in float32 and rounded once; max and min keep
    NaN.  One that a collective of torch's still fills is waited for.  op: "sum", "prod", "max", "min"; "any" and "all"
    of booleans.
    Returns a new contiguous tensor, outside of autograd: a NoGradientsWarning says so once where x requires a gradient
    (``shardfuse.nn.Redistribution`` has a backward).  Every rank of the group calls it, in one order with its other
    collectives.  Under torch.compile it breaks the graph.  Raises CollectiveArgumentError, also of what has no values
    of this rank's own: DTensors, fake tensors, tensors inside of torch.func, make_fx, torch.export and torch.jit.trace.
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


def all_gather(x: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The tensors of all ranks of ``group`` (left out, all ranks) concatenated along ``dim``, in their order.

    x: of one shape and dtype on all ranks.
    Returns a new contiguous tensor, outside of autograd.  Otherwise as ``all_reduce``.
    """
    if torch.compiler.is_compiling():
        return _out_of_graphs(_all_gather)(x, dim, group)
    return _all_gather(x, dim, group)


def all_to_all(
    x: torch.Tensor, split_dim: int = 0, concat_dim: int = 0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Piece i of ``x`` along ``split_dim`` goes to rank i of ``group``; those received are joined along ``concat_dim``.

    x: of one shape and dtype on all ranks, whose ``split_dim`` the number of ranks divides.
    Returns a new contiguous tensor, outside of autograd.  Otherwise as ``all_reduce``.
    """
    if torch.compiler.is_compiling():
        return _out_of_graphs(_all_to_all)(x, split_dim, concat_dim, group)
    return _all_to_all(x, split_dim, concat_dim, group)


def _refusals_noted(place: int) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """A call with arguments that do not fit is noted as one that this rank leaves out, where its group is known.

    place: of the group, among the arguments.
    """

    def of(call: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        @functools.wraps(call)
        def noted(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            try:
                return call(*args, **kwargs)
            except CollectiveArgumentError as error:
                group = args[place]
                with suppress(KeyError, NotInitializedError):  # of a group that was destroyed, or where there is none
                    if group is None or isinstance(group, dist.ProcessGroup):
                        note_refusal(dist.get_process_group_ranks(group or default_group()), error)
                raise

        return noted

    return of


@_refusals_noted(1)
def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None, op: Reduction) -> torch.Tensor:
    x = _with_values("all_reduce", x)
    check_op("all_reduce", op, x.dtype)
    team = _team("all_reduce", group)
    with turn_for(x, team), _noted(team, "all_reduce", x, op=op):
        found = result_by_kernel("all_reduce", x, team, all_reduced(x.numel()), x.shape) if op == "sum" else None
        return collective_calls.all_reduce(x.detach(), op, team) if found is None else found


@_refusals_noted(2)
def _reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, op: Reduction) -> torch.Tensor:
    x = _with_values("reduce_scatter", x)
    dim = _checked_dim("reduce_scatter", "dim", dim, x)
    check_op("reduce_scatter", op, x.dtype)
    team = _team("reduce_scatter", group)
    sizes = collective_calls.chunk_sizes(x.shape[dim], team.size)
    with turn_for(x, team), _noted(team, "reduce_scatter", x, dim, op=op):
        if op == "sum" and x.shape[dim] % team.size == 0:
            shape = with_extent(x.shape, dim, sizes[0])
            moves = scattered(prod(shape[:dim]), prod(shape[dim:]), team.size)
            found = result_by_kernel("reduce_scatter", x, team, moves, shape)
            if found is not None:
                return found
        return collective_calls.reduce_scatter(x.detach(), dim, op, team, sizes)


@_refusals_noted(2)
def _all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    x = _with_values("all_gather", x)
    dim = _checked_dim("all_gather", "dim", dim, x)
    team = _team("all_gather", group)
    with turn_for(x, team), _noted(team, "all_gather", x, dim):
        moves = gathered(prod(x.shape[:dim]), prod(x.shape[dim:]), team.size)
        found = result_by_kernel("all_gather", x, team, moves, with_extent(x.shape, dim, x.shape[dim] * team.size))
        return collective_calls.all_gather(x.detach(), dim, team) if found is None else found


@_refusals_noted(3)
def _all_to_all(x: torch.Tensor, split_dim: int, concat_dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    x = _with_values("all_to_all", x)
    split, concat = (
        _checked_dim("all_to_all", name, dim, x) for name, dim in (("split_dim", split_dim), ("concat_dim", concat_dim))
    )
    team = _team("all_to_all", group)
    if x.shape[split] % team.size:
        found = f"{split_dim} of a tensor of shape {list(x.shape)}"
        raise CollectiveArgumentError(
            "all_to_all", "split_dim", found, f"one whose extent {team.size} ranks divide", "pad x along it"
        )
    size = x.shape[split] // team.size
    with turn_for(x, team), _noted(team, "all_to_all", x, split, concat):
        piece = with_extent(x.shape, split, size)
        shape = with_extent(piece, concat, piece[concat] * team.size)
        found = result_by_kernel("all_to_all", x, team, exchanged(piece, split, concat, team.size), shape)
        if found is not None:
            return found
        if split != concat:
            return collective_calls.all_to_all(x.detach(), split, concat, team)
        flat = torch.cat([part.reshape(-1) for part in x.detach().chunk(team.size, split)]) if size else x.detach()
        received = collective_calls.exchange(flat.reshape(-1), [prod(piece)] * team.size, [piece] * team.size, team)
        return torch.cat(received, concat)


def _out_of_graphs(call: _Call) -> _Call:
    """``call``, which torch.compile leaves alone.  Made here, as to import its tracer takes more than a second."""
    if call not in _left_alone:
        reason = "shardfuse.collectives communicate outside of graphs"
        _left_alone[call] = cast("Any", torch.compiler).disable(call, reason=reason)
    return _left_alone[call]


def _with_values(kind: str, x: object) -> torch.Tensor:
    """``x``, after the collective that may still fill it.

    Raises CollectiveArgumentError for what is no tensor whose elements are in this rank's memory.
    """
    expected = "a dense torch.Tensor on a CPU or GPU"
    if not isinstance(x, torch.Tensor):
        raise CollectiveArgumentError(kind, "x", f"a {type(x).__name__}", expected, "pass one")
    if _functorch.is_functorch_wrapped_tensor(x):
        advice = "call the transform around a torch.autograd.Function that has the collective in its forward"
        raise CollectiveArgumentError(kind, "x", "a tensor inside of torch.func (grad, vmap, jvp)", expected, advice)
    if _is_recorded():
        advice = "record what is before and behind the collective, and call it in between"
        raise CollectiveArgumentError(
            kind, "x", "a tensor whose ops are recorded (make_fx, torch.export, torch.jit.trace)", expected, advice
        )
    x = waited(x)
    if cast("Any", type(x)).__torch_dispatch__ is not _core._disabled_torch_dispatch_impl:
        advice = "pass its to_local()" if hasattr(x, "to_local") else "pass the tensors that it stands for"
        raise CollectiveArgumentError(kind, "x", f"a {type(x).__name__}", expected, advice)
    if x.is_nested:
        raise CollectiveArgumentError(kind, "x", "a nested tensor", expected, "pass its parts, padded to one size")
    if x.layout != torch.strided:
        raise CollectiveArgumentError(kind, "x", f"a tensor of layout {x.layout}", expected, "pass its to_dense()")
    if x.is_quantized:
        raise CollectiveArgumentError(kind, "x", f"a tensor of {x.dtype}", expected, "pass its int_repr()")
    if x.is_meta:
        raise CollectiveArgumentError(kind, "x", "a tensor on device meta", expected, "pass one with data")
    warn_of_collective(kind, x)
    return x


def _is_recorded() -> bool:
    """Does make_fx or torch.jit.trace record ops now?  It sees neither a kernel, nor that gloo is waited for."""
    if _core._get_tracing_state() is not None:
        return True
    tracer: Any = sys.modules.get(_TRACER) if _core._len_torch_dispatch_stack() else None
    return tracer is not None and tracer.get_proxy_mode() is not None


def _checked_dim(kind: str, name: str, dim: object, x: torch.Tensor) -> int:
    try:
        number = operator.index(cast("Any", dim))
    except TypeError:
        raise CollectiveArgumentError(kind, name, repr(dim), *expected_dim(x.ndim)) from None
    return check_dim(kind, name, number, x.ndim)


def _team(kind: str, group: object) -> Team:
    expected = ("a group that this rank is in, or None for all ranks", "call it on the ranks of the group alone")
    if group is None:
        group = default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() returns on the other ranks
        raise CollectiveArgumentError(kind, "group", "a group of other ranks", *expected)
    if not isinstance(group, dist.ProcessGroup):
        advice = "pass what torch.distributed.new_group() gives, or get_group() of torch's DeviceMesh"
        raise CollectiveArgumentError(kind, "group", f"{group!r}, a {type(group).__name__}", expected[0], advice)
    ranks = _ranks_of(kind, group, expected[0])
    if dist.get_rank() not in ranks:
        raise CollectiveArgumentError(kind, "group", f"one of the ranks {ranks}", *expected)
    return Team.of(ranks)


def _ranks_of(kind: str, group: dist.ProcessGroup, expected: str) -> list[int]:
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        advice = "call it before destroy_process_group()"
        raise CollectiveArgumentError(kind, "group", "a group that was destroyed", expected, advice) from None


@contextmanager
def _noted(team: Team, kind: str, x: torch.Tensor, *dims: int, op: Reduction | None = None) -> Generator[None]:
    """The ranks' call of this kind is the body, for the comparison with other ranks.

    A rank whose body fails, as by too little memory, and that goes on, notes that too: the others have what it has not
    sent in this call paired with its next one.  Where ranks agree on a kernel, all of them fail and note it alike.
    """
    ledger = ledger_of(sorted(team.ranks))
    if ledger is None:
        yield
        return
    ledger.note(_call_of(kind, op, dims, tuple(x.shape), x.dtype))
    try:
        yield
    except ExchangeTimeoutError:
        raise
    except Exception:
        ledger.note(FAILED_RUN)
        raise


@functools.lru_cache(maxsize=_TEXTS)
def _call_of(kind: str, op: str | None, dims: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Call:
    along = f" along {' and '.join(f'dim {dim}' for dim in dims)}" if dims else ""
    text = f"shardfuse.collectives: {kind} of {list(shape)} {dtype}{along}{f', op {op}' if op else ''}"
    return Call.of(text, line=caller_line(in_modules=True))
