# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""Which Triton is installed, and the key under which it caches what it compiles.

The key is a hash of all of Triton's own files, its library of 0.4 GB among them: making it takes half a second of
every process, also where all kernels are found compiled.  It is kept on disk by what tells one installation from
another: place, size and time of the library.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

from .files import publish


@functools.cache
def installed_triton() -> str:
    """What tells this installation of Triton from another, found without importing it, which takes 0.2 s."""
    spec = importlib.util.find_spec("triton")
    places = (spec.submodule_search_locations if spec is not None else None) or []
    library = next((path for place in places for path in sorted(Path(place, "_C").glob("libtriton*.so"))), None)
    if library is None:
        return "none"
    stat = library.stat()
    return f"{library} {stat.st_size} {stat.st_mtime_ns}"


@functools.cache
def remember_triton_key(directory: Path) -> None:
    """Give Triton the key that an earlier process made; the first of an installation makes it and leaves it there."""
    from triton.runtime import cache

    facts = installed_triton()
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
