"""Ranks that wait for each other inside of kernels, on a GPU each, as processes: late, stopped, gone, or elsewhere."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from process_environment import environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SCRIPT = Path(__file__).with_name("exchange_ranks.py")
LIMIT = 20.0
"""Seconds from the fault to the end of the other rank."""


def outcome(case: str, under: Sequence[str] = ()) -> tuple[list[int], list[str], float]:
    """Exit codes and outputs of both ranks, and when the last of them ended.  under: what runs each of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world |= {"SHARDFUSE_EXCHANGE": "symmetric"}
    ranks = [
        subprocess.Popen(
            [*under, sys.executable, str(SCRIPT), case],
            env=environment() | world | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], texts, time.time()


def test_late_ranks_and_changing_sizes_are_no_fault() -> None:
    """One stands still for seconds; then sizes change in every call, and 100,000 calls are replayed out of step."""
    codes, texts, _ = outcome("go_on")
    assert codes == [0, 0], "\n".join(texts)
    assert all("done" in text for text in texts)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_access_is_out_of_bounds_and_no_shared_memory_is_raced_for(tool: str) -> None:
    under = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=exchange"]
    codes, texts, _ = outcome("few", under)
    assert codes == [0, 0], "\n".join(texts)


@pytest.mark.parametrize("case", ["kill", "raise", "other", "leave"])
def test_a_rank_that_waits_in_a_kernel_for_one_that_does_not_come_ends(case: str) -> None:
    codes, texts, ended = outcome(case)
    told = re.search(r"^fault (\S+)$", texts[1], re.MULTILINE)
    assert told is not None, "\n".join(texts)
    assert codes[0] == 1, texts[0]
    assert ended - float(told[1]) < LIMIT, texts[0]
    assert re.search(r"^shardfuse: rank 0: .*rank 1\b", texts[0], re.MULTILINE), texts[0]
    assert case != "raise" or "ValueError: a bug" in texts[1]
