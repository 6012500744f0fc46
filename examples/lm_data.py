"""Text for the language model: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

import torch

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens, and the tokens that follow each of them; both [sequences, length]."""

HELD_OUT_SHARE = 0.05
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


class Corpus:
    """The first ``max_bytes`` bytes of the standard library's .py files, a share of whose files is held out.

    Files come in the order of a checksum of their names: the same on every rank and in every run, and a mixture of
    all packages however early ``max_bytes`` cuts.
    """

    def __init__(self, max_bytes: int) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files: list[str] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in NOT_THE_LIBRARY]
            files += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
        files.sort(key=lambda name: (zlib.crc32(name.encode()), name))
        held_out, train = bytearray(), bytearray()
        self.files = 0
        for name in files:
            text = held_out if len(held_out) < HELD_OUT_SHARE * max_bytes else train
            text += (root / name).read_bytes()
            self.files += 1
            if len(held_out) + len(train) >= max_bytes:
                break
        self.train = torch.frombuffer(train, dtype=torch.uint8)
        self.held_out = torch.frombuffer(held_out, dtype=torch.uint8)

    def __str__(self) -> str:
        return (
            f"{len(self.train) / 1e6:.1f} MB of text, {len(self.held_out) / 1e6:.1f} MB held out, "
            f"from {self.files} files of Python's standard library"
        )

    def training_batch(self, seed: int, step: int, size: int, length: int) -> Batch:
        """``size`` windows of the text; which ones depends on seed and step alone."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - length, (size,), generator=generator)
        return _windows(self.train, starts, length)

    def validation_batch(self, index: int, count: int, size: int, length: int) -> Batch:
        """The ``index``-th of ``count`` batches, whose windows are spread evenly over the held-out files."""
        starts = torch.linspace(0, len(self.held_out) - length - 1, count * size).long()
        return _windows(self.held_out, starts[index::count], length)


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
