"""Lists of tensors as kernels go through them: tables in device memory, and launches bound to them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..executor.kernel import Argument, Kernel
from ..executor.launch import begin_on
from ..executor.options import CompileOptions
from .kernel_text import Shape, Use, kernel_source

COLUMNS = 8
"""Numbers in a row of addresses, of factors and of groups."""
LISTED_PARTIALS = 2
"""Partial sums of a walk begin at a multiple of so many, which is one of 16 bytes."""


@dataclass(frozen=True, eq=False)
class Walk:
    """Which program works on which chunk.  facts: [tensors, 4] int64; chunks: [programs] int32."""

    facts: torch.Tensor
    chunks: torch.Tensor
    programs: int


def make_walk(
    sizes: Sequence[int], kinds: Sequence[int], groups: Sequence[int], taken: Sequence[bool], chunk: int,
    device: torch.device,
) -> Walk:  # fmt: skip
    """A program for each ``chunk`` elements of each tensor that is taken; the others have a row and no program."""
    counts = [-(-size // chunk) if is_taken else 0 for size, is_taken in zip(sizes, taken, strict=True)]
    firsts = [0, *itertools.accumulate(counts)][: len(counts)]
    columns = [list(sizes), firsts, list(kinds), list(groups)]
    facts = torch.tensor(columns, dtype=torch.int64).reshape(4, len(sizes)).t().contiguous()
    places = torch.arange(len(sizes), dtype=torch.int32)
    chunks = torch.repeat_interleave(places, torch.tensor(counts, dtype=torch.int64))
    return Walk(facts.to(device), chunks.to(device), sum(counts))


Launch = Callable[..., None]


class Launcher:
    """Makes kernels launchable on one device.  ``begin``: the stream of a call, as ``executor.launch`` has it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.options = CompileOptions.from_environment()
        self.begin = begin_on(device)
        self.is_interpreted = device.type != "cuda"

    def bind(self, name: str, use: Use, shape: Shape, grid: int, integers: tuple[int, ...] = ()) -> Launch:
        source = kernel_source(name, use, shape, grid, integers)
        kernel = Kernel(source, self.options.cache_directory, interpret=self.is_interpreted)
        kernel.compile(self.device)
        launch = kernel.launcher()
        return lambda *arguments: launch(self.begin(), *cast("tuple[Argument, ...]", arguments))


def has_kernels(device: torch.device) -> bool:
    """Do kernels run there?  On a CPU under Triton's interpreter alone; torch's own ops do the work elsewhere."""
    return CompileOptions.from_environment().backend_for(device) == "triton" and device.type in ("cpu", "cuda")


class Table:
    """What a step tells the kernels: hyper-parameters and addresses, copied to the device where they have changed.

    The copy is asynchronous, from pinned memory that torch gives out again only after it was read.  What a CUDA graph
    captures is read again at each replay: it is kept as long as this object, and so are the addresses in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.Tensor | None = None
        self._there: torch.Tensor | None = None
        self._stream: int | None = None
        self._spare: torch.Tensor | None = None
        self._captured: list[torch.Tensor] = []

    def put(self, numbers: torch.Tensor, stream: int | None) -> torch.Tensor:
        """``numbers`` (int64, flat, on the CPU) on the device, for kernels on ``stream``."""
        if self._device.type != "cuda":
            return numbers
        if torch.cuda.is_current_stream_capturing():
            pinned, self._spare = self._pinned(numbers), None
            there = pinned.to(self._device, non_blocking=True)
            self._captured += [pinned, there]
            return there
        is_there = self._there is not None and self._last is not None and stream == self._stream
        if not is_there or not torch.equal(cast(torch.Tensor, self._last), numbers):
            if self._spare is None or self._spare.numel() < numbers.numel():
                self._spare = torch.empty(numbers.numel(), dtype=torch.int64, pin_memory=True)
            pinned = torch.empty(numbers.numel(), dtype=torch.int64, pin_memory=True)
            pinned.copy_(numbers)
            self._there = pinned.to(self._device, non_blocking=True)
            self._last, self._stream = numbers, stream
        return cast(torch.Tensor, self._there)

    def _pinned(self, numbers: torch.Tensor) -> torch.Tensor:
        """While a graph is captured no page may be pinned: the spare one was before."""
        spare = self._spare
        if spare is None or spare.numel() < numbers.numel():
            spare = torch.empty(numbers.numel(), dtype=torch.int64, pin_memory=True)
        return spare[: numbers.numel()].copy_(numbers)


def as_numbers(values: Sequence[float], integers: dict[int, int]) -> torch.Tensor:
    """float64 values as int64 bits, and integers in their place."""
    numbers = torch.frombuffer(array("d", values), dtype=torch.int64)
    for place, value in integers.items():
        numbers[place] = value
    return numbers


def column(values: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


def overlapping(stretches: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The places of two stretches of memory, each a start and a number of bytes, that share a byte."""
    kept = sorted((start, start + size, k) for k, (start, size) in enumerate(stretches) if size)
    for (_, end, k), (start, _, other) in itertools.pairwise(kept):
        if end > start:
            return min(k, other), max(k, other)
    return None


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the bytes of a tensor begin, and over how many they reach."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, cast("Any", tensor).stride(), strict=True)) + 1
    return tensor.data_ptr(), reach * tensor.element_size()
