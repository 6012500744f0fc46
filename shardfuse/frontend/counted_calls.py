"""Calls of a program in which ranks communicate are counted, and runs that fail are told of (``mesh/calls.py``)."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from ..errors import PeerLostError
from ..executor.agreement import agree
from ..executor.host_program import FILE, Program
from ..executor.refusals import note_refusal
from ..ir.fusion import Fusion
from ..mesh.calls import FAILED_RUN, Call, Ledger
from ..mesh.process import ledger_of
from ..rank_errors import ExchangeTimeoutError
from .bound_call import BoundCall
from .profiled import ops_of


class Sending(Protocol):
    """sends: do ranks send one another anything in the programs of a fusion?  None where none was made yet."""

    @property
    def sends(self) -> bool | None: ...


class RefusalsNoted:
    """Around what a call of the ``ranks`` of a fusion does before its program runs: a call that ends there is noted.

    Not where ranks are known to send one another nothing in its programs: no later call then meets another rank's.
    It is noted behind what is reported to ranks that wait (``failures_told``), which says how many calls came before.
    of: what knows whether they do; ``None`` where nothing is known of them.
    """

    __slots__ = ("_of", "_ranks")

    def __init__(self, of: Sending | None, ranks: Sequence[int]) -> None:
        self._of, self._ranks = of, ranks

    def __enter__(self) -> None:
        """Nothing: every call comes by."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and (self._of is None or self._of.sends is not False):
            note_refusal(self._ranks, error)


def counted(fusion: Fusion, program: Program, call: BoundCall, *, is_sending: bool) -> Program:
    """``program`` of ``fusion`` as ``call`` runs it.  is_sending: do its ranks send one another anything?"""
    ledger = ledger_of(call.ranks)
    if ledger is None:
        return program
    known = replace(program, call=Call.of(call.text, name_of_call(fusion, call.sizes.values())))
    if not is_sending:
        return known
    return replace(known, note=ledger.note, on_failure=partial(_tell, ledger, program.last_sending_line))


def name_of_call(fusion: Fusion, sizes: Iterable[Sequence[int]] = ()) -> str:
    """As an error calls it: its ops, unsharded sizes of its inputs, and the line of its first result.

    In place of the line the module that ran it first, where it is one's: modules of several classes may share it.
    """
    shapes, line = ", ".join(str(list(shape)) for shape in sizes), fusion.outputs[0].line
    origin = f", defined at {line}" if line else ""
    if fusion.first_owner is not None:
        origin = f", first run by {fusion.first_owner}"
    return f"a fusion of {ops_of(fusion)}{f' over {shapes}' if shapes else ''}{origin}"


def agree_on_exchange_of_sizes(fusion: Fusion, ranks: Sequence[int], asked: str) -> None:
    """Before the ranks of ``fusion`` tell one another sizes of their shards: ``asked`` is what they have alike."""
    text = f"sizes of uneven shards are exchanged\n{asked}"
    agree(ranks, asked, text)
    ledger = ledger_of(ranks)
    if ledger is not None:
        ledger.note(Call.of(text, f"an exchange of sizes for {name_of_call(fusion)}"))


def _tell(ledger: Ledger, last: int, error: Exception) -> None:
    """Of a run that has failed: calls that follow are compared as those of a rank that has not made this one.

    A rank that runs out of memory and goes on with its next batch would have the others add that to this one: it has
    sent less than it has called, in whatever order.  One that has sent everything has made the call as the others have,
    which need not know: ranks may agree on leaving out that batch.  Failures that another rank is the reason of are
    told anyway.  ``last``: the last line in which the program sends.
    """
    if _is_own(error) and _line_of(error) <= last:
        ledger.note(FAILED_RUN)


def note_failed(ranks: Sequence[int], program: Program, error: Exception, *, is_noted: bool) -> None:
    """Tell of a call around which ``ranks`` exchange pieces, which this one has not all sent.

    is_noted: is the call itself?  Where the program is told of by itself, it is not once more.
    """
    ledger = ledger_of(ranks) if _is_own(error) else None
    if ledger is None:
        return
    if not is_noted:
        ledger.note(program.call)
    if ledger.latest[0] is not FAILED_RUN:
        ledger.note(FAILED_RUN)


def _is_own(error: Exception) -> bool:
    return not isinstance(error, ExchangeTimeoutError | PeerLostError)


def _line_of(error: Exception) -> int:
    """The line of the program in which it was raised; 0 where that is before the program, as in a check of replicas."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    return next((line for name, line in reversed(frames) if name == FILE), 0)
