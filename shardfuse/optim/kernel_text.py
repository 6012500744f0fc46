"""The text of ``kernels.py`` for one use: its constants are written into it, as codegen writes a fusion's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..codegen import KernelSource
from ..executor.written_kernels import with_constants, written_source
from ..ir.dtype import DataType

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""Element types that the kernels take, and the numbers that they know them by."""

_POINTERS = {
    "norm_partials": ("addresses", "facts", "chunks", "groups", "partials"),
    "finish_norm": ("partials", "total"),
    "prepare_steps": ("addresses", "facts", "groups", "factors"),
    "finish_norm_and_prepare": ("partials", "total", "addresses", "facts", "groups", "factors"),
    "scale_gradients": ("addresses", "facts", "chunks", "groups", "total", "norm"),
    "adamw": ("addresses", "facts", "chunks", "factors", "groups", "total", "norm"),
}
_TYPES = {"addresses": DataType.Int, "facts": DataType.Int, "chunks": DataType.Int32}


@dataclass(frozen=True)
class Shape:
    """How a kernel goes through memory.  chunk: elements of a program; tile: those that it has in registers at once."""

    chunk: int
    tile: int
    warps: int


NORM_SHAPE = Shape(32768, 4096, 8)
"""One read of 16 elements a thread and tile; eight tiles a chunk, so that there are few partial sums to add up."""
GENERAL_NORM_SHAPE = Shape(8192, 1024, 8)
"""Powers are computed in float64, with a logarithm and an exponential: fewer elements a thread, for its registers."""
UPDATE_SHAPE = Shape(8192, 1024, 8)
"""Four elements a thread and tile: up to six tensors are read and five written at once, in registers."""
SCALE_SHAPE = Shape(16384, 4096, 8)
"""One read and one write of 16 elements a thread and tile."""


@dataclass(frozen=True)
class Use:
    """What the text depends on.  order: 2, 1, 0 for the largest element, 3 for any other exponent of the norm.

    parameters, gradients: element types, a bit for each of ``KINDS``.
    """

    order: int = 2
    parameters: int = 1
    gradients: int = 1
    amsgrad: bool = False
    master: bool = False
    clips: bool = False
    interpreted: bool = False
    wide_sums: bool = False

    @property
    def is_double(self) -> bool:
        """Is all computed in float64?  Also sums over narrower tensors are, where there are float64 ones beside."""
        return self.wide_sums or bool((self.parameters | self.gradients) & 1 << KINDS[torch.float64])


def kernel_source(name: str, use: Use, shape: Shape, grid: int, integers: tuple[int, ...] = ()) -> KernelSource:
    """The kernel ``name`` with so many programs.  ``integers``: counts of what its tables list."""
    real = DataType.Double if use.is_double else DataType.Float
    types = {**_TYPES, "norm": real}
    tensors = [(p, types.get(p, DataType.Double)) for p in _POINTERS[name]]
    return written_source(name, kernel_text(use, shape), tensors, grid, shape.warps, integers)


@functools.lru_cache(maxsize=64)
def kernel_text(use: Use, shape: Shape) -> str:
    constants = {
        "CHUNK": shape.chunk,
        "TILE": shape.tile,
        "ORDER": use.order,
        "PARAMETERS": use.parameters,
        "GRADIENTS": use.gradients,
        "DOUBLE": use.is_double,
        "AMSGRAD": use.amsgrad,
        "MASTER": use.master,
        "CLIPS": use.clips,
        "INTERPRETED": use.interpreted,
    }
    return with_constants(_file_text(), constants)


@functools.cache
def _file_text() -> str:
    return Path(__file__).with_name("kernels.py").read_text()
