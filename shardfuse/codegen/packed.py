"""A row in the registers of one program, 16-bit inputs as the bits that they are: two values in a word.

    words_k = packed(load(chunk k))                     for all chunks
    acc += f(unpacked(words_k))                         chunk by chunk, for each reduction
    words_k = again(words_k)                            what was widened is not kept for the next phase
    store(g(unpacked(words_k), whole))                  chunk by chunk, weights read a chunk ahead

RMSNorm of 8192 x 32768, bfloat16, took 255 us on an H200 so, held as float32 in twice as many warps 277, a copy 257.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.expr import BoundTensor
from .loads import EVICT_LAST
from .misaligned import MisalignedRows
from .source import Text
from .tile import Chunk
from .words import Words


class Packed(Words):
    """An emitter whose streamed inputs are words, widened in each phase again."""

    def read(self, tensors: Sequence[BoundTensor], chunks: Sequence[Chunk]) -> None:
        """The loads of a row, one after the other."""
        self.use("packed")
        for chunk in chunks:
            for tensor in tensors:
                words = f"{self.name(tensor, chunk)}_words"
                self.out.line(f"{words} = packed({self.whole_words(tensor, chunk, words)})")
                self.words[tensor, chunk.suffix] = words

    def read_ahead(self, wanted: Sequence[BoundTensor], chunks: Sequence[Chunk]) -> None:
        """Weights of the chunk that comes next: behind a store the compiler does not move them up."""
        for chunk in chunks:
            for tensor in self.needed(wanted, chunk):
                key = tensor, chunk.suffix
                if tensor in self.producer or not self.space.has_r(tensor) or key in self.words or key in self.came:
                    continue
                pointer, has_x, has_r = self.pointer(tensor, chunk)
                options = self.mask(has_x, has_r, chunk) + EVICT_LAST
                self.came[key] = f"{self.name(tensor, chunk)}_read"
                self.out.line(f"{self.came[key]} = {self.load_text(tensor, pointer, options)}")

    came: dict[tuple[BoundTensor, str], str]
    """What was read ahead."""

    def begin(self) -> None:
        self.words, self.came = {}, {}

    def load(self, tensor: BoundTensor, chunk: Chunk) -> Text:
        key = tensor, chunk.suffix
        if key in self.came:
            return self.widened(tensor, chunk, self.came[key], is_packed=False)
        if key not in self.words:
            return super().load(tensor, chunk)
        return self.widened(tensor, chunk, self.words[key], is_packed=True)

    def forget(self) -> None:
        """No wide value of a row is kept."""
        self.values = {k: v for k, v in self.values.items() if not self.space.has_r(k[0])}

    def renew(self) -> None:
        """Another pass over the row begins."""
        self.forget()
        if not self.interpret:
            self.use("again")
            for words in self.words.values():
                self.out.line(f"{words} = again({words})")


class MisalignedPacked(MisalignedRows, Packed):
    """Of misaligned rows."""

    def read_ahead(self, wanted: Sequence[BoundTensor], chunks: Sequence[Chunk]) -> None:
        """Weights come element by element: two chunks of them would not stay in registers."""
