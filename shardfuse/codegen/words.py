"""16-bit values of a row two in a word: packing and unpacking them, and the largest of many words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.op import Cast
from .arithmetic import converted
from .emitter import Emitter
from .loads import EVICT_LAST
from .source import Text
from .tile import Chunk

UNPACK = {DataType.BFloat16: "unpacked_bf16", DataType.Half: "unpacked_fp16"}
"""What gives float32 values of words."""
_LARGER = {DataType.BFloat16: "larger_bf16", DataType.Half: "larger_f16"}
"""What compares the values of words."""


class Words(Emitter):
    """An emitter that holds 16-bit inputs of a row as words."""

    words: dict[tuple[BoundTensor, str], str]
    """By input and chunk: text of what was loaded of it, as it came."""

    def words_of(self, tensor: BoundTensor, chunk: Chunk) -> str | None:
        """Text of the words, of two values each, that hold a chunk of ``tensor``; ``None`` where none do."""
        return self.words.get((tensor, chunk.suffix))

    def begin(self) -> None:
        """Lines that a row begins with."""

    def widened(self, tensor: BoundTensor, chunk: Chunk, words: str, *, is_packed: bool) -> Text:
        """The value of what was loaded as ``words``.  ``is_packed``: two values in each?"""
        name = self.name(tensor, chunk)
        if not is_packed:
            text = converted(words, tensor.dtype, tensor.dtype.compute)
            return self.assign(name, text, tensor.dtype.compute, False, True)
        self.use(UNPACK[tensor.dtype])
        return self.assign(name, f"{UNPACK[tensor.dtype]}({words})", DataType.Float, False, True)

    def whole_words(self, tensor: BoundTensor, chunk: Chunk, name: str) -> str:
        """Text of what is loaded of ``tensor``, as it is; lines that lead to it may use ``name``.

        A row that was expanded is one element for all lanes.
        """
        pointer, has_x, has_r = self.pointer(tensor, chunk)
        hint = "" if self.space.walked else EVICT_LAST
        text = self.load_text(tensor, pointer, self.mask(has_x, has_r, chunk) + hint)
        return text if has_r else f"tl.broadcast_to({text}, {self.tile.shape_of(chunk)})"


def largest_of_words(e: Emitter, x: BoundTensor, chunks: Sequence[Chunk], neutral: str) -> Iterator[str] | None:
    """Texts whose largest is that of ``x`` in each lane: chunks that are whole are compared two values at once.

    ``None`` where words do not hold ``x``, or where that does not pay: a program that never waits has time for it.
    """
    made = e.producer.get(x)
    if not isinstance(e, Words) or e.interpret or not (e.schedule.lag or e.schedule.is_aligned_down):
        return None
    if made is None or not isinstance(made.op, Cast) or made.tensors[0] in e.producer:
        return None
    source = made.tensors[0]
    whole = [c for c in chunks if not c.is_masked]
    words = [w for c in whole if (w := e.words_of(source, c)) is not None]
    return _texts(e, x, source, words, chunks, neutral) if len(words) > 1 else None


def _texts(
    e: Words, x: BoundTensor, source: BoundTensor, words: list[str], chunks: Sequence[Chunk], neutral: str
) -> Iterator[str]:
    """One after the other, since each is forgotten before the next is looked at."""
    larger, unpacked, name = _LARGER[source.dtype], UNPACK[source.dtype], f"{x}_largest"
    e.use(larger, unpacked)
    e.out.line(f"{name} = {words[0]}")
    for other in words[1:]:
        e.out.line(f"{name} = {larger}({name}, {other})")
    yield f"{unpacked}({name})"
    yield from (c.where(e.value(x, c).text, neutral) for c in chunks if c.is_masked)
