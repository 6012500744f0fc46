"""Errors of `initialize()`: what keeps ranks from finding each other, and calls of it that contradict each other."""

from __future__ import annotations

from collections.abc import Sequence

from .base_error import ShardfuseError


class PortInUseError(ShardfuseError):
    """Rank 0 cannot serve the job's store where MASTER_ADDR and MASTER_PORT say."""

    def __init__(self, addr: str, port: int) -> None:
        super().__init__(
            f"MASTER_PORT={port} is in use by another program on {addr}, expected a free port for rank 0's store: set "
            "MASTER_PORT to another number for every rank, or end that program (`ss -ltnp` names it)"
        )


class NoStoreError(ShardfuseError):
    """Something answers at MASTER_ADDR and MASTER_PORT, and it is not the store that rank 0 serves."""

    def __init__(self, rank: int, addr: str, port: int) -> None:
        super().__init__(
            f"rank {rank} found a program at {addr}:{port} (MASTER_ADDR, MASTER_PORT) that is not the store of rank 0: "
            "the port is in use; set MASTER_PORT to a free one for every rank"
        )


class RankTakenError(ShardfuseError):
    """Another process has this rank in the same store."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"another process is rank {rank} of this job already: give each process a RANK of its own, and each job "
            "that runs at the same time a MASTER_PORT of its own"
        )


class WorldSizesDisagreeError(ShardfuseError):
    """The ranks were started with different world sizes."""

    def __init__(self, rank: int, size: int, other: int, other_size: int) -> None:
        super().__init__(
            f"rank {rank} was started with a world of {size} ranks and rank {other} with {other_size}, expected one "
            "number: set WORLD_SIZE alike for every rank"
        )


class ExchangeMemoriesDisagreeError(ShardfuseError):
    """Ranks were told to allocate unlike sizes of memory that they share."""

    def __init__(self, megabytes: Sequence[int]) -> None:
        super().__init__(
            f"the ranks were given {list(megabytes)} MB of exchange memory (by rank), expected one number: set "
            "SHARDFUSE_EXCHANGE_MEMORY, or initialize(exchange_memory=...), alike for every rank"
        )


class SharedGpuError(ShardfuseError):
    """Ranks are to take turns on a GPU, and cannot."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(
            "SHARDFUSE_SHARED_GPU=1 has ranks take turns on the GPUs of their host, with collectives of gloo, and "
            f"rank {rank} {reason}: unset it, or set it for every rank of hosts with GPUs and leave out backend='nccl'"
        )


class ReinitializedError(ShardfuseError):
    """`initialize()` was called again with arguments that differ from those of the world that it made."""

    def __init__(self, argument: str, found: object, first: object) -> None:
        super().__init__(
            f"initialize({argument}={found!r}) was called in a world that was made with {argument}={first!r}: leave "
            f"{argument} out to get that world, or call finalize() first"
        )


class InitializeArgumentError(ShardfuseError):
    """An argument of `initialize()` is out of range."""

    def __init__(self, argument: str, found: object, expected: str) -> None:
        super().__init__(f"initialize({argument}={found!r}): expected {expected}")
