"""Self-tests that want processes of their own: each has a time to end in, and a failure is a finding.

``python -m shardfuse.tools.doctor.processes NAME`` runs one of `TRIALS` and prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import torch

from .finding import Finding, checked
from .trials import AREA, TRIALS
from .variables import environment_without_launch

_PACKAGE_PARENT = str(Path(__file__).parents[3])
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_IN_PLACE = ("torch", "cache", "C module")


@dataclass(frozen=True)
class _Started:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]


def self_tests(seconds: float) -> Iterator[Finding]:
    """All that this machine can do; each process has ``seconds`` to end."""
    deadline = time.monotonic() + seconds
    has_triton = find_spec("triton") is not None
    started: dict[str, list[_Started]] = {"ranks": _start_ranks()}
    if has_triton:
        said = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "SHARDFUSE_STRICT": "1"}
        started["interpreter"] = [_start("interpreter", said)]
        if torch.cuda.is_available():
            started["GPU"] = [_start("GPU", {"TRITON_INTERPRET": "0", "SHARDFUSE_STRICT": "1"})]
    for name in _IN_PLACE:
        yield from checked(AREA, lambda name=name: [f for f in [TRIALS[name]()] if f is not None])
    for name, processes in started.items():
        yield _collect(name, processes, deadline, seconds)


def _start_ranks() -> list[_Started]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    local = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    said = {**meeting, **local}
    return [_start("ranks", {**said, "RANK": str(k), "LOCAL_RANK": str(k)}) for k in range(2)]


def _start(name: str, said: Mapping[str, str]) -> _Started:
    # Pipes that are not read may fill up.
    output, errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 closed when they are collected
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, name],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=environment_without_launch(said, () if _PACKAGE_PARENT in _INSTALLED else (_PACKAGE_PARENT,)),
        start_new_session=True,
    )
    return _Started(process, output, errors)


def _collect(name: str, started: list[_Started], deadline: float, seconds: float) -> Finding:
    """What the first of the processes found; all have ended then."""
    codes = [one.process.poll() for one in started]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.02)
        codes = [one.process.poll() for one in started]
    for one in started:
        if one.process.poll() is None:  # late, or it waits for one that has failed
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
    if None in codes and not any(codes):
        remedy = "look at what it waits for, or allow more time with --seconds"
        return Finding(AREA, name, "fault", f"did not end within {seconds:g} s", remedy)
    for one, code in zip(started, codes, strict=True):
        if code:
            lines = [line for line in _text(one.errors).splitlines() if line.strip()]
            last = lines[-1].strip() if lines else f"exit code {code}, and not a word"
            return Finding(AREA, name, "fault", last, _REMEDIES.get(name, "read it, and look at the lines above"))
    return Finding(**json.loads(_text(started[0].output).splitlines()[-1]))


_REMEDIES = {
    "ranks": "see the network's line above: gloo has to reach 127.0.0.1 on the interface lo",
    "interpreter": "see that Triton and numpy are of the versions in constraints.txt",
    "GPU": "see that a plain Triton kernel runs here, and that no other process has taken the GPU's memory",
}


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def main(name: str) -> int:
    """One trial in this process."""
    found = TRIALS[name]()
    if found is not None:
        print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
