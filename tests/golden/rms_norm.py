# persistent_T13
#   T2 = cast(T0)
#   T3 = mul(T2, T2)
#   T4 = sum(T3)
#   T5 = broadcast(T4)
#   T6 = div(T5, 4096.0)
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
def persistent_T13(T0_ptr, T1_ptr, T13_ptr):
    x = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 1024)
    offs_0 = x * 4096

    T0_0 = tl.load(T0_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T0_1 = tl.load(T0_ptr + offs_0 + 1024 + c, eviction_policy="evict_last").to(tl.float32)
    T0_2 = tl.load(T0_ptr + offs_0 + 2048 + c, eviction_policy="evict_last").to(tl.float32)
    T0_3 = tl.load(T0_ptr + offs_0 + 3072 + c, eviction_policy="evict_last").to(tl.float32)

    T3_0 = T0_0 * T0_0
    T3_1 = T0_1 * T0_1
    T3_2 = T0_2 * T0_2
    T3_3 = T0_3 * T0_3
    T4 = tl.sum(T3_0 + T3_1 + T3_2 + T3_3, axis=0)

    T6 = T4 / 4096.0
    T7 = T6 + 1e-06
    T8 = tl.rsqrt(T7)

    T1_0 = tl.load(T1_ptr + c).to(tl.float32)
    T9_0 = T0_0 * T8
    T12_0 = T9_0 * T1_0
    tl.store(T13_ptr + offs_0 + c, T12_0)

    T1_1 = tl.load(T1_ptr + 1024 + c).to(tl.float32)
    T9_1 = T0_1 * T8
    T12_1 = T9_1 * T1_1
    tl.store(T13_ptr + offs_0 + 1024 + c, T12_1)

    T1_2 = tl.load(T1_ptr + 2048 + c).to(tl.float32)
    T9_2 = T0_2 * T8
    T12_2 = T9_2 * T1_2
    tl.store(T13_ptr + offs_0 + 2048 + c, T12_2)

    T1_3 = tl.load(T1_ptr + 3072 + c).to(tl.float32)
    T9_3 = T0_3 * T8
    T12_3 = T9_3 * T1_3
    tl.store(T13_ptr + offs_0 + 3072 + c, T12_3)
