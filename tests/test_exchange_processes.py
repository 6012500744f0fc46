"""Ranks that exchange inside of kernels, as processes on a CPU: under Triton's interpreter, in memory that they share.

What compiles for a GPU is tested there (``tests/gpu/test_exchange_ranks.py``); the rest of the way is the same:
the arena, the slots that ranks agree on, the numbers of launches, the waits, and what becomes of one for a lost rank.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from exchange_processes import SCRIPT, forked
from forked_ranks import Server

IS_SHORT = os.environ.get("STOPS") != "all"
"""Is no rank stopped for half a minute?"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(SCRIPT)
    yield made
    made.close()


def test_ranks_have_what_they_have_together(server: Server, tmp_path: Path) -> None:
    codes, texts = forked(server, "few", tmp_path, ranks=3)
    assert codes == [0, 0, 0], "\n".join(texts)


def test_ranks_of_any_mesh_whose_memory_they_reach_exchange(server: Server, tmp_path: Path) -> None:
    """Of two of four ranks, of lines of a mesh of two dimensions, and of one host of two."""
    codes, texts = forked(server, "meshes", tmp_path, ranks=4)
    assert codes == [0, 0, 0, 0], "\n".join(texts)


@pytest.mark.parametrize(
    "case",
    [
        "short_alone",
        "anew",
        "threads",
        "programs",
        "quantised",
        "losses",
        "tuned",
        "collectives",
        "collectives_of_views",
        "plain_collectives",
        "threads_of_collectives",
        "capture",
        "nothing_kept",
        "short_collective",
        "collectives_elsewhere",
        "no_collectives",
        "late_collective",
        "late_gather",
        "programs_of_collectives",
    ],
)
def test_all_ranks_go_on(case: str, server: Server, tmp_path: Path) -> None:
    """``exchange_alone.py`` says with what."""
    ranks = {"programs": 4, "collectives": 3}.get(case, 2)
    codes, texts = forked(server, case, tmp_path, ranks=ranks)
    assert codes == [0] * ranks, "\n".join(texts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_each_rank_are_added_up_normed_and_gathered(ranks: int, server: Server, tmp_path: Path) -> None:
    codes, texts = forked(server, "scattered", tmp_path, ranks=ranks)
    assert codes == [0] * ranks, "\n".join(texts)


@pytest.mark.parametrize("ranks", [3, 4])
def test_rows_of_a_sum_are_passed_on(ranks: int, server: Server, tmp_path: Path) -> None:
    codes, texts = forked(server, "passed", tmp_path, ranks=ranks)
    assert codes == [0] * ranks, "\n".join(texts)


def test_ranks_share_as_much_memory_as_they_are_asked_to(server: Server, tmp_path: Path) -> None:
    codes, texts = forked(server, "memory", tmp_path, variables={"SHARDFUSE_EXCHANGE_MEMORY": "1"})
    assert codes == [0, 0], "\n".join(texts)


@pytest.mark.parametrize("case", ["skip", "skipped_collective"])
def test_a_rank_that_fails_alone_and_goes_on_is_named(case: str, server: Server, tmp_path: Path) -> None:
    """Its next launch has the number of the one that it has not made: results would be those of two batches."""
    codes, texts = forked(server, case, tmp_path)
    assert codes == [1, 1], "\n".join(texts)
    for text in texts:
        assert re.search("ranks .0, 1. rank 1 left out the run of the call before, which failed, and went on", text), (
            text
        )


@pytest.mark.parametrize("case", ["kill", "killed_collective"])
def test_a_rank_that_waits_in_a_kernel_for_one_that_was_killed_ends(case: str, server: Server, tmp_path: Path) -> None:
    """Long before the end of the wait: its watchdog goes on while the kernel waits."""
    codes, texts = forked(server, case, tmp_path)
    assert codes == [1, -9], "\n".join(texts)
    assert re.search(r"^shardfuse: rank 0: rank 1 ended without a word", texts[0], re.MULTILINE), texts[0]


HEARTBEAT_LIMIT = 4.0
"""Seconds, of a world in which a rank is stopped for longer."""


def test_a_rank_that_waits_in_a_kernel_for_one_that_is_stopped_ends(server: Server, tmp_path: Path) -> None:
    """Once the stopped one counts as gone, long before the end of the wait; that one, as it goes on, ends as well."""
    limit = {"SHARDFUSE_HEARTBEAT_LIMIT": f"{HEARTBEAT_LIMIT}"}
    began = time.monotonic()
    codes, texts = forked(server, "stop", tmp_path, variables=limit, stopped=[1])
    assert codes == [1, 1], "\n".join(texts)
    silent = rf"^shardfuse: rank 0: rank 1 has given no sign of life for {HEARTBEAT_LIMIT:.0f} s"
    assert re.search(silent, texts[0], re.MULTILINE), texts[0]
    assert "has gone on" not in texts[0], "its kernel has ended, and no word has come"
    assert re.search(r"^shardfuse: rank 1: rank 0 (failed|ended)", texts[1], re.MULTILINE), texts[1]
    told = re.search(r"^fault (\S+)$", texts[1], re.MULTILINE)
    assert told is not None, texts[1]
    assert time.monotonic() - began < 55.0, "the wait of 60 s was not what ended it"


@pytest.mark.parametrize(
    "seconds",
    [4, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.skipif(IS_SHORT, reason="STOPS=all stops for 30 s")])],
)
def test_a_rank_that_is_stopped_for_seconds_is_waited_for(seconds: int, server: Server, tmp_path: Path) -> None:
    """For less than the heartbeat limit, in which others wait in their kernels; then sizes change in every call."""
    variables = {"STOPPED": f"{seconds}", "SHARDFUSE_HEARTBEAT_LIMIT": "50", "SLOW": "100"}
    codes, texts = forked(server, "go_on", tmp_path, variables=variables)
    assert codes == [0, 0], "\n".join(texts)
    for text in texts:
        times = [
            float(said) for said in re.findall(r"^ *(\S+) s: (?:has run partial|was stopped, or)", text, re.MULTILINE)
        ]
        assert len(times) == 2, text
        assert times[1] - times[0] >= seconds, text
