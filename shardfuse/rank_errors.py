"""Errors of ranks that wait for one another, as `errors.py` has the others: the class holds the sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import ShardfuseError


class ExchangeUnavailableError(ShardfuseError):
    """Ranks were asked to exchange inside of kernels, and cannot."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"SHARDFUSE_EXCHANGE=symmetric, and {reason}: set it alike on all ranks of one host whose GPUs reach each "
            "other's memory, or leave it out"
        )


class ExchangeTimeoutError(ShardfuseError):
    """A kernel waited in vain for another rank's part of a statistic."""

    def __init__(self, rank: int, peer: int, row: int, launch: int, timeout: float) -> None:
        super().__init__(
            f"rank {peer} did not send its part of row {row} within {timeout:g} s, in launch {launch} of a kernel in "
            f"which rank {rank} exchanges with it, whose results are NaN: see what rank {peer} is doing, or allow more "
            "time with initialize(timeout=...). Programs of these ranks cannot go on"
        )
        self.rank = peer


class CapturedCollectiveError(ShardfuseError):
    """The first collective of some ranks that is a kernel came in the capture of a CUDA graph."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(
            f"the first collective by a kernel among ranks {list(ranks)} is in the capture of a CUDA graph, in which "
            "its memory cannot be prepared: run it once before the capture"
        )


class WaitingCircleError(ShardfuseError):
    """Ranks wait for one another in programs of different meshes.

    ``waits``: who waits, for whom, and in a program of which ranks.
    """

    def __init__(self, waits: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        links = "; ".join(f"rank {a} waits for rank {b} in a program of ranks {list(team)}" for a, b, team in waits)
        super().__init__(
            f"ranks wait for one another in a circle: {links}. Call programs whose meshes share ranks in the same "
            "order on every rank"
        )
        self.ranks = tuple(a for a, _, _ in waits)


class ForkedProcessError(ShardfuseError):
    """A process that was forked from a rank came to do what only the rank can."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__(
            f"{what} in a process that was forked from rank {rank}: only the rank itself communicates. Start processes "
            "with the 'spawn' method, or run there what needs no other rank"
        )


class RanksLateError(ShardfuseError):
    """Some ranks of a mesh did not come to a program within the timeout."""

    def __init__(self, ranks: Sequence[int], timeout: float, program: str) -> None:
        who = "rank" if len(ranks) == 1 else "ranks"
        super().__init__(
            f"{who} {', '.join(map(str, ranks))} did not come within {timeout:g} s to a program that this rank is "
            f"about to run, of {len(program.splitlines())} lines that end in `{program.splitlines()[-1].strip()}`: see "
            f"what {'it is' if len(ranks) == 1 else 'they are'} doing, or allow more time with initialize(timeout=...)"
        )
        self.ranks = tuple(ranks)


class ThreadsError(ShardfuseError):
    """Two threads of a rank run programs that communicate: their collectives have no order that all ranks share."""

    def __init__(self, thread: str, other: str) -> None:
        super().__init__(
            f"thread {thread!r} came to run a fusion on several ranks, and so did thread {other!r}: collectives are "
            "paired in the order in which ranks issue them, expected one thread for all such fusions; hand them to it, "
            "or have the one that goes on call shardfuse.run_in_this_thread(), at the same point on every rank"
        )


class SimulationError(ShardfuseError):
    """`simulate` cannot run here, or so."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"simulate() found {found}: {remedy}")


class SimulationStuckError(ShardfuseError):
    """In a simulation each rank that still runs waits in a collective, or for a program, to which others never come."""

    def __init__(self, world_size: int, places: Mapping[int, str]) -> None:
        stand = _stand(world_size, places)
        super().__init__(
            f"the simulated ranks wait for each other and none can go on: {stand}: every rank has to come to the "
            "same programs and collectives in the same order"
        )
        self.places = dict(places)


class CollectivesDifferError(ShardfuseError):
    """The ranks of a process group come to different collectives, in a simulation.  ``found``: what to, by rank."""

    def __init__(self, found: Mapping[int, str]) -> None:
        told: dict[str, list[int]] = {}
        for rank, what in found.items():
            told.setdefault(what, []).append(rank)
        come = "; ".join(f"rank {', '.join(map(str, ranks))} to {what}" for what, ranks in told.items())
        super().__init__(
            f"ranks {sorted(found)} have come to different collectives: {come}: call the same ones in the same order "
            "on every rank, with one operation, shape and dtype"
        )
        self.ranks = tuple(tuple(ranks) for ranks in told.values())


class SimulationTimeoutError(ShardfuseError):
    """A simulation took longer than the ``timeout`` that `simulate` was given, in seconds."""

    def __init__(self, timeout: float, world_size: int, places: Mapping[int, str]) -> None:
        stand = _stand(world_size, places)
        super().__init__(
            f"the simulation has not ended within timeout={timeout:g} s: {stand}: pass a longer timeout, or see what "
            "the ranks do there"
        )
        self.places = dict(places)


def _stand(world_size: int, places: Mapping[int, str]) -> str:
    """Where each rank of a simulation is, and which have ended."""
    ended = [rank for rank in range(world_size) if rank not in places]
    also = f"; ranks {ended} have ended" if ended else ""
    return "; ".join(f"rank {rank} in {place}" for rank, place in sorted(places.items())) + also


class UnknownGroupError(ShardfuseError):
    """torch has no process group of a name: a graph of another job is run before this one made its groups."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch.distributed has no process group named {name!r}: make the process groups in the order in which "
            "they were made where the model was compiled, before it is called"
        )
