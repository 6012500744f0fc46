# reduction_T2_partial
#   T1 = cast(T0)
#   T2_partial = sum(T1)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["i1", "i2"])
def reduction_T2_partial(T0_ptr, T2_partial_ptr, i1: tl.int32, i2: tl.int32):
    i2 = i2 // 16 * 16
    split = tl.program_id(0) % 512
    first = split * i2
    last = tl.minimum(first + i2, i1)
    c = tl.arange(0, 4096)

    T2_partial_acc = tl.zeros([4096], tl.float32)
    for start in tl.range(first, last, 4096, num_stages=3):
        r = start + c
        T0 = tl.load(T0_ptr + r, eviction_policy="evict_last").to(tl.float32)
        T2_partial_acc += T0
    T2_partial = tl.sum(T2_partial_acc, axis=0)

    tl.store(T2_partial_ptr + split, T2_partial)
