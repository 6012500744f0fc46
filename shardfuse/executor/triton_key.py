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

from ..secure_files import read_sealed, write_sealed


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
    name = f"triton_{hashlib.sha256(facts.encode()).hexdigest()[:32]}.key"
    kept = read_sealed(directory, name)
    if kept is None:
        write_sealed(directory, name, cache.triton_key().encode())
    else:
        key = kept.decode()
        cache.triton_key = lambda: key
