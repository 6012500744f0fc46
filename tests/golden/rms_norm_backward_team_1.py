# finish_T20
#   T18 = sum(T18_partial)
#   T20 = cast(T18)

import triton
import triton.language as tl


@triton.jit
def finish_T20(T18_partial_ptr, T20_ptr):
    x = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    c = tl.arange(0, 32)[:, None]
    r_mask = c < 24

    T18_partial = tl.load(T18_partial_ptr + x + c * 32768, mask=r_mask, eviction_policy="evict_last")

    T18 = tl.sum(tl.where(r_mask, T18_partial, 0.0), axis=0)[None, :]

    tl.store(T20_ptr + x, T18)
