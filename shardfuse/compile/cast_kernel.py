# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
"""Tensors of a list in another type: a program casts one chunk of one of them.

``tensors[t]`` = address read, address written, elements; ``chunks[program]`` = tensor, first element of the chunk.
"""

import triton
import triton.language as tl


@triton.jit
def cast_chunk(
    tensors,
    chunks,
    SOURCE: tl.constexpr,
    RESULT: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Addresses are multiples of 16 bytes."""
    program = tl.program_id(0)
    tensor, first = tl.load(chunks + 2 * program), tl.load(chunks + 2 * program + 1)
    count = tl.load(tensors + 3 * tensor + 2)
    read = tl.multiple_of(tl.load(tensors + 3 * tensor).to(tl.pointer_type(SOURCE)), 16)
    written = tl.multiple_of(tl.load(tensors + 3 * tensor + 1).to(tl.pointer_type(RESULT)), 16)
    if first + CHUNK <= count:
        for k in tl.static_range(CHUNK // TILE):
            place = first + k * TILE + tl.arange(0, TILE)
            x = tl.load(read + place)
            if INTERPRETED and tl.bfloat16 == RESULT:  # whose own conversion truncates
                b = x.to(tl.float32).to(tl.int32, bitcast=True)
                r = ((b + 0x7FFF + ((b >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                x = tl.where(x == x, r, x.to(tl.float32))
            tl.store(written + place, x.to(RESULT))
    else:
        for k in tl.static_range(CHUNK // TILE):
            place = first + k * TILE + tl.arange(0, TILE)
            x = tl.load(read + place, place < count, other=0.0)
            if INTERPRETED and tl.bfloat16 == RESULT:
                b = x.to(tl.float32).to(tl.int32, bitcast=True)
                r = ((b + 0x7FFF + ((b >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                x = tl.where(x == x, r, x.to(tl.float32))
            tl.store(written + place, x.to(RESULT), place < count)
