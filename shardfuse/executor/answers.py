"""What one rank of a team finds out for all of it, told through the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..rank_errors import RanksLateError
from .agreement import LONGEST, SHORTEST, digest, name_call, side_of


def answer_once(ranks: Sequence[int], question: str, make: Callable[[], str]) -> str:
    """This rank's answer for all of ``ranks``: the one that it gave before, or what ``make`` gives now."""
    side = side_of(ranks)
    if side is None:
        return make()
    key = _answer_key(ranks, question)
    if not side.store.check([key]):
        side.store.set(key, make())
    return side.store.get(key).decode()


def answer_of(ranks: Sequence[int], question: str, who: int) -> str:
    """What the rank ``who`` answers to ``question``, waited for.  Raises RanksLateError."""
    side = side_of(ranks)
    assert side is not None, f"rank {who} answers only ranks {ranks}"
    key = _answer_key(ranks, question)
    began, pause = time.monotonic(), SHORTEST
    while not side.store.check([key]):
        if time.monotonic() - began > side.timeout:
            late = RanksLateError([who], side.timeout, question)
            side.tell_failure(late, ranks)
            name_call(late)
            raise late
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    return side.store.get(key).decode()


def _answer_key(ranks: Sequence[int], question: str) -> str:
    return f"answer/{digest(f'{tuple(ranks)}{question}')}"
