"""Ranks that exchange inside of kernels, as processes on a CPU: under Triton's interpreter, in memory that they share.

What compiles for a GPU is tested there (``tests/gpu/test_exchange_ranks.py``); the rest of the way is the same:
the arena, the slots that ranks agree on, the numbers of launches, the waits, and what becomes of one for a lost rank.
"""

from __future__ import annotations

import re
from pathlib import Path

from exchange_processes import outcome


def test_ranks_have_what_they_have_together(tmp_path: Path) -> None:
    codes, texts, _ = outcome("few", tmp_path, ranks=3)
    assert codes == [0, 0, 0], "\n".join(texts)


def test_ranks_of_any_mesh_whose_memory_they_reach_exchange(tmp_path: Path) -> None:
    """Of two of four ranks, of lines of a mesh of two dimensions, and of one host of two."""
    codes, texts, _ = outcome("meshes", tmp_path, ranks=4)
    assert codes == [0, 0, 0, 0], "\n".join(texts)


def test_a_rank_that_waits_in_a_kernel_for_one_that_was_killed_ends(tmp_path: Path) -> None:
    """Long before the end of the wait: its watchdog goes on while the kernel waits."""
    codes, texts, _ = outcome("kill", tmp_path)
    assert codes == [1, -9], "\n".join(texts)
    assert re.search(r"^shardfuse: rank 0: rank 1 ended without a word", texts[0], re.MULTILINE), texts[0]
