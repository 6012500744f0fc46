"""Work that Python's garbage collector does not interrupt."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Generator[None]:
    """Planning makes many small objects beside all of Inductor's, through which the collector would walk again and
    again: that was half of its time, and a quarter of the first calls of a model's regions."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
