"""Ranks that wait for one another are found where none of them can go on, and nowhere else."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from shardfuse.executor.circles import Wait, find_circle
from shardfuse.mesh.board import Record
from shardfuse.mesh.collective_waits import ReportedWait
from shardfuse.mesh.rendezvous import ProcessIdentity

RANKS = range(4)
TEAMS = ((0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2), (0, 1, 2, 3))
Step = tuple[str, tuple[int, ...]]
"""An agreement before a program's first run, or a collective, of these ranks."""


@dataclass
class Simulated:
    """Ranks that go through steps, each in its own order and at its own speed; what they tell is as old as may be."""

    steps: Sequence[Sequence[Step]]
    at: list[int] = field(default_factory=lambda: [0 for _ in RANKS])
    came: list[bool] = field(default_factory=lambda: [False for _ in RANKS])
    told: dict[int, tuple[ReportedWait, Mapping[str, int]]] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    looking: int | None = None
    """The rank that reads what others tell; meanwhile those go on."""

    def step(self, rank: int) -> Step | None:
        return self.steps[rank][self.at[rank]] if self.at[rank] < len(self.steps[rank]) else None

    def issued(self, rank: int) -> dict[str, int]:
        done = self.steps[rank][: self.at[rank] + self.came[rank]]
        return {str(team): sum(step == ("collective", team) for step in done) for team in TEAMS}

    def comparisons(self, rank: int, team: tuple[int, ...]) -> int:
        return sum(step == ("agreement", team) for step in self.steps[rank][: self.at[rank] + self.came[rank]])

    def lacks(self, rank: int) -> list[int]:
        """Those that ``rank`` waits for where it has come to a step."""
        step = self.step(rank)
        if step is None or not self.came[rank]:
            return []
        kind, team = step
        count = self.comparisons if kind == "agreement" else lambda r, t: self.issued(r)[str(t)]
        return [other for other in team if count(other, team) < count(rank, team)]

    def move(self, rank: int) -> bool:
        """Come to the next step, or leave it where all have come."""
        if self.step(rank) is None:
            return False
        if not self.came[rank]:
            self.came[rank] = True
        elif self.lacks(rank):
            return False
        else:
            self.came[rank], self.at[rank] = False, self.at[rank] + 1
        return True

    def tell(self, rank: int) -> None:
        """A record of a rank's board, which others read until it writes the next."""
        step = self.step(rank)
        self.told.pop(rank, None)
        if step is not None and self.came[rank] and step[0] == "collective":
            record = Record(
                ProcessIdentity("host", 1, 1), "working", 1, self.issued(rank), {}, self.reported(rank, step)
            )
            read = Record.from_json(record.to_json())
            assert read.wait is not None
            self.told[rank] = read.wait, read.sequences

    def reported(self, rank: int, step: Step) -> ReportedWait:
        return ReportedWait(self.at[rank], {str(step[1]): step[1]})

    def wait_of(self, rank: int) -> Wait | None:
        if self.looking is not None and self.rng.random() < 0.4:
            self.move(self.rng.choice([other for other in RANKS if other != self.looking]))
        step = self.step(rank)
        if step is not None and self.came[rank] and step[0] == "agreement":
            return Wait(("agreement", self.at[rank]), step[1], self.lacks(rank))
        if rank not in self.told:
            return None
        wait, own = self.told[rank]
        others = [other for other in RANKS if other != rank]
        lacks = [other for other in others if wait.missing(own, other, self.issued_by(other))]
        return Wait(("collective", wait.serial), others, lacks, is_collective=True)

    def issued_by(self, rank: int) -> Mapping[str, int]:
        step = self.step(rank)
        if step is not None and self.came[rank] and step[0] == "agreement":
            return self.issued(rank)
        return self.told[rank][1] if rank in self.told else {}

    def found(self) -> list[int]:
        """The ranks before a program's first run that find a circle."""
        found: list[int] = []
        for rank in RANKS:
            step = self.step(rank)
            if step is not None and self.came[rank] and step[0] == "agreement":
                self.looking = rank
                found += [rank] if any(find_circle(rank, other, self.wait_of) for other in self.lacks(rank)) else []
                self.looking = None
        return found

    def stuck(self) -> list[int]:
        """The ranks that can never go on, found by letting all others go as far as they can."""
        copy = Simulated(self.steps, list(self.at), list(self.came))
        while any(copy.move(rank) for rank in RANKS):
            pass
        return [rank for rank in RANKS if copy.step(rank) is not None]


def _steps(rng: random.Random, rank: int, common: Sequence[Step], swapped: bool) -> list[Step]:
    own = [step for step in common if rank in step[1]]
    if swapped and len(own) > 1:
        k = rng.randrange(len(own) - 1)
        own[k], own[k + 1] = own[k + 1], own[k]
    return own


@pytest.mark.parametrize("swaps", [0, 1, 2])
def test_a_circle_is_found_where_ranks_are_stuck_and_nowhere_else(swaps: int) -> None:
    """40 programs of random steps, in which as many ranks have two steps in another order."""
    rng, circles = random.Random(swaps), 0
    for _ in range(40):
        common = [(rng.choice(("agreement", "collective")), rng.choice(TEAMS)) for _ in range(10)]
        odd = rng.sample(RANKS, swaps)
        ranks = Simulated([_steps(rng, rank, common, rank in odd) for rank in RANKS])
        for _ in range(90):
            rank = rng.choice(RANKS)
            ranks.move(rank)
            ranks.tell(rng.choice(RANKS))
            ranks.rng = rng
            found = ranks.found() if rng.random() < 0.3 else []
            circles += len(found)
            if found:
                assert set(found) <= set(ranks.stuck())
        while any(ranks.move(rank) for rank in RANKS):
            pass
        for rank in RANKS:
            ranks.tell(rank)
        stuck = ranks.stuck()
        assert bool(stuck) or not ranks.found()
        for rank in stuck:  # who waits for a rank before a first run that waits for it in a collective, finds it
            waits = ranks.wait_of(rank)
            if waits is not None and not waits.is_collective:
                answers = [other for other in ranks.lacks(rank) if rank in ranks.lacks(other)]
                assert not answers or rank in ranks.found()
    assert (circles > 5) == (swaps > 0)


def test_what_a_rank_tells_is_read_as_it_was_told() -> None:
    told = ReportedWait(7, {"0": [0, 1, 2]})
    record = Record(ProcessIdentity("host", 1, 2), "working", 3, {"0": 5}, {}, told)
    assert Record.from_json(record.to_json()) == record
    assert json.loads(record.to_json())[5] == [7, {"0": [0, 1, 2]}]
    assert told.missing({"0": 5}, 1, {"0": 4})
    assert not told.missing({"0": 5}, 1, {"0": 5})  # it is in the collective as well
    assert not told.missing({"0": 5}, 3, {"0": 4})  # it has no part in it
    assert not told.missing({"0": 5}, 1, {})  # it does not wait, or nobody knows


@pytest.mark.parametrize("second", [None, Wait("another wait", (1, 2), (2,)), Wait("the wait", (1, 2), ())])
def test_waits_that_are_not_the_same_when_they_are_read_again_are_no_circle(second: Wait | None) -> None:
    """Rank 1 waited for rank 2, and went on before rank 2 came to wait for rank 0."""
    reads = [Wait("the wait", (1, 2), (2,)), second]
    waits = {2: Wait("its wait", (0, 2), (0,))}
    assert find_circle(0, 1, lambda rank: reads.pop(0) if rank == 1 else waits[rank]) is None
    links = find_circle(0, 1, lambda rank: Wait("the wait", (1, 2), (2,)) if rank == 1 else waits[rank])
    assert links is not None
    assert [(link.rank, link.other) for link in links] == [(1, 2), (2, 0)]
