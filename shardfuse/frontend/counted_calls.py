"""Calls of a program in which ranks communicate are counted, and runs that fail are told of (``mesh/calls.py``)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import PeerLostError
from ..executor.host_program import Host, Program
from ..mesh.calls import FAILED_RUN, Call, Ledger
from ..mesh.process import ledger_of
from ..rank_errors import ExchangeTimeoutError
from .bound_call import BoundCall


def counted(program: Program, call: BoundCall, *, is_sending: bool) -> Program:
    """``program`` as ``call`` runs it.  is_sending: do its ranks send one another anything?"""
    ledger = ledger_of(call.ranks)
    if ledger is None:
        return program
    known = replace(program, call=Call.of(call.text))
    return replace(known, run=_told_of(program.run, ledger), note=ledger.note) if is_sending else known


def _told_of(run: Host, ledger: Ledger) -> Host:
    """``run``; once it has failed, calls that follow are compared as those of a rank that has not made this one.

    A rank that runs out of memory and goes on with its next batch would have the others add that to this one: it has
    sent less than it has called, in whatever order.  Failures that another rank is the reason of are told anyway.
    """
    note = ledger.note

    def run_or_tell(*arguments: object) -> tuple[torch.Tensor | None, ...]:
        try:
            return run(*arguments)
        except (ExchangeTimeoutError, PeerLostError):
            raise
        except Exception:
            note(FAILED_RUN)
            raise

    return run_or_tell
