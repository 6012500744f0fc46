# finish_T2
#   T2 = sum(T2_partial)

import triton
import triton.language as tl


@triton.jit
def finish_T2(T2_partial_ptr, T2_ptr):
    c = tl.arange(0, 128)

    T2_partial_0 = tl.load(T2_partial_ptr + c, eviction_policy="evict_last")
    T2_partial_1 = tl.load(T2_partial_ptr + 128 + c, eviction_policy="evict_last")
    T2_partial_2 = tl.load(T2_partial_ptr + 256 + c, eviction_policy="evict_last")
    T2_partial_3 = tl.load(T2_partial_ptr + 384 + c, eviction_policy="evict_last")

    T2 = tl.sum(T2_partial_0 + T2_partial_1 + T2_partial_2 + T2_partial_3, axis=0)

    tl.store(T2_ptr, T2)
