# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false
"""Triton's own cache, which it loads compiled kernels and compiled C from without looking at whose they are."""

from __future__ import annotations

import warnings
from pathlib import Path

from ..errors import UnsafeFolderError
from ..secure_files import fresh_folder, open_folder


def keep_triton_private() -> None:
    """Have Triton keep what it compiles in a fresh folder where others can write into the one that it has.

    That they can read it is Triton's own choice, which makes it for all to read.  A folder that is missing is made
    for this user alone.
    """
    from triton import knobs

    if knobs.runtime.interpret:  # nothing is compiled
        return
    path = Path(knobs.cache.dir)
    try:
        with open_folder(path, "name another by TRITON_CACHE_DIR", "allowed"):
            return
    except UnsafeFolderError as error:
        warnings.warn(f"{error}; until then Triton keeps what it compiles for this process alone", stacklevel=2)
    except OSError:  # it cannot be made, and Triton has to have one
        pass
    knobs.cache.dir = str(fresh_folder())
