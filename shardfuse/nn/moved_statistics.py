"""Mean and variance that a BatchNorm keeps, and how those of a batch move them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch.utils import checkpoint

from ..executor.tensor_guard import Check, check_of
from .tensor_kinds import PLAIN, are_torchs, modes, plain_metadata_of

Statistics = tuple[torch.Tensor, ...]
"""Mean and unbiased variance of each channel."""
_KEPT = 256
"""Sizes for which it is known what tensors one kernel moves."""
_EndOfRecomputation: type[Exception] = cast("Any", checkpoint)._StopRecomputationError
_one_kernels: dict[Hashable, Check] = {}
"""By how many tensors there are, and what the first is like: are they like some that one kernel moved before?"""


def move_towards(
    running: Statistics, batch: Statistics, momentum: float | None, count: torch.Tensor | None = None
) -> None:
    """Move the ``running`` statistics towards those of a ``batch``, in place, and count it.

    A batch that was empty has none, and is counted nevertheless.  Without a momentum they are the average of all
    batches, and stay where nothing counts those.
    """
    if momentum is not None and _is_for_one_kernel(running, batch, count):
        from shardfuse.nn.running_kernel import move  # which needs Triton

        (mean, variance), (batch_mean, batch_variance) = running, batch
        move(mean, variance, batch_mean, batch_variance, momentum, count)
        changed = running if count is None else (*running, count)
        torch.autograd.graph.increment_version([t for t in changed if not t.is_inference()])
        return
    _move_by_torch(running, batch, momentum, count)


def is_end_of_recomputation(error: Exception) -> bool:
    """Has a checkpoint stopped the forward that it repeats, since the last tensor that it needs was saved?

    The results of the op that saved that tensor are lost then, the statistics of its batch among them.  Under a mode,
    that of a selective checkpoint say, which has counted the ops that it is to see, the answer is no.
    """
    return type(error) is _EndOfRecomputation and not modes()


def _move_by_torch(running: Statistics, batch: Statistics, momentum: float | None, count: torch.Tensor | None) -> None:
    if count is not None:
        count.add_(1)
    if momentum is None and count is None:
        return
    # Detached, and not under no_grad: that is a node of its own in graphs of torch.export, which cannot be saved.
    for own, other in zip(running, (t.detach() for t in batch), strict=False):
        # Rounded once: float16 holds neither a variance above 65504, of which a share is kept, nor as many batches.
        wide = torch.promote_types(own.dtype, other.dtype)
        share = momentum if momentum is not None else cast("torch.Tensor", count).to(wide).reciprocal()
        if own.dtype is wide:
            own.lerp_(other.to(wide), share)
        else:
            own.copy_(own.to(wide).lerp_(other.to(wide), share))


def _is_for_one_kernel(running: Statistics, batch: Statistics, count: torch.Tensor | None) -> bool:
    """Are they plain tensors on one GPU, which may be written to?"""
    if torch.compiler.is_compiling() or len(batch) != 2:
        return False
    everything = (*running, *batch) if count is None else (*running, *batch, count)
    if not PLAIN.issuperset(map(type, everything)):
        return False
    key = len(everything), plain_metadata_of(running[0])
    known = _one_kernels.get(key)
    if known is not None and known(*everything) and not modes():
        return True
    if not _may_be_moved(running, batch, count):
        return False
    check = check_of(everything)
    if check is not None:
        if len(_one_kernels) >= _KEPT:
            _one_kernels.clear()
        _one_kernels[key] = check
    return True


def _may_be_moved(running: Statistics, batch: Statistics, count: torch.Tensor | None) -> bool:
    """As ``_is_for_one_kernel``, asked of each of them.  Momentum is float32 in a kernel."""
    changed = running if count is None else (*running, count)
    everything = (*changed, *batch)
    if not are_torchs(everything) or not running[0].is_cuda or len({t.device for t in everything}) > 1:
        return False
    are_known = all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in running)
    are_known &= all(t.dtype is torch.float32 for t in batch) and (count is None or count.dtype is torch.int64)
    are_ours = torch.is_inference_mode_enabled() or not any(t.is_inference() for t in changed)
    return are_known and are_ours and all(t.is_contiguous() for t in everything)
