"""Starts the ranks of ``exchange_ranks.py``: on GPUs of their own, on one that they share, or on the CPU."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from forked_ranks import Server, rank_variables
from process_environment import environment

SCRIPT = Path(__file__).with_name("exchange_ranks.py")
PATIENCE = 280.0
"""Seconds that all ranks have, which print their stacks long before."""

NOTHING: Mapping[str, str] = {}


def outcome(
    case: str, directory: Path, under: Sequence[str] = (), *, ranks: int = 2
) -> tuple[list[int | None], list[str], float]:
    """Exit codes and outputs of all ranks, and when the last of them ended.  under: what runs each of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    world |= {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "SHARDFUSE_EXCHANGE": "symmetric"}
    if not torch.cuda.is_available():
        world["TRITON_INTERPRET"] = "1"
    elif torch.cuda.device_count() < ranks:
        world["SHARDFUSE_SHARED_GPU"] = "1"
    files = [directory / f"{case}_{rank}" for rank in range(ranks)]
    started = list[subprocess.Popen[bytes]]()
    for rank, file in enumerate(files):
        with file.open("w") as out:
            process = subprocess.Popen(
                [*under, sys.executable, str(SCRIPT), case],
                env=environment() | world | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
    deadline = time.monotonic() + PATIENCE
    try:
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            time.sleep(0.02)
        ended = time.time()
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes, [file.read_text() for file in files], ended


def forked(
    server: Server,
    case: str,
    directory: Path,
    *,
    ranks: int = 2,
    variables: Mapping[str, str] = NOTHING,
    stopped: Sequence[int] = (),
) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of ranks on the CPU that ``server`` has of this script: they have nothing to import.

    stopped: ranks that go on once all others have ended.
    """
    shared = {"LOCAL_WORLD_SIZE": f"{ranks}", "SHARDFUSE_EXCHANGE": "symmetric", **variables}
    environments = [env | shared | {"LOCAL_RANK": env["RANK"]} for env in rank_variables(ranks)]
    started = [server.start([case], env, directory) for env in environments]
    deadline, codes = time.monotonic() + PATIENCE, dict[int, int]()
    for rank in sorted(range(ranks), key=lambda r: r in stopped):
        if rank in stopped:
            started[rank].send(signal.SIGCONT)
        codes[rank] = started[rank].wait(max(deadline - time.monotonic(), 1.0))
    return [codes[r] for r in range(ranks)], [rank.output.read_text() + rank.errors.read_text() for rank in started]
