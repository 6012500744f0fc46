"""The protocol by which kernels of several ranks send whole rows, in every interleaving of small cases.

The same program of every rank has the same turns.  In each it stores its row into a slot of every peer, then a flag
behind it, waits for the flags of all peers, and reads their rows.  A row is stored while a peer may still read; a flag
is visible only once the row before it is.  No row may be written over that somebody still waits for or reads, and
somebody must be able to go on until the end.

What is planted here: protocols that are nearly this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

TURNS = 5


@dataclass(frozen=True)
class Protocol:
    """``ranks``: how many.  The rest are mistakes, and how it is without them.

    sets: of slots, which turns take in turn.  is_fenced: does a flag follow its row?  ahead: turns that a row is sent
    before those of its turn are waited for.  deaf: a rank that waits for nobody.
    """

    ranks: int
    sets: int = 2
    is_fenced: bool = True
    ahead: int = 0
    deaf: int | None = None


State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""For each rank its steps: 3 of a turn, that is sent, waited and read; for each pair of ranks the rows that are there,
and the flags."""


class Model:
    """What can follow from a state of ``protocol``."""

    def __init__(self, protocol: Protocol) -> None:
        self.p = protocol
        self.pairs = [(src, dst) for src in range(protocol.ranks) for dst in range(protocol.ranks) if src != dst]

    def start(self) -> State:
        none = (0,) * len(self.pairs)
        return (0,) * self.p.ranks, none, none

    def is_end(self, state: State) -> bool:
        return all(steps == 3 * TURNS for steps in state[0])

    def sent(self, state: State, rank: int) -> int:
        """Rows that it has issued."""
        turn, phase = divmod(state[0][rank], 3)
        return min(turn + self.p.ahead + (phase > 0), TURNS) if state[0][rank] else 0

    def steps(self, state: State) -> Iterator[State]:
        """Every state that may be next.  Raises where a row is not what is read."""
        steps, rows, flags = state
        for k, (src, dst) in enumerate(self.pairs):
            if rows[k] < self.sent(state, src):
                self.check_unread(state, dst, rows[k])
                yield steps, _one_more(rows, k), flags
            behind = rows[k] if self.p.is_fenced else self.sent(state, src)
            if flags[k] < behind:
                yield steps, rows, _one_more(flags, k)
        for rank in range(self.p.ranks):
            turn, phase = divmod(steps[rank], 3)
            if turn < TURNS and (phase != 1 or self.has_come(state, rank, turn)):
                if phase == 2 and rank != self.p.deaf:
                    self.check_read(state, rank, turn)
                yield _one_more(steps, rank), rows, flags

    def has_come(self, state: State, rank: int, turn: int) -> bool:
        """Is the flag in each slot that of ``turn``?"""
        if rank == self.p.deaf:
            return True
        for k, (_, dst) in enumerate(self.pairs):
            if dst == rank:
                there = [t for t in range(state[2][k]) if t % self.p.sets == turn % self.p.sets]
                assert not there or there[-1] <= turn, f"rank {rank} waits for turn {turn}, which was written over"
                if not there or there[-1] != turn:
                    return False
        return True

    def check_unread(self, state: State, dst: int, turn: int) -> None:
        """The row of ``turn`` takes the place of one that ``dst`` has read."""
        done = state[0][dst] // 3
        assert turn - self.p.sets < done or dst == self.p.deaf, f"turn {turn} writes over what rank {dst} reads"

    def check_read(self, state: State, rank: int, turn: int) -> None:
        for k, (_, dst) in enumerate(self.pairs):
            assert dst != rank or state[1][k] > turn, f"rank {rank} reads a row of turn {turn} that has not come"


def _one_more(counts: tuple[int, ...], k: int) -> tuple[int, ...]:
    return (*counts[:k], counts[k] + 1, *counts[k + 1 :])


def explore(protocol: Protocol) -> int:
    """How many states there are; raises AssertionError where one of them is wrong."""
    model = Model(protocol)
    seen, todo = {model.start()}, [model.start()]
    while todo:
        state = todo.pop()
        following = list(model.steps(state))
        assert following or model.is_end(state), "nobody can go on"
        for other in following:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return len(seen)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_interleaving_ends_with_every_row(ranks: int) -> None:
    assert explore(Protocol(ranks)) > 50


def test_rows_that_are_sent_ahead_take_two_more_sets_each() -> None:
    assert explore(Protocol(2, sets=4, ahead=1)) > 50
    with pytest.raises(AssertionError, match=r"writes over|was written over"):
        explore(Protocol(2, sets=2, ahead=1))


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (Protocol(2, sets=1), "writes over|was written over"),
        (Protocol(2, is_fenced=False), "has not come"),
        (Protocol(2, deaf=1), "writes over|was written over"),
    ],
)
def test_a_protocol_that_is_nearly_this_one_is_found_out(mistake: Protocol, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        explore(mistake)
