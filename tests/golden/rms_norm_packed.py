# persistent_T13
#   T2 = cast(T0)
#   T3 = mul(T2, T2)
#   T4 = sum(T3)
#   T5 = broadcast(T4)
#   T6 = div(T5, 65536.0)
#   T7 = add(T6, 1e-06)
#   T8 = rsqrt(T7)
#   T9 = mul(T2, T8)
#   T10 = cast(T1)
#   T11 = broadcast(T10)
#   T12 = mul(T9, T11)
#   T13 = cast(T12)

import triton
import triton.language as tl


@triton.jit
def packed(x):
    """Pairs of 16-bit values, a word each."""
    low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0] // 2, 2]))
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)


@triton.jit
def unpacked_bf16(words):
    """The bfloat16 values of ``words``, in order."""
    low = (words << 16).to(tl.float32, bitcast=True)
    return tl.interleave(low, (words & -65536).to(tl.float32, bitcast=True))


@triton.jit
def again(words):
    """``words``, which the compiler takes for others: it widens them anew, and does not keep them wide."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def persistent_T13(T0_ptr, T1_ptr, T13_ptr):
    x = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 8192)
    offs_0 = x * 65536

    T0_0_words = packed(tl.load(T0_ptr + offs_0 + c, eviction_policy="evict_last"))
    T0_1_words = packed(tl.load(T0_ptr + offs_0 + 8192 + c, eviction_policy="evict_last"))
    T0_2_words = packed(tl.load(T0_ptr + offs_0 + 16384 + c, eviction_policy="evict_last"))
    T0_3_words = packed(tl.load(T0_ptr + offs_0 + 24576 + c, eviction_policy="evict_last"))
    T0_4_words = packed(tl.load(T0_ptr + offs_0 + 32768 + c, eviction_policy="evict_last"))
    T0_5_words = packed(tl.load(T0_ptr + offs_0 + 40960 + c, eviction_policy="evict_last"))
    T0_6_words = packed(tl.load(T0_ptr + offs_0 + 49152 + c, eviction_policy="evict_last"))
    T0_7_words = packed(tl.load(T0_ptr + offs_0 + 57344 + c, eviction_policy="evict_last"))

    T0_0 = unpacked_bf16(T0_0_words)
    T3_0 = T0_0 * T0_0
    T4_acc = T3_0
    T0_1 = unpacked_bf16(T0_1_words)
    T3_1 = T0_1 * T0_1
    T4_acc += T3_1
    T0_2 = unpacked_bf16(T0_2_words)
    T3_2 = T0_2 * T0_2
    T4_acc += T3_2
    T0_3 = unpacked_bf16(T0_3_words)
    T3_3 = T0_3 * T0_3
    T4_acc += T3_3
    T0_4 = unpacked_bf16(T0_4_words)
    T3_4 = T0_4 * T0_4
    T4_acc += T3_4
    T0_5 = unpacked_bf16(T0_5_words)
    T3_5 = T0_5 * T0_5
    T4_acc += T3_5
    T0_6 = unpacked_bf16(T0_6_words)
    T3_6 = T0_6 * T0_6
    T4_acc += T3_6
    T0_7 = unpacked_bf16(T0_7_words)
    T3_7 = T0_7 * T0_7
    T4_acc += T3_7
    T4 = tl.sum(T4_acc, axis=0)
    T0_0_words = again(T0_0_words)
    T0_1_words = again(T0_1_words)
    T0_2_words = again(T0_2_words)
    T0_3_words = again(T0_3_words)
    T0_4_words = again(T0_4_words)
    T0_5_words = again(T0_5_words)
    T0_6_words = again(T0_6_words)
    T0_7_words = again(T0_7_words)

    T6 = T4 / 65536.0
    T7 = T6 + 1e-06
    T8 = tl.rsqrt(T7)

    T1_0_read = tl.load(T1_ptr + c, eviction_policy="evict_last")
    T1_1_read = tl.load(T1_ptr + 8192 + c, eviction_policy="evict_last")
    T0_0 = unpacked_bf16(T0_0_words)
    T1_0 = T1_0_read.to(tl.float32)
    T9_0 = T0_0 * T8
    T12_0 = T9_0 * T1_0
    tl.store(T13_ptr + offs_0 + c, T12_0)

    T1_2_read = tl.load(T1_ptr + 16384 + c, eviction_policy="evict_last")
    T0_1 = unpacked_bf16(T0_1_words)
    T1_1 = T1_1_read.to(tl.float32)
    T9_1 = T0_1 * T8
    T12_1 = T9_1 * T1_1
    tl.store(T13_ptr + offs_0 + 8192 + c, T12_1)

    T1_3_read = tl.load(T1_ptr + 24576 + c, eviction_policy="evict_last")
    T0_2 = unpacked_bf16(T0_2_words)
    T1_2 = T1_2_read.to(tl.float32)
    T9_2 = T0_2 * T8
    T12_2 = T9_2 * T1_2
    tl.store(T13_ptr + offs_0 + 16384 + c, T12_2)

    T1_4_read = tl.load(T1_ptr + 32768 + c, eviction_policy="evict_last")
    T0_3 = unpacked_bf16(T0_3_words)
    T1_3 = T1_3_read.to(tl.float32)
    T9_3 = T0_3 * T8
    T12_3 = T9_3 * T1_3
    tl.store(T13_ptr + offs_0 + 24576 + c, T12_3)

    T1_5_read = tl.load(T1_ptr + 40960 + c, eviction_policy="evict_last")
    T0_4 = unpacked_bf16(T0_4_words)
    T1_4 = T1_4_read.to(tl.float32)
    T9_4 = T0_4 * T8
    T12_4 = T9_4 * T1_4
    tl.store(T13_ptr + offs_0 + 32768 + c, T12_4)

    T1_6_read = tl.load(T1_ptr + 49152 + c, eviction_policy="evict_last")
    T0_5 = unpacked_bf16(T0_5_words)
    T1_5 = T1_5_read.to(tl.float32)
    T9_5 = T0_5 * T8
    T12_5 = T9_5 * T1_5
    tl.store(T13_ptr + offs_0 + 40960 + c, T12_5)

    T1_7_read = tl.load(T1_ptr + 57344 + c, eviction_policy="evict_last")
    T0_6 = unpacked_bf16(T0_6_words)
    T1_6 = T1_6_read.to(tl.float32)
    T9_6 = T0_6 * T8
    T12_6 = T9_6 * T1_6
    tl.store(T13_ptr + offs_0 + 49152 + c, T12_6)

    T0_7 = unpacked_bf16(T0_7_words)
    T1_7 = T1_7_read.to(tl.float32)
    T9_7 = T0_7 * T8
    T12_7 = T9_7 * T1_7
    tl.store(T13_ptr + offs_0 + 57344 + c, T12_7)
