"""What keeps ranks from finding each other ends every rank with an error that names it: ports, ranks, world sizes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from test_process import environment

from shardfuse.config import LaunchConfig
from shardfuse.errors import EnvironmentVariableError, ShardfuseError
from shardfuse.mesh import meeting, rendezvous
from shardfuse.mesh.process import finalize, initialize
from shardfuse.mesh.rendezvous import JobStore
from shardfuse.start_errors import (
    ExchangeMemoriesDisagreeError,
    InitializeArgumentError,
    PortInUseError,
    RankTakenError,
    ReinitializedError,
)

PROGRAM = "import shardfuse; print(shardfuse.initialize().world_size)"


@dataclass(frozen=True)
class Outcome:
    """Of one rank: its exit code, and what shardfuse said, or what it printed."""

    code: int
    line: str


def start(port: int, ranks: list[tuple[int, int]]) -> list[Outcome]:
    """Start processes of these (RANK, WORLD_SIZE)."""

    def one(place: tuple[int, int]) -> Outcome:
        own = {"RANK": str(place[0]), "WORLD_SIZE": str(place[1])}
        env = {**environment(), **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=150)
        said = [line for line in done.stderr.splitlines() if line.startswith("shardfuse: ")]
        return Outcome(done.returncode, said[-1] if said else done.stdout.strip())

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def another_program(answer: bytes) -> Generator[int]:
    """Listens on the port that it gives, and sends ``answer`` to who connects."""
    kept: list[socket.socket] = []

    def serve(server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            kept.append(client)
            if answer:
                client.sendall(answer)
                client.close()

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[object, tuple[int, Future[list[Outcome]]]]]:
    """All cases at once: most of their time is waiting."""
    with another_program(b"") as mute, another_program(b"HTTP/1.1 400 Bad Request\r\n\r\n") as web:
        ports = {"mute": mute, "web": web, (2, 3): free_port(), (3, 2): free_port()}
        with ThreadPoolExecutor(len(ports)) as pool:
            sizes = {case: case if isinstance(case, tuple) else (2, 2) for case in ports}
            yield {case: (port, pool.submit(start, port, list(enumerate(sizes[case])))) for case, port in ports.items()}


Cases = dict[object, tuple[int, Future[list[Outcome]]]]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mute", "web"])
def test_a_port_in_use_ends_every_rank(case: str, outcomes: Cases) -> None:
    port, running = outcomes[case]
    first, second = running.result()
    assert (first.code, second.code) == (1, 1)
    assert first.line == (
        f"shardfuse: rank 0: MASTER_PORT={port} is in use by another program on 127.0.0.1, expected a free port "
        "for rank 0's store: set MASTER_PORT to another number for every rank, or end that program "
        "(`ss -ltnp` names it)"
    )
    assert second.line == (
        f"shardfuse: rank 1: rank 1 found a program at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) that is not "
        "the store of rank 0: the port is in use; set MASTER_PORT to a free one for every rank"
    )


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_world_sizes_that_differ(sizes: tuple[int, int], outcomes: Cases) -> None:
    first, second = outcomes[sizes][1].result()
    assert (first.code, second.code) == (1, 1)
    rest = "expected one number: set WORLD_SIZE alike for every rank"
    assert first.line == (
        f"shardfuse: rank 0: rank 0 was started with a world of {sizes[0]} ranks and rank 1 with {sizes[1]}, {rest}"
    )
    assert second.line == (
        f"shardfuse: rank 1: rank 1 was started with a world of {sizes[1]} ranks and rank 0 with {sizes[0]}, {rest}"
    )


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_store_at_a_number_does_not_look_up_who_connects(name: str) -> None:
    """Over IPv6 its server asks a name server for the name of `::ffff:127.0.0.1` before it answers anybody."""
    store = rendezvous._serve(LaunchConfig(0, 2, 0, 2), name, 0, 30.0)
    client = rendezvous._join(LaunchConfig(1, 2, 1, 2), name, store.port, 30.0)
    client.set("key", "value")
    assert store.get("key") == b"value"
    over_ipv6 = [row.split()[1:4:2] for row in Path("/proc/net/tcp6").read_text().splitlines()]  # address, state
    if name == "127.0.0.1":
        assert not [address for address, state in over_ipv6 if state == "0A" and address.endswith(f":{store.port:04X}")]
    with pytest.raises(PortInUseError, match=f"^MASTER_PORT={store.port} is in use"):
        rendezvous._serve(LaunchConfig(0, 2, 0, 2), name, store.port, 30.0)


def test_two_processes_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobStore(dist.HashStore(), "shardfuse", True, None)
    monkeypatch.setattr(meeting, "_begun", {})
    assert [meeting.new_world(job, 0) for _ in range(2)] == ["world1", "world2"]
    monkeypatch.setattr(meeting, "_begun", {})  # as in another process
    with pytest.raises(
        RankTakenError, match=r"^another process is rank 0 of this job already: give each process a RANK"
    ):
        meeting.new_world(job, 0)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, others_aside: None) -> Iterator[None]:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    yield
    finalize()


@pytest.mark.usefixtures("alone")
def test_initialize_again() -> None:
    context = initialize("gloo", timeout=20)
    assert initialize() is initialize("gloo") is initialize(timeout=20.0) is initialize(watchdog=False) is context
    assert initialize(exchange_memory=64) is context
    with pytest.raises(
        ReinitializedError, match=r"^initialize\(exchange_memory=32\) .* with exchange_memory=64: leave"
    ):
        initialize(exchange_memory=32)
    with pytest.raises(ReinitializedError, match=r"^initialize\(timeout=1\) was called in a world .* with timeout=20"):
        initialize(timeout=1)
    with pytest.raises(
        ReinitializedError, match=r"^initialize\(backend='nccl'\) .* with backend='gloo': leave backend"
    ):
        initialize("nccl")
    assert dist.is_initialized()
    finalize()
    assert initialize(timeout=1).timeout == 1


@pytest.mark.usefixtures("alone")
def test_exchange_memory_is_the_argument_s_or_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_EXCHANGE_MEMORY", "16")
    assert initialize("gloo", exchange_memory=8).exchange_memory == 8
    finalize()
    assert initialize("gloo").exchange_memory == 16
    finalize()
    monkeypatch.setenv("SHARDFUSE_EXCHANGE_MEMORY", "none")
    with pytest.raises(EnvironmentVariableError, match=r"SHARDFUSE_EXCHANGE_MEMORY is 'none', expected a whole number"):
        initialize("gloo")
    monkeypatch.delenv("SHARDFUSE_EXCHANGE_MEMORY")
    for memory in (0, -1, 1.5, True, "64"):
        with pytest.raises(
            InitializeArgumentError, match=r"^initialize\(exchange_memory=.*\): expected a whole number"
        ):
            initialize("gloo", exchange_memory=memory)  # pyright: ignore[reportArgumentType]
    assert not dist.is_initialized()


def test_ranks_that_were_given_unlike_memory_are_told_so() -> None:
    """On each of them, before any of it is allocated."""
    job = JobStore(dist.HashStore(), "shardfuse", True, None)

    def agree(rank: int) -> str:
        try:
            meeting.agree(job, "world1", rank, 3, meeting.Place("gloo", 3, (64, 64, 32)[rank]))
        except ExchangeMemoriesDisagreeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        told = set(pool.map(agree, range(3)))
    assert told == {
        "the ranks were given [64, 64, 32] MB of exchange memory (by rank), expected one number: set "
        "SHARDFUSE_EXCHANGE_MEMORY, or initialize(exchange_memory=...), alike for every rank"
    }


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "5"])
def test_timeouts_that_are_none(timeout: object) -> None:
    with pytest.raises(InitializeArgumentError, match=r"^initialize\(timeout=.*\): expected a positive number of sec"):
        initialize(timeout=timeout)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShardfuseError, match=r"backend .* cannot be used here"):
        initialize([timeout])  # pyright: ignore[reportArgumentType]
    assert not dist.is_initialized()
