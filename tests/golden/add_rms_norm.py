# persistent_T3_T15
#   T3 = add(T0, T1)
#   T4 = cast(T3)
#   T5 = mul(T4, T4)
#   T6 = sum(T5)
#   T7 = broadcast(T6)
#   T8 = div(T7, 4096.0)
#   T9 = add(T8, 1e-06)
#   T10 = rsqrt(T9)
#   T11 = mul(T4, T10)
#   T12 = cast(T2)
#   T13 = broadcast(T12)
#   T14 = mul(T11, T13)
#   T15 = cast(T14)

import triton
import triton.language as tl


@triton.jit
def persistent_T3_T15(T0_ptr, T1_ptr, T2_ptr, T3_ptr, T15_ptr):
    x = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 1024)
    offs_0 = x * 4096

    T0_0 = tl.load(T0_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T1_0 = tl.load(T1_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T0_1 = tl.load(T0_ptr + offs_0 + 1024 + c, eviction_policy="evict_last").to(tl.float32)
    T1_1 = tl.load(T1_ptr + offs_0 + 1024 + c, eviction_policy="evict_last").to(tl.float32)
    T0_2 = tl.load(T0_ptr + offs_0 + 2048 + c, eviction_policy="evict_last").to(tl.float32)
    T1_2 = tl.load(T1_ptr + offs_0 + 2048 + c, eviction_policy="evict_last").to(tl.float32)
    T0_3 = tl.load(T0_ptr + offs_0 + 3072 + c, eviction_policy="evict_last").to(tl.float32)
    T1_3 = tl.load(T1_ptr + offs_0 + 3072 + c, eviction_policy="evict_last").to(tl.float32)

    T3_0 = (T0_0 + T1_0).to(tl.bfloat16).to(tl.float32)
    T5_0 = T3_0 * T3_0
    T3_1 = (T0_1 + T1_1).to(tl.bfloat16).to(tl.float32)
    T5_1 = T3_1 * T3_1
    T3_2 = (T0_2 + T1_2).to(tl.bfloat16).to(tl.float32)
    T5_2 = T3_2 * T3_2
    T3_3 = (T0_3 + T1_3).to(tl.bfloat16).to(tl.float32)
    T5_3 = T3_3 * T3_3
    T6 = tl.sum(T5_0 + T5_1 + T5_2 + T5_3, axis=0)

    T8 = T6 / 4096.0
    T9 = T8 + 1e-06
    T10 = tl.rsqrt(T9)

    T2_0 = tl.load(T2_ptr + c).to(tl.float32)
    T11_0 = T3_0 * T10
    T14_0 = T11_0 * T2_0
    tl.store(T3_ptr + offs_0 + c, T3_0)
    tl.store(T15_ptr + offs_0 + c, T14_0)

    T2_1 = tl.load(T2_ptr + 1024 + c).to(tl.float32)
    T11_1 = T3_1 * T10
    T14_1 = T11_1 * T2_1
    tl.store(T3_ptr + offs_0 + 1024 + c, T3_1)
    tl.store(T15_ptr + offs_0 + 1024 + c, T14_1)

    T2_2 = tl.load(T2_ptr + 2048 + c).to(tl.float32)
    T11_2 = T3_2 * T10
    T14_2 = T11_2 * T2_2
    tl.store(T3_ptr + offs_0 + 2048 + c, T3_2)
    tl.store(T15_ptr + offs_0 + 2048 + c, T14_2)

    T2_3 = tl.load(T2_ptr + 3072 + c).to(tl.float32)
    T11_3 = T3_3 * T10
    T14_3 = T11_3 * T2_3
    tl.store(T3_ptr + offs_0 + 3072 + c, T3_3)
    tl.store(T15_ptr + offs_0 + 3072 + c, T14_3)
