"""Files that many processes write: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def publish(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` by one atomic rename; a directory that cannot be written is gone without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
