# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false
"""Running statistics that move towards those of a batch, and the count of batches: one launch for all three."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_launch import Launches

BLOCK = 1024


@triton.jit
def moved(running_ptr, batch_ptr, channels, mask, momentum):
    """As torch's ``lerp``, which is exact at both ends."""
    running = tl.load(running_ptr + channels, mask=mask).to(tl.float32)
    batch = tl.load(batch_ptr + channels, mask=mask)
    way = batch - running
    new = tl.where(tl.abs(momentum) < 0.5, running + momentum * way, batch - way * (1 - momentum))
    tl.store(running_ptr + channels, new.to(running_ptr.dtype.element_ty), mask=mask)


@triton.jit
def move_statistics(
    mean_ptr, variance_ptr, batch_mean_ptr, batch_variance_ptr, count_ptr, size, momentum, IS_COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for BLOCK channels; the first one counts the batch."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < size
    moved(mean_ptr, batch_mean_ptr, channels, mask, momentum)
    moved(variance_ptr, batch_variance_ptr, channels, mask, momentum)
    if IS_COUNTED:  # noqa: SIM102 - what is false while it compiles is not compiled
        if tl.program_id(0) == 0:
            tl.store(count_ptr, tl.load(count_ptr) + 1)


_launch = Launches(move_statistics)
_COUNTED, _UNCOUNTED = ({"IS_COUNTED": there, "BLOCK": BLOCK, "num_warps": 4} for there in (True, False))


def move(
    mean: torch.Tensor,
    variance: torch.Tensor,
    batch_mean: torch.Tensor,
    batch_variance: torch.Tensor,
    momentum: float,
    count: torch.Tensor | None,
) -> None:
    """Statistics: [channels], contiguous, those of the batch in float32; count: of int64, or None to count nothing."""
    size = mean.numel()
    tensors = mean, variance, batch_mean, batch_variance, mean if count is None else count
    constants = _COUNTED if count is not None else _UNCOUNTED
    _launch((-(-size // BLOCK),), tensors, (size, float(momentum)), constants)
