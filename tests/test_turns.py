"""Programs that communicate are run by one thread of each rank; any number of threads runs those that do not."""

from __future__ import annotations

import _thread
import copy
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from ranks import run_ranks
from test_arguments import normalised, normalised_by_torch, numbers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_answers import assert_beside

from shardfuse import DeviceMesh, run_in_this_thread, simulate
from shardfuse.errors import NotInitializedError
from shardfuse.executor import turns
from shardfuse.executor.turns import Turn
from shardfuse.rank_errors import ThreadsError

T = TypeVar("T")


def in_thread(function: Callable[[], T], name: str = "other") -> T:
    """What ``function`` gives in a thread of its own, or what it raises."""
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001 raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def test_the_first_thread_has_the_turn_until_it_ends_or_another_takes_over() -> None:
    turn = Turn()

    def run() -> None:
        with turn.of([0, 1]):
            pass

    in_thread(run)
    run()  # that thread has ended
    with pytest.raises(ThreadsError, match=r"'other'.*'MainThread'.*run_in_this_thread"):
        in_thread(run)
    with pytest.raises(ThreadsError):  # what was paired with what is not known: nobody goes on
        run()
    assert turn.take_over() is None
    run()
    assert in_thread(turn.take_over) is None
    run()  # the thread that took over has ended


@pytest.mark.parametrize("attempt", range(5))  # the system gives most threads the number of one that has ended
def test_a_thread_of_the_number_of_one_that_ended_has_the_turn_too(attempt: int) -> None:
    turn, came, looked = Turn(), threading.Event(), threading.Event()

    def run() -> None:
        with turn.of([0, 1]):
            pass

    def stay() -> None:
        run()
        came.set()
        looked.wait(60)

    in_thread(run)
    thread = threading.Thread(target=stay, name="stays")
    thread.start()
    assert came.wait(60)
    with pytest.raises(ThreadsError, match=r"'MainThread'.*'stays'"):
        run()
    looked.set()
    thread.join()


def test_a_thread_that_is_refused_ends_the_run_that_it_came_upon() -> None:
    turn = Turn()

    def come_upon() -> None:
        with turn.of([0, 1]):
            with pytest.raises(ThreadsError, match="'other'"):
                in_thread(lambda: turn.of([0, 1]).__enter__())
            assert in_thread(turn.take_over) == "MainThread"

    with pytest.raises(ThreadsError, match=r"'MainThread'.*'other'"):
        come_upon()


class Told:
    """Whose turn it is on other ranks: ``others`` by the number of the owner."""

    def __init__(self, *others: dict[int, str]) -> None:
        self.others = others
        self.own: dict[tuple[tuple[int, ...] | None, int], str] = {}

    def publish(self, team: Sequence[int] | None, number: int, name: str) -> None:
        self.own[team and tuple(team), number] = name

    def names(self, team: Sequence[int] | None, number: int) -> list[str]:
        own = self.own[team and tuple(team), number]  # told before it asks: else two may ask before either has told
        return [own, *(other[number] for other in self.others if number in other)]


@pytest.mark.parametrize("others", [({1: "MainThread"}, {1: "MainThread"}), ({}, {1: "MainThread"}), ({}, {})])
def test_the_first_thread_goes_on_where_it_is_the_first_on_every_rank(others: tuple[dict[int, str], ...]) -> None:
    """A rank that has had no owner yet finds out itself where its owner is another one."""
    told = Told(*others)
    turn = Turn(told)

    def run() -> None:
        with turn.of([0, 1]):
            pass

    run()
    for _ in range(2):
        with pytest.raises(ThreadsError, match=r"'other'.*'MainThread'"):
            in_thread(run)
        run()
    with turn.of([0, 1]), pytest.raises(ThreadsError, match="'other'"):
        in_thread(run)
    run()
    in_thread(lambda: (turn.take_over(), run()))
    assert [told.own[None, k] for k in (1, 2)] == ["MainThread", "other"]
    run()
    assert told.own[None, 3] == "MainThread"


def test_nobody_goes_on_where_another_rank_has_another_thread() -> None:
    turn = Turn(Told({1: "MainThread"}, {1: "other"}))

    def run() -> None:
        with turn.of([0, 1]):
            pass

    run()
    for _ in range(2):
        with pytest.raises(ThreadsError, match=r"'other'"):
            in_thread(run)
        with pytest.raises(ThreadsError):
            run()
    assert turn.take_over() is None
    run()


@pytest.mark.parametrize("elsewhere", ["t1", "t0", "of another rank", "MainThread"])
def test_a_first_run_that_was_paired_with_another_threads_gives_nothing(elsewhere: str) -> None:
    """Threads t0 and t1 of each rank came at once, and another one was the first elsewhere."""
    turn, stay = Turn(Told({1: elsewhere, 2: "MainThread", 3: elsewhere})), threading.Event()
    t1 = threading.Thread(target=stay.wait, args=(60,), name="t1")
    t1.start()

    def run() -> None:
        with turn.of([0, 1]):
            pass

    def run_twice() -> None:
        run()
        run()

    try:
        if elsewhere == "t1":
            with pytest.raises(ThreadsError, match=r"'t0'.*'t1'"):
                in_thread(run_twice, "t0")
            with pytest.raises(ThreadsError):  # until one takes over
                run()
            assert turn.take_over() is None
            run()
            turn.take_over()
            in_thread(lambda: (turn.take_over(), run_twice()), "t0")  # which says that it is the one
        else:
            in_thread(run_twice, "t0")
    finally:
        stay.set()
        t1.join()


def test_a_program_within_a_program_of_the_same_thread() -> None:
    turn = Turn()
    with turn.of([0, 1]), turn.of([0, 1]):
        pass
    with turn.of([0, 1]):
        pass


@pytest.mark.parametrize("task", [-1, 7], ids=["no backward", "a backward"])
def test_threads_of_autograd_act_for_the_one_that_called_backward(task: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's own threads, which a backward on a GPU runs in, are none that Python started."""
    monkeypatch.setattr(turns, "_graph_task", lambda: task)
    turn, ended, errors = Turn(), threading.Event(), []
    with turn.of([0, 1]):
        pass

    def run() -> None:
        try:
            with turn.of([0, 1]):
                pass
        except ThreadsError as error:
            errors.append(error)
        ended.set()

    _thread.start_new_thread(run, ())
    assert ended.wait(60)
    assert len(errors) == (task == -1)
    monkeypatch.undo()
    if not errors:
        with turn.of([0, 1]):  # it did not take over
            pass


def test_the_main_thread_has_the_turn_after_a_first_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of autograd, which was the first, never ends."""
    monkeypatch.setattr(turns, "_graph_task", lambda: 7)
    turn, ended = Turn(), threading.Event()

    def run() -> None:
        with turn.of([0, 1]):
            pass
        ended.set()

    _thread.start_new_thread(run, ())
    assert ended.wait(60)
    monkeypatch.undo()
    with turn.of([0, 1]):
        pass
    assert turn.is_mine()


def test_a_backward_asks_in_its_graph_task() -> None:
    seen: list[int] = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(turns._graph_task()))
    y.sum().backward()
    assert turns._graph_task() == -1
    assert len(seen) == 1
    assert seen[0] != -1


def test_fusions_of_several_ranks_are_refused_in_a_second_thread_before_anything_is_sent() -> None:
    ready = threading.Barrier(2)

    def run(rank: int, size: int) -> None:
        # Threads of a rank share its world only where a process is a rank: here the turn is asked directly.
        mesh, whole = DeviceMesh([0, 1]), numbers(4, 8)
        fd = normalised(mesh)
        local = mesh.shard_tensor(whole, 1)
        (y,) = fd.execute([local])
        held = fd.fec.turn()
        with pytest.raises(ThreadsError, match="run_in_this_thread"):
            in_thread(held.__enter__)
        ready.wait()
        with pytest.raises(ThreadsError):
            fd.execute([local])
        run_in_this_thread()
        ready.wait()
        (z,) = fd.execute([local])
        assert torch.equal(y, z)

    run_ranks(2, run)


def test_without_several_ranks_every_thread_runs_fusions() -> None:
    fd, x = normalised(), numbers(4, 8)
    expected = normalised_by_torch(x)
    for k in range(3):
        (y,) = in_thread(lambda: fd.execute([x]), f"thread {k}")
        assert_beside(y, expected)
    with pytest.raises(NotInitializedError):
        run_in_this_thread()


def test_each_simulated_rank_has_a_turn_of_its_own() -> None:
    whole = numbers(4, 8)

    def run() -> None:
        mesh = DeviceMesh([0, 1])
        for _ in range(2):
            (y,) = normalised(mesh).execute([mesh.shard_tensor(whole, 1)])
        assert_beside(y, mesh.shard_tensor(normalised_by_torch(whole), 1))
        x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(1)])
        fd = normalised(mesh)
        (y,) = fd.execute([mesh.shard_tensor(whole, 1)])
        (z,) = copy.deepcopy(fd).execute([mesh.shard_tensor(whole, 1)])
        assert torch.equal(y, z)
        normalised(mesh).execute([x])

    simulate(run, 2)
    run_ranks(2, lambda rank, size: run())
