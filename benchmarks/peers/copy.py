"""The roof: the fastest of several device-to-device copies that move as many bytes as the workload does.

Half of the bytes are read, half written.  One copy alone is no roof: torch's ``copy_`` of more bytes is at times faster
than of fewer.  Where rows are not 16-byte aligned, there is also a copy with words of the width that rows keep aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 4096
WORD = 8
"""Bytes of an int64; each thread loads two."""
TILES = (1024, 2048, 4096, 8192)
"""Words in a program of Triton's copy, 8 warps each."""


@dataclass(frozen=True)
class Copy:
    """``name`` says by what; ``target`` holds ``source`` after ``run``, but for ``clone``, which gives a new tensor."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    run: Callable[[], object]

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.source.nbytes + self.target.nbytes


def copies(nbytes: int, device: torch.device) -> list[Copy]:
    """All ways to move ``nbytes``, to the multiple of a word on a GPU.  On a CPU there is no kernel of Triton's."""
    source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    found = [
        Copy("copy_", source, target, lambda: target.copy_(source)),
        Copy("clone", source, target, source.clone),
    ]
    if device.type == "cuda":
        words = (
            [t[: max(t.numel() // WORD, 1) * WORD].view(torch.int64) for t in (source, target)] if nbytes > 15 else []
        )
        found += [_by_triton(*words, tile) for tile in TILES if words]
    return found


def _by_triton(source: torch.Tensor, target: torch.Tensor, tile: int) -> Copy:
    from .copy_kernels import copy_aligned

    launch = copy_aligned[(-(-source.numel() // tile),)]
    run = lambda: launch(source, target, source.numel(), BLOCK=tile, num_warps=8)  # noqa: E731
    return Copy(f"Triton, {tile * WORD >> 10} KB a program", source, target, run)


def narrow(nbytes: int, width: int) -> Copy:
    """Words of ``width`` bytes, from and to addresses that are multiples of ``width`` only."""
    from .copy_kernels import copy_words

    word = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[width]
    count = max(nbytes // 2 // width, 1)
    source = torch.empty(count + 1, dtype=word, device="cuda").random_()[1:]
    target = torch.empty(count + 1, dtype=word, device="cuda")[1:]
    launch = copy_words[(-(-count // BLOCK),)]
    run = lambda: launch(source, target, count, BLOCK=BLOCK, num_warps=8)  # noqa: E731
    return Copy(f"Triton, words of {width} B", source, target, run)
