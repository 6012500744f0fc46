"""Kernels that are written by hand, one a file: the text for one use, compiled and kept as generated kernels are."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from ..codegen import KernelSource
from ..executor.kernel import Argument, Kernel
from ..executor.launch import begin_on
from ..executor.options import CompileOptions
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor

_CONSTANTS = re.compile(r"(# --- what kernel_files.py writes for each use ---\n).*?(?=# --- end ---)", re.DOTALL)
Constants = tuple[tuple[str, int | str], ...]
"""Names of a file's constants, and the text of each."""


def has_kernels(device: torch.device) -> bool:
    """Do kernels run there?  On a CPU under Triton's interpreter alone."""
    return CompileOptions.from_environment().backend_for(device) == "triton" and device.type in ("cpu", "cuda")


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
    lines = "".join(f"{k} = tl.constexpr({v})\n" for k, v in (*constants, ("INTERPRETED", is_interpreted)))
    given = Path(__file__).with_name(f"{name}.py").read_text()
    text, count = _CONSTANTS.subn(lambda found: found[1] + lines, given)
    assert count == 1, "the file marks its constants"
    arguments = tuple(BoundTensor(n, DataType.from_torch(t), BoundDomain(())) for n, t in tensors)
    options = CompileOptions.from_environment()
    source = KernelSource(name, text, arguments, (), (), grid, warps, 1)
    kernel = Kernel(source, options.cache_directory, interpret=is_interpreted)
    kernel.compile(device)
    launch, begin = kernel.launcher(), begin_on(device)
    return lambda *given: launch(begin(), *cast("tuple[Argument, ...]", given))
