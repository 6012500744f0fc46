"""Circles of ranks that wait for one another, each for the next: none of them can go on.

A rank waits before a program's first run, for those that have not come to it, or in a collective of a program, for
those that have not issued it.  What ranks tell of their waits is read one after the other.  A wait has a number of its
own, so where all are as they were when they are read again, there was a moment at which all were so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Wait(NamedTuple):
    """What a rank waits in.

    state: equal as long as it is the same wait. ranks: those of the program or the collective. missing: those that it
    waits for.
    """

    state: object
    ranks: Sequence[int]
    missing: Sequence[int]
    is_collective: bool = False


class Link(NamedTuple):
    """``rank`` waits for the rank ``other``."""

    rank: int
    other: int
    wait: Wait


def find_circle(me: int, first: int, wait_of: Callable[[int], Wait | None]) -> list[Link] | None:
    """How ``first``, which this rank waits for, waits for this rank, itself or by way of others."""
    came: dict[int, Link] = {}
    seen: set[int] = set()
    open_ranks = [first]
    while open_ranks and me not in came:
        rank = open_ranks.pop(0)
        wait = None if rank in seen else wait_of(rank)
        seen.add(rank)
        if wait is None:
            continue
        for other in wait.missing:
            if other not in came and other != rank:
                came[other] = Link(rank, other, wait)
                open_ranks.append(other)
    if me not in came:
        return None
    links = [came[me]]
    while links[0].rank != first:
        links.insert(0, came[links[0].rank])
    for link in links:
        again = wait_of(link.rank)
        if again is None or again.state != link.wait.state or link.other not in again.missing:
            return None
    return links
