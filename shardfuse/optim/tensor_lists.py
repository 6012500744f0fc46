"""Lists of tensors as kernels go through them: tables in device memory, and launches bound to them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ..executor.launch import begin_on
from ..executor.written_kernels import launcher_on
from .dense import ADDRESS, DTYPE, ELEMENTS, IS_CONTIGUOUS, is_dense
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
    facts = torch.tensor(columns, dtype=torch.int64, device="cpu").reshape(4, len(sizes)).t().contiguous()
    places = torch.arange(len(sizes), dtype=torch.int32, device="cpu")
    chunks = torch.repeat_interleave(places, torch.tensor(counts, dtype=torch.int64, device="cpu"))
    return Walk(facts.to(device), chunks.to(device), sum(counts))


Launch = Callable[..., None]


class Launcher:
    """Makes kernels launchable on one device.  ``begin``: the stream of a call, as ``executor.launch`` has it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin = begin_on(device)
        self.is_interpreted = device.type != "cuda"

    def bind(self, name: str, use: Use, shape: Shape, grid: int, integers: tuple[int, ...] = ()) -> Launch:
        return launcher_on(self.device, kernel_source(name, use, shape, grid, integers))


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
        """``numbers`` (int64, flat, on the CPU) on the device, for kernels on ``stream``, if known."""
        if self._device.type != "cuda":
            return numbers
        if torch.cuda.is_current_stream_capturing():
            pinned, self._spare = self._pinned(numbers), None
            there = pinned.to(self._device, non_blocking=True)
            self._captured += [pinned, there]
            return there
        is_there = self._there is not None and self._last is not None and stream is not None and stream == self._stream
        if not is_there or not torch.equal(cast(torch.Tensor, self._last), numbers):
            if self._spare is None or self._spare.numel() < numbers.numel():
                self._spare = torch.empty(numbers.numel(), dtype=torch.int64, pin_memory=True, device="cpu")
            pinned = torch.empty(numbers.numel(), dtype=torch.int64, pin_memory=True, device="cpu")
            pinned.copy_(numbers)
            self._there = pinned.to(self._device, non_blocking=True)
            self._last, self._stream = numbers, stream
        return cast(torch.Tensor, self._there)

    def _pinned(self, numbers: torch.Tensor) -> torch.Tensor:
        """While a graph is captured no page may be pinned: the spare one was before."""
        spare = self._spare
        if spare is None or spare.numel() < numbers.numel():
            spare = torch.empty(numbers.numel(), dtype=torch.int64, pin_memory=True, device="cpu")
        return spare[: numbers.numel()].copy_(numbers)


def as_numbers(values: Sequence[float], integers: dict[int, int]) -> torch.Tensor:
    """float64 values as int64 bits, and integers in their place."""
    numbers = torch.frombuffer(array("d", values), dtype=torch.int64)
    for place, value in integers.items():
        numbers[place] = value
    return numbers


def column(values: Sequence[int]) -> torch.Tensor:
    return (
        torch.frombuffer(array("q", values), dtype=torch.int64)
        if values
        else torch.empty(0, dtype=torch.int64, device="cpu")
    )


def overlapping(starts: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
    """The places of two stretches of memory that share a byte.  starts: addresses; sizes: bytes."""
    begin, length = column(starts), column(sizes)
    order = torch.argsort(begin + (length == 0))  # of those that begin together the one that has bytes goes first
    end = torch.cummax((begin + length)[order], 0).values if starts else begin
    shared = (end[:-1] > begin[order][1:]) & (length[order][1:] > 0)
    if not shared.any():
        return None
    k = int(torch.nonzero(shared)[0]) + 1
    at, until = begin[order], (begin + length)[order]
    other = next(j for j in range(k) if until[j] > at[k])
    first, second = sorted((int(order[other]), int(order[k])))
    return first, second


def stretches(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Where the bytes of each tensor begin, and how many they are; none of one with gaps, in which others may be."""
    starts = list(map(ADDRESS, tensors))
    if all(map(IS_CONTIGUOUS, tensors)):
        sizes = list(map(ELEMENTS, tensors))
    else:
        sizes = [t.numel() if is_dense(t) else 0 for t in tensors]
    return starts, [n * dtype.itemsize for n, dtype in zip(sizes, map(DTYPE, tensors), strict=True)]
