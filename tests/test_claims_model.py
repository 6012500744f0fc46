"""Every interleaving of programs that claim their numbers, on ranks that run more or fewer of them at a time.

A program of a rank has rows, each of which it posts and then waits for on all ranks.  As many run at a time as the rank
has room for: one that has ended makes room for the next number.  Whatever runs first, no state is without a next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from shardfuse.codegen.claims import within
from shardfuse.codegen.source import KernelSource
from shardfuse.device import H200
from shardfuse.mesh import DeviceMesh, ParallelType
from shardfuse.schedulers.plan import RankExchange

Order = Callable[[int, int], int]
"""``order(rank, claimed)``: the number of the program that is claimed next, where so many were."""


@dataclass(frozen=True)
class Side:
    """A rank: how many programs were claimed, and of those that run the number, row and whether the row is posted."""

    claimed: int = 0
    running: tuple[tuple[int, int, bool], ...] = ()
    posted: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Model:
    """``rows`` are shared by as many ``programs`` on all ranks; ``room``: programs that run at a time, of each rank."""

    rows: int
    programs: int
    room: tuple[int, ...]
    order: Order

    def next(self, state: tuple[Side, ...]) -> Iterator[tuple[Side, ...]]:
        for rank, side in enumerate(state):
            for after in self._moves(rank, side, state):
                yield (*state[:rank], after, *state[rank + 1 :])

    def _moves(self, rank: int, side: Side, state: tuple[Side, ...]) -> Iterator[Side]:
        if len(side.running) < self.room[rank] and side.claimed < self.programs:
            number = self.order(rank, side.claimed)
            yield Side(side.claimed + 1, tuple(sorted((*side.running, (number, number, False)))), side.posted)
        for one in side.running:
            number, row, is_posted = one
            rest = tuple(other for other in side.running if other is not one)
            if not is_posted:
                yield Side(side.claimed, tuple(sorted((*rest, (number, row, True)))), side.posted | {row})
            elif all(row in other.posted for other in state):
                on = () if row + self.programs >= self.rows else ((number, row + self.programs, False),)
                yield Side(side.claimed, tuple(sorted((*rest, *on))), side.posted)

    def is_over(self, state: tuple[Side, ...]) -> bool:
        return all(len(side.posted) == self.rows and not side.running for side in state)

    def stuck(self) -> tuple[Side, ...] | None:
        """A state that is not the end and has no next one; ``None`` where there is none."""
        first = tuple(Side() for _ in self.room)
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            after = list(self.next(state))
            if not after and not self.is_over(state):
                return state
            new = [s for s in after if s not in seen]
            seen.update(new)
            left += new
        return None


def ascending(rank: int, claimed: int) -> int:
    return claimed


@pytest.mark.parametrize("room", [*product((1, 2, 3), (1, 2, 3)), (1, 2, 1)])
def test_ranks_that_claim_in_ascending_order_end(room: tuple[int, ...]) -> None:
    rows = 5 if len(room) == 2 else 3
    assert Model(rows, 3, room, ascending).stuck() is None


def test_another_order_on_a_rank_would_hold_all_up() -> None:
    """The model sees a circle of waits where there is one."""
    assert Model(4, 3, (1, 1), lambda rank, claimed: 2 - claimed if rank else claimed).stuck() is not None
    assert Model(4, 3, (3, 3), lambda rank, claimed: 2 - claimed if rank else claimed).stuck() is None


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("room", [1, 3, 40, 200])
def test_launches_that_follow_one_another_have_every_program_once(rows: int, room: int) -> None:
    """In ascending order, and no launch has more than there is room for."""
    exchange = RankExchange(DeviceMesh(range(2)), ParallelType.mesh_x, (), programs=100, is_in_rows=True)
    assert H200.multiprocessors > exchange.programs
    source = KernelSource("k", "", (), (), (rows, 0), min(rows, 100), 8, 3)
    launched = within(source, exchange, room)
    numbers = [part.integers[-1] + k for part in launched for k in range(part.grid)]
    assert numbers == list(range(min(rows, 100)))
    assert all(part.grid <= room for part in launched)
    assert {part.integers[0] for part in launched} == {rows}


# what programs count


@dataclass(frozen=True)
class Counting:
    """The word in which ``grid`` programs count, of which those that are not ``within`` would end at once."""

    within: tuple[bool, ...]
    programs: int

    def ends(self) -> set[tuple[tuple[int, ...], int]]:
        """Of every interleaving: the numbers that were claimed, in order, and how many saw that the launch is over."""
        grid, found = len(self.within), set[tuple[tuple[int, ...], int]]()
        first = (0, ("new",) * grid, (), 0)
        seen, left = {first}, [first]
        while left:
            word, states, claimed, over = left.pop()
            if all(s == "gone" for s in states):
                found.add((claimed, over))
                assert over == 1
            for k, state in enumerate(states):
                if state == "gone":
                    continue
                after, to, number = self._step(word, state, self.within[k])
                is_over = to == "gone" and after & 0xFFFF == self.programs + grid - (after >> 16)
                made = (*claimed, number) if number is not None else claimed
                one = (after, (*states[:k], to, *states[k + 1 :]), made, over + is_over)
                if one not in seen:
                    seen.add(one)
                    left.append(one)
        return found

    def _step(self, word: int, state: str, is_within: bool) -> tuple[int, str, int | None]:
        """The word, the state of the program and what it claims behind its next access of the word."""
        match state:
            case "new" if not is_within:
                word += 1 << 16
                return word, "alone" if word >> 16 == len(self.within) else "gone", None
            case "alone":  # takes back that it has ended at once
                return self._claimed(word + 1 - (1 << 16))
            case _:
                return self._claimed(word + 1)

    def _claimed(self, word: int) -> tuple[int, str, int | None]:
        number = (word & 0xFFFF) - 1
        return (word, "runs", number) if number < self.programs else (word, "gone", None)


@pytest.mark.parametrize("within", [w for grid in (1, 2, 3, 4) for w in product((False, True), repeat=grid)])
@pytest.mark.parametrize("programs", [1, 2, 3])
def test_every_program_is_claimed_once_and_one_ends_the_launch(within: tuple[bool, ...], programs: int) -> None:
    assert Counting(within, programs).ends() == {(tuple(range(programs)), 1)}
