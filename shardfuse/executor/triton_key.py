# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""The key under which Triton caches what it compiles: a hash of all of its own files, its library of 0.4 GB among them.

Making it takes half a second of every process, also where all kernels are found compiled.  It is kept on disk by what
tells one installation from another: version, place, size and time of the library.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from .files import publish


@functools.cache
def remember_triton_key(directory: Path) -> None:
    """Give Triton the key that an earlier process made; the first of an installation makes it and leaves it there."""
    from triton import __version__
    from triton._C import libtriton
    from triton.runtime import cache

    library = Path(str(libtriton.__file__))
    stat = library.stat()
    facts = f"{__version__} {library} {stat.st_size} {stat.st_mtime_ns}"
    path = directory / f"triton_{_digest(facts)}.key"
    kept = _read(path, facts)
    if kept is None:
        key = cache.triton_key()
        publish(path, f"{facts}\n{_digest(key)}\n{key}")
    else:
        cache.triton_key = lambda: kept


def _read(path: Path, facts: str) -> str | None:
    """The key; ``None`` where the file is not there, or is not whole."""
    try:
        found, digest, key = path.read_text().split("\n", 2)
    except (OSError, ValueError):  # UnicodeDecodeError is a ValueError
        return None
    return key if (found, digest) == (facts, _digest(key)) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
