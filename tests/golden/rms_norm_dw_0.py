# reduction_T7_partial
#   T3 = cast(T1)
#   T4 = cast(T0)
#   T5 = mul(T4, T2)
#   T6 = mul(T3, T5)
#   T7_partial = sum(T6)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["i0", "i1", "i2"])
def reduction_T7_partial(T1_ptr, T0_ptr, T2_ptr, T7_partial_ptr, i0: tl.int32, i1: tl.int32, i2: tl.int32):
    i2 = i2 // 16 * 16
    split = tl.program_id(0) % 33
    first = split * i2
    last = tl.minimum(first + i2, i1)
    x = tl.program_id(0) // 33 * 512 + tl.arange(0, 512)[None, :]
    c = tl.arange(0, 8)[:, None]

    T7_partial_acc = tl.zeros([8, 512], tl.float32)
    for start in tl.range(first, last, 8, num_stages=3):
        r = start + c
        T1 = tl.load(T1_ptr + x + r * 4096, eviction_policy="evict_last").to(tl.float32)
        T0 = tl.load(T0_ptr + x + r * 4096, eviction_policy="evict_last").to(tl.float32)
        T2 = tl.load(T2_ptr + r)
        T5 = T0 * T2
        T6 = T1 * T5
        T7_partial_acc += T6
    T7_partial = tl.sum(T7_partial_acc, axis=0)[None, :]

    tl.store(T7_partial_ptr + split * i0 + x, T7_partial)
