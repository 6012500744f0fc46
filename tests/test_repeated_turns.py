"""Repeated calls of programs of several ranks, in C: whose turn it is, and where that has to be asked in Python."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import driver_on_cpu

from shardfuse.executor.driver import RepeatParts
from shardfuse.executor.turns import Held, Turn, go_on, is_of_autograd
from shardfuse.rank_errors import ThreadsError

Again = Callable[[Sequence[torch.Tensor]], object]


def in_thread(run: Callable[[], object], name: str = "other") -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(run()), name=name)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return found[0] if found else None


class Call:
    """A repeated call of ``run``.  came: what reached it, and by which way."""

    def __init__(self, held: Held | None, run: Callable[..., object], **parts: Any) -> None:
        self.came: list[str] = []
        self.cache = SimpleNamespace(programs="programs", last_made=None)
        self.noted: list[object] = []
        self.world = SimpleNamespace(_world=SimpleNamespace(default_pg=None))
        self.dual = SimpleNamespace(_current_level=-1)
        self.profiler = SimpleNamespace(_is_profiler_enabled=False)

        def otherwise(inputs: object) -> str:
            self.came.append("otherwise")
            return "otherwise"

        def failed(inputs: object, error: Exception, is_programs: bool) -> None:
            self.came.append("the program failed" if is_programs else "failed")
            raise error

        given = RepeatParts(
            check=None, run=run, otherwise=otherwise, failed=cast("Any", failed), cache=self.cache, programs="programs",
            made="made", group=None, held=held, note=self.noted.append, call="call", inputs=1, has_gradients=False,
            gives_list=False, c10d=cast("Any", self.world), forward_ad=self.dual,
            is_grad_enabled=torch.is_grad_enabled, set_grad_enabled=cast("Any", torch._C)._set_grad_enabled,
            current_thread=threading.current_thread, is_of_autograd=is_of_autograd, go_on=go_on,
            profiler=self.profiler,
        )  # fmt: skip
        driver = driver_on_cpu()
        if driver is None:
            pytest.skip("needs a C compiler")
        self.again: Again = driver.repeat(given._replace(**parts))


def owned() -> tuple[Turn, Held]:
    """A turn that this thread has had, with a team that knows of it."""
    turn = Turn()
    held = turn.of([0, 1])
    with held:
        pass
    return turn, held


X = torch.zeros(1)


def is_let_go(turn: Turn) -> bool:
    return (turn._inside, turn._depth) == (None, 0)  # pyright: ignore[reportPrivateUsage]


def test_the_owner_runs_it_inside_of_its_turn() -> None:
    turn, held = owned()
    seen: list[object] = []

    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append((turn._inside, turn._depth, torch.is_grad_enabled(), call.cache.last_made))
        return (x,)

    call = Call(held, run)
    for _ in range(3):
        found = call.again([X])
        assert isinstance(found, tuple)
        assert found[0] is X
    assert seen == [(threading.current_thread(), 1, False, "made")] * 3
    assert torch.is_grad_enabled()
    assert is_let_go(turn)
    assert call.noted == ["call"] * 3
    assert not call.came


def test_a_program_within_another() -> None:
    turn, held = owned()
    inner = Call(held, lambda x: turn._depth)
    outer = Call(held, lambda x: (inner.again([x]), turn._depth))
    assert outer.again((X,)) == (2, 1)
    assert is_let_go(turn)


def test_what_is_not_as_it_was_has_to_be_looked_up() -> None:
    _, held = owned()
    call = Call(held, lambda x: "ran")
    assert call.again([X]) == "ran"
    assert call.again([X, X]) is None
    assert call.again(cast("Any", X)) is None
    call.cache.programs = "others"
    assert call.again([X]) is None
    call.cache.programs = "programs"
    call.world._world = SimpleNamespace(default_pg=object())
    assert call.again([X]) is None
    call.world._world = SimpleNamespace(default_pg=None)
    call.dual._current_level = 0
    assert call.again([X]) is None
    call.dual._current_level = -1
    assert call.again([X]) == "ran"
    assert len(call.noted) == 2
    with pytest.raises(TypeError, match="its inputs"):
        cast("Any", call.again)(X, X)
    with pytest.raises(TypeError, match="its inputs"):
        cast("Any", call.again)(inputs=[X])


class Group:
    """In place of a process group, to which a weak reference may point."""


def test_a_default_group_that_is_gone() -> None:
    from weakref import ref

    group: Group | None = Group()
    call = Call(None, lambda x: "ran", group=ref(group))
    assert call.again([X]) is None
    call.world._world.default_pg = group
    assert call.again([X]) == "ran"
    call.world._world.default_pg = group = None
    gc.collect()
    assert call.again([X]) is None, "there was one"


def test_another_thread_has_to_ask() -> None:
    turn, held = owned()
    call = Call(held, lambda x: "ran")
    assert in_thread(lambda: call.again([X])) == "otherwise"
    assert call.again([X]) == "ran"
    assert is_refused(held)
    assert call.again([X]) == "otherwise", "a thread was refused"
    assert is_let_go(turn)


def is_refused(held: Held) -> bool:
    """Is another thread?"""

    def come() -> bool:
        with pytest.raises(ThreadsError):
            held.__enter__()
        return True

    return in_thread(come) is True


def test_what_a_profiler_records_runs_in_python() -> None:
    _, held = owned()
    call = Call(held, lambda x: "ran")
    call.profiler._is_profiler_enabled = True
    assert call.again([X]) == "otherwise"
    call.profiler._is_profiler_enabled = False
    assert call.again([X]) == "ran"


def test_whoever_holds_the_lock_is_left_alone() -> None:
    turn, held = owned()
    call = Call(held, lambda x: "ran")
    with turn._lock:
        assert call.again([X]) == "otherwise"
    assert call.again([X]) == "ran"


def test_other_ranks_are_told_of_a_new_owner() -> None:
    turn, held = owned()
    call = Call(held, lambda x: "ran")
    assert call.again([X]) == "ran"
    in_thread(turn.take_over)
    turn.take_over()
    assert call.again([X]) == "otherwise"
    with held:
        pass
    assert call.again([X]) == "ran"
    held.team.is_new = True
    assert call.again([X]) == "otherwise"


def test_a_thread_of_autograd_acts_for_the_owner() -> None:
    turn, held = owned()
    call = Call(held, lambda x: turn._inside is threading.current_thread(), is_of_autograd=lambda thread: True)
    assert in_thread(lambda: call.again([X])) is True
    assert is_let_go(turn)


def test_a_thread_of_autograd_waits_for_the_owner() -> None:
    """Which comes in while it is asked whose thread that is."""
    turn, held = owned()

    def is_of_autograd(thread: object) -> bool:
        turn._inside, turn._depth = turn._owner, 1
        return True

    call = Call(held, lambda x: "ran", is_of_autograd=is_of_autograd)
    assert in_thread(lambda: call.again([X])) == "otherwise"
    assert (turn._inside, turn._depth) == (turn._owner, 1)


def test_a_thread_that_is_refused_meanwhile() -> None:
    turn, held = owned()

    def come_upon(x: torch.Tensor) -> str:
        assert is_refused(held)
        return "ran"

    call = Call(held, come_upon)
    with pytest.raises(ThreadsError, match=r"'MainThread'.*'other'"):
        call.again([X])
    assert call.came == ["failed"]
    assert is_let_go(turn)
    assert torch.is_grad_enabled()


def test_a_program_that_fails() -> None:
    turn, held = owned()

    def fail(x: torch.Tensor) -> None:
        raise ValueError("planted")

    call = Call(held, fail)
    with pytest.raises(ValueError, match="planted") as caught:
        call.again([X])
    assert caught.traceback[-1].name == "fail"
    assert call.came == ["the program failed"]
    assert is_let_go(turn)
    assert torch.is_grad_enabled()


def test_failures_keep_nothing() -> None:
    _, held = owned()
    kept = [object() for _ in range(2)]

    def fail(x: torch.Tensor) -> None:
        raise ValueError(kept[0])

    call, x = Call(held, fail), torch.zeros(2)
    before = [*map(references, [*kept, x])]
    for _ in range(5):
        with pytest.raises(ValueError, match="object"):
            call.again([x])
    gc.collect()
    assert [*map(references, [*kept, x])] == before


def references(of: object) -> int:
    import sys

    return sys.getrefcount(of)


def test_parts_of_another_number() -> None:
    driver = driver_on_cpu()
    if driver is None:
        pytest.skip("needs a C compiler")
    with pytest.raises(TypeError, match="tuple of 22 parts"):
        driver.repeat(cast("Any", ()))
