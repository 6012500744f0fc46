"""The protocol by which kernels of several ranks exchange words, in every interleaving of small cases.

A rank launches kernels again and again, of as many rows or not; programs take rows in turn.  For each row a program
stores one word into a slot of every rank, and goes on once the words of all ranks in its own slots carry the number of
its launch; the next launch begins when all programs have ended.  A store becomes visible at any later time, and stores
to different slots in any order; a program that could go on may do so at any later time.  In no state may a word be
overwritten that some program still waits for, may a program take a word of another launch, or may all be stuck.

What is planted here: protocols that are nearly this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

LAUNCHES = 4


@dataclass(frozen=True)
class Protocol:
    """``grids``: programs of each rank, at most one for each row.  rows: of all launches, or of each.

    The rest are mistakes, and how it is without them.  sets: of slots, which launches take in turn.  by_program: slots
    are those of a program, not of a row.  is_at_least: a word is taken that is of this launch or a later one.  silent:
    a rank that neither posts nor waits for another.  deaf: one that posts and waits for no other rank.  counts_alone:
    a program counts the launches that it is part of, not all.
    """

    grids: tuple[int, ...]
    rows: int | tuple[int, ...] = 2
    sets: int = 2
    by_program: bool = False
    is_at_least: bool = False
    silent: int | None = None
    deaf: int | None = None
    counts_alone: bool = False

    def rows_in(self, launch: int) -> int:
        return self.rows if isinstance(self.rows, int) else self.rows[launch]

    def grid(self, rank: int, launch: int) -> int:
        return min(self.grids[rank], self.rows_in(launch))


State = tuple[int, ...]
"""For each program the rows that it has done, ever; for each store of every launch: is it visible?  As bits of a word
for each channel, which is a slot without its set."""


class Model:
    """What can follow from a state of ``protocol``."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = p = protocol
        self.ranks = range(len(p.grids))
        self.programs = [(rank, i) for rank in self.ranks for i in range(p.grids[rank])]
        self.turns = [
            [
                (e, row)
                for e in range(LAUNCHES)
                if i < p.grid(rank, e)
                for row in range(i, p.rows_in(e), p.grid(rank, e))
            ]
            for rank, i in self.programs
        ]
        """Launches and rows of each program, in order."""
        self.of_rank = [[k for k, (r, _) in enumerate(self.programs) if r == rank] for rank in self.ranks]
        self.place = {
            (self.programs[k][0], launch, row): (k, place)
            for k, turns in enumerate(self.turns)
            for place, (launch, row) in enumerate(turns)
        }
        self.channels = [
            (src, dst, row)
            for src in self.ranks
            for dst in self.ranks
            for row in range(max(map(p.rows_in, range(LAUNCHES))))
            if src != dst and src != p.silent
        ]
        self.at = {c: len(self.programs) + k for k, c in enumerate(self.channels)}

    def start(self) -> State:
        return (0,) * (len(self.programs) + len(self.channels))

    def launches(self, state: State, rank: int) -> int:
        """That this rank has ended."""
        own = self.of_rank[rank]
        return min(self.turns[k][state[k]][0] if state[k] < len(self.turns[k]) else LAUNCHES for k in own)

    def is_end(self, state: State) -> bool:
        return all(self.launches(state, rank) == LAUNCHES for rank in self.ranks)

    def number(self, rank: int, launch: int, row: int) -> int:
        """That the word of ``row`` carries, and what is waited for."""
        if not self.protocol.counts_alone:
            return launch
        program = row % self.protocol.grid(rank, launch)
        return sum(program < self.protocol.grid(rank, e) for e in range(launch))

    def steps(self, state: State) -> Iterator[State]:
        """Every state that may be next.  Raises where a program waits for what was overwritten, or takes it."""
        begun = [self.launches(state, rank) for rank in self.ranks]
        for src, dst, row in self.channels:
            at, before = self.at[src, dst, row], dict[int, bool]()
            for launch in range(min(begun[src] + 1, LAUNCHES)):
                if row >= self.protocol.rows_in(launch):
                    continue
                k, place = self.place[src, launch, row]
                # two stores to one slot become visible in order
                in_order = before.get(launch % self.protocol.sets, True)
                before[launch % self.protocol.sets] = is_seen = bool(state[at] >> launch & 1)
                if state[k] >= place and in_order and not is_seen:
                    yield (*state[:at], state[at] | 1 << launch, *state[at + 1 :])
        for k, (rank, _) in enumerate(self.programs):
            launch, row = self.turns[k][state[k]] if state[k] < len(self.turns[k]) else (LAUNCHES, 0)
            if launch < LAUNCHES and begun[rank] >= launch and self.may_go_on(state, rank, row, launch):
                yield (*state[:k], state[k] + 1, *state[k + 1 :])

    def may_go_on(self, state: State, rank: int, row: int, launch: int) -> bool:
        if rank in (self.protocol.silent, self.protocol.deaf):
            return True
        found = [self.has_come(state, src, rank, row, launch) for src in self.ranks if src != rank]  # each is looked at
        return all(found)

    def has_come(self, state: State, src: int, rank: int, row: int, launch: int) -> bool:
        """Is the word of ``launch`` in the slot that ``rank`` reads for ``row``?"""
        found, wanted = self.content(state, src, rank, row, launch), self.number(rank, launch, row)
        carried = None if found is None else self.number(src, *found)
        if carried is None or carried < wanted:
            return False
        if self.protocol.is_at_least or carried == wanted:
            assert found == (launch, row), f"rank {rank} takes launch and row {found} for {launch}, {row}"
            return True
        raise AssertionError(f"rank {rank} waits for launch {launch}, which {found} has written over")

    def content(self, state: State, src: int, rank: int, row: int, launch: int) -> tuple[int, int] | None:
        """Launch and row of the word in a slot."""
        p = self.protocol
        if src == p.silent:
            return None
        rows = [row]
        if p.by_program:  # the slot of the program that has it here holds what the peer's program of that number has
            number = row % p.grid(rank, launch)
            rows = [r for r in range(p.rows_in(launch)) if r % p.grid(src, launch) == number]
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


@pytest.mark.parametrize("rows", [(1, 2, 1, 2), (2, 1, 1, 2), (3, 1, 2, 3), (2, 1, 2, 1)])
@pytest.mark.parametrize("grids", [(1, 2), (2, 2), (2, 3)])
def test_kernels_of_other_rows_may_share_slots(rows: tuple[int, ...], grids: tuple[int, ...]) -> None:
    """Words of another launch may stand in a slot for longer than two, and in slots that a launch has no rows for."""
    assert explore(Protocol(grids, rows)) > 50


def test_kernels_of_three_ranks_may_share_slots() -> None:
    assert explore(Protocol((1, 2, 1), (1, 2, 1, 2))) > 50


@pytest.mark.parametrize("grids", [(1, 3, 2), (4,), (2, 2, 2)])
def test_all_programs_of_a_launch_have_its_number(grids: tuple[int, ...]) -> None:
    """Each reads a sum, and adds its part of a launch at its end, when others may not have begun; in any order."""
    whole, seen, todo = 1 << 32, set(), [(0, 0, (0,) * grids[0])]
    while todo:
        state = todo.pop()
        launch, total, programs = state  # 0: has not begun; 1: has read; 2: has added
        if state in seen or launch == len(grids):
            continue
        seen.add(state)
        if all(p == 2 for p in programs):
            assert total == (launch + 1) * whole
            todo.append((launch + 1, total, (0,) * (grids[launch + 1] if launch + 1 < len(grids) else 0)))
        for k, p in enumerate(programs):
            if p == 0:
                assert total // whole == launch
            added = (whole + 1 - len(programs) if k == 0 else 1) if p == 1 else 0
            if p < 2:
                todo.append((launch, total + added, (*programs[:k], p + 1, *programs[k + 1 :])))
    assert len(seen) > 4


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (Protocol((1, 1, 1), rows=1, sets=1), "has written over"),
        (Protocol((1, 2), sets=1), "has written over"),
        (Protocol((1, 2), by_program=True), "takes launch|no program can go on|has written over"),
        (Protocol((1, 1), rows=1, is_at_least=True, sets=1), "takes launch"),
        (Protocol((1, 1, 1), silent=1), "no program can go on"),
        (Protocol((1, 1, 1), deaf=2), "has written over"),
        (Protocol((1, 2), (2, 1, 2, 2), counts_alone=True), "takes launch|no program can go on|has written over"),
    ],
)
def test_a_protocol_that_is_nearly_this_one_is_found_out(mistake: Protocol, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        explore(mistake)
