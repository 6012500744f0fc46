# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
"""The gradient of a max pool over an image in channels-last: each pixel of the image adds up windows that chose it.

``kernel_files.py`` hands this text to Triton; nothing imports it.  A program has some cells of the image, side by side,
and some channels of each, which lie side by side in all three tensors.  A cell has ``STRIDE_H`` x ``STRIDE_W`` pixels,
and the windows that reach it are read once: pixel (r, c) of cell (q, p) is at row ``r + PADDING_H - STRIDE_H * v`` of
window ``q + v``.  ``offsets``: of each window the pixel that it chose, ``row * KERNEL_W + column`` in the window.
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


@triton.jit
def _chosen_here(chosen, given, r: tl.constexpr, s: tl.constexpr):
    """What windows give to their pixel (r, s), where they have such a pixel."""
    found = tl.zeros(chosen.shape, tl.float32)
    if r >= 0 and r < KERNEL_H and s >= 0 and s < KERNEL_W:
        found = tl.where(chosen == r * KERNEL_W + s, given.to(tl.float32), 0.0)
    return found


@triton.jit
def max_pool_gradient(gradient, offsets, out):
    program = tl.program_id(0)
    blocks: tl.constexpr = (ALL_CHANNELS + CHANNELS - 1) // CHANNELS
    down: tl.constexpr = (HEIGHT + STRIDE_H - 1) // STRIDE_H
    across: tl.constexpr = ((WIDTH + STRIDE_W - 1) // STRIDE_W + CELLS - 1) // CELLS
    c = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    row, p = program // blocks // across, program // blocks % across * CELLS + tl.arange(0, CELLS)
    image, q = (row // down).to(tl.int64), row % down
    is_channel = (c < ALL_CHANNELS)[None, :]
    first_v: tl.constexpr = (PADDING_H - KERNEL_H) // STRIDE_H + 1
    last_v: tl.constexpr = (STRIDE_H - 1 + PADDING_H) // STRIDE_H
    first_u: tl.constexpr = (PADDING_W - KERNEL_W) // STRIDE_W + 1
    last_u: tl.constexpr = (STRIDE_W - 1 + PADDING_W) // STRIDE_W
    windows_across: tl.constexpr = last_u + 1 - first_u
    chosen, given = (), ()
    for v in tl.static_range(first_v, last_v + 1):
        is_row = (q + v >= 0) & (q + v < POOLED_HEIGHT)
        windows = (image * POOLED_HEIGHT + q + v) * POOLED_WIDTH * ALL_CHANNELS
        for u in tl.static_range(first_u, last_u + 1):
            mask = (is_row & (p + u >= 0) & (p + u < POOLED_WIDTH))[:, None] & is_channel
            place = ((p + u) * ALL_CHANNELS)[:, None] + c[None, :]
            few = tl.max_contiguous(place, [1, WIDE])  # of bytes a thread then has as many as of the gradient
            found = tl.load(offsets + windows + few, mask, other=-1)
            chosen = chosen + (found,)  # noqa: RUF005 - Triton unpacks nothing
            found = tl.load(gradient + windows + place, mask, other=0.0)
            given = given + (found,)  # noqa: RUF005
    for r in tl.static_range(STRIDE_H):
        y = q * STRIDE_H + r
        pixels = out + (image * HEIGHT + y) * WIDTH * ALL_CHANNELS
        for s in tl.static_range(STRIDE_W):
            x = p * STRIDE_W + s
            total = tl.zeros([CELLS, CHANNELS], tl.float32)
            for v in tl.static_range(first_v, last_v + 1):
                for u in tl.static_range(first_u, last_u + 1):
                    total += _chosen_here(
                        chosen[(v - first_v) * windows_across + u - first_u],
                        given[(v - first_v) * windows_across + u - first_u],
                        r + PADDING_H - STRIDE_H * v,
                        s + PADDING_W - STRIDE_W * u,
                    )
            if INTERPRETED and out.dtype.element_ty == tl.bfloat16:  # whose own conversion truncates
                b = total.to(tl.int32, bitcast=True)
                half = ((b + 0x7FFF + ((b >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                total = tl.where(total == total, half, total)
            mask = ((y < HEIGHT) & (x < WIDTH))[:, None] & is_channel
            tl.store(pixels + (x * ALL_CHANNELS)[:, None] + c[None, :], total.to(out.dtype.element_ty), mask)
