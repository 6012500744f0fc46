# finish_T8
#   T7 = sum(T7_partial)
#   T8 = cast(T7)

import triton
import triton.language as tl


@triton.jit
def finish_T8(T7_partial_ptr, T8_ptr):
    x = tl.program_id(0) * 64 + tl.arange(0, 64)[None, :]
    c = tl.arange(0, 64)[:, None]
    r_mask = c < 33

    T7_partial = tl.load(T7_partial_ptr + x + c * 4096, mask=r_mask, eviction_policy="evict_last")

    T7 = tl.sum(tl.where(r_mask, T7_partial, 0.0), axis=0)[None, :]

    tl.store(T8_ptr + x, T7)
