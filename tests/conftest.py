"""What every test has: strict mode, one thread, and no GPU test where there is no GPU."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from functools import cache

import collector  # before what takes long to import
import numpy as np
import pytest

# Before anything reads it: a kernel that does not compile is an error here, never a fallback.
os.environ["SHARDFUSE_STRICT"] = "1"

import torch
from file_claims import Claims

from shardfuse.config import read_cache_directory
from shardfuse.executor.driver import Driver, open_unconnected
from shardfuse.frontend import repeat

_CLAIMS = Claims.from_environment()

torch.set_num_threads(1)


@cache
def driver_on_cpu() -> Driver | None:
    """What runs without a GPU of what is written in C; ``None`` where there is no compiler for it."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    return None if compiler is None else open_unconnected(read_cache_directory())


def _driver_for(tensors: Sequence[torch.Tensor]) -> Driver | None:
    return driver_on_cpu()


# Calls are repeated in C, as they are on a GPU; what runs in another process repeats them in Python.
repeat.driver_for = _driver_for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-goldens", action="store_true", help="write expected texts anew instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("multi_gpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two GPUs or more, {gpus} found"))

    if _CLAIMS is not None:
        _CLAIMS.order(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """True, which is to have run it, of a test in a file that another process runs."""
    return None if _CLAIMS is None or _CLAIMS.is_own(item.path) else True


def pytest_configure() -> None:
    """Without a GPU a process compiles its graphs itself: Inductor's workers import torch again, which takes longer.

    What vectors the processor has is read, and not tried by programs that are compiled and run before the first kernel.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_collection_finish() -> None:
    """Each test compiles its graphs: what shardfuse does with one that torch's caches have, left there by another test
    or by an earlier run, is for the tests of these caches to see.
    """
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor  # imports Triton, which the interpreter's conftest does first

    inductor.fx_graph_cache = autograd.enable_autograd_cache = False
    collector.begin()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Not where there is a GPU: CUDA graphs that tests have left are found by what the collector knows."""
    if (nextitem is None or nextitem.path != item.path) and not torch.cuda.is_available():
        collector.keep()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers in each run, in any order and alone."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def others_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a world looks for its groups among what this test has made, not among millions of other objects."""
    monkeypatch.setattr("gc.unfreeze", lambda: None)


@pytest.fixture
def device() -> torch.device:
    """A GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
