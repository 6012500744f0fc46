"""Partial sums of more than two ranks, of which each adds up some rows inside of a kernel and passes them on to all.

If each rank were given all summands it would be sent (ranks - 1) of them; so it is sent 2 (ranks - 1) / ranks.  A turn
of a program has a row for each rank, those that follow one another, and is two turns of its slots and flags
(``codegen/sending_rows.py``)::

    rank 1 of 4, turn 5     sends its parts of rows 20, 22 and 23 to ranks 0, 2 and 3
                            adds up what has come for row 21, in the order of the ranks, and sends the sum to all
                            for rows 20 to 23: reads the sum, and computes what is made of it

The sum is passed on in the type of the summands, and this rank reads its own rounded alike: so all ranks have the same
bits.  The last turn may have fewer rows: in place of those behind the end the last row is read and sent, and not used.
"""

from __future__ import annotations

from functools import partial

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.layout import Coordinates
from ..schedulers.plan import KernelPlan
from . import narrow
from .arithmetic import TRITON_TYPE
from .bodies import write_unrolled
from .emitter import Emitter
from .indexing import plus
from .mesh_exchange import row_elements
from .sending_rows import SendingRows
from .source import PROGRAM, Text
from .statements import Loop, Statement, Writer
from .tile import X_SIZE, Chunk, Layouts


def write_passed(e: PassingRows) -> None:
    """The rows of the others go out, this rank's is added up and passed on, and all are read."""
    e.send_others()
    e.add_up()
    e.read_all()


class PassingRows(SendingRows):
    """An emitter whose plan has each rank add up some rows of a sum and pass them on."""

    def __init__(
        self, plan: KernelPlan, layouts: Layouts, coordinates: Coordinates, *, interpret: bool, program: str = PROGRAM
    ) -> None:
        super().__init__(plan, layouts, coordinates, interpret=interpret, program=program)
        self._of_a_row = partial(Emitter, plan, layouts, coordinates, interpret=interpret, program=program)
        self._chunks = self.tile.in_pieces(self.tile.chunks())
        self._ranks = plan.rank_exchange.ranks
        self._others: list[Statement] = []

    @property
    def body(self) -> list[Statement]:
        """Whatever is read of a row stands behind the line that says which row it is."""
        return [*self._others, self._row_of("rank"), *super().body]

    def send_others(self) -> None:
        """This rank's parts of the rows that the others add up, to each its own, and a flag behind them."""
        self.out.line(f"first_row = row{'' if self.interpret else '.to(tl.int64)'} * {self._ranks}")
        self.begin_turn()
        for j in range(1, self._ranks):  # registers hold one row
            row = self._another()
            parts = [row.value(self.source, chunk).text for chunk in self._chunks]
            self.out.add([self._row_of(f"(rank + {j}) % {self._ranks}"), *row.body])
            for chunk, part in zip(self._chunks, parts, strict=True):
                self.store_at(j, chunk, f"{part}.to({TRITON_TYPE[self.source.dtype]})")
        self.end_sending()
        self._others, self.out = self.out.statements, Writer()

    def add_up(self) -> None:
        """This rank's row of the sum, to all others, rounded as it is sent; and the wait for theirs."""
        dtype = self.source.dtype
        self.use_rounding(dtype)
        for chunk in self._chunks:
            text = narrow.stored(self.value(self._passed, chunk).text, dtype, interpret=self.interpret)
            self.out.line(f"{self._sum(chunk)} = ({text}).to({TRITON_TYPE[dtype]})")
        self.begin_turn()
        for chunk in self._chunks:
            for j in range(1, self._ranks):
                self.store_at(j, chunk, self._sum(chunk))
        self.end_sending()
        self.await_turn()

    def read_all(self) -> None:
        """What is made of each row of the turn, once its sum is there."""
        row, peers, elements = self._another(), self._ranks - 1, row_elements(self.plan)
        row.offset_name = "offs_of_owner"  # what a loop assigns again has the type that it had before
        place = f"((owner - rank + {peers}) % {self._ranks} % {peers}) * {elements}"
        for chunk in self._chunks:
            name = row.name(self._passed, chunk)
            at = f"{plus('own_rows + lane_row', chunk.start or 0)} + {place} + {chunk.lane}"
            mask = f", mask={chunk.mask}, other=0.0" if chunk.is_masked else ""
            row.out.line(f'{name} = tl.load({at}{mask}, cache_modifier=".cg").to(tl.float32)')
            row.out.line(f'{name} = tl.where(late == 0, {name}, float("nan"))')
            row.out.line(f"{name} = tl.where(owner == rank, {self._sum(chunk)}.to(tl.float32), {name})")
            row.values[row.key(self._passed, chunk)] = Text(name, DataType.Float, False, True)
        write_unrolled(row)
        rows = f"tl.minimum({self._ranks}, {X_SIZE} - row * {self._ranks})"
        self.out.add(["", Loop("owner", "0", rows, None, 1, [self._row_of("owner"), *row.body])])

    def _another(self) -> Emitter:
        """Writes of another row of the turn, for the same kernel."""
        row = self._of_a_row()
        row.helpers, row.starts, row.accesses = self.helpers, self.starts, self.accesses
        return row

    def _row_of(self, rank: str) -> str:
        """The line that says which row of the turn is read: that of ``rank``, or the last one there is."""
        return f"x = tl.minimum(first_row + {rank}, {X_SIZE} - 1)"

    def _sum(self, chunk: Chunk) -> str:
        return f"{self._passed}_here{chunk.suffix}"

    @property
    def _passed(self) -> BoundTensor:
        passed = self.plan.rank_exchange.passed
        assert passed is not None, "what they pass on"
        return passed
