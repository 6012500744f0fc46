# persistent_T17
#   T4 = cast(T0)
#   T5 = mul(T4, T3)
#   T6 = cast(T1)
#   T7 = cast(T2)
#   T8 = broadcast(T7)
#   T9 = mul(T6, T8)
#   T10 = mul(T9, T5)
#   T11 = sum(T10)
#   T12 = broadcast(T11)
#   T13 = div(T12, 4096.0)
#   T14 = mul(T5, T13)
#   T15 = sub(T9, T14)
#   T16 = mul(T15, T3)
#   T17 = cast(T16)

import triton
import triton.language as tl


@triton.jit
def persistent_T17(T0_ptr, T3_ptr, T1_ptr, T2_ptr, T17_ptr):
    x = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 2048)
    offs_0 = x * 4096

    T3 = tl.load(T3_ptr + x)
    T1_0 = tl.load(T1_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T2_0 = tl.load(T2_ptr + c).to(tl.float32)
    T0_0 = tl.load(T0_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T1_1 = tl.load(T1_ptr + offs_0 + 2048 + c, eviction_policy="evict_last").to(tl.float32)
    T2_1 = tl.load(T2_ptr + 2048 + c).to(tl.float32)
    T0_1 = tl.load(T0_ptr + offs_0 + 2048 + c, eviction_policy="evict_last").to(tl.float32)

    T9_0 = T1_0 * T2_0
    T5_0 = T0_0 * T3
    T10_0 = T9_0 * T5_0
    T9_1 = T1_1 * T2_1
    T5_1 = T0_1 * T3
    T10_1 = T9_1 * T5_1
    T11 = tl.sum(T10_0 + T10_1, axis=0)

    T13 = T11 / 4096.0

    T14_0 = T5_0 * T13
    T15_0 = T9_0 - T14_0
    T16_0 = T15_0 * T3
    tl.store(T17_ptr + offs_0 + c, T16_0)

    T14_1 = T5_1 * T13
    T15_1 = T9_1 - T14_1
    T16_1 = T15_1 * T3
    tl.store(T17_ptr + offs_0 + 2048 + c, T16_1)
