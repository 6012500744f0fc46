# pointwise_T13
#   T3 = cast(T0)
#   T4 = cast(T1)
#   T5 = cast(T2)
#   T0w3 = window(T0)
#   T6w = cast(T0w3)
#   T7w = neg(T6w)
#   T0w4 = window(T0)
#   T8w = cast(T0w4)
#   T9i = iota()
#   T9m = lt(T9i, 64)
#   T9b = broadcast(T9m)
#   T9 = where(T9b, T7w, T8w)
#   T10 = mul(T3, T4)
#   T11 = mul(T9, T5)
#   T12 = add(T10, T11)
#   T13 = cast(T12)

import triton
import triton.language as tl


@triton.jit
def pointwise_T13(T0_ptr, T1_ptr, T2_ptr, T13_ptr):
    x = tl.program_id(0) * 2048 + tl.arange(0, 2048)

    T0 = tl.load(T0_ptr + x).to(tl.float32)
    T1 = tl.load(T1_ptr + x % 524288).to(tl.float32)
    in_T0w3 = x % 128 < 64
    T0w3 = tl.load(T0_ptr + x + 64, mask=in_T0w3, other=0).to(tl.float32)
    in_T0w4 = x % 128 >= 64
    T0w4 = tl.load(T0_ptr + x - 64, mask=in_T0w4, other=0).to(tl.float32)
    T2 = tl.load(T2_ptr + x % 524288).to(tl.float32)

    T10 = T0 * T1
    T9i = (x % 128).to(tl.int32)
    T9m = T9i < 64
    T7w = -T0w3
    T9 = tl.where(T9m, T7w, T0w4)
    T11 = T9 * T2
    T12 = T10 + T11

    tl.store(T13_ptr + x, T12)
