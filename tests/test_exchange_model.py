"""The protocol by which kernels of several ranks exchange words, in every interleaving of small cases.

A rank launches the same kernel again and again; its programs take rows in turn.  For each row a program stores one word
into a slot of every rank, and goes on once the words of all ranks in its own slots carry the number of its launch; the
next launch begins when all programs have ended.  A store becomes visible at any later time, and stores to different
slots in any order; a program that could go on may do so at any later time.  In no state may a word be overwritten that
some program still waits for, may a program take a word of another launch, or may all be stuck before the end.

What is planted here: protocols that are nearly this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

LAUNCHES = 4


@dataclass(frozen=True)
class Protocol:
    """``grids``: programs of each rank.  The rest are mistakes, and how it is without them.

    sets: of slots, which launches take in turn.  by_program: slots are those of a program, not of a row.  is_at_least:
    a word is taken that is of this launch or a later one.  silent: a rank that neither posts nor waits for another.
    deaf: one that posts and waits for no other rank.
    """

    grids: tuple[int, ...]
    rows: int = 2
    sets: int = 2
    by_program: bool = False
    is_at_least: bool = False
    silent: int | None = None
    deaf: int | None = None


State = tuple[int, ...]
"""For each program the rows that it has done, ever; for each store of every launch: is it visible?  As bits of a word
for each channel, which is a slot without its set."""


class Model:
    """What can follow from a state of ``protocol``."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = p = protocol
        self.ranks = range(len(p.grids))
        self.programs = [(rank, i) for rank in self.ranks for i in range(p.grids[rank])]
        self.rows_of = [tuple(range(i, p.rows, p.grids[rank])) for rank, i in self.programs]
        self.of_rank = [[k for k, (r, _) in enumerate(self.programs) if r == rank] for rank in self.ranks]
        self.place = {
            (rank, row): (k, rows.index(row))
            for k, ((rank, _), rows) in enumerate(zip(self.programs, self.rows_of, strict=True))
            for row in rows
        }
        self.channels = [
            (src, dst, row)
            for src in self.ranks
            for dst in self.ranks
            for row in range(p.rows)
            if src != dst and src != p.silent
        ]
        self.at = {c: len(self.programs) + k for k, c in enumerate(self.channels)}

    def start(self) -> State:
        return (0,) * (len(self.programs) + len(self.channels))

    def launches(self, state: State, rank: int) -> int:
        """That this rank has ended."""
        own = self.of_rank[rank]
        return min(state[k] // len(self.rows_of[k]) if self.rows_of[k] else LAUNCHES for k in own)

    def is_end(self, state: State) -> bool:
        return all(self.launches(state, rank) == LAUNCHES for rank in self.ranks)

    def steps(self, state: State) -> Iterator[State]:
        """Every state that may be next.  Raises where a program waits for what was overwritten, or takes it."""
        begun = [self.launches(state, rank) for rank in self.ranks]
        for src, dst, row in self.channels:
            at, (k, place) = self.at[src, dst, row], self.place[src, row]
            for launch in range(min(begun[src] + 1, LAUNCHES)):
                is_posted = state[k] >= launch * len(self.rows_of[k]) + place
                # two stores to one slot become visible in order
                before = launch < self.protocol.sets or state[at] >> (launch - self.protocol.sets) & 1
                if is_posted and before and not state[at] >> launch & 1:
                    yield (*state[:at], state[at] | 1 << launch, *state[at + 1 :])
        for k, (rank, _) in enumerate(self.programs):
            rows = self.rows_of[k]
            launch, place = divmod(state[k], len(rows)) if rows else (LAUNCHES, 0)
            if launch < LAUNCHES and begun[rank] >= launch and self.may_go_on(state, rank, rows[place], launch):
                yield (*state[:k], state[k] + 1, *state[k + 1 :])

    def may_go_on(self, state: State, rank: int, row: int, launch: int) -> bool:
        if rank in (self.protocol.silent, self.protocol.deaf):
            return True
        found = [self.has_come(state, src, rank, row, launch) for src in self.ranks if src != rank]  # each is looked at
        return all(found)

    def has_come(self, state: State, src: int, rank: int, row: int, launch: int) -> bool:
        """Is the word of ``launch`` in the slot that ``rank`` reads for ``row``?"""
        found = self.content(state, src, rank, row, launch)
        if found is None or found[0] < launch:
            return False
        if self.protocol.is_at_least or found[0] == launch:
            assert found == (launch, row), f"rank {rank} takes launch {found[0]}, row {found[1]} for {launch}, {row}"
            return True
        raise AssertionError(f"rank {rank} waits for launch {launch}, which launch {found[0]} has written over")

    def content(self, state: State, src: int, rank: int, row: int, launch: int) -> tuple[int, int] | None:
        """Launch and row of the word in a slot."""
        p = self.protocol
        if src == p.silent:
            return None
        rows = [row]
        if (
            p.by_program
        ):  # the slot of the program that has this row here holds what the peer's program of that number has
            number = row % p.grids[rank]
            rows = [r for r in range(p.rows) if r % p.grids[src] == number]
        seen = [
            (e, r) for r in rows for e in range(LAUNCHES)
            if e % p.sets == launch % p.sets and state[self.at[src, rank, r]] >> e & 1
        ]  # fmt: skip
        return max(seen, default=None)


def explore(protocol: Protocol) -> int:
    """How many states there are; raises AssertionError where one of them is wrong."""
    model = Model(protocol)
    seen, todo, ends = {model.start()}, [model.start()], 0
    while todo:
        state = todo.pop()
        following = list(model.steps(state))
        ends += not following
        assert following or model.is_end(state), "no program can go on"
        for other in following:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    assert ends == 1
    return len(seen)


@pytest.mark.parametrize("grids", [(1, 1), (1, 2), (2, 2), (1, 1, 1), (1, 2, 1), (3, 1, 2)])
def test_every_interleaving_ends_with_every_word(grids: tuple[int, ...]) -> None:
    """Unequal grids too, and a program that has no rows."""
    assert explore(Protocol(grids)) > 50


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (Protocol((1, 1, 1), rows=1, sets=1), "has written over"),
        (Protocol((1, 2), sets=1), "has written over"),
        (Protocol((1, 2), by_program=True), "takes launch|no program can go on|has written over"),
        (Protocol((1, 1), rows=1, is_at_least=True, sets=1), "takes launch"),
        (Protocol((1, 1, 1), silent=1), "no program can go on"),
        (Protocol((1, 1, 1), deaf=2), "has written over"),
    ],
)
def test_a_protocol_that_is_nearly_this_one_is_found_out(mistake: Protocol, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        explore(mistake)
