# pointwise_T13p0_T13p1
#   T0w3 = window(T0)
#   T6w = cast(T0w3)
#   T9p0 = neg(T6w)
#   T0w4 = window(T0)
#   T9p1 = cast(T0w4)
#   T2w = window(T2)
#   T5p0 = cast(T2w)
#   T11p0 = mul(T9p0, T5p0)
#   T2w2 = window(T2)
#   T5p1 = cast(T2w2)
#   T11p1 = mul(T9p1, T5p1)
#   T3w = cast(T0w4)
#   T1w = window(T1)
#   T4w = cast(T1w)
#   T10p0 = mul(T3w, T4w)
#   T12p0 = add(T10p0, T11p0)
#   T3w2 = cast(T0w3)
#   T1w2 = window(T1)
#   T4w2 = cast(T1w2)
#   T10p1 = mul(T3w2, T4w2)
#   T12p1 = add(T10p1, T11p1)
#   T13p0 = cast(T12p0)
#   T13p1 = cast(T12p1)

import triton
import triton.language as tl


@triton.jit
def pointwise_T13p0_T13p1(T0_ptr, T2_ptr, T1_ptr, T13p0_ptr, T13p1_ptr):
    x = tl.program_id(0) * 2048 + tl.arange(0, 2048)
    offs_0 = x // 64 * 128 + x % 64
    offs_1 = x // 64 % 4096 * 128 + x % 64

    T0w4 = tl.load(T0_ptr + offs_0).to(tl.float32)
    T1w = tl.load(T1_ptr + offs_1).to(tl.float32)
    T0w3 = tl.load(T0_ptr + offs_0 + 64).to(tl.float32)
    T2w = tl.load(T2_ptr + offs_1).to(tl.float32)
    T1w2 = tl.load(T1_ptr + offs_1 + 64).to(tl.float32)
    T2w2 = tl.load(T2_ptr + offs_1 + 64).to(tl.float32)

    T10p0 = T0w4 * T1w
    T9p0 = T0w3 * -1.0
    T11p0 = T9p0 * T2w
    T12p0 = T10p0 + T11p0
    T10p1 = T0w3 * T1w2
    T11p1 = T0w4 * T2w2
    T12p1 = T10p1 + T11p1

    tl.store(T13p0_ptr + x, T12p0)
    tl.store(T13p1_ptr + x, T12p1)
