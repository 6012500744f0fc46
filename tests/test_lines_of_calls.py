"""Errors of ranks that wait for one another, or whose calls differ, name the caller's line that made the call."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from planted_differences import BASE
from ranks import run_ranks

from shardfuse.errors import ProgramMismatchError, ShardfuseError
from shardfuse.mesh.calls import Call, Ledgers, first_difference
from shardfuse.mesh.ending import sentence
from shardfuse.rank_errors import RanksLateError
from shardfuse.source_line import caller_line


def raised(rank: int, *, op: str = "neg") -> ShardfuseError:
    with pytest.raises(ShardfuseError) as error:
        replace(BASE, unary=op).run(rank)
    return error.value


def test_programs_that_differ_before_their_first_run() -> None:
    for error in run_ranks(3, lambda rank, _: raised(rank, op="exp" if rank else "neg")):
        assert isinstance(error, ProgramMismatchError)
        assert _is_named(error), error


def test_a_rank_that_is_late_for_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_TIMEOUT", "0.5")

    def run(rank: int, _: int) -> ShardfuseError:
        time.sleep(1.0 if rank == 1 else 0.0)
        return raised(rank)

    errors = run_ranks(3, run)
    for rank in (0, 2):
        assert isinstance(errors[rank], RanksLateError)
        assert _is_named(errors[rank]), errors[rank]


def _is_named(error: ShardfuseError) -> bool:
    _, *lines = str(error).split("\n")
    own = [line for line in lines if line.endswith("# the call")]
    return len(own) == 1 and "execute(" in own[0] and "planted_differences.py" in own[0]


def test_collectives_that_differ_name_where_they_were_first_called() -> None:
    """The line is found where the text of a call is made, which is kept, and not in each call."""
    ranks, calls = [Ledgers(k) for k in range(2)], []
    for k, ledgers in enumerate(ranks):
        calls.append(Call.of(f"all_reduce of [{k}]", line=caller_line(in_modules=True)))
        ledgers.of((0, 1)).note(calls[-1])
        ledgers.take_in()
    error = first_difference((0, 1), {k: ledgers.of((0, 1)).tail() for k, ledgers in enumerate(ranks)})
    assert error is not None
    for k, call in enumerate(calls):
        assert f"rank {k} has `all_reduce of [{k}], first called at {call.line}`" in str(error)
    assert Call.of("one", line=calls[0].line).digest == Call.of("one", line=None).digest, "lines are not compared"


def test_a_collective_that_fails_names_the_line_that_came_to_it() -> None:
    def found(error: type[Exception]) -> str:
        try:
            raise error("timed out")
        except Exception as raised_here:  # noqa: BLE001 - any
            return sentence(raised_here)

    assert found(dist.DistNetworkError).startswith("DistNetworkError: timed out; at ")
    assert found(dist.DistNetworkError).endswith('raise error("timed out")')
    assert found(ValueError) == "ValueError: timed out"
