"""Partial sums of which each rank adds up its own rows inside of a kernel, and gives all ranks what it makes of them.

A row takes two turns of its program (``codegen/sending_rows.py``).  In the first one each rank stores what it has of a
peer's row into the memory of that peer, and adds up what has come for its own; in the second it stores the row that it
has made of that into the memory of every peer, and writes theirs into its own result.  The programs of all ranks are at
the row of the same number, each of its own rank::

    rank 0      own row 3 of the first half                 rank 1      own row 3 of the second half
                sends its part of row 3 of the second                   sends its part of row 3 of the first
                adds up, and makes row 3 of the first                   adds up, and makes row 3 of the second
                sends that                                              sends that
                writes row 3 of both halves                             writes row 3 of both halves

A row of each rank is ``shift`` elements behind that of the rank before, in what is given and in the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.expr import BoundTensor
from ..schedulers.plan import KernelPlan
from .arithmetic import TRITON_TYPE
from .bodies import write_unrolled
from .indexing import plus
from .mesh_exchange import row_elements
from .sending_rows import SendingRows, row_sender_lines
from .tile import Chunk


def piece_lines(plan: KernelPlan) -> list[str]:
    """Before the loop over programs: the table, and where this rank's rows begin."""
    cut = [t for t in (plan.rank_exchange.sent, plan.rank_exchange.gathered) if t is not None]
    return [*row_sender_lines(plan), *(f"{t}_ptr += rank * {plan.rank_exchange.shift}" for t in cut)]


def write_gathered(e: GatheringRows) -> None:
    """The row, and then those of the other ranks."""
    write_unrolled(e)
    e.gather()


class GatheringRows(SendingRows):
    """An emitter whose plan sends each rank its own rows of a tensor, and all ranks the rows of a result."""

    def send(self, chunks: Sequence[Chunk]) -> None:
        """The other ranks' rows go out, to each its own, and a flag behind them, where there is anything to add up."""
        if self.plan.rank_exchange.sent is None:
            return
        self.begin_turn()
        ranks, source = self.plan.rank_exchange.ranks, self.source
        for j in range(1, ranks):  # all loads of a row are under way before the first is stored; registers hold one row
            for chunk in chunks:
                mask = f", mask={chunk.mask}" if chunk.is_masked else ""
                self.out.line(f"{source}_to_{j}{chunk.suffix} = tl.load({self._at_rank(source, j, chunk)}{mask})")
            for chunk in chunks:
                self.store_at(j, chunk, f"{source}_to_{j}{chunk.suffix}")
        self.end_sending()

    def store(self, tensor: BoundTensor, chunk: Chunk) -> None:
        super().store(tensor, chunk)
        if tensor is not self._made:
            return
        if chunk == self._chunks[0]:
            self.begin_turn()
        text = f"({self.stored_text(self.value(tensor, chunk).text, tensor)}).to({TRITON_TYPE[tensor.dtype]})"
        for j in range(1, self.plan.rank_exchange.ranks):
            self.store_at(j, chunk, text)

    def gather(self) -> None:
        """The rows that the other ranks have made, where they belong; NaN where one of them has not come."""
        made, elements = self._made, row_elements(self.plan)
        self.end_sending()
        self.await_turn()
        for chunk in self._chunks:
            mask = f", mask={chunk.mask}" if chunk.is_masked else ""
            for j in range(1, self.plan.rank_exchange.ranks):
                name = f"{made}_from_{j}{chunk.suffix}"
                at = f"{plus('own_rows + lane_row', (j - 1) * elements, chunk.start or 0)} + {chunk.lane}"
                self.out.line(f'{name} = tl.load({at}{mask}, cache_modifier=".cg").to(tl.float32)')
                self.out.line(f'{name} = tl.where(late == 0, {name}, float("nan"))')
                self.out.line(f"tl.store({self._at_rank(made, j, chunk)}, {self.stored_text(name, made)}{mask})")

    @property
    def _made(self) -> BoundTensor:
        made = self.plan.rank_exchange.gathered
        assert made is not None, "what all ranks are given"
        return made

    @property
    def _chunks(self) -> list[Chunk]:
        return self.tile.in_pieces(self.tile.chunks())

    def _at_rank(self, tensor: BoundTensor, j: int, chunk: Chunk) -> str:
        """Text of where the row of the rank at distance ``j`` is."""
        pointer, _, _ = self.pointer(tensor, chunk)
        exchange = self.plan.rank_exchange
        return f"{pointer} + ((rank + {j}) % {exchange.ranks} - rank) * {exchange.shift}"
