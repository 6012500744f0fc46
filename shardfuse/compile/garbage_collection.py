"""Python's garbage collector, paused while regions are planned and first called."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Generator[None]:
    """The garbage collector does not run, and afterwards is as it was.

    Planning makes many small objects among all of Inductor's, which the collector would traverse again and again: that
    took half of the time of planning, and a quarter of the first calls of a model's regions.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
