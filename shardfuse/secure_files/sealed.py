"""What processes keep for later ones, each file with an authentication code that only this user's key can have made.

The key is not beside what it vouches for: it is in the user's configuration folder, so that nothing is loaded which
somebody left in the cache folder while that was open to others, or which was damaged, cut off or renamed there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import os
import secrets
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

from shardfuse.config import is_cache_directory_named, read_cache_directory, read_key_directory
from shardfuse.errors import UnsafeFolderError

from .folder import open_folder, read_file, write_file

_ANOTHER = "name another by SHARDFUSE_CACHE_DIR"
_KEY_FILE = "key"
_KEY_BYTES = 32
_CODE_BYTES = 1 + 2 * 32  # a line feed, and HMAC-SHA256 in hexadecimal

_choosing = threading.Lock()


def read_sealed(directory: Path, name: str) -> bytes | None:
    """What `write_sealed` wrote under `name`, which may have a folder in it; None for anything else that is there."""
    try:
        with open_folder(_usable(directory), _ANOTHER) as folder:
            found = read_file(folder, name)
    except (OSError, UnsafeFolderError):
        return None
    content, code = found[:-_CODE_BYTES], found[-_CODE_BYTES:]
    return content if hmac.compare_digest(code, _code(name, content)) else None


def write_sealed(directory: Path, name: str, content: bytes) -> None:
    """Keep `content` under `name`; a directory that cannot be written is gone without, which is warned of once."""
    _write(directory, name, content + _code(name, content))


def keep_text(directory: Path, name: str, text: str) -> Path:
    """Keep a text that people read and nothing loads; where it is, or would be if it could be written."""
    _write(directory, name, text.encode())
    return _usable(directory) / name


def _write(directory: Path, name: str, content: bytes) -> None:
    try:
        with open_folder(_usable(directory), _ANOTHER) as folder:
            if "/" in name:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(name), 0o700, dir_fd=folder)
            write_file(folder, name, content)
    except (OSError, UnsafeFolderError) as error:
        _warn_of(directory, f"nothing can be kept in {directory}: {_reason(error)}; each process compiles it again")


def _code(name: str, content: bytes) -> bytes:
    message = b"%s\0%s" % (name.encode(), content)  # under another name it would be another kernel
    with _choosing:
        key = _key()
    return b"\n" + hmac.digest(key, message, "sha256").hex().encode()


def _usable(directory: Path) -> Path:
    """`directory`, or a fresh folder of this process where that is refused, or cannot be made."""
    with _choosing:
        return _choose(directory)


@functools.cache
def _choose(directory: Path) -> Path:
    is_default = directory == read_cache_directory() and not is_cache_directory_named()
    try:
        with open_folder(directory, _ANOTHER, "closed" if is_default else "refused"):
            return directory
    except (OSError, UnsafeFolderError) as error:
        found = (
            str(error) if isinstance(error, UnsafeFolderError) else f"{directory} cannot be opened: {_reason(error)}"
        )
        _warn_of(directory, f"{found}; until then this process keeps kernels for itself alone")
        return fresh_folder()


_warned: set[Path] = set()


def _warn_of(directory: Path, text: str) -> None:
    """Once for each folder: a full disk is met by every kernel."""
    if directory not in _warned:
        _warned.add(directory)
        warnings.warn(text, stacklevel=2)


def _reason(error: Exception) -> str:
    """What the system says, without the file's name, and what to do."""
    said = error.strerror if isinstance(error, OSError) else None
    return f"{said}: make it a folder of yours with room in it, or {_ANOTHER}" if said else str(error)


def fresh_folder() -> Path:
    """A folder that is gone with this process."""
    folder, owner = Path(tempfile.mkdtemp(prefix="shardfuse-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and not a process that was forked off
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _key() -> bytes:
    """The user's key, made at the first use; one of this process alone where it can be kept nowhere."""
    directory = read_key_directory()
    reason = "this user has no home folder"
    if directory is not None:
        try:
            return _kept_key(directory)
        except (OSError, UnsafeFolderError) as error:
            reason = str(error)
    warnings.warn(
        f"the key that vouches for kept kernels cannot be kept: {reason}; so that each process compiles all of its "
        "kernels; set HOME or XDG_CONFIG_HOME to a folder of this user",
        stacklevel=2,
    )
    return secrets.token_bytes(_KEY_BYTES)


def _kept_key(directory: Path) -> bytes:
    """Raises OSError and UnsafeFolderError."""
    with open_folder(directory, "name another by XDG_CONFIG_HOME", "closed") as folder:
        try:
            found = read_file(folder, _KEY_FILE)
        except FileNotFoundError:
            return _first_key(folder, secrets.token_bytes(_KEY_BYTES))
        except PermissionError:  # somebody else may know it
            found = b""
        if len(found) == _KEY_BYTES:
            return found
        made = secrets.token_bytes(_KEY_BYTES)
        write_file(folder, _KEY_FILE, made)
        return made


def _first_key(folder: int, made: bytes) -> bytes:
    """`made`, unless another process was first: all have the one that is there."""
    try:
        write_file(folder, _KEY_FILE, made, keep_first=True)
    except FileExistsError:
        return read_file(folder, _KEY_FILE)
    except OSError:  # a file system without hard links
        write_file(folder, _KEY_FILE, made)
    return made
