"""16-bit values of a row two in a word: packing and unpacking them, and the largest of many words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.op import Cast
from .emitter import Emitter
from .hints import EVICT_LAST
from .tile import Chunk

PACKED = '''@triton.jit
def packed(x):
    """Pairs of 16-bit values, a word each."""
    low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0] // 2, 2]))
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
'''
UNPACKED_BFLOAT16 = '''@triton.jit
def unpacked_bf16(words):
    """The bfloat16 values of ``words``, in order."""
    low = (words << 16).to(tl.float32, bitcast=True)
    return tl.interleave(low, (words & -65536).to(tl.float32, bitcast=True))
'''
UNPACKED_HALF = '''@triton.jit
def unpacked_fp16(words):
    """The float16 values of ``words``, in order."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.interleave(low, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
'''
UNPACK = {DataType.BFloat16: ("unpacked_bf16", UNPACKED_BFLOAT16), DataType.Half: ("unpacked_fp16", UNPACKED_HALF)}
"""Name and text of what gives float32 values of words."""

_LARGER = '''@triton.jit
def larger_{kind}(a, b):
    """Of each value of the words; NaN if either is."""
    return tl.inline_asm_elementwise(
        "max.NaN.{kind}x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )
'''
_KIND = {DataType.BFloat16: "bf16", DataType.Half: "f16"}


class Words(Emitter):
    """An emitter that holds 16-bit inputs of a row as words."""

    def words_of(self, tensor: BoundTensor, chunk: Chunk) -> str | None:
        """The name of the words that hold a chunk of ``tensor``; ``None`` where none do."""
        raise NotImplementedError

    def whole_words(self, tensor: BoundTensor, chunk: Chunk, name: str) -> str:
        """Text of what is loaded of ``tensor``, as it is; lines that lead to it may use ``name``.

        A row that was expanded is one element for all lanes.
        """
        pointer, has_x, has_r = self.pointer(tensor, chunk)
        hint = "" if self.space.walked else EVICT_LAST
        text = f"tl.load({pointer}{self.mask(has_x, has_r, chunk)}{hint})"
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
    kind, name = _KIND[source.dtype], f"{x}_largest"
    unpacked, text = UNPACK[source.dtype]
    e.helpers |= {f"larger_{kind}": _LARGER.format(kind=kind), unpacked: text}
    e.out.line(f"{name} = {words[0]}")
    for other in words[1:]:
        e.out.line(f"{name} = larger_{kind}({name}, {other})")
    yield f"{unpacked}({name})"
    yield from (c.where(e.value(x, c).text, neutral) for c in chunks if c.is_masked)
