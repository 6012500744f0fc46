# persistent_T9_T26
#   T3 = uniform(0.0, 1.0, S0, S1)
#   T4 = ge(T3, 0.1)
#   T5 = broadcast(T1)
#   T6 = add(T0, T5)
#   T7 = mul(T6, 1.1111111111111112)
#   T8 = where(T4, T7, 0.0)
#   T9 = add(T8, T2)
#   T10 = cast(T9)
#   T11 = sum(T10)
#   T12 = broadcast(T11)
#   T13 = div(T12, 4096.0)
#   T14 = sub(T10, T13)
#   T15 = square(T14)
#   T16 = sum(T15)
#   T17 = broadcast(T16)
#   T18 = div(T17, 4096.0)
#   T19 = add(T18, 1e-05)
#   T20 = rsqrt(T19)
#   T21 = mul(T14, T20)
#   T23 = cast(T22)
#   T24 = broadcast(T23)
#   T25 = mul(T21, T24)
#   T26 = cast(T25)

import triton
import triton.language as tl


@triton.jit
def wide_product(a, b):
    """All 64 bits of the product of two words."""
    return tl.inline_asm_elementwise("mul.wide.u32 $0, $1, $2;", "=l,r,r", [a, b], tl.uint64, is_pure=True, pack=1)


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
def philox(seed, offset, index):
    """Philox 4x32-10: four random words for the key ``seed`` and the counter ``(index, offset)``."""
    return philox_words(tl.full([], seed, tl.int64), tl.full([], offset, tl.int64), index)


@triton.jit
def uniform_run(seed, offset, index, BITS: tl.constexpr, RUN: tl.constexpr):
    """The numbers of ``uniform`` for 4 or 8 elements from each ``index`` on, a multiple of as many: a word each."""
    a, b, c, d = philox(seed, offset, index >> 2)
    if RUN == 8:
        e, f, g, h = philox(seed, offset, (index >> 2) + 1)
        a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return (words >> (32 - BITS)).to(tl.float32) * (1.0 / (1 << BITS))


@triton.jit(do_not_specialize=["S0", "S1"])
def persistent_T9_T26(T1_ptr, T0_ptr, T2_ptr, T22_ptr, T9_ptr, T26_ptr, S0: tl.int64, S1: tl.int64):
    x = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 2048)
    offs_0 = x * 4096
    offs_1 = tl.arange(0, 256) * 8

    T0_0 = tl.load(T0_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T1_0 = tl.load(T1_ptr + c).to(tl.float32)
    T2_0 = tl.load(T2_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T0_1 = tl.load(T0_ptr + offs_0 + 2048 + c, eviction_policy="evict_last").to(tl.float32)
    T1_1 = tl.load(T1_ptr + 2048 + c).to(tl.float32)
    T2_1 = tl.load(T2_ptr + offs_0 + 2048 + c, eviction_policy="evict_last").to(tl.float32)

    T3_0 = tl.reshape(uniform_run(S0, S1, (offs_0 + offs_1).to(tl.int64), 24, 8), [2048])
    T4_0 = T3_0 >= 0.1
    T6_0 = (T0_0 + T1_0).to(tl.bfloat16).to(tl.float32)
    T7_0 = (T6_0 * 1.1111111111111112).to(tl.bfloat16).to(tl.float32)
    T8_0 = tl.where(T4_0, T7_0, 0.0)
    T9_0 = (T8_0 + T2_0).to(tl.bfloat16).to(tl.float32)
    T3_1 = tl.reshape(uniform_run(S0, S1, (offs_0 + 2048 + offs_1).to(tl.int64), 24, 8), [2048])
    T4_1 = T3_1 >= 0.1
    T6_1 = (T0_1 + T1_1).to(tl.bfloat16).to(tl.float32)
    T7_1 = (T6_1 * 1.1111111111111112).to(tl.bfloat16).to(tl.float32)
    T8_1 = tl.where(T4_1, T7_1, 0.0)
    T9_1 = (T8_1 + T2_1).to(tl.bfloat16).to(tl.float32)
    T11 = tl.sum(T9_0 + T9_1, axis=0)

    T13 = T11 / 4096.0
    T14_0 = T9_0 - T13
    T15_0 = T14_0 * T14_0
    T14_1 = T9_1 - T13
    T15_1 = T14_1 * T14_1
    T16 = tl.sum(T15_0 + T15_1, axis=0)

    T18 = T16 / 4096.0
    T19 = T18 + 1e-05
    T20 = tl.rsqrt(T19)

    T22_0 = tl.load(T22_ptr + c).to(tl.float32)
    T21_0 = T14_0 * T20
    T25_0 = T21_0 * T22_0
    tl.store(T9_ptr + offs_0 + c, T9_0)
    tl.store(T26_ptr + offs_0 + c, T25_0)

    T22_1 = tl.load(T22_ptr + 2048 + c).to(tl.float32)
    T21_1 = T14_1 * T20
    T25_1 = T21_1 * T22_1
    tl.store(T9_ptr + offs_0 + 2048 + c, T9_1)
    tl.store(T26_ptr + offs_0 + 2048 + c, T25_1)
