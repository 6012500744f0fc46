# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""The folders that shardfuse keeps files in, the environment variables that it reads, and the host's name."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import threading
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from ...config import (
    read_cache_directory,
    read_compiler_settings,
    read_job_directory,
    read_key_directory,
    read_launch,
)
from ...errors import ShardfuseError, UnsafeFolderError
from ...secure_files import open_folder
from .finding import Finding, Status, ok
from .variables import read_variables, unknown_variables

_MOST_FILES = 100_000
_PATIENCE = 5.0  # seconds for a name to be resolved


def caches() -> Iterator[Finding]:
    """Each folder: where, whose, its mode and size, and whether shardfuse takes it or refuses it."""
    another = "name another by SHARDFUSE_CACHE_DIR"
    slower = "until then each process compiles its kernels anew"
    key = read_key_directory()
    if key is None:
        remedy = "set HOME or XDG_CONFIG_HOME to a folder of this user"
        yield Finding("caches", "key", "warning", f"this user has no home folder: {slower}", remedy)
    else:
        yield folder("key", key, "name another by XDG_CONFIG_HOME", slower)
    triton = _triton_directory()
    if triton is not None:
        yield folder("Triton", triton, "name another by TRITON_CACHE_DIR", slower)
    by_hand = "set MASTER_ADDR and MASTER_PORT"
    yield folder("rendezvous", read_job_directory(), by_hand, "until then ranks do not find each other", "fault")
    yield folder("kernels", read_cache_directory(), another, slower)


def folder(name: str, path: Path, instead: str, effect: str, refused: Status = "warning") -> Finding:
    """``instead``: what a user can do to have another.  ``effect``: what follows where it cannot be used."""
    area = "caches"
    if not path.exists():
        parent = next(p for p in path.absolute().parents if p.exists())
        if os.access(parent, os.W_OK | os.X_OK) and parent.is_dir():
            return ok(area, name, f"{path}: not made yet, {parent} can be written")
        found = f"{path}: missing, and cannot be made in {parent}, which cannot be written: {effect}"
        return Finding(area, name, "warning", found, f"allow it, or {instead}")
    text = f"{path}: {_described(path)}"
    try:
        with open_folder(path, instead, "allowed"):  # of its own folders shardfuse takes away what others may read
            if not os.access(path, os.W_OK):
                return Finding(area, name, "warning", f"{text}, cannot be written: {effect}", f"allow it, or {instead}")
            return ok(area, name, f"{text}, trusted")
    except UnsafeFolderError as error:
        return Finding(area, name, refused, f"{text}, refused: {effect}", str(error))
    except OSError as error:
        found = f"{text}, cannot be opened ({error.strerror}): {effect}"
        return Finding(area, name, refused, found, f"remove it, or {instead}")


def _described(path: Path) -> str:
    found = path.stat()
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = f"user {found.st_uid}"
    files, size = _measured(path)
    many = f"more than {_MOST_FILES} files" if files == _MOST_FILES else f"{files} file{'' if files == 1 else 's'}"
    return f"owner {owner}, mode {stat.S_IMODE(found.st_mode):04o}, {many} of {size / 2**20:.1f} MiB"


def _measured(path: Path) -> tuple[int, int]:
    """How many files are below ``path``, and their bytes."""
    files = size = 0
    for parent, _, names in os.walk(path):
        for name in names:
            if files == _MOST_FILES:
                return files, size
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # another process has removed it since
                continue
            files += 1
    return files, size


def _triton_directory() -> Path | None:
    """Where Triton keeps what it compiles; None without Triton."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return Path(knobs.cache.dir)


def environment() -> Iterator[Finding]:
    """Each variable that shardfuse reads, with what it makes of it.  Others' values may be secret."""
    area = "environment"
    for variable in read_variables():
        if variable.error:
            remedy = f"correct it, or unset it: {variable.error}"
            yield Finding(area, variable.name, "fault", f"{variable.text!r} is refused", remedy)
        else:
            set_or_not = "not set" if variable.text is None else f"{variable.text!r}"
            yield ok(area, variable.name, f"{set_or_not}, read as {variable.value}")
    known = [variable.name for variable in read_variables()]
    for name in unknown_variables():
        near = get_close_matches(name, known, 1)
        remedy = f"did you mean {near[0]}?" if near else f"shardfuse reads {', '.join(known[:6])}"
        yield Finding(area, name, "warning", "is set, and nothing reads it", remedy)
    names = [text.split("=", 1)[0] for text in read_compiler_settings()]
    yield ok(area, "compiler settings", f"{', '.join(names) or 'none'} (other kernels may come of other settings)")
    try:
        launch = read_launch()
    except ShardfuseError as error:
        yield Finding(area, "launcher", "fault", str(error), "unset the variables of the launcher, or start through it")
    else:
        yield ok(area, "launcher", f"{launch.launcher}: rank {launch.rank} of {launch.world_size}")


def network() -> Iterator[Finding]:
    """Whether this host's name has an address: gloo and torchrun ask for it, and wait."""
    found: list[str] = []
    name = socket.gethostname()

    def resolve() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, None)[0][4][0]))
        except OSError as error:
            found.append("")
            found.append(str(error))

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if found and found[0]:
        yield ok("network", "host name", f"{name} is {found[0]}")
        return
    reason = found[1] if len(found) > 1 else f"no answer within {_PATIENCE:g} s"
    remedy = "pass --local-addr 127.0.0.1 to torchrun and set GLOO_SOCKET_IFNAME=lo, or add it to /etc/hosts"
    yield Finding("network", "host name", "warning", f"{name} has no address: {reason}", remedy)
