# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false
"""A list of casts as generated code of Inductor calls it: one kernel, and nothing looked up but the addresses.

    casts_0f3a = shardfuse_casts(torch.bfloat16, [((64, 8), (8, 1)), ((64, ), (1, ))], True)
    ...
    buf3 = casts_0f3a.run(primals_1, primals_2)

The kernel reads a table of the tensors' addresses, which is on the GPU.  It holds those of the results as distances
from one of them, so that parameters, which stay where they are, need one table only as long as the results are laid out
alike; it is made again, and copied behind what the stream does already, where an address is new.  In a capture there
is none: a replay would read the table that is copied, and the numbers that it is copied from, after both are gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import cast

import torch
from torch._C._dynamo import guards

from ..executor.cache import LRUCache
from ..executor.launch import queue_on
from ..executor.written_kernels import has_kernels
from .kernel_files import launcher_of

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor, dense in memory."""
CHUNK = 8192
"""Elements of a program: 32 a thread, all of them loaded before one is stored."""
WARPS = 8
ALIGNED = 16
TABLES = 8
"""That a list keeps: the addresses of steps that are alike are, too."""
_view = cast(Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor], guards._reinterpret_tensor)


@dataclass
class CastCall:
    """``run(*inputs)`` gives them in the type ``result``, each laid out as its input, of which ``layouts`` tells.

    ``is_joined``: results are views of one tensor, whose memory stays until the last of them is gone: for tensors that
    a graph keeps to itself.  Inputs have one dtype and are on one device, in every call.
    """

    result: torch.dtype
    layouts: Sequence[Layout]
    is_joined: bool = False
    _tables: LRUCache[tuple[int, ...], torch.Tensor] = field(default_factory=lambda: LRUCache(TABLES), init=False)
    _made: _Kernel | None = field(default=None, init=False)

    @cached_property
    def _counts(self) -> list[int]:
        return [prod(shape) for shape, _ in self.layouts]

    @cached_property
    def _begins(self) -> list[int]:
        """Where each result begins in the one tensor, in elements, and where the last one ends."""
        words = ALIGNED // self.result.itemsize
        return [0, *accumulate(-(-count // words) * words for count in self._counts)]

    def run(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        kernel = self._made
        if kernel is None:
            kernel = self._made = _Kernel.of(inputs[0], self.result, self._counts)
        found = self._empty(inputs[0].device)
        read, written = [x.data_ptr() for x in inputs], [y.data_ptr() for y in found]
        if kernel.launch is None or kernel.is_captured() or any(a % ALIGNED for a in (*read, *written)):
            return [y.copy_(x) for x, y in zip(inputs, found, strict=True)]
        first, size = written[0], self.result.itemsize
        key = (kernel.queue(), *read, *[(a - first) // size for a in written])
        table = self._tables.get(key)
        if table is None:
            table = _on_device(key[1:], self._counts, inputs[0].device)
            self._tables.put(key, table)
        kernel.launch(table, kernel.chunks, found[0])
        return found

    def _empty(self, device: torch.device) -> list[torch.Tensor]:
        """The results with nothing in them."""
        if self.is_joined:
            whole = torch.empty(self._begins[-1], dtype=self.result, device=device)
            return [_view(whole, *layout, k) for layout, k in zip(self.layouts, self._begins, strict=False)]
        return [torch.empty_strided(*layout, dtype=self.result, device=device) for layout in self.layouts]


@dataclass(frozen=True)
class _Kernel:
    """Of one list on one device.  ``launch``: None where there are no kernels.  ``queue``: the current stream.

    is_captured: does that stream record a CUDA graph?
    """

    launch: Callable[..., None] | None
    chunks: torch.Tensor
    queue: Callable[[], int]
    is_captured: Callable[[], bool]

    @staticmethod
    def of(like: torch.Tensor, result: torch.dtype, counts: Sequence[int]) -> _Kernel:
        rows = [(t, begin) for t, count in enumerate(counts) for begin in range(0, count, CHUNK)]
        chunks = torch.tensor(rows, dtype=torch.int64, device=like.device)
        if not has_kernels(like.device):
            return _Kernel(None, chunks, int, bool)
        constants = (("SOURCE", _name(like.dtype)), ("RESULT", _name(result)), ("CHUNK", CHUNK))
        given = (("tensors", torch.int64), ("chunks", torch.int64), ("results", result))
        launch = launcher_of("cast_chunk", constants, given, len(rows), WARPS, like.device)
        is_captured = torch.cuda.is_current_stream_capturing if like.is_cuda else bool
        return _Kernel(launch, chunks, queue_on(like.device), is_captured)


def _name(dtype: torch.dtype) -> str:
    return "tl." + str(dtype).removeprefix("torch.")


def _on_device(addresses: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """The kernel's table.  Memory that is not pinned is read before the copy returns, and so may go."""
    n = len(counts)
    rows = array("q", [e for row in zip(addresses[:n], addresses[n:], counts, strict=True) for e in row])
    return torch.frombuffer(rows, dtype=torch.int64).to(device, non_blocking=True, copy=True)
