# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false
"""Kernels of regions are compiled by Inductor's workers, beside its own, from when a graph is lowered on.

Else each would be compiled at the first call of its region, one behind the other, while the workers have nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ..executor.binding import Argument
from ..executor.compile_workers import Submit
from ..executor.options import CompileOptions
from .region_op import Program

Layout = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""Shape, strides, dtype and device."""


def compile_ahead(program: Program, layouts: Sequence[Layout], numbers: Sequence[Argument]) -> None:
    """Begin to compile what the region runs on tensors laid out so, and on these numbers, where workers do it."""
    submit = _pool()
    devices = [device for *_, device in layouts if device.type == "cuda"]
    options = CompileOptions.from_environment()
    if submit is None or not devices or options.autotune or options.backend_for(devices[0]) != "triton":
        return
    with unset_fake_temporarily():
        with FakeTensorMode():
            tensors = [torch.empty_strided(*layout[:2], dtype=layout[2], device=layout[3]) for layout in layouts]
        program.fd.fec.begin_compiling([*tensors, *numbers], submit)


def _pool() -> Submit | None:
    """Inductor's workers, where it has any."""
    if get_compile_threads() <= 1:
        return None
    AsyncCompile.use_process_pool()  # which starts them, unless it says why not
    if AsyncCompile._ready_future is None:
        return None
    pool: Any = AsyncCompile.process_pool()
    return pool.submit
