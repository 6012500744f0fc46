"""Kernels that are written by hand, one a file: the text for one use, compiled and kept as generated kernels are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from ..executor.written_kernels import launcher_on, with_constants, written_source
from ..ir.dtype import DataType

Constants = tuple[tuple[str, int | str], ...]
"""Names of a file's constants, and the text of each."""


@functools.lru_cache(maxsize=256)
def launcher_of(
    name: str,
    constants: Constants,
    tensors: tuple[tuple[str, torch.dtype], ...],
    grid: int,
    warps: int,
    device: torch.device,
) -> Callable[..., None]:
    """The function ``name`` of ``NAME.py``, to be called with its tensors on the current stream.

    ``tensors``: their names and types, in order.
    """
    is_interpreted = device.type != "cuda"
    file = Path(__file__).with_name(f"{name}.py").read_text()
    text = with_constants(file, dict((*constants, ("INTERPRETED", is_interpreted))))
    given = [(n, DataType.from_torch(t)) for n, t in tensors]
    return launcher_on(device, written_source(name, text, given, grid, warps))
