"""Ranks that are forked from one process, which has imported torch and shardfuse once: importing takes them seconds.

A script of cases calls `serve` and is run by a `Server`; each rank is a process like any other, with a world, an
exception hook and an end of its own.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from process_environment import environment


def serve() -> list[str] | None:
    """In the script, with all it needs imported: forks a rank when asked to. Returns its arguments in a rank, or None.

    Every line that comes in is answered by one: arguments and an environment by the process's number, a process's
    number and a time limit in seconds by its exit code.
    """
    import shardfuse.frontend.executor_cache  # noqa: F401 which imports what the first call needs

    gc.freeze()  # the end of a rank is to walk what is its own
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            answer = _reap(request["pid"], request["timeout"])
        else:
            answer = os.fork()
            if answer == 0:
                keep_aside()
                os.environ |= request["environment"]
                for number, path in enumerate(("/dev/null", request["output"], request["errors"])):
                    os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600), number)
                return request["arguments"]
        print(answer, flush=True)
    return None


def keep_aside() -> None:
    """In a rank: what was put aside before the fork stays there, also where a world ends, which looks for its groups.

    Those are the rank's own. Walking all that was imported, once more at the end, was most of what a rank did.
    """
    gc.unfreeze = lambda: None


def _reap(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


class Server:
    """The process that all ranks of a script are forked from."""

    def __init__(self, script: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=environment() | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},  # no warnings of lost stores
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running: set[int] = set()

    def start(self, arguments: Sequence[str], env: Mapping[str, str], folder: Path) -> Rank:
        """A rank, whose output and errors are files in the folder."""
        files = [folder / f"{kind}{env.get('RANK', 0)}" for kind in ("output", "errors")]
        pid = self._ask(
            {"arguments": list(arguments), "environment": dict(env), "output": str(files[0]), "errors": str(files[1])}
        )
        assert isinstance(pid, int)
        self._running.add(pid)
        return Rank(self, pid, *files)

    def wait(self, pid: int, timeout: float) -> int | None:
        code = self._ask({"pid": pid, "timeout": timeout})
        if code is not None:
            self._running.remove(pid)
        return code

    def close(self) -> None:
        for pid in self._running:
            os.kill(pid, 9)
        self._process.communicate()

    def _ask(self, request: Mapping[str, object]) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks ranks has ended"
        return None if answer == "None\n" else int(answer)


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """The environment of each of so many ranks on this host; none of a process alone."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), **shared} for rank in range(ranks)]


@dataclass(frozen=True)
class Rank:
    server: Server
    pid: int
    output: Path
    errors: Path

    def send(self, signal: int) -> None:
        os.kill(self.pid, signal)

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal."""
        code = self.server.wait(self.pid, timeout)
        assert code is not None, f"still runs after {timeout} s: {self.errors.read_text()}"
        return code
