# pyright: reportPrivateUsage=false
"""The two ways in which a bound collective reaches NCCL: torch's backend, and NCCL's functions on its communicator.

A backend's call takes 29 us of the host on an H200's machine, of an all-reduce of 64 numbers, NCCL's own function 11:
the rest is torch's record of the call, and the events by which its watchdog times it.  `nccl.c` keeps what shardfuse
needs of that.  A collective gives the same on both ways, and ranks may take different ones.

Where no watchdog of shardfuse's is there, collectives go on torch's way, whose own ends those that wait for ever.
The communicator is made by the first collective on torch's way, which is where a rank that does not come is found out
within the process group's timeout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..codegen.collective_kernels import Kind
from ..codegen.collective_moves import Moves
from ..config import is_nccl_blocking, read_cache_directory
from ..mesh.gpu_waits import watch_waits
from ..mesh.groups import count_too
from ..mesh.process import own_watchdog
from .driver import LIBRARY, Driver, open_driver
from .nccl import OPERATIONS, TAKEN
from .rank_reduction import Reduction

Issue = Callable[..., None]
"""``issue(queue, given, taken, ...)``: tensors that are contiguous, two for each collective; queue: the handle of the
current stream, which is behind it when it returns."""
Backend = Any  # torch leaves its backends untyped

_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER = range(3)
_LIBRARY = "libnccl.so.2"


@dataclass(frozen=True)
class Pieces:
    """One collective, or as many as there are rows of an inner dim, in one group: no copy puts those in order.

    count: elements of each, as NCCL counts them.  given, taken: of both tensors the elements from one to the next.
    """

    count: int
    pieces: int = 1
    given: int = 0
    taken: int = 0

    def of(self, given: Tensor, taken: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The tensors of each collective, flat."""
        if self.pieces == 1:
            return [(given.view(-1), taken.view(-1))]
        return list(zip(given.view(self.pieces, -1).unbind(0), taken.view(self.pieces, -1).unbind(0), strict=True))


class Channel(Protocol):
    """Collectives of a process group on tensors of one dtype, each laid out for so many elements."""

    def by_kernel(self, kind: Kind, moves: Moves) -> Issue | None:
        """A kernel of shardfuse's own, which adds up in float32; ``None`` where there is none.  moves: in elements."""
        ...

    def all_reduce(self, op: Reduction, count: int) -> Issue:
        """``taken``, of ``count`` elements as ``given``, and maybe that, is the reduction of every member's."""
        ...

    def all_gather(self, pieces: Pieces) -> Issue:
        """``taken`` is every member's ``given``, of ``count`` elements, one behind the other."""
        ...

    def reduce_scatter(self, op: Reduction, pieces: Pieces) -> Issue:
        """``taken``, of ``count`` elements, is this member's part of the reduction of every member's ``given``."""
        ...

    def all_to_all(self) -> Issue:
        """``taken`` is this member's part of every member's ``given``."""
        ...

    def group(self, issues: Sequence[Issue]) -> Issue:
        """Several of them as one."""
        ...


class BackendChannel:
    """By a backend of torch.distributed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_grouping = False

    def by_kernel(self, kind: Kind, moves: Moves) -> Issue | None:
        return None

    def all_reduce(self, op: Reduction, count: int) -> Issue:
        run, options = self._backend.allreduce, _reducing(c10d.AllreduceOptions(), op)

        def issue(queue: int, given: Tensor, taken: Tensor) -> None:
            if taken is not given:
                taken.view(-1).copy_(given.view(-1))
            self._ended(run([taken], options))

        return issue

    def all_gather(self, pieces: Pieces) -> Issue:
        run, options = self._backend._allgather_base, c10d.AllgatherOptions()
        options.asyncOp = False
        return self._by_pieces(pieces, lambda given, taken: run(taken, given, options))

    def reduce_scatter(self, op: Reduction, pieces: Pieces) -> Issue:
        run, options = self._backend._reduce_scatter_base, _reducing(c10d.ReduceScatterOptions(), op)
        return self._by_pieces(pieces, lambda given, taken: run(taken, given, options))

    def _by_pieces(self, pieces: Pieces, run: Callable[[Tensor, Tensor], Any]) -> Issue:
        def issue(queue: int, given: Tensor, taken: Tensor) -> None:
            with self._grouped(pieces.pieces):
                for one in pieces.of(given, taken):
                    self._ended(run(*one))

        return issue

    def all_to_all(self) -> Issue:
        run, options = self._backend.alltoall_base, c10d.AllToAllOptions()
        options.asyncOp = False
        even: list[int] = []

        def issue(queue: int, given: Tensor, taken: Tensor) -> None:
            self._ended(run(taken, given, even, even, options))

        return issue

    def group(self, issues: Sequence[Issue]) -> Issue:
        def issue(queue: int, *tensors: Tensor) -> None:
            with self._grouped(len(issues)):
                for k, one in enumerate(issues):
                    one(queue, tensors[2 * k], tensors[2 * k + 1])

        return issue

    @contextmanager
    def _grouped(self, collectives: int) -> Generator[None]:
        """What NCCL takes as a group it lays out otherwise than one by one: ranks have to do the same."""
        if collectives == 1 or self._is_grouping or not self._backend.supports_coalescing:
            yield
            return
        self._is_grouping = True
        self._backend._start_coalescing()
        try:
            yield
        finally:
            self._is_grouping = False
            work = self._backend._end_coalescing()
        self._ended(work)

    def _ended(self, work: Any) -> None:
        """A backend that does not order the current stream behind its collective by itself gives something to wait for.

        Of a group that is the group's end.
        """
        if work is not None and not self._is_grouping:
            work.wait()


class NcclChannel:
    """By NCCL's functions on a backend's communicator; what they do not have in all versions, by the backend."""

    def __init__(self, driver: Driver, communicator: int, dtype: torch.dtype, backend: Backend) -> None:
        self._driver, self._communicator, self._dtype, self._backend = driver, communicator, dtype, backend

    def by_kernel(self, kind: Kind, moves: Moves) -> Issue | None:
        return None

    def all_reduce(self, op: Reduction, count: int) -> Issue:
        return self._issue(_ALL_REDUCE, Pieces(count), op)

    def all_gather(self, pieces: Pieces) -> Issue:
        return self._issue(_ALL_GATHER, pieces)

    def reduce_scatter(self, op: Reduction, pieces: Pieces) -> Issue:
        return self._issue(_REDUCE_SCATTER, pieces, op)

    def all_to_all(self) -> Issue:
        return BackendChannel(self._backend).all_to_all()

    def group(self, issues: Sequence[Issue]) -> Issue:
        return self._driver.group(tuple(issues))

    def _issue(self, kind: int, p: Pieces, op: Reduction = "sum") -> Issue:
        size, numbers = self._dtype.itemsize, (TAKEN[self._dtype], OPERATIONS[op][1])
        steps = (p.given * size, p.taken * size)
        return self._driver.collective(kind, self._communicator, p.count, *numbers, p.pieces, *steps)


def nccl_channel(group: dist.ProcessGroup, backend: Backend, dtype: torch.dtype) -> NcclChannel | None:
    """NCCL's functions on the communicator that the backend has made; ``None`` where they cannot be called."""
    pointer = getattr(backend, "_comm_ptr", None)
    driver = _nccl() if pointer is not None and is_watched() and _is_blocking(backend) else None
    if pointer is None or driver is None:
        return None
    communicator = int(pointer())
    if not communicator:
        return None
    if _counted.get(group) != communicator:
        driver.begin_counting(communicator)
        _counted[group] = communicator
        count_too(group, lambda: driver.issued(communicator))
    return NcclChannel(driver, communicator, dtype, backend)


def is_watched() -> bool:
    """Would anybody end a collective that NCCL waits in for ever?  What torch has not issued, it does not time."""
    return own_watchdog() is not None


def _is_blocking(backend: Backend) -> bool:
    """Do NCCL's functions end when they return?  A process group's own options go before the environment."""
    config = getattr(getattr(backend, "options", None), "config", None)
    return getattr(config, "blocking", None) != 0 and is_nccl_blocking()


_counted: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The communicator of each process group whose collectives are counted."""
_found: list[Driver | None] = []


def _nccl() -> Driver | None:
    """The driver module with NCCL's functions; ``None`` where they are not found, which is said once."""
    if not _found:
        driver = open_driver(read_cache_directory())
        try:
            if driver is not None:
                driver.connect_nccl(_LIBRARY, LIBRARY)
                watch_waits(driver.waiting)
        except OSError as error:
            warnings.warn(f"collectives are called through torch, which takes longer: {error}", stacklevel=2)
            driver = None
        _found.append(driver)
    return _found[0]


def _reducing(options: Any, op: Reduction) -> Any:
    options.reduceOp = OPERATIONS[op][0]
    options.asyncOp = False
    return options
