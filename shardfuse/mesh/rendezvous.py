"""How ranks find each other: the store that all of a job share, and who is behind a process number."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # torch.distributed has them untyped

from shardfuse.config import LaunchConfig, read_job_directory
from shardfuse.errors import LaunchEnvironmentError, RendezvousError
from shardfuse.secure_files import read_private, write_private
from shardfuse.start_errors import NoStoreError, PortInUseError

__all__ = ["JobStore", "PrefixStore", "ProcessIdentity", "Store", "meet", "open_job_store"]

_LOOPBACK = "127.0.0.1"
_OTHERWISE = "set MASTER_ADDR and MASTER_PORT"
_LOOK = 1.0  # seconds between two looks for somebody who listens where the store should be
_ANSWER = 10.0  # seconds in which a store that listens answers; another program may never do


@dataclass(frozen=True)
class ProcessIdentity:
    """One process for ever: a number is used again, a number with its start time is not.

    host: the boot and the process namespace; processes of one host see each other's numbers.
    pid: its number there. started: clock ticks from boot to its start.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        return cls(_this_host(), os.getpid(), _started(os.getpid()) or 0)

    def has_ended(self) -> bool:
        """True where the process has ended for certain; False for one of another host, which is not known here."""
        return self.host == _this_host() != "" and _started(self.pid) != self.started

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ProcessIdentity:
        fields = cast("dict[str, object]", json.loads(text))
        return cls(str(fields["host"]), int(str(fields["pid"])), int(str(fields["started"])))


@dataclass(frozen=True)
class JobStore:
    """The key-value store that all ranks of a job share.

    prefix: what this job's keys begin with in it. is_host: this process serves it.
    address: host and port of its server, or None in a world of one.
    """

    store: Store
    prefix: str
    is_host: bool
    address: tuple[str, int] | None

    def connect(self, timeout: float) -> Store:
        """A connection of its own: a thread that waits in the shared one keeps others out."""
        if self.address is None:
            return PrefixStore(self.prefix, self.store)
        host, port = self.address
        client = TCPStore(host, port, None, False, timedelta(seconds=timeout))
        return PrefixStore(self.prefix, client)


@functools.cache
def open_job_store(launch: LaunchConfig, timeout: float) -> JobStore:
    """Open the job's store, serving it where this rank is the one to do so.

    Opened once in a process and kept until its end: a second world of the same job finds the same store.

    torchrun's agent serves one; else rank 0 does, at MASTER_ADDR and MASTER_PORT where they are set, and on one
    host at a free port that it tells the others in a file named after the job.
    Raises RendezvousError where the ranks do not meet within `timeout` seconds, LaunchEnvironmentError where
    the environment does not say how they could, UnsafeFolderError where others could write that file, PortInUseError
    and NoStoreError where another program has the port.
    """
    if launch.world_size == 1:
        return JobStore(HashStore(), "shardfuse", True, None)
    prefix = f"shardfuse/{launch.attempt}"
    if launch.master_addr is not None and launch.master_port is not None:
        is_host = launch.rank == 0 and not launch.agent_store
        start = _serve if is_host else _join
        store = start(launch, launch.master_addr, launch.master_port, timeout)
        return JobStore(store, prefix, is_host, (launch.master_addr, launch.master_port))
    if launch.local_size < launch.world_size or not launch.job:
        raise LaunchEnvironmentError(
            f"{launch.world_size} ranks and no MASTER_ADDR and MASTER_PORT", "both, the same for every rank"
        )
    path = _rendezvous_file(launch.job)
    if launch.rank == 0:
        store = _serve(launch, _LOOPBACK, 0, timeout)
        _publish(path, store.port)
        port = store.port
    else:
        port = _await_port(path, launch, timeout)
        store = _join(launch, _LOOPBACK, port, timeout)
    try:  # all have read the file: the next rendezvous of the job writes a new one
        meet(store, "here", launch.rank, launch.world_size, str(path), timeout)
    finally:
        if launch.rank == 0:
            path.unlink(missing_ok=True)
    return JobStore(store, prefix, launch.rank == 0, (_LOOPBACK, port))


def _serve(launch: LaunchConfig, addr: str, port: int, timeout: float) -> TCPStore:
    """Raises PortInUseError, and RendezvousError for an address that is not this machine's, say."""
    listening = _listen_over_ipv4(addr, port)
    if listening is not None:
        port = listening.getsockname()[1]
    handle = None if listening is None else listening.detach()  # the store closes it
    limit = timedelta(seconds=timeout)
    try:
        return TCPStore(addr, port, None, True, limit, wait_for_workers=False, master_listen_fd=handle)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise PortInUseError(addr, port) from error
        raise RendezvousError(launch.rank, launch.world_size, f"{addr}:{port}", timeout) from error


def _listen_over_ipv4(addr: str, port: int) -> socket.socket | None:
    """A socket that listens at the port, where ``addr`` is a number of IPv4; None for the store to open its own.

    The store's listens over IPv6 too, and then calls who connects `::ffff:a.b.c.d`. It looks up the name of each before
    it answers anybody's question, and that number stands in no /etc/hosts: one lost packet of a name server's would
    silence the store for 5 s, 127.0.0.1 being of this machine or not.  Raises PortInUseError.
    """
    try:
        socket.inet_pton(socket.AF_INET, addr)
    except OSError:
        return None
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("", port))
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(addr, port) from error
        return None  # the store says what is wrong
    return listening


def _join(launch: LaunchConfig, addr: str, port: int, timeout: float) -> TCPStore:
    """Connect to the store of rank 0 or of the launcher.

    torch waits without limit for the first answer of whoever listens there: a thread does that, which is left behind.
    """
    made: list[TCPStore | dist.DistError] = []

    def connect() -> None:
        try:
            made.append(TCPStore(addr, port, None, False, timedelta(seconds=timeout), wait_for_workers=False))
        except dist.DistError as error:
            made.append(error)

    thread = threading.Thread(target=connect, name="shardfuse-rendezvous", daemon=True)
    thread.start()
    deadline, heard = time.monotonic() + timeout, None
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_LOOK if heard is None else _ANSWER)
        if not thread.is_alive():
            break
        if heard is not None:
            raise NoStoreError(launch.rank, addr, port)
        heard = _listens(addr, port) or None
    found = made[0] if made else None
    if isinstance(found, TCPStore):
        return found
    raise RendezvousError(launch.rank, launch.world_size, f"{addr}:{port}", timeout) from found


def _listens(addr: str, port: int) -> bool:
    try:
        with socket.create_connection((addr, port), timeout=_LOOK):
            return True
    except OSError:
        return False


def meet(store: Store, key: str, rank: int, world_size: int, where: str, timeout: float) -> None:
    """A barrier in the store; where: what the error calls it.  Raises RendezvousError after `timeout` seconds."""
    store.set(f"{key}/{rank}", "")
    try:
        store.wait([f"{key}/{other}" for other in range(world_size)], timedelta(seconds=timeout))
    except dist.DistError as error:
        raise RendezvousError(rank, world_size, where, timeout) from error


def _rendezvous_file(job: str) -> Path:
    return read_job_directory() / f"rendezvous-{hashlib.sha256(job.encode()).hexdigest()[:16]}"


def _publish(path: Path, port: int) -> None:
    write_private(path, f"{port}\n{ProcessIdentity.of_this_process().to_json()}\n".encode(), _OTHERWISE)


def _await_port(path: Path, launch: LaunchConfig, timeout: float) -> int:
    """The port in the file, once it is there and its writer runs: a crashed job's file may lie there still."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = read_private(path, _OTHERWISE)
        if found is not None:
            lines = found.decode().splitlines()
            if len(lines) == 2 and not ProcessIdentity.from_json(lines[1]).has_ended():
                return int(lines[0])
        time.sleep(0.01)
    raise RendezvousError(launch.rank, launch.world_size, str(path), timeout)


def _this_host() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc: nothing can be said about other processes
        return ""


def _started(pid: int) -> int | None:
    """Start time of a running process, None for one that has ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
