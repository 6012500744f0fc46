# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportUndefinedVariable=false, reportGeneralTypeIssues=false
"""Random numbers that kernels draw.  As ``gpu_functions.py`` is, this is copied into kernels, and not imported."""

import triton
import triton.language as tl


@triton.jit
def philox(seed, offset, index):
    """Philox 4x32-10: four random words for the key ``seed`` and the counter ``(index, offset)``."""
    return philox_words(tl.full([], seed, tl.int64), tl.full([], offset, tl.int64), index)


# As one instruction.  The compiler makes two of a product of 64-bit numbers, of which either half is taken.
@triton.jit
def wide_product(a, b):
    """All 64 bits of the product of two words."""
    return tl.inline_asm_elementwise("mul.wide.u32 $0, $1, $2;", "=l,r,r", [a, b], tl.uint64, is_pure=True, pack=1)


# Triton lays out what follows from indices alone by itself, one element after the other over the threads, where several
# ops read it.  A mask then goes through shared memory on its way to what it masks.
@triton.jit
def laid_out_as(index, loaded):
    """``index``, a thread having the elements that it has of ``loaded``, float32.  No instruction, and no wait."""
    return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l,f", [index, loaded], tl.int64, is_pure=True, pack=1)


@triton.jit
def philox_words(seed, offset, index):
    """What ``philox`` gives, of tensors."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    c2, c3 = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = wide_product(c0, 0xD2511F53), wide_product(c2, 0xCD9E8D57)
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32)
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def fraction(high, low):
    """In [0, 1), of 53 bits of two words."""
    bits = (high.to(tl.uint64) << 21) | (low >> 11).to(tl.uint64)
    return bits.to(tl.float64) * tl.full([], 1.1102230246251565e-16, tl.float64)


@triton.jit
def uniform(seed, offset, index, BITS: tl.constexpr):
    """In [0, 1), of as many bits as the type holds below 1."""
    a, b, c, d = philox(seed, offset, index >> 2)
    place = index & 3
    word = tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d))
    return (word >> (32 - BITS)).to(tl.float32) * (1.0 / (1 << BITS))


@triton.jit
def uniform_run(seed, offset, index, BITS: tl.constexpr, RUN: tl.constexpr):
    """The numbers of ``uniform`` for 4 or 8 elements from each ``index`` on, a multiple of as many: a word each."""
    a, b, c, d = philox(seed, offset, index >> 2)
    if RUN == 8:
        e, f, g, h = philox(seed, offset, (index >> 2) + 1)
        a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return (words >> (32 - BITS)).to(tl.float32) * (1.0 / (1 << BITS))


@triton.jit
def philox_uniform(seed, index):
    """In [0, 1): ``tl.rand`` of both, of which it takes the low 32 bits of ``index``."""
    zero = tl.full([], 0, tl.int64)
    word, _, _, _ = philox_words(seed + zero, zero, (index + zero) & 0xFFFFFFFF)
    signed = word.to(tl.int32, bitcast=True)
    return tl.where(signed < 0, -signed - 1, signed).to(tl.float32) * 4.6566127342e-10


@triton.jit
def uniform_double(seed, offset, index):
    """In [0, 1)."""
    high, low, _, _ = philox(seed, offset, index)
    return fraction(high, low)


@triton.jit
def normal(seed, offset, index):
    """Mean 0, deviation 1, by Box and Muller."""
    u, v, _, _ = philox(seed, offset, index)
    u = (u >> 8).to(tl.float32) * 5.960464477539063e-08
    v = (v >> 8).to(tl.float32) * 5.960464477539063e-08
    return tl.sqrt(-2.0 * tl.log(1.0 - u)) * tl.cos(6.283185307179586 * v)


@triton.jit
def normal_double(seed, offset, index):
    """Mean 0, deviation 1, by Box and Muller."""
    a, b, c, d = philox(seed, offset, index)
    turns = tl.full([], 6.283185307179586, tl.float64) * fraction(c, d)
    return tl.sqrt(-2.0 * tl.log(1.0 - fraction(a, b))) * tl.cos(turns)
