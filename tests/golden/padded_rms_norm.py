# persistent_T13
#   T3 = cast(T1)
#   T0w = window(T0)
#   T2w = cast(T0w)
#   T4vw = full(0.0)
#   T4i = iota()
#   T4m = ge(T4i, 8)
#   T4b = broadcast(T4m)
#   T4m2 = lt(T4i, 3848)
#   T4b2 = broadcast(T4m2)
#   T4w = where(T4b, T2w, T4vw)
#   T4 = where(T4b2, T4w, T4vw)
#   T5 = mul(T4, T4)
#   T6 = sum(T5)
#   T7 = broadcast(T6)
#   T8 = div(T7, 4096)
#   T9 = add(T8, 1e-05)
#   T10 = rsqrt(T9)
#   T11 = mul(T4, T10)
#   T12 = mul(T11, T3)
#   T13 = cast(T12)

import triton
import triton.language as tl


@triton.jit
def persistent_T13(T1_ptr, T0_ptr, T13_ptr):
    x = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 1024)
    offs_0 = x * 3840
    offs_1 = x * 4096

    in_T0w_0 = c >= 8
    T0w_0 = tl.load(T0_ptr + offs_0 + c - 8, mask=in_T0w_0, other=0, eviction_policy="evict_last").to(tl.float32)
    T0w_1 = tl.load(T0_ptr + offs_0 + 1024 + c - 8, eviction_policy="evict_last").to(tl.float32)
    T0w_2 = tl.load(T0_ptr + offs_0 + 2048 + c - 8, eviction_policy="evict_last").to(tl.float32)
    in_T0w_3 = 3072 + c < 3848
    T0w_3 = tl.load(T0_ptr + offs_0 + 3072 + c - 8, mask=in_T0w_3, other=0, eviction_policy="evict_last").to(tl.float32)

    T4i_0 = c.to(tl.int32)
    T4m2_0 = T4i_0 < 3848
    T4m_0 = T4i_0 >= 8
    T4vw = tl.full([], 0.0, tl.float32)
    T4w_0 = tl.where(T4m_0, T0w_0, T4vw)
    T4_0 = tl.where(T4m2_0, T4w_0, T4vw)
    T5_0 = T4_0 * T4_0
    T4i_1 = (1024 + c).to(tl.int32)
    T4m2_1 = T4i_1 < 3848
    T4m_1 = T4i_1 >= 8
    T4w_1 = tl.where(T4m_1, T0w_1, T4vw)
    T4_1 = tl.where(T4m2_1, T4w_1, T4vw)
    T5_1 = T4_1 * T4_1
    T4i_2 = (2048 + c).to(tl.int32)
    T4m2_2 = T4i_2 < 3848
    T4m_2 = T4i_2 >= 8
    T4w_2 = tl.where(T4m_2, T0w_2, T4vw)
    T4_2 = tl.where(T4m2_2, T4w_2, T4vw)
    T5_2 = T4_2 * T4_2
    T4i_3 = (3072 + c).to(tl.int32)
    T4m2_3 = T4i_3 < 3848
    T4m_3 = T4i_3 >= 8
    T4w_3 = tl.where(T4m_3, T0w_3, T4vw)
    T4_3 = tl.where(T4m2_3, T4w_3, T4vw)
    T5_3 = T4_3 * T4_3
    T6 = tl.sum(T5_0 + T5_1 + T5_2 + T5_3, axis=0)

    T8 = T6 / 4096.0
    T9 = T8 + 1e-05
    T10 = tl.rsqrt(T9)

    T1_0 = tl.load(T1_ptr + c).to(tl.float32)
    T11_0 = T4_0 * T10
    T12_0 = T11_0 * T1_0
    tl.store(T13_ptr + offs_1 + c, T12_0)

    T1_1 = tl.load(T1_ptr + 1024 + c).to(tl.float32)
    T11_1 = T4_1 * T10
    T12_1 = T11_1 * T1_1
    tl.store(T13_ptr + offs_1 + 1024 + c, T12_1)

    T1_2 = tl.load(T1_ptr + 2048 + c).to(tl.float32)
    T11_2 = T4_2 * T10
    T12_2 = T11_2 * T1_2
    tl.store(T13_ptr + offs_1 + 2048 + c, T12_2)

    T1_3 = tl.load(T1_ptr + 3072 + c).to(tl.float32)
    T11_3 = T4_3 * T10
    T12_3 = T11_3 * T1_3
    tl.store(T13_ptr + offs_1 + 3072 + c, T12_3)
