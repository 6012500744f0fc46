# persistent_T10_T17
#   T1 = cast(T0)
#   T3 = max(T1)
#   T4 = broadcast(T3)
#   T5 = sub(T1, T4)
#   T6 = exp(T5)
#   T7 = sum(T6)
#   T8 = broadcast(T7)
#   T9 = log(T8)
#   T10 = add(T9, T4)
#   T11 = iota()
#   T12 = broadcast(T11)
#   T13 = eq(T12, T2)
#   T14 = where(T13, T1, 0.0)
#   T15 = sum(T14)
#   T16 = broadcast(T15)
#   T17 = sub(T10, T16)

import triton
import triton.language as tl


@triton.jit
def maximum(a, b):
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def persistent_T10_T17(T0_ptr, T2_ptr, T10_ptr, T17_ptr):
    x = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 4096)
    r_mask = c < 3328
    offs_0 = x * 32000

    T2 = tl.load(T2_ptr + x)
    T0_0 = tl.load(T0_ptr + offs_0 + c, eviction_policy="evict_last").to(tl.float32)
    T0_1 = tl.load(T0_ptr + offs_0 + 4096 + c, eviction_policy="evict_last").to(tl.float32)
    T0_2 = tl.load(T0_ptr + offs_0 + 8192 + c, eviction_policy="evict_last").to(tl.float32)
    T0_3 = tl.load(T0_ptr + offs_0 + 12288 + c, eviction_policy="evict_last").to(tl.float32)
    T0_4 = tl.load(T0_ptr + offs_0 + 16384 + c, eviction_policy="evict_last").to(tl.float32)
    T0_5 = tl.load(T0_ptr + offs_0 + 20480 + c, eviction_policy="evict_last").to(tl.float32)
    T0_6 = tl.load(T0_ptr + offs_0 + 24576 + c, eviction_policy="evict_last").to(tl.float32)
    T0_7 = tl.load(T0_ptr + offs_0 + 28672 + c, mask=r_mask, eviction_policy="evict_last").to(tl.float32)

    T11_0 = c.to(tl.int64)
    T13_0 = T11_0 == T2
    T14_0 = tl.where(T13_0, T0_0, 0.0)
    T11_1 = (4096 + c).to(tl.int64)
    T13_1 = T11_1 == T2
    T14_1 = tl.where(T13_1, T0_1, 0.0)
    T11_2 = (8192 + c).to(tl.int64)
    T13_2 = T11_2 == T2
    T14_2 = tl.where(T13_2, T0_2, 0.0)
    T11_3 = (12288 + c).to(tl.int64)
    T13_3 = T11_3 == T2
    T14_3 = tl.where(T13_3, T0_3, 0.0)
    T11_4 = (16384 + c).to(tl.int64)
    T13_4 = T11_4 == T2
    T14_4 = tl.where(T13_4, T0_4, 0.0)
    T11_5 = (20480 + c).to(tl.int64)
    T13_5 = T11_5 == T2
    T14_5 = tl.where(T13_5, T0_5, 0.0)
    T11_6 = (24576 + c).to(tl.int64)
    T13_6 = T11_6 == T2
    T14_6 = tl.where(T13_6, T0_6, 0.0)
    T11_7 = (28672 + c).to(tl.int64)
    T13_7 = T11_7 == T2
    T14_7 = tl.where(T13_7, T0_7, 0.0)
    T3_acc = T0_0
    T3_acc = maximum(T3_acc, T0_1)
    T3_acc = maximum(T3_acc, T0_2)
    T3_acc = maximum(T3_acc, T0_3)
    T3_acc = maximum(T3_acc, T0_4)
    T3_acc = maximum(T3_acc, T0_5)
    T3_acc = maximum(T3_acc, T0_6)
    T3_acc = maximum(T3_acc, tl.where(r_mask, T0_7, float("-inf")))
    T3 = tl.reduce(T3_acc, 0, maximum)
    T15_acc = T14_0
    T15_acc += T14_1 + T14_2 + T14_3 + T14_4 + T14_5 + T14_6 + tl.where(r_mask, T14_7, 0.0)
    T15 = tl.sum(T15_acc, axis=0)

    T5_0 = T0_0 - T3
    T6_0 = tl.exp(T5_0)
    T5_1 = T0_1 - T3
    T6_1 = tl.exp(T5_1)
    T5_2 = T0_2 - T3
    T6_2 = tl.exp(T5_2)
    T5_3 = T0_3 - T3
    T6_3 = tl.exp(T5_3)
    T5_4 = T0_4 - T3
    T6_4 = tl.exp(T5_4)
    T5_5 = T0_5 - T3
    T6_5 = tl.exp(T5_5)
    T5_6 = T0_6 - T3
    T6_6 = tl.exp(T5_6)
    T5_7 = T0_7 - T3
    T6_7 = tl.exp(T5_7)
    T7 = tl.sum(T6_0 + T6_1 + T6_2 + T6_3 + T6_4 + T6_5 + T6_6 + tl.where(r_mask, T6_7, 0.0), axis=0)

    T9 = tl.log(T7)
    T10 = T9 + T3
    T17 = T10 - T15

    tl.store(T10_ptr + x, T10)
    tl.store(T17_ptr + x, T17)
