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
    c = tl.arange(0, 4096)
    offs_0 = x * 4096

    T0 = tl.load(T0_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T1 = tl.load(T1_ptr + c).to(tl.float32)

    T3 = T0 * T0
    T4 = tl.sum(T3, axis=0)

    T6 = T4 / 4096.0
    T7 = T6 + 1e-06
    T8 = tl.rsqrt(T7)

    T9 = T0 * T8
    T12 = T9 * T1
    tl.store(T13_ptr + offs_0 + c, T12)
