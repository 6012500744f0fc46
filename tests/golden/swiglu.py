# pointwise_T6
#   T2 = cast(T0)
#   T3 = silu(T2)
#   T4 = cast(T1)
#   T5 = mul(T3, T4)
#   T6 = cast(T5)

import triton
import triton.language as tl


@triton.jit
def pointwise_T6(T0_ptr, T1_ptr, T6_ptr):
    x = tl.program_id(0) * 2048 + tl.arange(0, 2048)

    T0 = tl.load(T0_ptr + x).to(tl.float32)
    T1 = tl.load(T1_ptr + x).to(tl.float32)

    T3 = T0 * tl.sigmoid(T0)
    T5 = T3 * T1

    tl.store(T6_ptr + x, T5)
