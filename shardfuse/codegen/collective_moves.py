"""Which elements a collective moves, and where they lie in what is given and in what is taken.

A rank gives each other rank, or is given by it, ``count`` elements: ``outer`` times ``inner`` runs of ``run`` elements
one behind the other.  Element ``at`` of run ``(o, i)`` for rank r, or of it, is at ::

    o * outer + i * inner + r * peer + at

of ``given`` and of ``taken``, each with steps of its own.  So dims in front of the one that is gathered or scattered
need no copy, nor do those between the one that is scattered and the one that is gathered by an all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

UNIT = 16
"""Bytes that a thread stores at once: kernels move whole numbers of these."""


@dataclass(frozen=True)
class Steps:
    """Elements, or units, from one run to the next, and from what is one rank's to what is the next one's."""

    outer: int = 0
    inner: int = 0
    peer: int = 0


@dataclass(frozen=True)
class Moves:
    """See above: ``run``, ``inner`` and ``outer`` are numbers of elements, or units, and of runs."""

    run: int
    inner: int
    outer: int
    given: Steps
    taken: Steps

    @property
    def count(self) -> int:
        return self.run * self.inner * self.outer

    @property
    def is_flat(self) -> bool:
        """Is it one run?"""
        return self.inner * self.outer == 1

    def in_units(self, itemsize: int) -> Moves | None:
        """In units of 16 bytes; ``None`` where something does not begin or end at one."""
        each = UNIT // itemsize
        steps = [n for s in (self.given, self.taken) for n in (s.outer, s.inner, s.peer)]
        if any(n % each for n in (self.run, *steps)):
            return None
        outer, inner, peer, *taken = (n // each for n in steps)
        return Moves(self.run // each, self.inner, self.outer, Steps(outer, inner, peer), Steps(*taken))

    def numbers(self, *, is_flat: bool) -> dict[str, int]:
        """Arguments of a kernel by their names."""
        found = {"count": self.count, "given_peer": self.given.peer, "taken_peer": self.taken.peer}
        if is_flat:
            return found
        found |= {"run": self.run, "inner": self.inner}
        found |= {"given_outer": self.given.outer, "given_inner": self.given.inner}
        return found | {"taken_outer": self.taken.outer, "taken_inner": self.taken.inner}


def all_reduced(count: int) -> Moves:
    """All elements of every rank are added up."""
    return Moves(count, 1, 1, Steps(), Steps())


def gathered(before: int, piece: int, members: int) -> Moves:
    """``before`` runs of ``piece`` elements of each rank, those of all ranks side by side in what is taken."""
    return _along_a_dim(before, piece, Steps(outer=piece), Steps(outer=piece * members, peer=piece))


def scattered(before: int, piece: int, members: int) -> Moves:
    """The other way round: those of all ranks are side by side in what is given."""
    return _along_a_dim(before, piece, Steps(outer=piece * members, peer=piece), Steps(outer=piece))


def _along_a_dim(before: int, piece: int, given: Steps, taken: Steps) -> Moves:
    if before == 1:  # as other single runs are, so that one kernel does for all
        given, taken = Steps(peer=given.peer), Steps(peer=taken.peer)
    return Moves(piece, 1, before, given, taken)


def exchanged(piece: Sequence[int], split: int, concat: int, members: int) -> Moves:
    """Pieces of shape ``piece``, side by side along dim ``split`` in what is given, ``concat`` in what is taken."""
    low, high = sorted((split, concat))
    run, inner, outer = prod(piece[high:]), prod(piece[low:high]), prod(piece[:low])
    at_low = Steps(outer=inner * run * members, inner=run, peer=inner * run)
    at_high = Steps(outer=inner * run * members, inner=run * members, peer=run)
    given, taken = (at_low, at_high) if split < concat else (at_high, at_low)
    if inner * outer == 1:
        given = taken = Steps(peer=run)
    return Moves(run, inner, outer, given, taken)
