"""How long the thread in which gloo threw waits before it aborts the process."""

from __future__ import annotations

import time

import pytest

from shardfuse.mesh import gloo_aborts
from shardfuse.mesh.gloo_aborts import HeldAbort


def seconds_held(monkeypatch: pytest.MonkeyPatch, beats: list[int | None], *, ending: int = 0) -> float:
    """``beats``: what its looks find, the last one for ever.  ``ending``: looks during which the process is ended."""
    monkeypatch.setattr(gloo_aborts, "_SECONDS", 2.0)
    looks = iter([True] * ending)
    held = HeldAbort(lambda: beats.pop(0) if len(beats) > 1 else beats[0], lambda: next(looks, False))
    monkeypatch.setattr(held, "_is_gloos", lambda: True)
    began = time.monotonic()
    held._wait()
    return time.monotonic() - began


def test_it_waits_for_sixteen_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_held(monkeypatch, [*range(3, 20)]) > 0.7
    assert seconds_held(monkeypatch, [7]) >= 2.0


def test_it_does_not_wait_where_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_held(monkeypatch, [None]) < 0.5
    assert seconds_held(monkeypatch, [3, 3, None]) < 0.5


def test_a_process_that_is_ended_with_an_error_of_its_own_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has named the calls that differ waits for the others to read it; their store may be gone by then."""
    assert seconds_held(monkeypatch, [3, None], ending=10) > 0.4
    assert seconds_held(monkeypatch, [None], ending=10) > 0.4
    assert seconds_held(monkeypatch, [0, 99], ending=10) > 0.4
