# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportAssignmentType=false
"""Tensors of a list in another type: a program casts one chunk of one of them.

``kernel_files.py`` hands this text to Triton; nothing imports it.  ``tensors[t]`` = address read, element of
``results`` from which on it is written, elements; each address is a multiple of 16 bytes.  An element of ``results``
may lie outside of that tensor, and before it.  ``chunks[program]`` = tensor, first element of the chunk.
"""

import triton
import triton.language as tl

# --- what kernel_files.py writes for each use ---
SOURCE = tl.constexpr(tl.float32)
RESULT = tl.constexpr(tl.bfloat16)
CHUNK = tl.constexpr(8192)
INTERPRETED = tl.constexpr(False)
# --- end ---


@triton.jit
def cast(x):
    if INTERPRETED and tl.bfloat16 == RESULT:  # whose own conversion truncates
        b = x.to(tl.float32).to(tl.int32, bitcast=True)
        r = ((b + 0x7FFF + ((b >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, r, x.to(tl.float32))
    return x.to(RESULT)


@triton.jit
def cast_chunk(tensors, chunks, results):
    program = tl.program_id(0)
    tensor, first = tl.load(chunks + 2 * program), tl.load(chunks + 2 * program + 1)
    count = tl.load(tensors + 3 * tensor + 2)
    read = tl.multiple_of(tl.load(tensors + 3 * tensor).to(tl.pointer_type(SOURCE)), 16)
    written = tl.multiple_of(results + tl.load(tensors + 3 * tensor + 1), 16)
    place = tl.multiple_of(first, 16) + tl.arange(0, CHUNK)
    if first + CHUNK <= count:
        tl.store(written + place, cast(tl.load(read + place)))
    else:
        tl.store(written + place, cast(tl.load(read + place, place < count, other=0.0)), place < count)
