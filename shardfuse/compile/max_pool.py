# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
"""A max pool over an image in channels-last, and of each window the pixel that it chose.

``kernel_files.py`` hands this text to Triton; nothing imports it.  A program has some windows of one row, side by side,
and some channels of each, which lie side by side in all three tensors.  ``offsets``: ``row * KERNEL_W + column`` in the
window, of the first of its pixels that is as large as any, or of the first NaN.
"""

import triton
import triton.language as tl

# --- what kernel_files.py writes for each use ---
ALL_CHANNELS = tl.constexpr(64)
HEIGHT = tl.constexpr(112)
WIDTH = tl.constexpr(112)
POOLED_HEIGHT = tl.constexpr(56)
POOLED_WIDTH = tl.constexpr(56)
KERNEL_H = tl.constexpr(3)
KERNEL_W = tl.constexpr(3)
STRIDE_H = tl.constexpr(2)
STRIDE_W = tl.constexpr(2)
PADDING_H = tl.constexpr(1)
PADDING_W = tl.constexpr(1)
CELLS = tl.constexpr(16)
CHANNELS = tl.constexpr(64)
WIDE = tl.constexpr(8)
INTERPRETED = tl.constexpr(False)
# --- end ---
SIGN = tl.constexpr(-(2**31))


@triton.jit
def max_pool(image, pooled, offsets):
    program = tl.program_id(0)
    blocks: tl.constexpr = (ALL_CHANNELS + CHANNELS - 1) // CHANNELS
    across: tl.constexpr = (POOLED_WIDTH + CELLS - 1) // CELLS
    c = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    row, u = program // blocks // across, program // blocks % across * CELLS + tl.arange(0, CELLS)
    n, v = (row // POOLED_HEIGHT).to(tl.int64), row % POOLED_HEIGHT
    top, left = v * STRIDE_H - PADDING_H, u * STRIDE_W - PADDING_W
    is_channel = (c < ALL_CHANNELS)[None, :]
    largest = tl.full([CELLS, CHANNELS], float("-inf"), tl.float32)
    # the first pixel that is no padding: what is -inf all over has chosen it
    chosen = tl.maximum(-top, 0) * KERNEL_W + tl.maximum(-left, 0)
    chosen = tl.broadcast_to(chosen[:, None], [CELLS, CHANNELS])
    for r in tl.static_range(KERNEL_H):
        y = top + r
        pixels = image + (n * HEIGHT + y) * WIDTH * ALL_CHANNELS
        for s in tl.static_range(KERNEL_W):
            x = left + s
            mask = ((y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH))[:, None] & is_channel
            found = tl.load(pixels + (x * ALL_CHANNELS)[:, None] + c[None, :], mask, other=float("-inf"))
            found = found.to(tl.float32)
            # -0 is compared as 0: of equals the first is kept, which are those whose bits are the same then, NaNs too
            above = tl.maximum(largest, found + 0.0, propagate_nan=tl.PropagateNan.ALL)
            is_larger = above.to(tl.int32, bitcast=True) != largest.to(tl.int32, bitcast=True)
            bits = found.to(tl.int32, bitcast=True)
            if image.dtype.element_ty == tl.float32:  # the last bits of narrower ones are free
                bits &= SIGN
            largest, chosen = above, tl.where(is_larger, bits | (r * KERNEL_W + s), chosen)
    largest = (largest.to(tl.int32, bitcast=True) | (chosen & SIGN)).to(tl.float32, bitcast=True)  # 0 or -0
    chosen &= 0xFF
    windows = (n * POOLED_HEIGHT + v) * POOLED_WIDTH * ALL_CHANNELS
    place, mask = (u * ALL_CHANNELS)[:, None] + c[None, :], (u < POOLED_WIDTH)[:, None] & is_channel
    tl.store(pooled + windows + place, largest.to(pooled.dtype.element_ty), mask)
    few = tl.max_contiguous(place, [1, WIDE])  # of bytes a thread then has as many as of what it compares
    tl.store(offsets + windows + few, chosen.to(tl.int8), mask)
