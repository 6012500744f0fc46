"""Kernels that are written by hand, in files of their own: the text for one use is kept as a generated one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from ..codegen import KernelSource
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from .kernel import Argument, Kernel
from .launch import begin_on
from .options import CompileOptions

_BEGIN, _END = "for each use ---\n", "# --- end ---"
"""What stands before and behind the constants in a file, which are those of one use."""


def has_kernels(device: torch.device) -> bool:
    """Do kernels run there?  On a CPU under Triton's interpreter alone; torch's own ops do the work elsewhere."""
    return CompileOptions.from_environment().backend_for(device) == "triton" and device.type in ("cpu", "cuda")


def with_constants(text: str, constants: Mapping[str, object]) -> str:
    """``text`` of a file, with these constants in place of its own."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, rest = rest.partition(_END)
    assert end, "the file marks its constants"
    lines = "".join(f"{name} = tl.constexpr({value})\n" for name, value in constants.items())
    return "".join((head, begin, lines, end, rest))


def written_source(
    name: str, text: str, tensors: Sequence[tuple[str, DataType]], grid: int, warps: int, integers: tuple[int, ...] = ()
) -> KernelSource:
    """The function ``name`` of ``text``.  tensors: their names and types, in order.  integers: behind them."""
    arguments = tuple(BoundTensor(t, dtype, BoundDomain(())) for t, dtype in tensors)
    return KernelSource(name, text, arguments, (), integers, grid, warps, 1)


def launcher_on(device: torch.device, source: KernelSource) -> Callable[..., None]:
    """``launch(*tensors)`` on the current stream of ``device``, for which it is compiled now."""
    options = CompileOptions.from_environment()
    kernel = Kernel(source, options.cache_directory, interpret=device.type != "cuda")
    kernel.compile(device)
    launch, begin = kernel.launcher(), begin_on(device)
    return lambda *given: launch(begin(), *cast("tuple[Argument, ...]", given))
