"""Tests on a GPU may share it, in processes of pytest-xdist; one that measures has it to itself."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest
import torch

KEPT_BYTES = 2 * 2**30
"""Of free memory, which torch's allocator may keep for the process's next test."""


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests marked ``alone`` wait until no other process is in a test of this folder, and the others wait for them.
    What a test has taken is there for the other processes after it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    is_alone = request.node.get_closest_marker("alone") is not None
    shared = tmp_path_factory.getbasetemp().parent  # of all processes of this session
    with (shared / "gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        yield
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEPT_BYTES:
            torch.cuda.empty_cache()
