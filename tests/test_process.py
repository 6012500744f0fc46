"""A rank that fails, leaves or dies ends every rank, with one line on each, by every launcher."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from kill_points import kill_at
from process_environment import environment

from shardfuse.errors import AlreadyInitializedError, BackendUnavailableError
from shardfuse.mesh.process import finalize, initialize
from shardfuse.mesh.rendezvous import ProcessIdentity

SCRIPT = Path(__file__).with_name("process_cases.py")
LIMIT = 40.0  # seconds from the fault to the end of the last rank, of a busy machine; else less than 10
MESH_LINE = (
    r"DeviceMesh\(\[\[0, 1\], \[2, 3\]\]\) of 4 ranks \(largest 3\) does not fit a world of 2: "
    "start at least 4 ranks, or use a smaller mesh"
)
TAIL = "; this rank cannot go on without it"
RUNS = [
    ("torchrun", "finish"),
    ("torchrun", "raise"),
    ("torchrun", "refuse_on_all"),
    ("torchrun", "leave"),
    ("mpirun", "finish"),
    ("mpirun", "make_way"),
    ("mpirun", "fail"),
    ("mpirun", "leave_0"),
    ("mpirun", "kill"),
    ("by hand", "finish"),
    ("by hand", "kill_0"),
    ("by hand", "quit"),
]


@dataclass(frozen=True)
class Outcome:
    """codes: exit statuses (one a rank by hand, else the launcher's). seconds: from the fault, or start, to the end."""

    codes: tuple[int, ...]
    output: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """What shardfuse said, in the order of ranks, without its head."""
        return [line for _, line in sorted(re.findall(r"^shardfuse: rank (\d): (.*)$", self.output, re.MULTILINE))]


def commands(launcher: str, case: str) -> list[tuple[list[str], dict[str, str]]]:
    python = [sys.executable, str(SCRIPT), case]
    if launcher == "torchrun":
        head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        return [([*head, "--nproc-per-node", "2", *python[1:]], {})]
    if launcher == "mpirun":
        return [(["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", *python], {})]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [(python, {"RANK": str(rank), **shared}) for rank in range(2)]


def run(launcher: str, case: str) -> Outcome:
    env = environment()
    start = time.time()
    ranks = [
        subprocess.Popen(command, env={**env, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, own in commands(launcher, case)
    ]
    try:
        output = "".join(rank.communicate(timeout=150)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    faults = [float(text) for text in re.findall(r"^fault ([\d.]+)", output, re.MULTILINE)]
    return Outcome(tuple(rank.returncode for rank in ranks), output, time.time() - max([start, *faults]))


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Mapping[tuple[str, str], Future[Outcome]]]:
    """All runs, a few at a time: most of their time is waiting."""
    has_mpirun = shutil.which("mpirun", path=environment()["PATH"]) is not None
    with ThreadPoolExecutor(3) as pool:
        yield {key: pool.submit(run, *key) for key in RUNS if key[0] != "mpirun" or has_mpirun}


def expected_lines(case: str) -> list[str]:
    """By rank, as regular expressions."""
    match case:
        case "finish" | "make_way":
            return []
        case "raise":
            return [f"rank 1 failed: ValueError: a bug in two lines{TAIL}", "ValueError: a bug in two lines"]
        case "refuse_on_all":
            return [f"(rank 1 failed: )?{MESH_LINE}({TAIL})?", f"(rank 0 failed: )?{MESH_LINE}({TAIL})?"]
        case "fail":
            return [f"rank 1 failed: cannot go on{TAIL}", "cannot go on"]
        case "leave":
            left = r"left before collective 2 of ranks \[0, 1\]"
            return [f"rank 1 {left}{TAIL}", f"this rank {left}"]
        case "leave_0":
            left = r"left before collective 2 of ranks \[0, 1\]"
            return [f"this rank {left}", f"rank 0 {left}{TAIL}"]
        case _:
            guilty = 0 if case.endswith("_0") else 1
            return [rf"rank {guilty} ended without a word \(killed, or crashed\){TAIL}"]


@pytest.mark.parametrize(("launcher", "case"), RUNS, ids=lambda value: value.replace(" ", "_"))
def test_end(launcher: str, case: str, outcomes: Mapping[tuple[str, str], Future[Outcome]]) -> None:
    if (launcher, case) not in outcomes:
        pytest.skip("mpirun is not installed")
    outcome = outcomes[launcher, case].result()
    text = outcome.output
    assert "went on" not in text, text
    if case in ("finish", "make_way"):
        assert set(outcome.codes) == {0}, text
        assert "Traceback" not in text, text
        assert "terminate called" not in text, text
    else:
        assert outcome.seconds < LIMIT, text
        died_by_itself = (
            {"kill": {-9}, "kill_0": {-9}, "quit": {0}}.get(case, set()) if launcher == "by hand" else set()
        )
        assert all(code != 0 or code in died_by_itself for code in outcome.codes), (outcome.codes, text)
    if case == "kill" and launcher != "by hand":
        # The launcher may end the other rank before it has noticed; it then names the dead one itself.
        assert re.search(r"rank\s*:? 1\b", text), text
        return
    expected = expected_lines(case)
    assert len(outcome.lines) == len(expected), text
    for line, pattern in zip(outcome.lines, expected, strict=True):
        assert re.fullmatch(pattern, line), text
    if case == "raise":
        assert re.search(r"^\[rank1\]: +raise ValueError\(", text, re.MULTILINE), text


def test_a_process_alone_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    hook = sys.excepthook
    with pytest.raises(BackendUnavailableError):  # the hook is set by then, for an error that nobody catches
        initialize("nonsense")
    context = initialize("gloo", timeout=20)
    try:
        assert (context.rank, context.world_size, context.backend, context.timeout) == (0, 1, "gloo", 20)
        assert dist.get_world_size() == 1
        assert initialize() is context
    finally:
        finalize()
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    finalize()


def test_refused_backends_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        BackendUnavailableError, match="backend 'mpi' cannot be used here: shardfuse knows gloo and nccl"
    ):
        initialize("mpi")
    with pytest.raises(BackendUnavailableError, match=r"backend 'nccl' cannot be used here: 1 ranks .* have 0 GPUs"):
        initialize("nccl")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(AlreadyInitializedError, match="found a default process group that it did not make"):
            initialize()
    finally:
        dist.destroy_process_group()


def test_a_process_is_known_by_its_start() -> None:
    own = ProcessIdentity.of_this_process()
    assert ProcessIdentity.from_json(own.to_json()) == own
    assert not own.has_ended()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    running = ProcessIdentity(own.host, child.pid, int(fields[19]))
    assert not running.has_ended()
    assert ProcessIdentity(own.host, child.pid, running.started + 1).has_ended()
    assert not ProcessIdentity("elsewhere", 2**22 + 1, 0).has_ended()
    child.kill()
    child.communicate()
    assert running.has_ended()


@pytest.mark.parametrize(("victim", "after"), [(0, 0.05), (2, 0.6)])
def test_a_rank_that_is_killed_at_work_is_named(victim: int, after: float) -> None:
    """`python tests/kill_points.py` does it at 50 random points."""
    assert kill_at(victim, after).faults == []
