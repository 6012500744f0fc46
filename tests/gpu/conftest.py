"""Tests on a GPU may share it, in processes of pytest-xdist; one that measures has it to itself."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests marked ``alone`` wait until no other process is in a test of this folder, and the others wait for them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    is_alone = request.node.get_closest_marker("alone") is not None
    shared = tmp_path_factory.getbasetemp().parent  # of all processes of this session
    with (shared / "gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        yield
