"""A rank that fails, leaves or dies ends every rank, with one line on each, by every launcher."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import Server, rank_variables
from kill_points import kill_at
from process_environment import environment

from shardfuse.config import LaunchConfig
from shardfuse.errors import AlreadyInitializedError, BackendUnavailableError
from shardfuse.mesh.own_device import choose
from shardfuse.mesh.process import finalize, initialize
from shardfuse.mesh.rendezvous import ProcessIdentity
from shardfuse.start_errors import SharedGpuError

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


def command(launcher: str, case: str) -> list[str]:
    if launcher == "mpirun":
        head = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable]
    else:
        head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        head += ["--nproc-per-node", "2"]
    return [*head, str(SCRIPT), case]


def run(launcher: str, case: str) -> Outcome:
    start = time.time()
    done = subprocess.run(
        command(launcher, case),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    return outcome_of((done.returncode,), done.stdout, start)


def run_by_hand(cases: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """One after the other, without a launcher; the ranks are forked from one process."""
    found: dict[str, Outcome] = {}
    server = Server(SCRIPT, "serve")
    try:
        for case in cases:
            start = time.time()
            (folder / case).mkdir()
            ranks = [server.start([case], own, folder / case) for own in rank_variables(2)]
            codes = tuple(rank.wait(150) for rank in ranks)
            output = "".join(file.read_text() for rank in ranks for file in (rank.output, rank.errors))
            found[case] = outcome_of(codes, output, start)
    finally:
        server.close()
    return found


def outcome_of(codes: tuple[int, ...], output: str, start: float) -> Outcome:
    faults = [float(text) for text in re.findall(r"^fault ([\d.]+)", output, re.MULTILINE)]
    return Outcome(codes, output, time.time() - max([start, *faults]))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[tuple[str, str], Callable[[], Outcome]]]:
    """All runs, a few at a time: most of their time is waiting."""
    has_mpirun = shutil.which("mpirun", path=environment()["PATH"]) is not None
    by_hand = [case for launcher, case in RUNS if launcher == "by hand"]
    launched = [key for key in RUNS if key[0] == "torchrun" or (key[0] == "mpirun" and has_mpirun)]
    with ThreadPoolExecutor(3) as pool:
        forked = pool.submit(run_by_hand, by_hand, tmp_path_factory.mktemp("ranks"))
        found: dict[tuple[str, str], Callable[[], Outcome]] = {key: pool.submit(run, *key).result for key in launched}
        yield found | {("by hand", case): lambda case=case: forked.result()[case] for case in by_hand}


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
def test_end(launcher: str, case: str, outcomes: Mapping[tuple[str, str], Callable[[], Outcome]]) -> None:
    if (launcher, case) not in outcomes:
        pytest.skip("mpirun is not installed")
    outcome = outcomes[launcher, case]()
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


@pytest.mark.usefixtures("others_aside")
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


def test_ranks_take_turns_on_a_gpu_where_they_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    current = list[torch.device]()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    launch = LaunchConfig(rank=3, world_size=4, local_rank=3, local_size=4)
    assert choose(None, launch) == ("gloo", torch.device("cpu"))
    assert choose(None, launch, is_gpu_shared=True) == ("gloo", torch.device("cuda", 1))
    assert current == [torch.device("cuda", 1)]


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
    monkeypatch.setenv("SHARDFUSE_SHARED_GPU", "1")
    with pytest.raises(SharedGpuError, match="and rank 0 sees no GPU: unset it"):
        initialize()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SharedGpuError, match="and rank 0 asks for NCCL, which refuses that: unset it"):
        initialize("nccl")
    monkeypatch.delenv("SHARDFUSE_SHARED_GPU")
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
