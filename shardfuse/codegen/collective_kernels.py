"""Kernels that are collectives: ranks of a host send pieces of a tensor into each other's memory, and read them there.

The protocol is that of rows which a fused kernel sends (``codegen/sending_rows.py``): a program stores a piece into a
slot of every peer, then a flag behind a fence; it waits for the peers' flags, and reads their pieces from its own
memory.  Here a piece is a *chunk* of the tensor, and what follows is no fusion but the collective's own result::

    all_gather      sends its own chunk to every peer                      stores everybody's into the result
    reduce_scatter  sends each peer that peer's chunk of its summands      stores the sum of what all have for it
    all_reduce      sends its own chunk to every peer                      stores the sum of all

Sums are in float32, in the order of the ranks, and rounded once; so all ranks have the same bits in every run.  What is
gathered is moved as words of 32 bits, whatever it is.

A launch has a chunk of one *strip* in each turn of a program.  Strips are the rows of an inner dim that is gathered or
scattered: so many, each contiguous, ``given_step`` apart in what is given and ``taken_step`` in the result.  Sizes come
as numbers of whole 16-byte *units*, so that the compiler knows how they are aligned.

All kernels of the same ranks share slots and turns: chunks have as many bytes at the most in each, and each kernel has
as many programs.  Chunk k of a launch belongs to program ``k % programs``, on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..schedulers.limits import power_of_two, power_of_two_within
from ..schedulers.plan import RankExchange
from ..schedulers.rank_exchange import LEFT_FREE
from . import narrow
from .arithmetic import TRITON_TYPE
from .claims import FIRST, ROOM, claim_helpers, grid_of, program_loops
from .exchange_functions import GONE, await_turn_text, post_turn_text
from .indexing import plus
from .mesh_exchange import FLAG_WORDS, SLOTS, count_lines, flags_of_rows, slots_at, table_lines
from .source import MAILBOX, KernelSource
from .statements import Statement, function_text

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
UNIT = 16
"""Bytes that a thread stores at once; strips and their distances are whole numbers of these."""
SUMMED = (DataType.BFloat16, DataType.Half, DataType.Float)
"""Types whose sums, accumulated in float32 and rounded once, are at least as near as NCCL's."""
MOST_CHUNK = 1 << 14
"""Bytes of a chunk for one peer: the row of 8192 16-bit elements with which the exchange row by row reaches NVLink's
bandwidth, 4 programs of 8 warps on each multiprocessor.  More peers have smaller ones, so that slots take as much."""
_LEAST_CHUNK = 1 << 12
"""Bytes of a chunk where a launch has less than one for each multiprocessor: the smaller ones leave and come by more of
them at a time.  Below it a fence and a flag take longer than what they stand for."""
_OF_THREAD = 64
"""Bytes of the chunks of all peers that a thread has, of each those of one load at least: four are under way at once."""
_WARP = 32
PROGRAMS_EACH = 4
"""Programs on a multiprocessor: while one waits, the others store."""
_SIZES = ("units", "strips", "given_units", "taken_units")
"""Arguments, in units of 16 bytes but for the number of strips."""


@dataclass(frozen=True)
class Collective:
    """The kernel of one kind of collective.

    dtype: of the elements; of a gather, which moves bits, 32-bit integers.  chunk: its bytes.  exchange: which ranks,
    how many programs share the chunks, and whether those that start claim their numbers.
    """

    kind: Kind
    dtype: DataType
    chunk: int
    exchange: RankExchange

    @property
    def elements(self) -> int:
        """Of a chunk."""
        return self.chunk // self.dtype.itemsize

    @property
    def unit(self) -> int:
        """Elements of 16 bytes."""
        return UNIT // self.dtype.itemsize

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.exchange.ranks}"


@dataclass(frozen=True)
class Strips:
    """What one collective moves, in units of 16 bytes: so many strips of ``units`` each, and their distances."""

    units: int
    count: int
    given_units: int
    taken_units: int

    @staticmethod
    def of(itemsize: int, count: int, strips: int, given: int, taken: int) -> Strips | None:
        """From numbers of elements; ``None`` where they are not whole units."""
        sizes = [n * itemsize for n in (count, given, taken)]
        if any(size % UNIT for size in sizes):
            return None
        units, given_units, taken_units = (size // UNIT for size in sizes)
        return Strips(units, strips, given_units, taken_units)

    @property
    def bytes(self) -> int:
        """Of all strips together."""
        return self.units * self.count * UNIT

    def chunks(self, chunk: int) -> int:
        """How many of so many bytes they are."""
        return -(-self.units * UNIT // chunk) * self.count

    def sizes(self) -> tuple[int, ...]:
        return self.units, self.count, self.given_units, self.taken_units


def most_chunk(ranks: int) -> int:
    """Bytes of the largest chunk that is sent to each of the other ranks."""
    return power_of_two_within(MOST_CHUNK // (ranks - 1))


def slot_words(exchange: RankExchange) -> int:
    """64-bit words of each rank's slots and flags, which all kernels of these ranks share."""
    return flags_of_rows(exchange) + 2 * exchange.programs * (exchange.ranks - 1) * most_chunk(exchange.ranks) // 8


def chosen_chunk(strips: Strips, ranks: int, free: int) -> int:
    """Bytes of the chunks of a launch: the largest, or those by which each of ``free`` multiprocessors has one."""
    most = most_chunk(ranks)
    return max(min(most, _LEAST_CHUNK), min(most, power_of_two(-(-strips.bytes // free))))


def collective_source(
    made: Collective, strips: Strips, multiprocessors: int, *, interpret: bool = False
) -> KernelSource:
    """The kernel for so much, as a GPU with so many multiprocessors launches it where NCCL takes those of one group."""
    exchange = made.exchange
    numbers = dict.fromkeys(_SIZES, "tl.int64") | {ROOM if exchange.is_claimed else FIRST: "tl.int32"}
    parameters = [MAILBOX, "given_ptr", "taken_ptr", *(f"{name}: {kind}" for name, kind in numbers.items())]
    body = [*_head(made), *program_loops(_turn(made, interpret=interpret), "blocks", exchange)]
    function = function_text(made.name, parameters, body, not_specialised=[*numbers])
    helpers = "".join(f"{text}\n\n" for text in _helpers(made, interpret=interpret).values())
    title = f'"""{made.kind} among {exchange.ranks} ranks, chunks of {made.chunk} bytes."""'
    text = f"{title}\n\nimport triton\nimport triton.language as tl\n\n\n{helpers}{function}"
    tensors = tuple(BoundTensor(name, made.dtype, BoundDomain(())) for name in ("given", "taken"))
    last = free_multiprocessors(multiprocessors) if exchange.is_claimed else 0
    grid = grid_of(exchange, strips.chunks(made.chunk), multiprocessors)
    of_thread = max(power_of_two_within(_OF_THREAD // (exchange.ranks - 1)), UNIT)
    warps = max(made.chunk // of_thread // _WARP, 1)
    return KernelSource(
        made.name, text, tensors, (), (*strips.sizes(), last), grid, warps, 1,
        mailbox=1, is_cooperative=not exchange.is_claimed,
    )  # fmt: skip


def _helpers(made: Collective, *, interpret: bool) -> dict[str, str]:
    peers = made.exchange.ranks - 1
    found = claim_helpers(interpret=interpret) if made.exchange.is_claimed else {}
    found[f"post_{peers}"] = post_turn_text(f"post_{peers}", peers, interpret=interpret)
    found[f"await_{peers}"] = await_turn_text(f"await_{peers}", peers, interpret=interpret)
    return found | (narrow.helpers(made.dtype, interpret=interpret) if made.kind != "all_gather" else {})


def _head(made: Collective) -> list[Statement]:
    """Before the loop over programs: the table, the slots of the ranks by their distance behind this one, and sizes."""
    exchange, element = made.exchange, TRITON_TYPE[made.dtype]
    flags = 8 * flags_of_rows(exchange)
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
        f"lanes = tl.arange(0, {made.elements})",
        f"count = units * {made.unit}",
        f"chunks = (count + {made.elements - 1}) // {made.elements}",
        "blocks = (strips * chunks).to(tl.int32)",
        "",
    ]


def _turn(made: Collective, *, interpret: bool) -> list[Statement]:
    """One chunk, the ``row`` of the loop over them."""
    ranks, is_scattered = made.exchange.ranks, made.kind == "reduce_scatter"
    peers = ranks - 1
    lane = "program * 2 + (epoch & 1)"
    flags = [plus(f"peer_{j}_flags + lane * {FLAG_WORDS}", (peers - j) * FLAG_WORDS) for j in range(1, ranks)]
    own_flags = [plus(f"own_flags + lane * {FLAG_WORDS}", k * FLAG_WORDS) for k in range(peers)]
    own = f"mine = tl.load({_at('given', '+ rank * count' if is_scattered else '')}, mask=mask)"
    lines: list[Statement] = [
        "block = tl.full([], 0, tl.int32) + row",  # a number of Python's under the interpreter
        "strip = block // chunks",
        f"start = (block - strip * chunks) * {made.elements}",
        "mask = start + lanes < count",
        f"given = given_ptr + (strip * given_units * {made.unit} + start)",
        f"taken = taken_ptr + (strip * taken_units * {made.unit} + start)",
        "epoch = (epoch + 1) & 0x7FFFFFFF",
        f"lane = {lane}" if peers == 1 else f"lane = ({lane}) * {peers}",
        f"slot = lane.to(tl.int64) * {_slot_elements(made)}",
        "is_sent = mask & (late == 0)",
        *([] if is_scattered else [own]),
    ]
    for j in range(1, ranks):  # this rank is at distance ranks - j of that one
        sent = f"tl.load({_at('given', f'+ (rank + {j}) % {ranks} * count')}, mask=mask)" if is_scattered else "mine"
        lines.append(f"tl.store({_slot_of(made, f'peer_{j}_slots', peers - j)}, {sent}, mask=is_sent)")
    lines.append(f"post_{peers}({', '.join(flags)}, tl.where(late == 0, epoch, {GONE}))")
    if is_scattered:
        lines.append(own)
    elif made.kind == "all_gather":
        lines.append(f"tl.store({_at('taken', '+ rank * count')}, mine, mask=mask)")
    waited = ", ".join([*own_flags, "epoch", "block", "limit", "report", "names_ptr"])
    lines.append(f"late = late | await_{peers}({waited})")
    return lines + (_gathered(made) if made.kind == "all_gather" else _summed(made, interpret=interpret))


def _at(pointer: str, beyond: str = "") -> str:
    """Text of the lanes of a chunk: what all of them have in common is added first, as one number."""
    return f"{pointer} {beyond} + lanes".replace("  ", " ")


def _slot_elements(made: Collective) -> int:
    return most_chunk(made.exchange.ranks) // made.dtype.itemsize


def _slot_of(made: Collective, slots: str, k: int) -> str:
    """Text of the k-th peer's part of a lane."""
    return _at(plus(f"{slots} + slot", k * _slot_elements(made)))


def _come(made: Collective, j: int) -> str:
    """Text of what has come of the rank at distance ``j``."""
    return f'tl.load({_slot_of(made, "own_slots", j - 1)}, mask=mask, cache_modifier=".cg")'


def _gathered(made: Collective) -> list[Statement]:
    ranks = made.exchange.ranks
    lines: list[Statement] = [f"come_{j} = {_come(made, j)}" for j in range(1, ranks)]
    places = [_at("taken", f"+ (rank + {j}) % {ranks} * count") for j in range(1, ranks)]
    return lines + [f"tl.store({place}, come_{j}, mask=mask)" for j, place in enumerate(places, 1)]


def _summed(made: Collective, *, interpret: bool) -> list[Statement]:
    """The sum in the order of the ranks; NaN where some rank has not come."""
    ranks, element = made.exchange.ranks, TRITON_TYPE[made.dtype]
    is_narrow = made.dtype.is_low_precision
    lines: list[Statement] = ["mine = mine.to(tl.float32)"]
    lines += [f"come_{j} = {_come(made, j)}.to(tl.float32)" for j in range(1, ranks)]
    if ranks == 2:  # in either order
        lines.append("total = mine + come_1")
    for k in range(ranks) if ranks > 2 else ():
        chosen = "mine"
        for j in range(1, ranks):
            chosen = f"tl.where((rank + {j}) % {ranks} == {k}, come_{j}, {chosen})"
        lines.append(f"total = {chosen}" if k == 0 else f"total = total + {chosen}")
    lines.append('total = tl.where(late == 0, total, float("nan"))')
    result = narrow.rounded("total", made.dtype, interpret=interpret) if is_narrow else "total"
    return [*lines, f"tl.store({_at('taken')}, {result}.to({element}), mask=mask)"]


def free_multiprocessors(multiprocessors: int) -> int:
    """Those that NCCL leaves where it has one process group."""
    return max(multiprocessors - LEFT_FREE, 1)


def shared_programs(multiprocessors: int) -> int:
    """Programs that share the chunks of every launch, on a GPU with so many multiprocessors."""
    return PROGRAMS_EACH * free_multiprocessors(multiprocessors)
