"""Which failures of other ranks a rank has shared or heard of: by the places where ranks failed, not by when.

Ranks that fail alike fail at one place as often, catch it, and go on.  A rank that has failed at a place more often
than another one is not waited for by that one.  Failures at other places, of which only some ranks know, say nothing
of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

from ..base_error import ShardfuseError

Team = tuple[int, ...]
"""The ranks of a program, ascending."""


class Failure(NamedTuple):
    """A failure of a rank that runs a program of ``team``: the ``number``-th at its place.

    The place: in or before comparison ``k`` of the team, after so many ``calls`` of its programs.
    """

    team: Team
    k: int
    calls: int
    number: int

    @classmethod
    def told(cls, state: Mapping[str, object]) -> Failure:
        """As a rank told it in the store."""
        team, k, calls, number = cast("tuple[list[int], int, int, int]", state["failure"])
        return cls(tuple(team), k, calls, number)


class Failures:
    """Those that one rank knows of, by team: only how many at the latest place, for who is behind it has gone on."""

    def __init__(self) -> None:
        self._latest: dict[Team, Failure] = {}

    def next(self, team: Team, k: int, calls: int) -> Failure:
        """What this rank's own failure at this place is."""
        return Failure(team, k, calls, self._count(team, k, calls) + 1)

    def add(self, failure: Failure) -> None:
        self._latest[failure.team] = failure

    def knows(self, failure: Failure) -> bool:
        """Has this rank failed at the same place as often, or heard of it?"""
        return failure.number <= self._count(*failure[:3])

    def _count(self, team: Team, k: int, calls: int) -> int:
        known = self._latest.get(team)
        return known.number if known is not None and known[1:3] == (k, calls) else 0


def sentence_of(error: Exception) -> str:
    return str(error) if isinstance(error, ShardfuseError) else f"{type(error).__name__}: {error}"
