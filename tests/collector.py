"""The collector of garbage while tests run: off until all is imported, then seldom, and never over what stays.

Objects that stay are millions: looking for garbage among them, again and again, took a fifth of the time.
"""

from __future__ import annotations

import gc

gc.disable()  # from the first import on: nearly nothing of what is imported is garbage


def begin() -> None:
    """What has been imported by now stays."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def keep() -> None:
    """What the tests of a file have left, in tables of the compiler for one, stays as well."""
    gc.collect(1)
    gc.freeze()
