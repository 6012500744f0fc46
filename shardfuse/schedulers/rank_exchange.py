"""exchange: a kernel that makes partial statistics, their all-reduce, and the kernel that reads the sums, as one.

before (hidden axis on mesh_x)::

    reduction:      T3p = sum(T2)
    communication:  T3 = sum(T3p)       # all_reduce over mesh_x
    pointwise:      T8 = mul(T0, rsqrt(T3))

after: what one rank computes is a norm of its own columns, but for ``T3``, which its kernel combines with the other
ranks' while it holds the row::

    exchange:       T3 = sum(T2)
                    T8 = mul(T0, rsqrt(T3))

A row is held by one program, as in ``persistent``; one that no program holds by several, or it is read again in each
phase, as in ``looped``, from L2 behind the first (``long_rows``).  What is decided here follows from unsharded sizes
and from the kind of GPU, which is the same on all ranks, so that all decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..analysis.communication_table import Collective, communication_of, local_bytes
from ..analysis.sharding import is_even
from ..device import Device
from ..ir.domain import without
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Cast, Iota, Pointwise, Reduce, Set, View, is_reduction
from ..mesh import DeviceMesh
from ..segments.segment import Segment, touches_empty
from ..segments.space import Space, analysed
from .exchange_room import MANY_WARPS, WARPS_OF_ROWS, free_multiprocessors
from .features import Features, carried, features, features_or_refusal
from .limits import WARP, WIDEST_LOAD, power_of_two
from .long_rows import has_nothing_somewhere, held_by_members, read_again, why_not_read_again
from .persistent import by_one_program, in_branches, in_registers, in_whole_blocks, too_long
from .plan import KernelPlan, RankExchange
from .schedule import Launch, Schedule, Tile
from .sent_words import for_passing, for_words, is_in_rows, members_of, passed_on, why_not_sent

_SHORT = 16
"""Values of a short row that a thread holds: two loads of 16 bytes of a 16-bit type, under way at once."""
MOST_RANKS = 8
"""Ranks that each other rank stores to: GPUs of a host that NVLink joins.  Source: NVIDIA HGX H200."""
MOST_READ = 64 << 20
"""Bytes of what a rank has of a tensor up to which a kernel that waits with its rows in registers was measured to be
faster than two kernels with a collective between them: 54 us and 60 for 64 MB, in a CUDA graph on 2 x H200."""
_ONE_BY_ONE = (Pointwise, Cast, Set, View)
"""Ops that make a number of one of each argument."""
_MOST_ROWS = 1 << 16
"""Rows with slots of their own.  Of 8 ranks and two statistics they take 16 MB, a quarter of the arena."""


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
    over = [communication_of(e) for e in call.exprs]
    dims = {c.mesh_dim for c in over if c is not None}
    if any(c is None or c.kind is not Collective.ALL_REDUCE for c in over) or len(dims) != 1 or None in dims:
        return "it is no all-reduce over one mesh dimension"
    (parallel_type,) = dims
    mesh = call.exprs[0].output.domain.mesh
    assert mesh is not None, "an all-reduce is over a mesh dimension"
    assert parallel_type is not None, "it was looked at"
    if known is not None and (known.mesh, known.parallel_type) != (mesh, parallel_type):
        return "it is over other ranks than the statistics before"
    if known is not None and known.sent is not None:
        return "the kernel before sends a tensor"
    if mesh.extent(parallel_type) > MOST_RANKS:
        return f"{mesh.extent(parallel_type)} ranks are more than {MOST_RANKS}"
    sums = {e.tensors[0]: e for e in call.exprs}
    outside = frozenset(needed)
    for partial, total in sums.items():
        maker = before.maker.get(partial)
        refusal = _why_not_within(partial, total, maker, outside, after)
        if refusal is not None:
            return refusal
    # a reduction whose partial results are exchanged gives those of all ranks
    exprs = [replace(e, outputs=sums[e.output].outputs) if e.output in sums else e for e in before.exprs]
    exprs += [e for e in after.exprs if e not in before.exprs]
    wanted = (*before.outputs, *(e.output for e in sums.values()), *after.outputs)
    segment = Segment.of(exprs, [t for t in wanted if t not in sums and (t in outside or t in after.outputs)])
    statistics = (*(known.statistics if known else ()), *(e.output for e in sums.values()))
    return Exchanged(segment, RankExchange(mesh, parallel_type, statistics))


def _why_not_within(
    partial: BoundTensor, total: Expr, maker: Expr | None, outside: frozenset[BoundTensor], after: Segment
) -> str | None:
    if maker is None or not isinstance(total.op, Reduce) or not is_reduction(maker.op, total.op.kind):
        return f"{partial} is no reduction of its ranks"
    if partial in outside or partial in after.inputs:
        return f"{partial} itself is read"
    found = next((d for d in (partial.dtype, total.output.dtype, carried(maker)) if d is not DataType.Float), None)
    if found is not None:
        return f"{total.output} is {found.name}, and a word holds a float32"
    return None


def why_not(found: Exchanged, device: Device) -> str | None:
    """Why no kernel exchanges what ``found`` says; ``None`` where one does."""
    segment, exchange = found.segment, found.exchange
    if any(map(touches_empty, segment.exprs)):
        return "a tensor has no elements"
    space = features_or_refusal(segment, device)
    if isinstance(space, str):
        return space
    uneven = _uneven(segment, exchange)
    if any(not _is_row_uneven(t, exchange, space) for t in uneven):
        return f"{uneven[0]} is cut unevenly, and not along its rows alone"
    for t in exchange.statistics:
        if not space.has_r(segment.maker[t].tensors[0]) or space.has_r(t):
            return f"{t} reduces nothing on this rank"
    if not space.is_inner or space.walked or space.in_columns.grouped:
        return "what is reduced is not innermost"
    sent = exchange.sent or exchange.gathered
    if sent is not None and (space.is_padded or space.row_parts > 1):
        return f"chunks of its rows of {space.reduced} elements, whose sums are in pairs, are no neighbours"
    refusal = too_long(space) if sent is not None else _why_not_by_rows(space, exchange)
    if refusal is not None:
        return refusal
    if space.kept > _MOST_ROWS:
        return f"{space.kept} rows are more than {_MOST_ROWS}"
    read = max(map(local_bytes, segment.inputs))
    if exchange.statistics and read > MOST_READ:
        return f"an input of {read} bytes is more than {MOST_READ}"
    everywhere = frozenset(space.x)
    short = next((t for t in exchange.statistics if space.atoms[t] != everywhere), None)
    if short is not None:
        return f"{short} has not one number for each row"
    return None if sent is None else why_not_sent(sent, space)


def in_two_steps(found: Exchanged, device: Device) -> Exchanged:
    """``found`` with each rank adding up some rows of what is sent, where that takes less time than all of them."""
    space, sent = features_or_refusal(found.segment, device), found.exchange.sent
    if isinstance(space, str) or sent is None:
        return found
    exchange = found.exchange
    passed = passed_on(sent, space, exchange.parallel_type, exchange.ranks)
    return replace(found, exchange=replace(exchange, passed=passed))


def _why_not_by_rows(space: Features, exchange: RankExchange) -> str | None:
    """Why no program, or group of them, has a row of which statistics are exchanged."""
    if not _is_read_again(space, exchange):
        return None
    if space.adds_in_pairs:
        return "no program holds its rows, whose sums are in pairs"
    if _by_members(space, exchange) is not None:
        return None
    return why_not_read_again(space, exchange, is_too_long=_is_too_long(space))


def _is_read_again(space: Features, exchange: RankExchange) -> bool:
    """Do registers not hold the rows of statistics, or has a rank nothing of them?"""
    return _is_too_long(space) or has_nothing_somewhere(space, exchange)


def _by_members(space: Features, exchange: RankExchange) -> Schedule | None:
    """Rows that no program holds, held by several; ``None`` where they are not."""
    most = _indexed_held(space.device) * WARP * WARPS_OF_ROWS if _is_indexed(space) else space.reduced
    return held_by_members(space, exchange, most) if _is_too_long(space) else None


def _is_too_long(space: Features) -> bool:
    """Do registers not hold a row, or not with the places of its elements?"""
    is_held = not _is_indexed(space) or space.reduced <= _indexed_held(space.device) * WARP * WARPS_OF_ROWS
    return too_long(space) is not None or not is_held


def why_not_given(segment: Segment, exchange: RankExchange) -> str | None:
    """Why ranks might have other bits of a result that all of them have: kernels of uneven shards are not the same.

    A statistic itself is added up by all in the same way.  So is what is made of such numbers one by one, by the same
    operations in the same order, where the compiler contracts none of them: neither sizes nor blocks are part of it.
    """
    space = analysed(segment)
    uneven = _uneven(segment, exchange)
    other = next((t for t in _alike(exchange, space) if not _is_of_rows(t, exchange, space)), None)
    return f"{other}, of which all ranks have as much, would be made with {uneven[0]}" if uneven and other else None


def _uneven(segment: Segment, exchange: RankExchange) -> list[BoundTensor]:
    return [t for t in segment.tensors if not _is_even(t, exchange.mesh)]


def _alike(exchange: RankExchange, space: Space) -> list[BoundTensor]:
    """Results of which all ranks have as much, but for statistics; of partial sums each rank has its own."""
    outputs = [t for t in space.segment.outputs if not space.has_r(t) and t not in exchange.statistics]
    return [t for t in outputs if not t.domain.digits_on(exchange.parallel_type)]


def _is_of_rows(result: BoundTensor, exchange: RankExchange, space: Space) -> bool:
    """Is ``result`` made of numbers that all ranks have of each row, one number of one of each?"""
    todo = [result]
    for t in todo:
        if space.has_r(t):
            return False
        maker = None if t in exchange.statistics else space.segment.maker.get(t)
        if maker is None:
            continue
        if not isinstance(maker.op, _ONE_BY_ONE):
            return False
        todo += [source for source in maker.tensors if source not in todo]
    return True


def _is_indexed(space: Space) -> bool:
    """Does a kernel make something of the places of a row's elements?"""
    return any(isinstance(e.op, Iota) and space.has_r(e.output) for e in space.segment.exprs)


def _held(device: Device, warps: int) -> int:
    """Registers of a thread that hold a row, where it has all that so many resident warps leave it: half of them."""
    return device.bound(warps) // 2


def _indexed_held(device: Device) -> int:
    """Elements of a row of a thread of ``WARPS_OF_ROWS``, where each is compared with its place, as a target's is.

    Element and place take a register each: with more, or with as many of ``MANY_WARPS``, the compiler spills 264 to
    696 bytes of a thread (sm_90).
    """
    return _held(device, WARPS_OF_ROWS) // 2


def _indexed(schedule: Schedule, space: Features) -> Schedule:
    """``schedule`` with so many warps that threads hold a row with the places of its elements."""
    warps = max(schedule.launch.warps, power_of_two(-(-space.reduced // (_indexed_held(space.device) * WARP))))
    return replace(schedule, launch=replace(schedule.launch, warps=min(warps, WARPS_OF_ROWS), registers=None))


def _in_fewest_turns(space: Features, device: Device, *, is_sent: bool) -> Schedule:
    """A row for each program, with as many warps as one GPU alone takes, or fewer where more rows then wait at once.

    A turn is a wait for the other ranks, which takes as long for a row of many warps as for one of few.  Where rows
    that are not sent could wait at once only with less than the registers that ``WARPS_OF_ROWS`` leave, half as many
    warps have them rather: RMSNorm of 512 x 8192 took 5.8 us so, else 6.3 (2 x H200, bfloat16, in a CUDA graph).
    """
    most, least = by_one_program(space), in_registers(space)
    schedule = least if _turns(least, space, device) < _turns(most, space, device) else most
    if is_sent or schedule.launch.warps > least.launch.warps:
        return schedule
    halved = _in_half_the_warps(schedule)
    is_held = space.reduced * max(space.held_at_most, 1) <= halved.launch.warps * WARP * _held(device, WARPS_OF_ROWS)
    few, many = (_resident(device, WARPS_OF_ROWS, s.launch) * s.kept for s in (schedule, halved))
    return halved if is_held and few < space.kept <= many else schedule


def _in_half_the_warps(schedule: Schedule) -> Schedule:
    return replace(schedule, launch=Launch(max(schedule.launch.warps // 2, 1)))


def _turns(schedule: Schedule, space: Features, device: Device) -> int:
    """Rows that a program has, one behind the other, of as many programs as are resident at most."""
    programs = _resident(device, MANY_WARPS, schedule.launch)
    return -(-space.kept // (programs * schedule.kept))


def _resident(device: Device, warps: int, launch: Launch) -> int:
    """Programs that run at once, with so many warps on each multiprocessor that NCCL leaves."""
    return free_multiprocessors(device.multiprocessors) * max(warps // launch.warps, 1)


def _one_row(space: Features) -> Schedule:
    """A short row for each program, so that one warp waits for it.

    Where each of four warps had a row and waited for that, a launch of 1024 x 512 took 590 us now and then.
    """
    warps = min(power_of_two(-(-space.reduced // (_SHORT * WARP))), WARPS_OF_ROWS)
    return Schedule(Tile(1, min(warps * WARP * WIDEST_LOAD, power_of_two(space.reduced))), launch=Launch(warps))


def _is_even(tensor: BoundTensor, mesh: DeviceMesh) -> bool:
    own = tensor.domain.mesh
    if own is None:
        return True
    return own == mesh and all(is_even(digits, own.extent(p)) for p, digits in tensor.domain.sharding)


def _is_row_uneven(tensor: BoundTensor, exchange: RankExchange, space: Features) -> bool:
    """Do ranks have more or less of each row of ``tensor``, and as many rows?"""
    domain = tensor.domain
    for p, digits in domain.sharding:
        if is_even(digits, exchange.mesh.extent(p)):
            continue
        here = [without(axis, digits) for axis in domain.logical if not set(digits).isdisjoint(axis)]
        if p is not exchange.parallel_type or not {a for axis in here for d in axis for a in space.pieces[d]} <= {
            *space.r
        }:
            return False
    return domain.mesh == exchange.mesh


def scheduled(found: Exchanged, device: Device) -> tuple[KernelPlan, ...]:
    """One kernel, with a grid that is resident beside what other streams run."""
    segment = found.segment
    space = features(segment, device)
    is_gathered = found.exchange.gathered is not None
    is_sent = is_gathered or found.exchange.sent is not None
    shared = None if is_sent else _by_members(space, found.exchange)
    is_looped = shared is None and not is_sent and _is_read_again(space, found.exchange)
    schedule = shared or (read_again(space) if is_looped else _in_fewest_turns(space, device, is_sent=is_sent))
    free, members = free_multiprocessors(device.multiprocessors), max(schedule.members, 1)
    in_rows, passed = is_gathered or (is_sent and is_in_rows(space)), found.exchange.passed
    turns = space.kept if passed is None else -(-space.kept // found.exchange.ranks)
    if passed is not None:
        schedule = for_passing(schedule, space, found.exchange.ranks)
    elif is_sent:
        members = members_of(space, free, in_rows=in_rows)
        schedule = for_words(schedule, space, members, in_rows=in_rows)
    elif schedule.kept > 1:
        schedule = _one_row(space)
    is_indexed = not (is_sent or is_looped or shared) and _is_indexed(space)
    schedule = in_whole_blocks(_indexed(schedule, space) if is_indexed else schedule, space)
    schedule = in_branches(schedule, space) if space.adds_in_pairs else schedule
    launch = schedule.launch
    programs, registers = _resident(device, WARPS_OF_ROWS, launch), device.bound(max(WARPS_OF_ROWS, launch.warps))
    # of more than two ranks the address of each one's slots takes two registers
    held = schedule.kept * space.reduced * space.held_at_most / (launch.warps * WARP)
    held += 2 * (found.exchange.ranks - 2)
    held *= 1 + is_indexed
    if not is_looped and passed is None and held <= _held(device, MANY_WARPS) and turns > programs * schedule.kept:
        programs, registers = _resident(device, MANY_WARPS, launch), device.bound(MANY_WARPS)
    # what a schedule says is for rows of which a thread holds one value
    own = launch.registers if space.held_at_most <= 1 and passed is None else None
    launch = replace(launch, registers=min(own or registers, registers))
    is_claimed = programs > free and turns > free * schedule.kept
    is_uneven = bool(_uneven(segment, found.exchange))
    exchange = replace(
        found.exchange,
        programs=programs if is_claimed else free,
        is_claimed=is_claimed,
        is_in_rows=in_rows,
        members=members,
        is_uneven=is_uneven,
        is_alike=is_uneven and bool(_alike(found.exchange, space)),
    )
    schedule = replace(schedule, launch=launch)
    made = KernelPlan.of("exchange", space, replace(schedule, group=None))  # a group of ranks has its exchange
    return (replace(made, schedule=schedule, exchange=exchange),)
