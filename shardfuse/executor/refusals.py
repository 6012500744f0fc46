"""Calls that a rank refuses are noted in its record of calls, as those that it makes are (``mesh/calls.py``).

Ranks that have all refused a call are in step.  One that has refused it alone, and whose caller catches the error and
goes on with the same program, would meet the others' run of the one before in each later call: its record differs from
theirs, and the watchdog ends all by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..base_error import ShardfuseError
from ..mesh.calls import refused_call
from ..mesh.process import is_forked, ledger_of
from ..rank_errors import WaitingCircleError

_NOTED: Final = "_shardfuse_refusal_is_noted"
"""Of an error: it may pass several places that report it."""
_LONGEST = 300
"""Letters of a reason: a record keeps thousands."""


def note_refusal(ranks: Sequence[int], error: Exception) -> None:
    """Note that a call of a program of ``ranks`` ends by ``error`` before the program runs, once for each error.

    Also one that has waited before a first run, where others have called another program: its caller's next call would
    meet their next one.  Not a circle of programs of several meshes, which ends another call on each rank.
    """
    if is_noted(error) or is_forked() or isinstance(error, WaitingCircleError):
        return
    ledger = ledger_of(tuple(sorted(ranks)))
    if ledger is not None:
        mark_noted(error)
        reason = f"{type(error).__name__}: {error}" if isinstance(error, ShardfuseError) else type(error).__name__
        ledger.note_refused(refused_call(reason.partition("\n")[0][:_LONGEST]))


def is_noted(error: BaseException) -> bool:
    return _NOTED in vars(error)


def mark_noted(error: BaseException) -> None:
    """``error`` is raised in place of one that is noted, or is noted now."""
    vars(error)[_NOTED] = True
