"""Partial sums that ranks send one another row by row inside of a kernel, for messages that NVLink's bandwidth bounds.

A word that is its own flag (``codegen/sending.py``) doubles what is sent.  Here a program stores the elements of its
row into the memory of every peer as they are, then one flag for each, at system scope behind a fence; it waits for the
flags of the others, and reads their rows from its own memory.  What bounds a launch is NVLink: other programs of the
multiprocessor store their rows meanwhile.

Slots belong to programs, not to rows, so that they take as little memory for many rows as for few, and all programs of
the same geometry share them (``executor/symmetric_slots.py``)::

    flags   [programs, 2, ranks - 1]            32 bytes each, of which the first four are the number of a turn
    rows    [programs, 2, ranks - 1, elements]  of 16 bits; elements: of a row, up to whole blocks

A program that has waited in vain has given up for good: it stores no more rows, over which late peers may still read,
and ``GONE`` at flags, which ends their waits.  That it has stands above its turns in the table.

Turns are counted for each program, through all launches.  Ranks have the same grid, so that the same program of each
has the same turns.  Two sets are enough: who stores the row of turn t + 2 has seen the flag of turn t + 1 of every
peer, which a peer stores when it has read the rows of turn t.

The rank at distance ``j`` behind this one, counted round the ranks, has its place ``j - 1``; addresses and names in the
table are in this order, this rank's own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.op import OfRank
from ..schedulers.plan import KernelPlan
from .arithmetic import TRITON_TYPE
from .exchange_functions import GONE, await_turn_text, post_turn_text
from .indexing import plus
from .mesh_exchange import FLAG_WORDS, SLOTS, count_lines, flags_of_rows, row_elements, row_of, slots_at, table_lines
from .sending import Sending
from .source import MAILBOX
from .tile import Chunk


def row_sender_lines(plan: KernelPlan) -> list[str]:
    """Before the loop over programs: the table."""
    exchange = plan.rank_exchange
    ranks = exchange.ranks
    places = [*range(1, ranks)]
    return [
        *(count_lines(exchange) if exchange.is_claimed else []),
        *table_lines(ranks + 1),
        f"own_flags = {slots_at(SLOTS)}",
        *(f"flags_{j} = {slots_at(SLOTS + j)}" for j in places),
        f"own_rows = {_rows_at(plan, 0)}",
        *(f"rows_{j} = {_rows_at(plan, j)}" for j in places),
    ]


def _rows_at(plan: KernelPlan, j: int) -> str:
    """Text of where the rows of the rank at distance ``j`` begin, aligned for the widest stores."""
    exchange = plan.rank_exchange
    sent = exchange.sent or exchange.gathered
    assert sent is not None, "what they send"
    flags, kind = flags_of_rows(exchange), TRITON_TYPE[sent.dtype]
    return f"tl.multiple_of((tl.load({MAILBOX} + {SLOTS + j}) + {8 * flags}).to(tl.pointer_type({kind})), 16)"


class SendingRows(Sending):
    """An emitter whose plan sends a tensor row by row."""

    def send(self, chunks: Sequence[Chunk]) -> None:
        """The row goes out to all peers, and a flag behind it."""
        self.begin_turn()
        for chunk in chunks:
            text = f"{self.value(self.source, chunk).text}.to({TRITON_TYPE[self.source.dtype]})"
            for j in range(1, self.plan.rank_exchange.ranks):
                self.store_at(j, chunk, text)
        self.end_sending()

    def begin_turn(self) -> None:
        """The next turn of the program, and where its rows are stored."""
        peers = self.plan.rank_exchange.ranks - 1
        self.helpers[f"post_{peers}"] = post_turn_text(f"post_{peers}", peers, interpret=self.interpret)
        self.out.paragraph()
        self.out.line("epoch = (epoch + 1) & 0x7FFFFFFF")  # no turn has the sign, which stands for a lost one
        lane = "program * 2 + (epoch & 1)"
        self.out.line(f"lane = {lane}" if peers == 1 else f"lane = ({lane}) * {peers}")
        self.out.line(f"lane_row = lane.to(tl.int64) * {row_elements(self.plan)}")

    def store_at(self, j: int, chunk: Chunk, text: str) -> None:
        """``text``, of the type that is sent, goes to the rank at distance ``j``, of whom this one is at ranks - j."""
        place = (self.plan.rank_exchange.ranks - 1 - j) * row_elements(self.plan)
        mask = f"{chunk.mask} & (late == 0)" if chunk.is_masked else "late == 0"
        at = plus(f"rows_{j} + lane_row", place, chunk.start or 0)
        self.out.line(f"tl.store({at} + {chunk.lane}, {text}, mask={mask})")

    def end_sending(self) -> None:
        """The flags behind the rows of a turn."""
        peers = self.plan.rank_exchange.ranks - 1
        flags = [plus(f"flags_{j} + lane * {FLAG_WORDS}", (peers - j) * FLAG_WORDS) for j in range(1, peers + 1)]
        self.out.line(f"post_{peers}({', '.join(flags)}, tl.where(late == 0, epoch, {GONE}))")

    def await_turn(self) -> None:
        """Wait for the flags of all peers."""
        peers = self.plan.rank_exchange.ranks - 1
        wait = f"await_rows_{peers}"
        self.helpers[wait] = await_turn_text(wait, peers, interpret=self.interpret)
        flags = [plus(f"own_flags + lane * {FLAG_WORDS}", i * FLAG_WORDS) for i in range(peers)]
        given = [*flags, "epoch", row_of(self), "limit", "report", "names_ptr"]
        self.out.line(f"late = late | {wait}({', '.join(given)})")

    def receive(self, chunk: Chunk) -> None:
        """What all ranks have of a chunk, once all rows have come."""
        exchange, source = self.plan.rank_exchange, self.source
        ranks, peers, elements = exchange.ranks, exchange.ranks - 1, row_elements(self.plan)
        if f"await_rows_{peers}" not in self.helpers:  # the first chunk of a turn waits for all
            self.await_turn()
        mine = self.value(source, chunk)
        names = [f"{source}_of_{k}{chunk.suffix}" for k in range(ranks)]
        for k in range(ranks):
            name = f"{source}_of_peer{chunk.suffix}" if ranks == 2 else names[k]
            if ranks > 2 or not k:
                place = [] if ranks == 2 else [f"({k} - rank + {peers}) % {ranks} % {peers} * {elements}"]
                at = " + ".join([plus("own_rows + lane_row", chunk.start or 0), *place, chunk.lane])
                mask = f"mask={chunk.mask}, other=0.0, " if chunk.is_masked else ""
                self.out.line(f'{name} = tl.load({at}, {mask}cache_modifier=".cg").to(tl.float32)')
                self.out.line(f'{name} = tl.where(late == 0, {name}, float("nan"))')
            own, come = (mine.text, name) if k == 0 or ranks > 2 else (name, mine.text)
            condition = f"rank == {k}" if ranks > 2 else "rank == 0"
            self.out.line(f"{names[k]} = tl.where({condition}, {own}, {come})")
        for expr in self.plan.segment.exprs:
            if isinstance(expr.op, OfRank):
                text = names[expr.op.rank]
                self.values[self.key(expr.output, chunk)] = replace(mine, text=text, dtype=DataType.Float)
