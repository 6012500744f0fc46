"""What ranks have called is compared without a cost of every call: every difference is found, and nothing else."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import HashStore
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, collectives
from shardfuse.errors import (
    CallLeftOutError,
    CollectiveArgumentError,
    InputError,
    ModuleInputError,
    PeerLostError,
    ProgramMismatchError,
    ShardfuseError,
)
from shardfuse.executor import agreement
from shardfuse.executor.turns import Turn, turn_here
from shardfuse.ir.tensor_view import TensorView
from shardfuse.mesh import process
from shardfuse.mesh.board import Board, Record
from shardfuse.mesh.calls import FAILED_RUN, Call, Ledger, Ledgers, Told, refused_call
from shardfuse.mesh.collective_waits import CollectiveWait
from shardfuse.mesh.rendezvous import ProcessIdentity
from shardfuse.nn import RMSNorm
from shardfuse.rank_errors import ThreadsError

PROGRAMS = [Call.of(f"program {k}\nT0: unsharded [{k}, 4]") for k in range(5)]
TEAM = (0, 1, 2)


class Ranks:
    """The ledgers of some ranks, whose watchdogs look when told so, at what the others told some looks ago."""

    def __init__(self) -> None:
        self.ledgers = [Ledgers(rank) for rank in TEAM]
        self.published: dict[str, str] = {}
        self.told: dict[int, dict[str, Told]] = {rank: {} for rank in TEAM}
        self.errors: dict[int, ProgramMismatchError] = {}

    def call(self, rank: int, program: Call) -> None:
        self.ledgers[rank].of(TEAM).calls.append(program)

    def wait(self, rank: int, program: Call | None) -> None:
        self.ledgers[rank].of(TEAM).waits = None if program is None else Call.of(program.text)

    def why_in_vain(self, rank: int) -> str:
        """What the caller that waits is told."""
        ledger = self.ledgers[rank].of(TEAM)
        return "" if ledger.waits is None else str(ledger.why_in_vain(ledger.waits) or "")

    def is_in_doubt(self) -> bool:
        return any(ledgers.is_in_doubt() for ledgers in self.ledgers)

    def look(self, rank: int) -> None:
        others = {other: told for other, told in self.told.items() if other != rank}
        found = self.ledgers[rank].compare(others, self.published.__setitem__, self.published.get)
        self.told[rank] = self.ledgers[rank].told()
        if found is not None:
            self.errors[rank] = found[1]

    def look_all(self, times: int = 4) -> None:
        for _ in range(times):
            for rank in TEAM:
                self.look(rank)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_late_are_no_fault(seed: int) -> None:
    """The same calls on all ranks, each as far as it has come, with looks at any time and waits before some calls."""
    rng = random.Random(seed)
    ranks, sequence = Ranks(), [rng.choice(PROGRAMS) for _ in range(400)]
    done = dict.fromkeys(TEAM, 0)
    while min(done.values()) < len(sequence):
        rank = rng.choice([rank for rank in TEAM if done[rank] < len(sequence)])
        ranks.wait(rank, None)
        for _ in range(rng.randrange(60)):
            if done[rank] < len(sequence):
                ranks.call(rank, sequence[done[rank]])
                done[rank] += 1
        if rng.random() < 0.3 and done[rank] < len(sequence):
            ranks.wait(rank, Call.of(sequence[done[rank]].text))
        ranks.look(rng.choice(TEAM))
    ranks.look_all()
    assert ranks.errors == {}


@pytest.mark.parametrize("seed", range(20))
def test_every_difference_is_found_on_every_rank(seed: int) -> None:
    """One call of one rank is of another program; the ranks come to it, and go on, at different speeds."""
    rng = random.Random(seed)
    ranks, place, odd = Ranks(), rng.randrange(300), rng.choice(TEAM)
    sequence = [rng.choice(PROGRAMS[:4]) for _ in range(300)]
    for rank in rng.sample(TEAM, 3):
        own = [*sequence[:place], PROGRAMS[4], *sequence[place + 1 :]] if rank == odd else sequence
        for program in own[: rng.randrange(place + 1, 301)]:
            ranks.call(rank, program)
            if rng.random() < 0.05:
                ranks.look(rank)
    ranks.look_all()
    assert sorted(ranks.errors) == list(TEAM)
    for error in ranks.errors.values():
        assert f"at call {place + 1} of ranks [0, 1, 2] the ranks do not run the same program" in str(error)
        assert f"rank {odd} has `program 4`" in str(error)
        assert f"`{sequence[place].text.splitlines()[0]}`" in str(error)


@pytest.mark.parametrize("call_first", [True, False])
def test_a_rank_that_waits_with_another_program(call_first: bool) -> None:
    """Rank 1 waits before a program's first run, while the others have called what they know."""
    ranks = Ranks()
    for rank in TEAM:
        ranks.call(rank, PROGRAMS[0])
    if call_first:
        ranks.call(0, PROGRAMS[1])
        ranks.call(2, PROGRAMS[1])
    ranks.look_all()
    assert ranks.errors == {}
    ranks.wait(1, PROGRAMS[2])
    ranks.look_all()
    assert bool(ranks.why_in_vain(1)) == call_first
    for rank in (0, 2):
        ranks.call(rank, PROGRAMS[1])
    ranks.look_all()
    told = ranks.why_in_vain(1)
    assert "at call 2 of ranks [0, 1, 2]" in told
    assert "ranks 0, 2 have `program 1`" in told
    assert "rank 1 has `program 2`" in told
    assert ranks.errors == {}, (
        "rank 1 may have learnt by now that the first run has failed: what it waits for is no call"
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_wait_that_comes_to_nothing_is_no_difference(seed: int) -> None:
    """First runs fail, one after the other; all ranks get over that, when it may be, and go on alike."""
    rng = random.Random(seed)
    ranks = Ranks()
    for attempt in range(8):
        for rank in rng.sample(TEAM, rng.randrange(1, 3)):
            ranks.wait(rank, Call.of(f"attempt {attempt}"))
        for _ in range(rng.randrange(6)):
            ranks.look(rng.choice(TEAM))
        for rank in rng.sample(TEAM, 3):
            for _ in range(rng.randrange(3)):
                ranks.look(rng.choice(TEAM))
            ranks.wait(rank, None)
            for program in PROGRAMS[: 1 + attempt % 3]:
                ranks.call(rank, program)
        ranks.look_all(rng.randrange(3))
    ranks.look_all()
    assert ranks.errors == {}
    assert not ranks.is_in_doubt()
    ranks.wait(0, PROGRAMS[0])
    assert not ranks.why_in_vain(0), "what was found of another wait is nothing to this one"


def test_what_is_called_after_a_wait_is_compared() -> None:
    """The texts that were published for a rank that waited do not hide what differs later."""
    ranks = Ranks()
    ranks.wait(1, PROGRAMS[0])
    for rank in (0, 2):
        ranks.call(rank, PROGRAMS[1])
    ranks.look_all()
    ranks.wait(1, None)
    ranks.call(1, PROGRAMS[1])
    for rank in TEAM:
        ranks.call(rank, PROGRAMS[2 if rank == 2 else 3])
    ranks.look_all()
    assert sorted(ranks.errors) == list(TEAM)
    assert "at call 2 of ranks [0, 1, 2]" in str(ranks.errors[0])


def test_a_difference_that_is_thousands_of_calls_old_is_told() -> None:
    ranks = Ranks()
    for rank in TEAM:
        for k in range(20_000):
            ranks.call(rank, PROGRAMS[1 if (rank, k) == (2, 3) else 0])
    for rank in TEAM:
        ranks.ledgers[rank]._known[TEAM].take_in()
        ranks.told[rank] = ranks.ledgers[rank].told()
    for rank in TEAM:
        ranks.look(rank)
        ranks.ledgers[rank]._until = dict.fromkeys(ranks.ledgers[rank]._until, 0.0)  # seconds later
    ranks.look_all(1)
    assert sorted(ranks.errors) == list(TEAM)
    assert "at one of the calls of ranks [0, 1, 2], thousands of calls ago, the ranks do not run" in str(
        ranks.errors[0]
    )


def test_teams_are_counted_each_for_itself() -> None:
    """Programs of two teams in another order are no difference in either."""
    one, two = Ledgers(0), Ledgers(1)
    order: Sequence[tuple[tuple[int, ...], Call]] = [((0, 1), PROGRAMS[0]), ((0, 1, 2), PROGRAMS[1])]
    for team, program in order:
        one.of(team).calls.append(program)
    for team, program in reversed(order):
        two.of(team).calls.append(program)
    store: dict[str, str] = {}
    told: dict[int, dict[str, Told]] = {}
    for _ in range(3):
        assert one.compare(told, store.__setitem__, store.get) is None
        told = {0: one.told()}
        assert two.compare(told, store.__setitem__, store.get) is None
        told = {1: two.told()}


def test_a_wait_that_ends_while_it_is_looked_at_is_not_told() -> None:
    """The caller goes on between two readings of the watchdog: its wait is then for a call that was counted."""
    ledger = Ledgers(0).of((0, 1))
    waited = Call.of("program")

    class Calls(list[Call]):
        def __len__(self) -> int:  # the watchdog reads the wait before this, and after it
            if ledger.waits is waited:
                ledger.waits = None
                self.append(waited)
            return super().__len__()

    ledger.waits = waited
    ledger.calls = Calls()
    told = ledger.take_in()
    assert (told.calls, told.waits) == (1, 0)


def test_a_wait_for_a_program_that_sends_nothing_is_no_difference() -> None:
    """What rank 0 waits for is never called: rank 1 goes on, and rank 0 tells so only later."""
    ranks = Ranks()
    for rank in TEAM:
        ranks.call(rank, PROGRAMS[0])
    ranks.wait(TEAM[0], PROGRAMS[1])
    ranks.look_all(1)
    for rank in TEAM[1:]:
        ranks.call(rank, PROGRAMS[2])
    ranks.look_all(1)
    ranks.wait(TEAM[0], None)
    ranks.call(TEAM[0], PROGRAMS[2])
    ranks.look_all()
    assert not ranks.errors
    assert not ranks.is_in_doubt()
    for rank in TEAM:
        ranks.call(rank, PROGRAMS[1 if rank == TEAM[0] else 0])
    ranks.look_all()
    assert sorted(ranks.errors) == list(TEAM)


class Waits:
    """A ledger that remembers what ranks said that they wait for."""

    def __init__(self) -> None:
        self.said: list[object] = []

    @property
    def waits(self) -> None:
        return None

    @waits.setter
    def waits(self, call: Call | None) -> None:
        self.said += [] if call is None else [call.text]


@pytest.mark.parametrize("is_reduced", [False, True])
def test_a_wait_is_told_for_programs_that_send_something(is_reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointwise programs of a mesh are agreed on as well, but no call of them is noted."""
    ledger = Waits()
    monkeypatch.setattr(agreement, "ledger_of", lambda ranks: ledger)

    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([2 * size, 4])
            fd.add_output(fd.ops.sum(x, [0]) if is_reduced else fd.ops.exp(x))
            x.set_device_mesh(DeviceMesh(list(range(size))))
            x.outer_split(0, size)
            x.axis(0).parallelize(ParallelType.mesh_x)
        if rank == 0:
            time.sleep(0.6)
        fd.execute([torch.ones(2, 4)])

    run_ranks(len(TEAM), run)
    assert bool(ledger.said) == is_reduced


class KnowsBetter(Ledger):
    """A ledger whose watchdog has found that a wait is in vain, where ``meanwhile`` has happened."""

    def __init__(self, ranks: Sequence[int], meanwhile: Callable[[], None]) -> None:
        super().__init__(ranks)
        self.meanwhile = meanwhile

    def why_in_vain(self, waits: Call) -> ProgramMismatchError | None:
        self.meanwhile()
        return ProgramMismatchError({0: waits.text, 1: "another program"}, "call 1 of ranks [0, 1]")


@pytest.mark.parametrize("what", ["nothing", "came", "failed"])
def test_who_waits_looks_once_more_before_it_gives_up(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has come, or has failed, just before it was known to have called another program."""
    go, gone = threading.Event(), threading.Event()

    def meanwhile() -> None:
        go.set()
        assert gone.wait(60)

    ledger = KnowsBetter((0, 1), meanwhile)
    monkeypatch.setattr(agreement, "ledger_of", lambda ranks: ledger if dist.get_rank() == 0 else None)

    def run(rank: int, size: int) -> str:
        if rank == 1:
            assert go.wait(60)
            side = agreement.side_of((0, 1))
            assert side is not None
            if what == "came":  # the first that it writes is that it has come
                monkeypatch.setattr(side, "take_back", gone.set)
            if what == "failed":
                side.tell_failure(ValueError("it is no number"), (0, 1))
            if what != "came":
                gone.set()
                return ""
        try:
            agreement.agree((0, 1), what)
        except ShardfuseError as error:
            return f"{type(error).__name__}: {error}"
        return "agreed"

    said = run_ranks(2, run)[0]
    expected = {
        "nothing": "ProgramMismatchError: at call 1",
        "came": "agreed",
        "failed": "PeerLostError: rank 1 failed",
    }
    assert said.startswith(expected[what])


class Guard:
    """A watchdog, as far as it keeps ledgers."""

    def __init__(self, rank: int) -> None:
        self.ledgers = Ledgers(rank)
        self.collective_wait = CollectiveWait()

    def lost(self, rank: int) -> None:
        return None

    def wait_of(self, rank: int) -> None:
        return None


@pytest.mark.parametrize("calls", [0, 1])
def test_a_failure_that_was_got_over_ends_no_later_program(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 failed where nobody waited for it; both have made so many calls since then when rank 0 waits for it."""
    guards = [Guard(rank) for rank in range(2)]
    for module in (agreement, process):
        monkeypatch.setattr(module, "own_watchdog", lambda: guards[dist.get_rank()])
    monkeypatch.setattr(agreement, "issued", dict)
    has_failed, has_looked = threading.Event(), threading.Event()
    is_failure = agreement._Side.is_failure

    def look(self: agreement._Side, *arguments: Any) -> bool:
        found = is_failure(self, *arguments)
        has_looked.set()
        return found

    monkeypatch.setattr(agreement._Side, "is_failure", look, raising=False)

    def run(rank: int, size: int) -> str:
        ledger = process.ledger_of((0, 1))
        side = agreement.side_of((0, 1))
        assert ledger is not None
        assert side is not None
        ledger.note(PROGRAMS[0])
        if rank == 1:
            side.tell_failure(ValueError("it is no number"), (0, 1))
            has_failed.set()
        assert has_failed.wait(60)
        for program in PROGRAMS[:calls]:
            ledger.note(program)
        if rank == 1:
            assert has_looked.wait(60)
            if not calls:
                return ""
        try:
            agreement.agree((0, 1), "next")
        except PeerLostError as error:
            return str(error)
        return "agreed"

    said = run_ranks(2, run)
    assert said == ["agreed"] * 2 if calls else "it is no number" in said[0]


def test_calls_of_a_rank_that_is_on_no_mesh_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(2)
    monkeypatch.setattr(process, "own_watchdog", lambda: guard)
    assert [found is None for found in run_ranks(3, lambda rank, size: process.ledger_of((0, 1)))] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("how", ["again", "copied", "refused"])
def test_what_is_run_is_counted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a copy of a definition that has run; not of a thread that is refused."""
    guards = [Guard(rank) for rank in range(2)]
    monkeypatch.setattr(process, "own_watchdog", lambda: guards[dist.get_rank()])

    def refuse(self: Turn) -> str:
        return "another thread"

    def run(rank: int, size: int) -> int:
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 4])
            fd.add_output(fd.ops.sum(x, [0]))
            x.set_device_mesh(DeviceMesh(list(range(size))))
            x.outer_split(0, size)
            x.axis(0).parallelize(ParallelType.mesh_x)
        ledger = process.ledger_of((0, 1))
        assert ledger is not None
        fd.execute([torch.ones(2, 4)])
        assert ledger.made() == 1
        both.wait(60)
        if how == "refused":
            turn_here()._refused = "another thread"  # so that its turn is asked for anew
            monkeypatch.setattr(Turn, "enter", refuse)
            both.wait(60)
            with pytest.raises(ThreadsError):
                fd.execute([torch.ones(2, 4)])
        else:
            (copy.deepcopy(fd) if how == "copied" else fd).execute([torch.ones(2, 4)])
        return ledger.made()

    both = threading.Barrier(2)
    assert run_ranks(2, run) == [1 if how == "refused" else 2] * 2


def over_ranks(size: int, made: Callable[[Any, TensorView, TensorView], TensorView]) -> FusionDefinition:
    """Of [4, 4], cut over the ranks along the first dim, and an index, which the CPU looks at in each run."""
    with FusionDefinition() as fd:
        x, at = fd.define_tensor([4, 4]), fd.define_tensor([1], dtype=DataType.Int)
        fd.add_output(made(fd.ops, x, at))
        x.set_device_mesh(DeviceMesh(list(range(size))))
        x.outer_split(0, size)
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def test_a_run_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its call, which others have made as well."""
    guards = [Guard(rank) for rank in range(2)]
    monkeypatch.setattr(process, "own_watchdog", lambda: guards[dist.get_rank()])

    def run(rank: int, size: int) -> list[Call]:
        fd = over_ranks(size, lambda ops, x, at: ops.sum(ops.index_select(x, at, 1), [0]))
        ledger = process.ledger_of((0, 1))
        assert ledger is not None
        for index in (1, 9, 1):  # of 4, which the CPU looks at, on both
            with pytest.raises(IndexError) if index == 9 else nullcontext():
                fd.execute([torch.ones(2, 4), torch.tensor([index])])
        return list(ledger.calls)

    for called in run_ranks(2, run):
        assert [call is FAILED_RUN for call in called] == [False, False, True, False]


def test_a_run_that_fails_once_it_has_sent_all_is_a_call_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that agree on leaving out a batch, of which one has failed alone, go on in step."""
    guards = [Guard(rank) for rank in range(2)]
    monkeypatch.setattr(process, "own_watchdog", lambda: guards[dist.get_rank()])

    def run(rank: int, size: int) -> list[Call]:
        fd = over_ranks(size, lambda ops, x, at: ops.index_select(ops.sum(x, [0]), at, 0))
        ledger = process.ledger_of((0, 1))
        assert ledger is not None
        for batch in range(3):
            is_failing = (rank, batch) == (1, 1)
            with pytest.raises(IndexError) if is_failing else nullcontext():
                fd.execute([torch.ones(2, 4), torch.tensor([9 if is_failing else 1])])
        return list(ledger.calls)

    calls = run_ranks(2, run)
    assert [[call.digest for call in made] for made in calls] == [[calls[0][0].digest] * 3] * 2


def test_a_run_that_fails_before_pieces_are_exchanged_behind_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that sends nothing by itself, on whose call the other ranks go on to the exchange."""
    guards = [Guard(rank) for rank in range(4)]
    monkeypatch.setattr(process, "own_watchdog", lambda: guards[dist.get_rank()])

    def run(rank: int, size: int) -> list[Call]:
        mesh = DeviceMesh(torch.arange(size).view(2, 2))
        with FusionDefinition() as fd:
            x, at = fd.define_tensor([-1, 2]), fd.define_tensor([1], dtype=DataType.Int)
            fd.add_output(fd.ops.index_select(x, at, 1))
        placed = [Shard(0), Shard(0)]  # 5, 4 | 5, 3 of 17 rows in a fusion, 5, 4 | 4, 4 outside
        given = distribute_tensor(torch.ones(17, 2), mesh.to_torch("cpu"), placed, src_data_rank=None)
        ledger = process.ledger_of(range(size))
        assert ledger is not None
        for index in (1, 9, 1):
            with pytest.raises(IndexError) if index == 9 else nullcontext():
                fd.execute([given, torch.tensor([index])])
        return list(ledger.calls)

    for called in run_ranks(4, run):
        assert [call is FAILED_RUN for call in called] == [False, False, True, False]


def test_a_rank_that_fails_and_goes_on_with_the_next_run_is_found() -> None:
    """Of the same program, as in a training loop: else it would be one run ahead of the others for ever."""
    ranks, (step, *_) = Ranks(), PROGRAMS
    for rank in TEAM:
        for turn in range(3):
            ranks.call(rank, step)
            if (rank, turn) == (1, 1):
                ranks.call(rank, FAILED_RUN)
    for _ in range(4):
        for rank in TEAM:
            ranks.look(rank)
    assert set(ranks.errors) == set(TEAM)
    assert all("call 3 of ranks [0, 1, 2]" in str(error) for error in ranks.errors.values())
    assert all("rank 1 left out the run of the call before" in str(error) for error in ranks.errors.values())


@pytest.mark.parametrize("refusing", [(1,), TEAM])
def test_a_rank_that_refuses_a_call_alone_and_goes_on_is_found(refusing: Sequence[int]) -> None:
    """Ranks that all refuse it, each for a reason of its own, are in step."""
    ranks, (step, *_) = Ranks(), PROGRAMS
    for rank in TEAM:
        for turn in range(3):
            is_refused = turn == 1 and rank in refusing
            ranks.call(rank, refused_call(f"InputError of rank {rank}") if is_refused else step)
    ranks.look_all()
    assert set(ranks.errors) == (set(TEAM) if refusing == (1,) else set())
    for error in ranks.errors.values():
        assert isinstance(error, CallLeftOutError)
        said = "at call 2 of ranks [0, 1, 2] rank 1 left out a call that was refused: InputError of rank 1, and went on"
        assert str(error).startswith(said)


def test_ranks_that_have_sent_nothing_refuse_what_they_like() -> None:
    """Of programs that send nothing no call is noted, and one that is left out changes no result."""
    ranks, (step, *_) = Ranks(), PROGRAMS
    ranks.call(1, refused_call("InputError"))
    ranks.look_all()
    assert not ranks.errors
    for rank in TEAM:
        ranks.call(rank, step)
    ranks.look_all()
    assert set(ranks.errors) == set(TEAM), "who has left out a call sends that of the next one"


REFUSALS: dict[str, Callable[[FusionDefinition], object]] = {
    "shape": lambda fd: fd.execute([torch.ones(5, 4)]),
    "dtype": lambda fd: fd.execute([torch.ones(2, 4).half()]),
    "count": lambda fd: fd.execute([]),
    "layout": lambda fd: fd.execute([torch.ones(2, 4).to_sparse()]),
    "device": lambda fd: fd.execute([torch.ones(2, 4)], device="nothing"),
    "placement": lambda fd: fd.execute([mesh_tensor(Replicate())]),
    "partial": lambda fd: fd.execute([mesh_tensor(Partial())]),
    "collective": lambda fd: collectives.all_reduce(torch.ones(4), op="mean"),  # pyright: ignore[reportArgumentType]
    "module": lambda fd: RMSNorm(4, mesh=DeviceMesh([0, 1]), input=Shard(-1))(torch.ones(2, 3)),
}


@pytest.mark.parametrize("has_sent", [False, True])
def test_a_refused_call_of_a_program_that_sends_nothing_is_not_noted(
    has_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where other programs of its ranks have sent something; a group of other ranks is not that of all."""
    guards = [Guard(rank) for rank in range(2)]
    monkeypatch.setattr(process, "own_watchdog", lambda: guards[dist.get_rank()])

    def run(rank: int, size: int) -> list[str]:
        with FusionDefinition() as quiet:
            x = quiet.define_tensor([4, 4])
            quiet.add_output(quiet.ops.exp(x))
            x.set_device_mesh(DeviceMesh([0, 1]))
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
        sums = over_ranks(size, lambda ops, x, at: ops.sum(x, [0]))
        norm = RMSNorm(4, mesh=DeviceMesh([0, 1]), input=Shard(0), elementwise_affine=False)
        ledger = process.ledger_of((0, 1))
        assert ledger is not None
        for _ in range(2):
            quiet.execute([torch.ones(2, 4)])
            norm(torch.ones(2, 4))
            if has_sent:
                sums.execute([torch.ones(2, 4), torch.tensor([0])])
            if rank == 1:
                with pytest.raises(InputError):
                    quiet.execute([torch.ones(2, 5)])
                with pytest.raises(ModuleInputError):
                    norm(torch.ones(2, 5))
                with pytest.raises(CollectiveArgumentError):
                    collectives.all_reduce(torch.ones(4), cast("Any", dist.GroupMember.NON_GROUP_MEMBER))
        return [call.text for call in ledger.calls if call.text.startswith("a call that was refused")]

    assert run_ranks(2, run) == [[], []]


def test_calls_that_a_quiet_team_refuses_are_not_kept_for_ever() -> None:
    ledger = Ledger((0, 1))
    for k in range(10_000):
        ledger.note_refused(refused_call(f"InputError {k}"))
        if k % 1000 == 0:
            assert ledger.take_in().calls == 0
    assert ledger.made() < 5000
    ledger.note(PROGRAMS[0])
    ledger.note_refused(refused_call("InputError"))
    assert ledger.take_in().calls == ledger.made() > 4000


def mesh_tensor(placement: Any) -> torch.Tensor:
    mesh = DeviceMesh([0, 1]).to_torch("cpu")
    return DTensor.from_local(torch.ones(2, 4), mesh, [placement], run_check=False)


@pytest.mark.parametrize("what", REFUSALS)
def test_a_call_that_is_refused_is_noted_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place among the calls that are made; a plan that is asked for is no call."""
    guards = [Guard(rank) for rank in range(2)]
    monkeypatch.setattr(process, "own_watchdog", lambda: guards[dist.get_rank()])

    def run(rank: int, size: int) -> list[str]:
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 4])
            fd.add_output(fd.ops.sum(x, [0]))
            x.set_device_mesh(DeviceMesh([0, 1]))
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
        ledger = process.ledger_of((0, 1))
        assert ledger is not None
        for _ in range(2):
            fd.execute([torch.ones(2, 4)])
            with pytest.raises(ShardfuseError):
                REFUSALS[what](fd)
        with pytest.raises(ShardfuseError):
            fd.explain([torch.ones(5, 4)])
        with pytest.raises(ShardfuseError):
            fd.explain([mesh_tensor(Replicate())])
        fd.execute([torch.ones(2, 4)])
        return ["left out" if call.text.startswith("a call that was refused") else "made" for call in ledger.calls]

    assert run_ranks(2, run) == [["made", "left out", "made", "left out", "made"]] * 2


@pytest.mark.parametrize("what", ["nothing", "a seed", "digests", "pieces"])
def test_what_ranks_send_beside_collectives_of_a_plan_is_counted(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that is pointwise: a seed that it draws, a check of replicas, pieces of DTensors."""
    monkeypatch.setenv("SHARDFUSE_CHECK", "replicas" if what == "digests" else "")
    guards = [Guard(rank) for rank in range(4)]
    monkeypatch.setattr(process, "own_watchdog", lambda: guards[dist.get_rank()])

    def run(rank: int, size: int) -> int:
        mesh = DeviceMesh(torch.arange(size).view(2, 2))
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 2])
            y = fd.ops.mul(x, fd.ops.uniform(0.0, 1.0, fd.ops.shape(x), dtype=x.dtype)) if what == "a seed" else x
            fd.add_output(fd.ops.exp(y))
            if what != "pieces":
                x.set_device_mesh(mesh)
        given = torch.ones(17, 2)
        if what == "pieces":  # 5, 4 | 5, 3 of 17 rows in a fusion, 5, 4 | 4, 4 outside
            given = distribute_tensor(given, mesh.to_torch("cpu"), [Shard(0), Shard(0)], src_data_rank=None)
        for _ in range(3):
            fd.execute([given])
        ledger = process.ledger_of(range(size))
        assert ledger is not None
        return ledger.made()

    assert run_ranks(4, run) == [0 if what == "nothing" else 3] * 4


class Counting:
    """A store that counts how often each key is fetched."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.fetched = Counter[str]()

    def get(self, key: str) -> bytes:
        self.fetched[key] += 1
        return self.store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_what_nobody_reads_any_more_is_not_fetched() -> None:
    identity, store = ProcessIdentity.of_this_process(), Counting()
    board = Board(cast(Any, store), 0, 2, lambda: Record(identity), lambda: True)
    board.start()
    store.set("calls", "text")
    assert board.read("calls") is None
    for _ in range(3):
        assert board.exchange(60)
        assert board.read("calls") == "text"
    assert board.exchange(60)
    before = store.fetched["calls"]
    for _ in range(50):
        assert board.exchange(60)
    assert store.fetched["calls"] == before
    assert board.read("calls") is None, "nor is it kept"
    assert board.exchange(60)
    assert board.read("calls") == "text"
    board.close()
