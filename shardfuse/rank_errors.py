"""Errors of ranks that wait for one another, as `errors.py` has the others: the class holds the sentence."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ShardfuseError


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
