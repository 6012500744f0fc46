# looped_T10_T17
#   T1 = cast(T0)
#   T3, T7 = online_softmax(T1)
#   T4 = broadcast(T3)
#   T8 = broadcast(T7)
#   T9 = log(T8)
#   T10 = add(T9, T4)
#   T15_x, T15_hit = pick(T1, T2)
#   T15 = where(T15_hit, T15_x, 0.0)
#   T16 = broadcast(T15)
#   T17 = sub(T10, T16)

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """For x of at most 0, in sums of 1 and more: what is below 1e-38 is 0, which saves the care for denormals."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def maximum(a, b):
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def add_exponentials(top, total, x, axis: tl.constexpr):
    """(max, sum of exp(x - max)) of each lane, with its elements of ``x``, which lie along ``axis``, taken in."""
    higher = maximum(top, tl.reduce(x, axis, maximum))
    return higher, total * exp(top - higher) + tl.sum(exp(x - tl.expand_dims(higher, axis)), axis)


@triton.jit(do_not_specialize=["i1"])
def looped_T10_T17(T0_ptr, T2_ptr, T10_ptr, T17_ptr, i1: tl.int32):
    i1 = i1 // 16 * 16
    x = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 4096)
    offs_0 = x * 32000

    T3_acc = tl.full([512], -3.4028234663852886e38, tl.float32)
    T7_acc = tl.zeros([512], tl.float32)
    for start in tl.range(0, i1, 4096, num_stages=1):
        r = start + c
        r_mask = r < i1
        T0 = tl.load(T0_ptr + offs_0 + r, mask=r_mask, eviction_policy="evict_last").to(tl.float32)
        T3_acc, T7_acc = add_exponentials(T3_acc, T7_acc, tl.reshape(tl.where(r_mask, T0, float("-inf")), [512, 8]), 1)
    T3_all = tl.reduce(T3_acc, 0, maximum)
    T7_all = tl.sum(T7_acc * exp(T3_acc - T3_all), axis=0)
    T3 = tl.where(T7_all == 0, float("-inf"), T3_all)
    T7 = tl.where(T7_all == 0, float("nan"), T7_all)
    T2 = tl.load(T2_ptr + x)
    T9 = tl.log(T7)
    T10 = T9 + T3
    T15_hit = (T2 >= 0) & (i1 > T2)
    T0_at_T2 = tl.load(T0_ptr + offs_0 + T2, mask=T15_hit, eviction_policy="evict_last").to(tl.float32)
    T15 = tl.where(T15_hit, T0_at_T2, 0.0)
    T17 = T10 - T15

    tl.store(T10_ptr + x, T10)
    tl.store(T17_ptr + x, T17)
