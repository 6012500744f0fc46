"""exchange: a kernel that makes partial statistics, their all-reduce, and the kernel that reads the sums, as one.

before (hidden axis on mesh_x)::

    reduction:      T3p = sum(T2)
    communication:  T3 = sum(T3p)       # all_reduce over mesh_x
    pointwise:      T8 = mul(T0, rsqrt(T3))

after: what one rank computes is a norm of its own columns, but for ``T3``, which its kernel combines with the other
ranks' while it holds the row::

    exchange:       T3 = sum(T2)
                    T8 = mul(T0, rsqrt(T3))

A row is held by one program, as in ``persistent``.  What is decided here follows from unsharded sizes alone, so that
all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..analysis.resharding import communication_of
from ..analysis.sharding import is_even
from ..device import Device
from ..ir.dtype import DataType
from ..ir.expr import REDUCTIONS, BoundTensor, Expr
from ..mesh import DeviceMesh
from .limits import WARP, WIDEST_LOAD, power_of_two
from .persistent import by_one_program, too_long
from .plan import KernelPlan, RankExchange, kernel_name
from .schedule import Launch, Schedule, Tile
from .segment import Segment, touches_empty
from .sent_words import for_words, why_not_sent
from .space import Space, analyse
from .team import in_columns

LEFT_FREE = 32
"""Multiprocessors on which no program waits, for the collectives of other streams: each waits for its peers too."""
_WARPS, _REGISTERS = 16, 128
"""Of a multiprocessor and of a thread: so many warps are resident whatever the compiler does."""
_MANY_WARPS, _FEW_REGISTERS = 32, 64
_HELD = 32
"""Values of a row that a thread holds in so few registers.  Each program waits for its row: the more of them there are,
the more rows are on their way."""
_SHORT = 16
"""Values of a short row that a thread holds."""
_MOST_RANKS = 8
_MOST_ROWS = 1 << 16
"""Ranks that exchange inside of a kernel, and rows that they do it for, at most."""


@dataclass(frozen=True)
class Exchanged:
    """``segment`` with ``exchange`` inside of it."""

    segment: Segment
    exchange: RankExchange


def exchanged(
    before: Segment, known: RankExchange | None, call: Segment, after: Segment, needed: Iterable[BoundTensor]
) -> Exchanged | str:
    """``before``, ``call`` and ``after`` as one segment, or why they are none.

    known: what ``before`` exchanges already.  needed: what is read outside of the three, the fusion's outputs among it.
    """
    producer = {t: e for e in before.exprs for t in e.outputs}
    over = [communication_of(e) for e in call.exprs]
    dims = {c.mesh_dim for c in over if c is not None}
    if any(c is None or c.kind != "all_reduce" for c in over) or len(dims) != 1 or None in dims:
        return "it is no all-reduce over one mesh dimension"
    (parallel_type,) = dims
    mesh = call.exprs[0].output.domain.mesh
    assert mesh is not None, "an all-reduce is over a mesh dimension"
    assert parallel_type is not None, "it was looked at"
    if known is not None and (known.mesh, known.parallel_type) != (mesh, parallel_type):
        return "it is over other ranks than the statistics before"
    if mesh.extent(parallel_type) > _MOST_RANKS:
        return f"{mesh.extent(parallel_type)} ranks are more than {_MOST_RANKS}"
    sums = {e.tensors[0]: e for e in call.exprs}
    outside = frozenset(needed)
    for partial, total in sums.items():
        maker = producer.get(partial)
        refusal = _why_not_within(partial, total, maker, outside, after)
        if refusal is not None:
            return refusal
    exprs = [_over_ranks(e, sums) for e in before.exprs]
    exprs += [e for e in after.exprs if e not in before.exprs]
    wanted = (*before.outputs, *(e.output for e in sums.values()), *after.outputs)
    segment = Segment.of(exprs, [t for t in wanted if t not in sums and (t in outside or t in after.outputs)])
    statistics = (*(known.statistics if known else ()), *(e.output for e in sums.values()))
    return Exchanged(segment, RankExchange(mesh, parallel_type, statistics))


def _why_not_within(
    partial: BoundTensor, total: Expr, maker: Expr | None, outside: frozenset[BoundTensor], after: Segment
) -> str | None:
    if maker is None or maker.op not in REDUCTIONS or maker.op != total.op:
        return f"{partial} is no reduction of its ranks"
    if partial in outside or partial in after.inputs:
        return f"{partial} itself is read"
    if partial.dtype is not DataType.Float or total.output.dtype is not DataType.Float:
        return f"{total.output} is {total.output.dtype.name}, and a word holds a float32"
    return None


def _over_ranks(expr: Expr, sums: dict[BoundTensor, Expr]) -> Expr:
    """A reduction whose partial results are exchanged gives those of all ranks."""
    total = sums.get(expr.output)
    return expr if total is None else Expr(expr.op, expr.inputs, (total.output,), expr.attributes)


def why_not(found: Exchanged, device: Device) -> str | None:
    """Why no kernel exchanges what ``found`` says; ``None`` where one does."""
    segment, exchange = found.segment, found.exchange
    if any(map(touches_empty, segment.exprs)):
        return "a tensor has no elements"
    uneven = next((t for t in (*segment.inputs, *segment.outputs) if not _is_even(t, exchange.mesh)), None)
    if uneven is not None:
        return f"{uneven} is cut unevenly"
    space = analyse(segment)
    if isinstance(space, str):
        return space
    made = {t: e for e in segment.exprs for t in e.outputs}
    for t in exchange.statistics:
        if not space.has_r(made[t].tensors[0]) or space.has_r(t):
            return f"{t} reduces nothing on this rank"
    if not space.is_inner or space.walked or in_columns(segment, space, device).grouped:
        return "what is reduced is not innermost"
    refusal = too_long(segment, space)
    if refusal is not None:
        return refusal
    if space.kept > _MOST_ROWS:
        return f"{space.kept} rows are more than {_MOST_ROWS}"
    everywhere = frozenset(space.x)
    short = next((t for t in exchange.statistics if space.atoms[t] != everywhere), None)
    if short is not None:
        return f"{short} has not one number for each row"
    return None if exchange.sent is None else why_not_sent(exchange.sent, space)


def _one_row(space: Space) -> Schedule:
    """A short row for each program, so that one warp waits for it.

    Where each of four warps had a row and waited for that, a launch of 1024 x 512 took 590 us now and then.
    """
    warps = min(power_of_two(-(-space.reduced // (_SHORT * WARP))), _WARPS)
    return Schedule(Tile(1, min(warps * WARP * WIDEST_LOAD, power_of_two(space.reduced))), launch=Launch(warps))


def _is_even(tensor: BoundTensor, mesh: DeviceMesh) -> bool:
    own = tensor.domain.mesh
    if own is None:
        return True
    return own == mesh and all(is_even(digits, own.extent(p)) for p, digits in tensor.domain.sharding)


def scheduled(found: Exchanged, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel, with a grid that is resident beside what other streams run."""
    segment = found.segment
    space = analyse(segment)
    assert not isinstance(space, str), "it was asked about"
    schedule = by_one_program(segment, space, device)
    if found.exchange.sent is not None:
        schedule = for_words(schedule, space)
    elif schedule.kept > 1:
        schedule = _one_row(space)
    free, launch = max(device.multiprocessors - LEFT_FREE, 1), schedule.launch
    programs, registers = free * max(_WARPS // launch.warps, 1), _REGISTERS
    held = schedule.kept * space.reduced / (launch.warps * WARP)
    if held <= _HELD and space.kept > programs * schedule.kept:
        programs, registers = free * max(_MANY_WARPS // launch.warps, 1), _FEW_REGISTERS
    launch = replace(launch, registers=min(launch.registers or registers, registers))
    schedule, exchange = replace(schedule, launch=launch), replace(found.exchange, programs=programs)
    return (KernelPlan(kernel_name("exchange", segment), segment, space, schedule, device, exchange=exchange),)
