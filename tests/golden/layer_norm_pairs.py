# persistent_T28
#   T2 = cast(T1)
#   T4 = cast(T3)
#   T6 = cast(T5)
#   T8 = cast(T7)
#   T9 = cast(T0)
#   T10 = add(T2, T4)
#   T11 = broadcast(T10)
#   T12 = add(T9, T11)
#   T13 = sum(T12)
#   T14 = broadcast(T13)
#   T15 = div(T14, 2048.0)
#   T16 = sub(T12, T15)
#   T17 = mul(T16, T16)
#   T18 = sum(T17)
#   T19 = broadcast(T18)
#   T20 = div(T19, 2048.0)
#   T21 = add(T20, 1e-05)
#   T22 = rsqrt(T21)
#   T23 = mul(T16, T22)
#   T24 = broadcast(T6)
#   T25 = mul(T23, T24)
#   T26 = broadcast(T8)
#   T27 = add(T25, T26)
#   T28 = cast(T27)

import triton
import triton.language as tl


@triton.jit
def persistent_T28(T1_ptr, T3_ptr, T5_ptr, T7_ptr, T0_ptr, T28_ptr):
    x = tl.program_id(0).to(tl.int64) * 2 + tl.arange(0, 2)[:, None]
    c = tl.arange(0, 1024)[None, :]
    offs_0 = x * 2048

    T0_0 = tl.load(T0_ptr + offs_0 + c, cache_modifier=".cg").to(tl.float32)
    T1_0 = tl.load(T1_ptr + c, eviction_policy="evict_last").to(tl.float32)
    T3_0 = tl.load(T3_ptr + c, eviction_policy="evict_last").to(tl.float32)
    T0_1 = tl.load(T0_ptr + offs_0 + 1024 + c, cache_modifier=".cg").to(tl.float32)
    T1_1 = tl.load(T1_ptr + 1024 + c, eviction_policy="evict_last").to(tl.float32)
    T3_1 = tl.load(T3_ptr + 1024 + c, eviction_policy="evict_last").to(tl.float32)

    T10_0 = T1_0 + T3_0
    T12_0 = T0_0 + T10_0
    T10_1 = T1_1 + T3_1
    T12_1 = T0_1 + T10_1
    T13 = tl.sum(T12_0 + T12_1, axis=1)[:, None]

    T15 = T13 / 2048.0
    T16_0 = T12_0 - T15
    T17_0 = T16_0 * T16_0
    T16_1 = T12_1 - T15
    T17_1 = T16_1 * T16_1
    T18 = tl.sum(T17_0 + T17_1, axis=1)[:, None]

    T5_0 = tl.load(T5_ptr + c, eviction_policy="evict_last").to(tl.float32)
    T7_0 = tl.load(T7_ptr + c, eviction_policy="evict_last").to(tl.float32)
    T5_1 = tl.load(T5_ptr + 1024 + c, eviction_policy="evict_last").to(tl.float32)
    T7_1 = tl.load(T7_ptr + 1024 + c, eviction_policy="evict_last").to(tl.float32)

    T20 = T18 / 2048.0
    T21 = T20 + 1e-05
    T22 = tl.rsqrt(T21)
    T23_0 = T16_0 * T22
    T25_0 = T23_0 * T5_0
    T27_0 = T25_0 + T7_0
    T23_1 = T16_1 * T22
    T25_1 = T23_1 * T5_1
    T27_1 = T25_1 + T7_1

    tl.store(T28_ptr + offs_0 + c, T27_0)
    tl.store(T28_ptr + offs_0 + 1024 + c, T27_1)
