# finish_T34_T35
#   T31 = sum(T31_partial)
#   T32 = sum(T32_partial)
#   T34 = cast(T31)
#   T35 = cast(T32)

import triton
import triton.language as tl


@triton.jit
def finish_T34_T35(T31_partial_ptr, T32_partial_ptr, T34_ptr, T35_ptr):
    x = tl.program_id(0) * 16 + tl.arange(0, 16)[None, :]
    c = tl.arange(0, 512)[:, None]
    r_mask = c < 264

    T31_partial = tl.load(T31_partial_ptr + x + c * 4096, mask=r_mask, eviction_policy="evict_last")
    T32_partial = tl.load(T32_partial_ptr + x + c * 4096, mask=r_mask, eviction_policy="evict_last")

    T31 = tl.sum(tl.where(r_mask, T31_partial, 0.0), axis=0)[None, :]
    T32 = tl.sum(tl.where(r_mask, T32_partial, 0.0), axis=0)[None, :]

    tl.store(T34_ptr + x, T31)
    tl.store(T35_ptr + x, T32)
