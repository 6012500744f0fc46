"""Rows that no program holds, in kernels whose ranks exchange: several programs of each rank hold them, where there are
multiprocessors for so many, or each phase reads them again, later ones from L2."""

from __future__ import annotations

from ..ir.digits import extent
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.op import Pick, Reduce, Statistic
from .exchange_room import WARPS_OF_ROWS, free_multiprocessors
from .features import Features, carried
from .limits import WARP, power_of_two, power_of_two_within
from .looped import in_loop
from .persistent import too_long
from .plan import RankExchange
from .resources import within_shared
from .schedule import Group, Launch, Schedule, Tile
from .schedule_cost import instructions_of
from .schedule_parts import WithRanks


def held_by_members(space: Features, exchange: RankExchange, most: int) -> Schedule | None:
    """A row for each group of programs, which hold it; ``None`` where they do not, or could not all run at once.

    most: elements that a program holds, whatever its bytes.  The more programs, the fewer loads each waits for.
    """
    free, block = free_multiprocessors(space.device.multiprocessors), WARPS_OF_ROWS * WARP * space.width
    parts = power_of_two_within(space.tuned.groups.of_ranks // exchange.ranks)
    members = min(power_of_two_within(max(free // space.kept, 1)), parts, power_of_two_within(space.reduced // block))
    if members < 2 or not _may_be_shared(space, exchange):
        return None
    if space.row_bytes > members * space.device.row_bytes or space.reduced > members * most:
        return None
    launch = Launch(WARPS_OF_ROWS, registers=space.device.bound(WARPS_OF_ROWS))
    return Schedule(Tile(1, block), group=Group(members, free, WithRanks()), launch=launch)


def _may_be_shared(space: Features, exchange: RankExchange) -> bool:
    """Can programs have parts of a row, and give each other what they have of each reduction, as a float32?"""
    segment = space.segment
    if space.block or segment.windows or has_nothing_somewhere(space, exchange):
        return False
    if any(isinstance(e.op, Statistic | Pick) for e in segment.exprs):
        return False
    return all(carried(e) is DataType.Float for e in segment.exprs if isinstance(e.op, Reduce))


def why_not_read_again(space: Features, exchange: RankExchange, *, is_too_long: bool) -> str | None:
    """Why there is no program for each row that reads it in each phase, or why collectives between two kernels take no
    longer.

    is_too_long: would no program hold the row?  Where one would, some rank has nothing of it, and rows may be many.
    """
    if space.block:
        return too_long(space) or "some rank has nothing of its rows, which are cut into blocks"
    single = next((t for t in space.segment.tensors if _is_of_one_or_none(t, exchange)), None)
    if single is not None:
        return f"{single} has one element along a dim of some ranks, and none of others"
    free = free_multiprocessors(space.device.multiprocessors)
    if is_too_long and space.kept > free:
        return f"{space.kept} rows, which no program holds, are more than the {free} multiprocessors for one each"
    run = _run_of_one(space)
    if run % (WARPS_OF_ROWS * WARP):
        whole = WARPS_OF_ROWS * WARP
        return f"{run} elements, which is no multiple of {whole}, have one weight, and rows are read in a loop"
    return _why_too_slow(space)


def _why_too_slow(space: Features) -> str | None:
    """By what one multiprocessor does for its row, and all of them where two kernels share the rows."""
    tuned, rates = space.tuned.loops, space.device.rates
    read = space.phases * space.row_bytes
    computed = instructions_of(space) / space.kept * space.device.multiprocessors / rates.issued
    alone = read / tuned.read_alone + computed
    apart = tuned.two_kernels + 2 * space.kept * space.row_bytes / rates.memory
    if alone <= apart:
        return None
    return f"{read} bytes of a row that one program reads take {alone:.1f} us, two kernels and a collective {apart:.1f}"


def _run_of_one(space: Features) -> int:
    """Elements of a row that lie one behind the other and have one number, where a weight has one for several: a loop
    that reads it element by element took 59 us for 2 x 640 x 64 x 64, with 128 x 128 pixels 18 (H200)."""
    own = [a for t in space.beside if space.has_x(t) for a in space.atoms[t]]
    last = max((k for k, a in enumerate(space.r) if a in own), default=-1)
    return extent(space.r[last + 1 :]) if last >= 0 else WARPS_OF_ROWS * WARP


def read_again(space: Features) -> Schedule:
    """A row for each program, in a loop for each phase, by so many warps that many loads are under way."""
    schedule = in_loop(space)
    is_alone = space.kept <= free_multiprocessors(space.device.multiprocessors)
    warps = min(WARPS_OF_ROWS if is_alone else schedule.launch.warps, max(power_of_two(space.reduced) // WARP, 1))
    block = min(schedule.reduced * max(warps // schedule.launch.warps, 1), power_of_two(space.reduced))
    if space.is_by_sample:
        run = _run_of_one(space)
        block = min(block, run & -run)
    return within_shared(space, schedule.sized(kept=1, reduced=block).with_warps(warps))


def _is_of_one_or_none(tensor: BoundTensor, exchange: RankExchange) -> bool:
    """Has it a dim of which ranks have one element at most, and some none?  What has one is no axis of a kernel, which
    would not know of those that have none."""
    shapes = [tensor.domain.local_shape(rank) for rank in exchange.mesh.ranks]
    return any(0 in sizes and max(sizes) == 1 for sizes in zip(*shapes, strict=True))


def has_nothing_somewhere(space: Features, exchange: RankExchange) -> bool:
    """Has some rank nothing of its rows?  A loop over nothing gives what changes no statistic."""
    shapes = (t.domain.local_shape(rank) for t in space.segment.tensors for rank in exchange.mesh.ranks)
    return any(0 in shape for shape in shapes)
