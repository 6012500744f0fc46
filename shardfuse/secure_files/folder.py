"""Folders that nobody but this user can enter, and files in them.

A folder is opened first and then checked, and its files are reached through that one descriptor. Whoever can rename
or replace a folder further up can therefore hide a folder, but cannot put another in its place unnoticed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from shardfuse.errors import UnsafeFolderError

Reading = Literal["refused", "closed", "allowed"]
"""What becomes of a folder that others can read or search; where it is closed, they lose that right."""

_FOR_OTHERS = 0o077
_WRITABLE_FOR_OTHERS = 0o022


@contextlib.contextmanager
def open_folder(path: Path, instead: str, reading: Reading = "refused") -> Iterator[int]:
    """A descriptor of the folder, made with mode 0700 if it is missing; it is this user's, and nobody else can write.

    instead: what the user can do to have another folder used.
    Raises UnsafeFolderError, and OSError where the folder cannot be made.
    """
    descriptor = _checked(path, instead, reading)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(folder: int, name: str) -> bytes:
    """What the regular file holds. Raises OSError where there is none that only this user can have written."""
    # O_NONBLOCK: a named pipe must not be waited for.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_FOR_OTHERS:
            raise PermissionError(f"{name} is no file that {_user(os.geteuid())} alone can write")
        return file.read()


def write_file(folder: int, name: str, content: bytes, *, keep_first: bool = False) -> None:
    """Write the file by one atomic rename, so that whoever reads it finds all of it, or none.

    keep_first: leave a file that is there already. Raises OSError.
    """
    temporary = f"{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if keep_first:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def read_private(path: Path, instead: str) -> bytes | None:
    """What the file holds that only this user can have written; None where there is none. Raises UnsafeFolderError."""
    with contextlib.suppress(OSError), open_folder(path.parent, instead, "closed") as folder:
        return read_file(folder, path.name)
    return None


def write_private(path: Path, content: bytes, instead: str) -> None:
    """Write it where nobody else can enter. Raises UnsafeFolderError and OSError."""
    with open_folder(path.parent, instead, "closed") as folder:
        write_file(folder, path.name, content)


def _checked(path: Path, instead: str, reading: Reading) -> int:
    try:
        link = path.lstat()
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was first
            path.mkdir(0o700, parents=True)  # those above it have the mode that any new folder has
        link = path.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        raise _unsafe(path, f"it is a symbolic link that {_user(link.st_uid)} made", instead, link)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        forbidden = _FOR_OTHERS if reading == "refused" else _WRITABLE_FOR_OTHERS
        if found.st_uid != os.geteuid() or found.st_mode & forbidden:
            mode = stat.S_IMODE(found.st_mode)
            raise _unsafe(path, f"it belongs to {_user(found.st_uid)} and has mode {mode:04o}", instead, found)
        if reading == "closed" and found.st_mode & _FOR_OTHERS:
            with contextlib.suppress(OSError):  # a read-only file system: nobody writes there
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~_FOR_OTHERS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unsafe(path: Path, what: str, instead: str, found: os.stat_result) -> UnsafeFolderError:
    remedy = f"run `chmod 700 {path}`" if found.st_uid == os.geteuid() else "remove it"
    expected = f"one of {_user(os.geteuid())} that nobody else can enter, mode 0700"
    return UnsafeFolderError(str(path), what, expected, f"{remedy}, or {instead}")


def _user(number: int) -> str:
    try:
        return f"user {number} ({pwd.getpwuid(number).pw_name})"
    except KeyError:
        return f"user {number}"
