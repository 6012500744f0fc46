# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
"""The gradient of a max pool over an image in channels-last: each pixel of the image adds up windows that chose it.

Rows ``h + padding = stride * q + r`` of the image lie in the windows ``q - t`` at their row ``r + stride * t``.  A
program has some pixels of one row of the image, and channels: its rows of windows are numbers, and channels lie side
by side in all three tensors.
"""

import triton
import triton.language as tl


@triton.jit
def max_pool_gradient(
    gradient,
    offsets,
    out,
    channels,
    height: tl.constexpr,
    width: tl.constexpr,
    pooled_height: tl.constexpr,
    pooled_width: tl.constexpr,
    kernel_h: tl.constexpr,
    kernel_w: tl.constexpr,
    stride_h: tl.constexpr,
    stride_w: tl.constexpr,
    padding_h: tl.constexpr,
    padding_w: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``offsets``: of each window the pixel that it chose, ``row * kernel_w + column`` in the window."""
    across = tl.cdiv(width, PIXELS)
    program = tl.program_id(0)
    row, x = program // across, (program % across) * PIXELS + tl.arange(0, PIXELS)
    image, y = row // height, row % height
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    window_y, window_x = (y + padding_h) // stride_h, (x + padding_w) // stride_w
    in_y, in_x = (y + padding_h) % stride_h, (x + padding_w) % stride_w
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    rows: tl.constexpr = (kernel_h + stride_h - 1) // stride_h
    columns: tl.constexpr = (kernel_w + stride_w - 1) // stride_w
    for t in tl.static_range(rows):
        v = window_y - (rows - 1 - t)
        at_v = in_y + stride_h * (rows - 1 - t)
        is_row = (v >= 0) & (v < pooled_height) & (at_v < kernel_h)
        for s in tl.static_range(columns):
            u = window_x - (columns - 1 - s)
            at_u = in_x + stride_w * (columns - 1 - s)
            is_there = is_row & (u >= 0) & (u < pooled_width) & (at_u < kernel_w) & (x < width)
            mask = is_there[:, None] & (c < channels)[None, :]
            windows = (image.to(tl.int64) * pooled_height + v) * pooled_width * channels
            place = windows + (u * channels)[:, None] + c[None, :]
            chosen = tl.load(offsets + place, mask, other=-1).to(tl.int32)
            given = tl.load(gradient + place, mask, other=0.0).to(tl.float32)
            total += tl.where(chosen == (at_v * kernel_w + at_u)[:, None], given, 0.0)
    pixels = (image.to(tl.int64) * height + y) * width * channels
    stored = (x < width)[:, None] & (c < channels)[None, :]
    tl.store(out + pixels + (x * channels)[:, None] + c[None, :], total, stored)
