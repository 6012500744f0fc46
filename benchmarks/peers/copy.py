"""The roof: a device-to-device copy that moves as many bytes as the workload; half read, half written.

Where rows are not 16-byte aligned, also a copy with words of the width that rows keep aligned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 4096


def prepare(nbytes: int, device: torch.device) -> Callable[[], torch.Tensor]:
    source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def prepare_narrow(nbytes: int, width: int) -> Callable[[], object]:
    """Words of ``width`` bytes, from and to addresses that are multiples of ``width`` only."""
    from .narrow_copy import copy_words

    word = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[width]
    count = max(nbytes // 2 // width, 1)
    source = torch.empty(count + 1, dtype=word, device="cuda").random_()[1:]
    target = torch.empty(count + 1, dtype=word, device="cuda")[1:]
    launch = copy_words[(-(-count // BLOCK),)]
    return lambda: launch(source, target, count, BLOCK=BLOCK, num_warps=8)
