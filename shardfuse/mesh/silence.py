"""For how long other ranks have said nothing, as the watchdog counts it."""

from __future__ import annotations

import time

from shardfuse.mesh.board import INTERVAL, Board


class Silence:
    """For how long the other ranks, and the store, have given no sign of life, in time that this process has lived."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}
        self.of_store = 0.0
        self._beats: dict[int, int] = {}
        self._unanswered: int | None = None
        self._rounds = 0
        self._heard = time.monotonic()

    def listen(self, board: Board) -> None:
        """To be called at every interval: what lies between two calls beyond that, this process did not live."""
        now = time.monotonic()
        lived, self._heard = min(now - self._heard, 2 * INTERVAL), now
        unanswered = board.unanswered()
        self.of_store = self.of_store + lived if unanswered is not None and unanswered == self._unanswered else 0.0
        self._unanswered = unanswered
        if unanswered is not None and board.rounds == self._rounds:
            return  # no round has ended: nothing is known of the others
        self._rounds = board.rounds
        for rank, record in board.records.items():
            moved = record.beat != self._beats.get(rank)
            self._beats[rank] = record.beat
            self.of[rank] = 0.0 if moved else self.of[rank] + lived
