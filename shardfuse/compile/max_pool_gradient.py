# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAssignmentType=false
"""The gradient of a max pool over an image in channels-last: each pixel of the image adds up windows that chose it.

``kernel_files.py`` hands this text to Triton; nothing imports it.  Rows ``h + padding = stride * q + r`` of the image
lie in the windows ``q - t`` at their row ``r + stride * t``.  A program has some pixels of one row of the image, and
some channels, which lie side by side in all three tensors.  ``offsets``: of each window the pixel that it chose,
``row * KERNEL_W + column`` in the window.
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
PIXELS = tl.constexpr(16)
CHANNELS = tl.constexpr(64)
INTERPRETED = tl.constexpr(False)
# --- end ---


@triton.jit
def max_pool_gradient(gradient, offsets, out):
    program = tl.program_id(0)
    blocks: tl.constexpr = (ALL_CHANNELS + CHANNELS - 1) // CHANNELS
    across: tl.constexpr = (WIDTH + PIXELS - 1) // PIXELS
    c = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    row, x = program // blocks // across, program // blocks % across * PIXELS + tl.arange(0, PIXELS)
    image, y = (row // HEIGHT).to(tl.int64), row % HEIGHT
    window_y, window_x = (y + PADDING_H) // STRIDE_H, (x + PADDING_W) // STRIDE_W
    in_y, in_x = (y + PADDING_H) % STRIDE_H, (x + PADDING_W) % STRIDE_W
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    rows: tl.constexpr = (KERNEL_H + STRIDE_H - 1) // STRIDE_H
    columns: tl.constexpr = (KERNEL_W + STRIDE_W - 1) // STRIDE_W
    for t in tl.static_range(rows):
        v = window_y - (rows - 1 - t)
        at_v = in_y + STRIDE_H * (rows - 1 - t)
        is_row = (v >= 0) & (v < POOLED_HEIGHT) & (at_v < KERNEL_H)
        for s in tl.static_range(columns):
            u = window_x - (columns - 1 - s)
            at_u = in_x + STRIDE_W * (columns - 1 - s)
            is_there = is_row & (u >= 0) & (u < POOLED_WIDTH) & (at_u < KERNEL_W) & (x < WIDTH)
            mask = is_there[:, None] & (c < ALL_CHANNELS)[None, :]
            windows = (image * POOLED_HEIGHT + v) * POOLED_WIDTH * ALL_CHANNELS
            place = (u * ALL_CHANNELS)[:, None] + c[None, :]
            chosen = tl.load(offsets + windows + place, mask, other=-1).to(tl.int32)
            given = tl.load(gradient + windows + place, mask, other=0.0).to(tl.float32)
            total += tl.where(chosen == (at_v * KERNEL_W + at_u)[:, None], given, 0.0)
    pixels = out + (image * HEIGHT + y) * WIDTH * ALL_CHANNELS
    place = (x * ALL_CHANNELS)[:, None] + c[None, :]
    if INTERPRETED and out.dtype.element_ty == tl.bfloat16:  # whose own conversion truncates
        b = total.to(tl.int32, bitcast=True)
        r = ((b + 0x7FFF + ((b >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        total = tl.where(total == total, r, total)
    tl.store(pixels + place, total.to(out.dtype.element_ty), (x < WIDTH)[:, None] & (c < ALL_CHANNELS)[None, :])
