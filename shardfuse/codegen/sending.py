"""A tensor that ranks send one another inside of a kernel: partial sums, which each adds up where it reads them.

Two 16-bit elements are the 32 bits of a word, which is its own flag (``codegen/mesh_exchange.py``): the words of a
block of a row go out to all ranks as soon as it is loaded, and each thread waits for those that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import OfRank
from ..schedulers.limits import WARP
from .arithmetic import TRITON_TYPE
from .emitter import Emitter
from .exchange_functions import await_text, push_text
from .indexing import plus
from .mesh_exchange import exchanged_rows, row_of, sent_words
from .source import Text
from .tile import Chunk
from .words import UNPACK

_MOST_WORDS = 8
"""Of all ranks that a thread asks for at once."""


class Sending(Emitter):
    """An emitter whose plan sends a tensor."""

    def send(self, chunks: Sequence[Chunk]) -> None:
        """The words of all ``chunks`` go out to all ranks."""
        exchange, source = self.plan.rank_exchange, self.source
        words, block = sent_words(self.plan), self.schedule.reduced // 2
        first = len(exchange.statistics) * exchange.ranks * exchanged_rows(self.plan)
        self.use("packed")
        self.helpers["push_words"] = push_text("push_words", is_one_row=False, interpret=self.interpret)
        self.out.paragraph()
        start = f"{first} + " if first else ""
        each = self._each()
        self.out.line(f"at = tl.arange(0, {block})")
        if each > 1:  # a thread's words are apart, so that those of a warp are side by side
            self.out.line(f"at = at % {each} * {block // each} + at // {each}")
        if exchange.members > 1:
            self.out.line(f"at += member * {words // exchange.members}")
        self.out.line(f"{source}_slot = {start}{row_of(self)} * {exchange.ranks * words} + at")
        for chunk in chunks:
            value = self.value(source, chunk)
            name = f"{source}_words{chunk.suffix}"
            self.out.line(f"{name} = packed({value.text}.to({TRITON_TYPE[source.dtype]}))")
            to = ["peer"] if exchange.ranks == 2 else [f"slots_{k}" for k in range(exchange.ranks)]
            for slots in to:
                at = plus(f"{slots} + {source}_slot + rank * {words}", self._start(chunk))
                self.out.line(f"push_words({at}, epoch, {name})")

    def compute(self, expr: Expr, tensor: BoundTensor, chunk: Chunk) -> Text:
        if not isinstance(expr.op, OfRank):
            return super().compute(expr, tensor, chunk)
        self.receive(chunk)
        return self.values[self.key(tensor, chunk)]

    def receive(self, chunk: Chunk) -> None:
        """What all ranks have of a chunk: values of every Expr that is one of theirs."""
        exchange, source = self.plan.rank_exchange, self.source
        ranks, words = exchange.ranks, sent_words(self.plan)
        waited = 1 if ranks == 2 else ranks
        pack = max(min(self._each(), _MOST_WORDS // waited), 1)
        self.helpers["await_words"] = await_text(
            "await_words", waited, is_one_row=False, warps=1, interpret=self.interpret, pack=pack
        )
        unpack = UNPACK[source.dtype]
        self.use(unpack)
        names = [f"{source}_of_{k}{chunk.suffix}" for k in range(ranks)]
        start = self._start(chunk)
        row = f"epoch, {row_of(self)}, limit, report, names_ptr"
        if ranks == 2:  # what this rank has need not go through memory
            came, mine = f"{source}_of_peer{chunk.suffix}", f"{source}_words{chunk.suffix}"
            at = plus(f"own + {source}_slot + (1 - rank) * {words}", start)
            self.out.line(f"{came} = await_words({at}, {row} + 1 - rank)")
            self.out.line(f"{names[0]} = tl.where(rank == 0, {mine}, {came})")
            self.out.line(f"{names[1]} = tl.where(rank == 0, {came}, {mine})")
        else:
            pointers = [plus(f"own + {source}_slot", k * words + start) for k in range(ranks)]
            self.out.line(f"{', '.join(names)} = await_words({', '.join(pointers)}, {row})")
        value = self.value(source, chunk)
        for expr in self.plan.segment.exprs:
            if isinstance(expr.op, OfRank):
                name = self.name(expr.output, chunk)
                self.out.line(f"{name} = {unpack}({names[expr.op.rank]})")
                self.values[self.key(expr.output, chunk)] = replace(value, text=name, dtype=DataType.Float)

    def _each(self) -> int:
        """Words of a block that a thread has."""
        return max(self.schedule.reduced // 2 // (self.schedule.launch.warps * WARP), 1)

    @property
    def source(self) -> BoundTensor:
        """What is sent."""
        sent = self.plan.rank_exchange.sent
        assert sent is not None, "what they send"
        return sent

    def _start(self, chunk: Chunk) -> int:
        assert chunk.start is not None, "a row is held"
        return chunk.start // 2
