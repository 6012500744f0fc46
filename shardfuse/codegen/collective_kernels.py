"""Kernels that are collectives: ranks of a host send pieces of a tensor into each other's memory, and read them there.

The protocol is that of rows which a fused kernel sends (``codegen/sending_rows.py``): a program stores a piece into a
slot of every peer, then a flag behind a fence; it waits for the peers' flags, and reads their pieces from its own
memory.  Here a piece is a *chunk* of the tensor, and what follows is no fusion but the collective's own result::

    all_gather      sends its own chunk to every peer                      stores everybody's into the result
    all_to_all      sends each peer the chunk that is for it               stores everybody's into the result
    reduce_scatter  sends each peer that peer's chunk of its summands      stores the sum of what all have for it
    all_reduce      sends its own chunk to every peer                      stores the sum of all

Sums are in float32, in the order of the ranks, and rounded once; so all ranks have the same bits in every run.  What is
not added up is moved as integers of as many bits, whatever it is: 16 bytes at a time, but for tensors that begin
elsewhere than at a multiple of 16 bytes, which are read and written element by element.

Tensors are read and written where they lie: an inner dim that is gathered or scattered needs no copy
(``collective_moves.py``).  All kernels of the same ranks share slots and turns: chunks have as many bytes at the most
in each, and each kernel has as many programs.  Chunk k of a launch belongs to program ``k % programs``, on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..device import WARP, Device
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..schedulers.exchange_room import free_multiprocessors
from ..schedulers.limits import power_of_two, power_of_two_within
from ..schedulers.plan import RankExchange
from . import narrow
from .arithmetic import TRITON_TYPE
from .claims import FIRST, ROOM, claim_helpers, grid_of, program_loops
from .collective_moves import UNIT, Moves
from .exchange_functions import GONE, await_turn_text, post_turn_text
from .indexing import plus
from .mesh_exchange import FLAG_WORDS, SLOTS, count_lines, flags_of_rows, slots_at, table_lines
from .source import MAILBOX, KernelSource
from .statements import Statement, function_text

Kind = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
SUMMED = (DataType.BFloat16, DataType.Half, DataType.Float)
"""Types whose sums, accumulated in float32 and rounded once, are at least as near as NCCL's."""


@dataclass(frozen=True)
class Collective:
    """The kernel of one kind of collective.

    dtype: of the elements; of what is not added up, whose bits are moved, integers.  chunk: its bytes.
    device: for which GPU it is.
    exchange: which ranks, how many programs share the chunks, and whether those that start claim their numbers.
    is_flat: is all that a rank gives, or has of one peer, one run of memory?
    is_whole: has the last chunk as many bytes as the others?
    """

    kind: Kind
    dtype: DataType
    chunk: int
    device: Device
    exchange: RankExchange
    is_flat: bool = True
    is_whole: bool = False

    @property
    def unit(self) -> int:
        """Elements of 16 bytes."""
        return UNIT // self.dtype.itemsize

    @property
    def is_summed(self) -> bool:
        return self.kind in ("reduce_scatter", "all_reduce")

    @property
    def has_pieces(self) -> bool:
        """Is what a rank gives another piece for each peer?"""
        return self.kind in ("reduce_scatter", "all_to_all")

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.exchange.ranks}"


def most_chunk(ranks: int, device: Device) -> int:
    """Bytes of the largest chunk that is sent to each of the other ranks."""
    return power_of_two_within(device.measured.collectives.chunk_bytes // (ranks - 1))


def slot_words(exchange: RankExchange, device: Device) -> int:
    """64-bit words of each rank's slots and flags, which all kernels of these ranks share."""
    chunks = 2 * exchange.programs * (exchange.ranks - 1)
    return flags_of_rows(exchange) + chunks * most_chunk(exchange.ranks, device) // 8


def chosen_chunk(size: int, ranks: int, device: Device) -> int:
    """Bytes of the chunks of so many bytes: the largest, or those by which each multiprocessor that NCCL leaves has
    one."""
    most, least = most_chunk(ranks, device), device.measured.collectives.least_chunk_bytes
    free = free_multiprocessors(device.multiprocessors)
    return max(min(most, least), min(most, power_of_two(-(-size // free))))


def collective_source(made: Collective, moves: Moves, *, interpret: bool = False) -> KernelSource:
    """The kernel for so much, as its GPU launches it where NCCL takes the multiprocessors of one process group.

    moves: in units of 16 bytes.
    """
    exchange, multiprocessors = made.exchange, made.device.multiprocessors
    numbers = moves.numbers(is_flat=made.is_flat)
    last = ROOM if exchange.is_claimed else FIRST
    kinds = dict.fromkeys(numbers, "tl.int64") | {last: "tl.int32"}
    parameters = [MAILBOX, "given_ptr", "taken_ptr", *(f"{name}: {kind}" for name, kind in kinds.items())]
    body = [*_head(made), *program_loops(_turn(made, interpret=interpret), "blocks", exchange)]
    function = function_text(made.name, parameters, body, not_specialised=[*kinds])
    helpers = "".join(f"{text}\n\n" for text in _helpers(made, interpret=interpret).values())
    title = f'"""{made.kind} among {exchange.ranks} ranks, chunks of {made.chunk} bytes."""'
    text = f"{title}\n\nimport triton\nimport triton.language as tl\n\n\n{helpers}{function}"
    tensors = tuple(BoundTensor(name, made.dtype, BoundDomain(())) for name in ("given", "taken"))
    given_last = free_multiprocessors(multiprocessors) if exchange.is_claimed else 0
    grid = grid_of(exchange, -(-moves.count * UNIT // made.chunk), multiprocessors)
    of_thread = made.device.measured.collectives.thread_bytes // (exchange.ranks - 1)
    of_thread = max(power_of_two_within(of_thread), UNIT)
    warps = max(made.chunk // of_thread // WARP, 1)
    # Left to itself, ptxas gives a thread 32 to 40 registers, with which 16 MB between two H200s took 89 us, with up to
    # 64 60.  In both all loads of a chunk come before its first store.
    registers = made.device.bound(made.device.measured.collectives.programs * warps)
    return KernelSource(
        made.name, text, tensors, (), (*numbers.values(), given_last), grid, warps, 1, registers, mailbox=1
    )  # fmt: skip


def _helpers(made: Collective, *, interpret: bool) -> dict[str, str]:
    peers = made.exchange.ranks - 1
    found = claim_helpers(interpret=interpret) if made.exchange.is_claimed else {}
    found[f"post_{peers}"] = post_turn_text(f"post_{peers}", peers, interpret=interpret)
    found[f"await_{peers}"] = await_turn_text(f"await_{peers}", peers, interpret=interpret)
    return found | (narrow.helpers(made.dtype, interpret=interpret) if made.is_summed else {})


def _head(made: Collective) -> list[Statement]:
    """Before the loop over programs: the table, the slots of the ranks by their distance behind this one, and sizes."""
    exchange, element = made.exchange, TRITON_TYPE[made.dtype]
    flags, units = 8 * flags_of_rows(exchange), made.chunk // UNIT
    slots = ["own", *(f"peer_{j}" for j in range(1, exchange.ranks))]
    return [
        *(count_lines(exchange) if exchange.is_claimed else []),
        *table_lines(exchange.ranks + 1),
        *(f"{name}_flags = {slots_at(SLOTS + j)}" for j, name in enumerate(slots)),
        *(
            f"{name}_slots = tl.multiple_of((tl.load({MAILBOX} + {SLOTS + j}) + {flags})"
            f".to(tl.pointer_type({element})), {UNIT})"
            for j, name in enumerate(slots)
        ),
        "",
        f"units = tl.arange(0, {units})[:, None]",
        f"within = tl.arange(0, {made.unit})[None, :]",
        f"lanes = units * {made.unit} + within",
        f"blocks = ((count + {units - 1}) // {units}).to(tl.int32)",
        "",
    ]


def _turn(made: Collective, *, interpret: bool) -> list[Statement]:
    """One chunk, the ``row`` of the loop over them."""
    ranks = made.exchange.ranks
    peers = ranks - 1
    lane = "program * 2 + (epoch & 1)"
    flags = [plus(f"peer_{j}_flags + lane * {FLAG_WORDS}", (peers - j) * FLAG_WORDS) for j in range(1, ranks)]
    own_flags = [plus(f"own_flags + lane * {FLAG_WORDS}", k * FLAG_WORDS) for k in range(peers)]
    own = f"mine = {_given(made, 'rank')}"
    lines: list[Statement] = [
        "block = tl.full([], 0, tl.int32) + row",  # a number of Python's under the interpreter
        *_places(made),
        "epoch = (epoch + 1) & 0x7FFFFFFF",
        f"lane = {lane}" if peers == 1 else f"lane = ({lane}) * {peers}",
        f"slot = lane.to(tl.int64) * {_slot_elements(made)}",
        *([] if made.has_pieces else [own]),
    ]
    is_sent = "late == 0" if made.is_whole else "mask & (late == 0)"
    for j in range(1, ranks):  # this rank is at distance ranks - j of that one
        sent = _given(made, f"(rank + {j}) % {ranks}") if made.has_pieces else "mine"
        lines.append(f"tl.store({_slot_of(made, f'peer_{j}_slots', peers - j)}, {sent}, mask={is_sent})")
    lines.append(f"post_{peers}({', '.join(flags)}, tl.where(late == 0, epoch, {GONE}))")
    lines += [own] if made.has_pieces else []
    lines += [] if made.is_summed else [_stored(made, "rank", "mine")]
    waited = ", ".join([*own_flags, "epoch", "block", "limit", "report", "names_ptr"])
    lines.append(f"late = late | await_{peers}({waited})")
    return lines + (_summed(made, interpret=interpret) if made.is_summed else _placed(made))


def _places(made: Collective) -> list[Statement]:
    """Where the units of a chunk are in what is given and taken: ``given`` and ``taken``, and which there are."""
    units, unit = made.chunk // UNIT, made.unit
    if made.is_flat:
        return [
            f"start = block.to(tl.int64) * {units}",
            *([] if made.is_whole else ["mask = (start + units < count) & (within >= 0)"]),
            f"given = given_ptr + start * {unit}",
            f"taken = taken_ptr + start * {unit}",
        ]
    return [
        f"index = block * {units} + units",
        *([] if made.is_whole else ["mask = (index < count) & (within >= 0)"]),
        "strip = index // run.to(tl.int32)",
        "outer = strip // inner.to(tl.int32)",
        "at = (index - strip * run.to(tl.int32)).to(tl.int64)",
        "step = (strip - outer * inner.to(tl.int32)).to(tl.int64)",
        f"given = given_ptr + (outer * given_outer + step * given_inner + at) * {unit}",
        f"taken = taken_ptr + (outer * taken_outer + step * taken_inner + at) * {unit}",
    ]


def _masked(made: Collective) -> str:
    """Text of the argument by which an access leaves out what a chunk has not.

    With a condition for each access, a gather of 16 MB between two H200s took 74 us where 61 to 64 stand, one of 64 MB
    244 where 207 do.
    """
    return "" if made.is_whole else ", mask=mask"


def _given(made: Collective, rank: str) -> str:
    """Text of this rank's chunk for ``rank``."""
    piece = f" + {rank} * given_peer * {made.unit}" if made.has_pieces else ""
    return f"tl.load(given{piece} + {'lanes' if made.is_flat else 'within'}{_masked(made)})"


def _stored(made: Collective, rank: str, text: str) -> str:
    """The line that stores ``text`` where what ``rank`` has given belongs."""
    return f"tl.store({_taken(made, rank)}, {text}{_masked(made)})"


def _taken(made: Collective, rank: str) -> str:
    """Text of where what ``rank`` has given belongs."""
    piece = "" if made.is_summed else f" + {rank} * taken_peer * {made.unit}"
    return f"taken{piece} + {'lanes' if made.is_flat else 'within'}"


def _slot_of(made: Collective, slots: str, k: int) -> str:
    """Text of the k-th peer's part of a lane."""
    return f"{plus(f'{slots} + slot', k * _slot_elements(made))} + lanes"


def _slot_elements(made: Collective) -> int:
    return most_chunk(made.exchange.ranks, made.device) // made.dtype.itemsize


def _arrived(made: Collective, j: int) -> str:
    """Text of what has arrived of the rank at distance ``j``."""
    return f'tl.load({_slot_of(made, "own_slots", j - 1)}{_masked(made)}, cache_modifier=".cg")'


def _placed(made: Collective) -> list[Statement]:
    """What has arrived, where it belongs; where some rank has not come, all ones, which are NaN in floating types."""
    ranks = made.exchange.ranks
    lines: list[Statement] = [f"arrived_{j} = tl.where(late == 0, {_arrived(made, j)}, -1)" for j in range(1, ranks)]
    return lines + [_stored(made, f"(rank + {j}) % {ranks}", f"arrived_{j}") for j in range(1, ranks)]


def _summed(made: Collective, *, interpret: bool) -> list[Statement]:
    """The sum in the order of the ranks; NaN where some rank has not come."""
    ranks, element = made.exchange.ranks, TRITON_TYPE[made.dtype]
    lines: list[Statement] = ["mine = mine.to(tl.float32)"]
    if ranks == 2:  # in either order
        lines += [f"arrived_1 = {_arrived(made, 1)}.to(tl.float32)", "total = mine + arrived_1"]
    for k in range(ranks) if ranks > 2 else ():  # the place of this rank itself is another's, whose value is not taken
        place = f"({k} - rank + {ranks - 1}) % {ranks} % {ranks - 1} * {_slot_elements(made)}"
        lines.append(f'of_{k} = tl.load(own_slots + slot + {place} + lanes{_masked(made)}, cache_modifier=".cg")')
        lines.append(f"of_{k} = tl.where(rank == {k}, mine, of_{k}.to(tl.float32))")
        lines.append(f"total = of_{k}" if k == 0 else f"total = total + of_{k}")
    lines.append('total = tl.where(late == 0, total, float("nan"))')
    is_narrow = made.dtype.is_low_precision
    result = narrow.rounded("total", made.dtype, interpret=interpret) if is_narrow else "total"
    return [*lines, _stored(made, "", f"{result}.to({element})")]


def shared_programs(device: Device) -> int:
    """Programs that share the chunks of every launch."""
    return device.measured.collectives.programs * free_multiprocessors(device.multiprocessors)
