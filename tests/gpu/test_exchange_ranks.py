"""Ranks that wait for each other inside of kernels, as processes: late, stopped, gone, or elsewhere.

Each has a GPU of its own where there are two; else they take turns on one (SHARDFUSE_SHARED_GPU), where the words, the
waits, the faults and the memory are the same, and NCCL is not there.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from exchange_processes import outcome

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

LIMIT = 20.0
"""Seconds from the fault to the end of the other rank."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_late_ranks_and_changing_sizes_are_no_fault(ranks: int, tmp_path: Path) -> None:
    """One stands still for seconds; then sizes change in every call, and 100,000 calls are replayed out of step."""
    codes, texts, _ = outcome("go_on", tmp_path, ranks=ranks)
    assert codes == [0] * ranks, "\n".join(texts)
    assert all("done" in text for text in texts)


@pytest.mark.parametrize("case", ["collectives", "collectives_of_views", "plain_collectives", "capture"])
def test_collectives_by_kernels(case: str, tmp_path: Path) -> None:
    """Of every kind, along every dim, up to 32 MB, and of tensors that begin anywhere: ``exchange_collectives.py``."""
    codes, texts, _ = outcome(case, tmp_path)
    assert codes == [0, 0], "\n".join(texts)


def test_graphs_and_calls_on_many_streams_take_no_words_of_one_another(tmp_path: Path) -> None:
    """10,000 replays of two graphs and calls of other programs, each kind on a stream of its own."""
    codes, texts, _ = outcome("graphs", tmp_path)
    assert codes == [0, 0], "\n".join(texts)
    assert all("done" in text for text in texts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL has ranks on GPUs of their own")
def test_process_groups_and_kernels_that_ranks_start_in_other_orders_all_end(tmp_path: Path) -> None:
    """Each of them waits for its part on another rank, and there is room for all at once."""
    codes, texts, _ = outcome("groups", tmp_path)
    assert codes == [0, 0], "\n".join(texts)
    assert all("done" in text for text in texts)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_access_is_out_of_bounds_and_no_shared_memory_is_raced_for(tool: str, tmp_path: Path) -> None:
    under = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=exchange"]
    if tool == "memcheck":  # calls of NCCL's fail, which it then does without
        under += ["--report-api-errors", "no"]
    codes, texts, _ = outcome("few", tmp_path, under)
    assert codes == [0, 0], "\n".join(texts)


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    "case", ["kill", "killed_collective", "raise", "other", "leave", pytest.param("elsewhere", marks=TWO_GPUS)]
)
def test_a_rank_that_waits_in_a_kernel_for_one_that_does_not_come_ends(case: str, tmp_path: Path) -> None:
    codes, texts, ended = outcome(case, tmp_path)
    told = re.search(r"^fault (\S+)$", texts[1], re.MULTILINE)
    assert told is not None, "\n".join(texts)
    assert codes[0] == 1, "\n".join(texts)
    assert ended - float(told[1]) < LIMIT, texts[0]
    assert re.search(r"^shardfuse: rank 0: .*rank 1\b", texts[0], re.MULTILINE), texts[0]
    said = "rank 1 has `tensors are on another GPU than this rank's own`"
    assert case != "elsewhere" or all(said in text for text in texts), "\n".join(texts)
    assert case != "raise" or "ValueError: a bug" in texts[1]
