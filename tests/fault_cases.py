"""Faults at every stage of a rank's life: `python tests/fault_cases.py` tries them all, strictly by the clock.

A case is (stage, fault, who): of two ranks the one that is `who` does the fault when it comes to the stage, the other
goes on. One process imports torch once and forks every rank of every case, which saves most of the cost; a rank is then
a process like any other, with its own world, hook and end. Prints a line a case; ends with 1 where one is bad.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fault_calls import call_differently, program
from forked_ranks import keep_aside
from process_environment import environment

STAGES = ("initialize", "first", "making", "collective", "between", "exit")
FAULTS = ("kill", "stop", "raise", "exit", "_exit", "fork", "fork_raise")
DIFFERENCES = ("one_cached", "both_cached", "both_new", "one_more", "another_next", "step_next")
DIFFERENCES += ("quiet", "quiet_of_three", "slow", "reduce_scatter_next", "op_next", "refused_draw", "longer_cached")
DIFFERENCES += ("summands_next", "failed_clip", "refused_clip", "refused_rows", "refused_module", "refused_reduce")
DIFFERENCES += ("other_rows", "refused_step", "other_chunks")
CASES = [(stage, fault, who) for stage in STAGES for fault in FAULTS for who in (0, 1)]
CASES += [("calls", difference, 1) for difference in DIFFERENCES]
HEARTBEAT = 4.0
"""Seconds without a sign of life after which a rank counts as gone."""
STRICT = 10.0
"""Seconds from the fault to the end of the last survivor; a rank that is stopped has HEARTBEAT + 5."""
SLACK = 120.0
"""The same where the machine may be busy. A collective, and whoever waits for a program, waits for 600 s."""
AT_ONCE = 8
"""Cases that run at a time: nearly all of their time is waiting."""

Case = tuple[str, str, int]


def world_size(case: Case) -> int:
    return 3 if case[1] == "quiet_of_three" else 2


def is_in_ci(case: Case) -> bool:
    """Of each stage and fault the first rank's or the other's, of a rank that is stopped both, and all other calls."""
    stage, fault, who = case
    return stage == "calls" or fault == "stop" or (STAGES.index(stage) + FAULTS.index(fault) + who) % 2 == 0


@dataclass
class Outcome:
    """codes: exit status by rank; None for a rank that was stopped. seconds: from the fault to the survivor's end."""

    case: Case
    codes: list[int | None] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    orphans: int = 0

    def faults(self, limit: float) -> list[str]:
        """What is wrong with it."""
        stage, fault, who = self.case
        found = [f"{self.orphans} processes were left behind"] if self.orphans else []
        if "fault " not in self.outputs[who]:
            return [*found, f"rank {who} did not come to the fault"]
        if self.seconds > limit:
            found.append(f"the last rank ended after {self.seconds:.1f} s")
        survivor, text = self.codes[1 - who], self.outputs[1 - who]
        if stage == "calls":
            return found + self._unlike_calls()
        if fault in ("fork", "fork_raise") or (stage == "exit" and fault in ("raise", "exit")):
            if self.codes != [0, 0]:
                found.append(f"exit codes {self.codes}, though no rank is lost")
            if "child ended" not in self.outputs[who] and fault.startswith("fork"):
                found.append("the forked process did not end")
            return found
        if survivor == 0:
            found.append(f"rank {1 - who} ended as if nothing had happened")
        if not re.search(rf"^shardfuse: rank {1 - who}: .*rank {who}\b", text, re.MULTILINE):
            found.append(f"rank {1 - who} does not name rank {who}")
        if fault == "raise" and stage != "exit" and "RuntimeError: a bug" not in self.outputs[who]:
            found.append(f"rank {who} lost its traceback")
        return found

    def _unlike_calls(self) -> list[str]:
        """All ranks end with what each of them called; where one has made a call more, with who has left."""
        if self.case[1] == "slow":
            return [f"rank {rank} ended with {code}" for rank, code in enumerate(self.codes) if code != 0]
        found = [f"rank {rank} ended with {code}" for rank, code in enumerate(self.codes) if code != 1]
        failed = (
            r"at call 2 of .* rank 1 left out the run of the call before, which failed, and went on, where rank 0 "
            r"called shardfuse.optim: all_reduce of .*, norm_type 2, max_norm 1.0, first called at "
            r".*fault_calls\.py:\d+: .*\. "
        )
        refused = (
            r"at call 4 of ranks \[0, 1\] rank 1 left out a call that was refused: {}.*, and went on, where rank 0 "
            r"called {}.*\. Each later call may have met the other ranks' call before it"
        )
        both = {
            "one_more": [r"rank 1 left before collective 4 of ranks \[0, 1\]", "this rank left before collective 4 "],
            "another_next": [
                r"at call 5 of .*: rank 0 has `T1 = fd.ops.exp\(T0\)`; rank 1 has `T1 = fd.ops.relu\(T0\)`"
            ],
            "step_next": [
                r"at call 3 of .*: rank 0 has `shardfuse.optim: all_reduce of .*, norm_type 2, max_norm 1.0, first "
                r"called at .*`; rank 1 has `"
            ],
            "failed_clip": [failed],
            "refused_clip": [failed],
            "refused_step": [failed],
            "other_chunks": [
                r"at call 4 of .*: rank 0 has `LinearCrossEntropyLoss\(reduction='mean'\) of 4 rows, 2 in a chunk, "
                r"without a bias, first called at .*fault_calls\.py:\d+: .*`; rank 1 has `.* of 6 rows, 2 in a chunk, "
            ],
            "refused_rows": [
                refused.format("InputError: Expected input 0, T0", r"a fusion of exp, sum over \[16, 4\], defined at ")
            ],
            "other_rows": [refused.format("ProgramMismatchError: at call 4 of", "a fusion of exp, sum")],
            "refused_module": [
                refused.format(
                    "ModuleInputError: RMSNorm", r"a fusion of .* over \[2, 8\], first run by shardfuse\.nn\.RMSNorm"
                )
            ],
            "refused_reduce": [
                refused.format("CollectiveArgumentError: .*all_reduce", "shardfuse.collectives: all_reduce of ")
            ],
            "summands_next": [
                r"at call 3 of .*: rank 0 has `shardfuse.optim: gradient 0 of the mesh, \[4\] torch.float32, from "
                r"\(Partial.*\) to \(Replicate.*\), first called at .*`; rank 1 has `shardfuse.optim: gradient "
                r"1 of the mesh, "
            ],
            "reduce_scatter_next": [
                r"at call 2 of .*: rank 0 has `shardfuse.collectives: all_reduce of \[4\] torch.float32, op sum, first "
                r"called at .*fault_calls\.py:\d+: .*`; rank 1 has `shardfuse.collectives: reduce_scatter of \[4\] "
                r"torch.float32 along dim 0, op sum, first called at .*fault_calls\.py:\d+: .*`\. Call the same"
            ],
            "refused_draw": [
                refused.replace("call 4", "call 3").format(
                    "ModuleInputError: DropoutAddNorm",
                    r"a fusion of uniform, ge, .*, first run by shardfuse\.nn\.DropoutAddNorm",
                )
            ],
            "op_next": [r"at call 2 of .*: rank 0 has `.* torch.float32, op sum, .*`; rank 1 has `.*, op prod, .*`"],
        }.get(self.case[1], [r"rank 0 has `T0: unsharded \[16, 4\]`; rank 1 has `T0: unsharded \[14, 4\]`"])
        if self.case[1] == "one_more" and "raised PeerLostError" not in self.outputs[0]:
            found.append("rank 0 does not raise who has left")
        if self.case[1] in ("one_cached", "both_cached", "longer_cached"):
            both = [rf"at call {5 if self.case[1] == 'both_cached' else 4} of ranks \[0, 1\] .*{both[0]}"]
        if self.case[1].startswith("quiet"):
            n = len(self.codes)
            both = [
                r"at a collective that rank [02] waits in, and rank 1 does not come to, "
                rf"(?=.* ha(?:s|ve) `T0: unsharded \[{8 * n}, 4\]`)(?=.*rank 1 has `T0: unsharded \[{7 * n}, 4\]`)"
            ]
        for rank, text in enumerate(self.outputs):
            if not re.search(rf"^shardfuse: rank {rank}: .*{both[rank % len(both)]}", text, re.MULTILINE):
                found.append(f"rank {rank} does not say what differs")
        return found

    def __str__(self) -> str:
        stage, fault, who = self.case
        return f"{stage:<10} {fault:<10} rank {who}: {self.seconds:4.1f} s, codes {self.codes}"


def strict_limit(case: Case) -> float:
    return HEARTBEAT + 5.0 if case[1] == "stop" else STRICT


# --- one rank ----------------------------------------------------------------------------------------------


def misbehave(fault: str) -> None:
    print(f"fault {time.time()}", flush=True)
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError("a bug")  # which torch raises for collectives, too
        case "exit":
            sys.exit(0)
        case "_exit":
            os._exit(3)
        case _:
            child = os.fork()
            if child == 0 and fault == "fork":
                sys.exit(0)
            if child == 0:
                raise ValueError("in the forked process")
            deadline = time.monotonic() + SLACK
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    return
                time.sleep(0.02)
            print("child ended", flush=True)


def once(fault: str, function: Callable[..., object]) -> Callable[..., object]:
    """``function``, with the fault before its first call."""
    is_done: list[bool] = []

    def run(*arguments: object, **named: object) -> object:
        if not is_done:
            is_done.append(True)
            misbehave(fault)
        return function(*arguments, **named)

    return run


def work(stage: str, fault: str, *, is_guilty: bool) -> None:
    """What a rank of a case does; the fault is where the stage is."""
    import torch
    import torch.distributed as dist

    from shardfuse import initialize
    from shardfuse.executor import nccl
    from shardfuse.frontend.executor_cache import FusionExecutorCache

    if is_guilty and stage == "initialize":
        dist.init_process_group = once(fault, dist.init_process_group)
    initialize(timeout=600)
    if is_guilty and stage == "exit":
        atexit.register(misbehave, fault)  # before what initialize() has registered
    if stage == "calls":
        call_differently(fault, is_guilty=is_guilty)
        return
    fd = program("exp")
    if is_guilty and stage == "first":
        misbehave(fault)
    if is_guilty and stage == "making":
        FusionExecutorCache._build = once(fault, FusionExecutorCache._build)
    for k in range(4):
        if is_guilty and stage == "collective" and k == 1:
            nccl.all_gather_single = once(fault, nccl.all_gather_single)
        if is_guilty and stage == "between" and k == 2:
            misbehave(fault)
        (y,) = fd.execute([torch.zeros(3, 4)])
        assert y is not None
        assert y.tolist() == [6.0] * 4


# --- all ranks of all cases --------------------------------------------------------------------------------


@dataclass
class _Running:
    case: Case
    pids: list[int]
    files: list[Path]
    began: float = field(default_factory=time.time)
    codes: dict[int, int | None] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)

    def poll(self) -> bool:
        """True once all have ended, or the other of one that is stopped."""
        for rank, pid in enumerate(self.pids):
            if rank in self.codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[rank], self.ends[rank] = os.waitstatus_to_exitcode(status), time.time()
        who = self.case[2]
        if self.case[1] == "stop" and 1 - who in self.codes and who not in self.codes:
            os.kill(self.pids[who], signal.SIGKILL)
            os.waitpid(self.pids[who], 0)
            self.codes[who] = None
        if time.time() - self.began > 2 * SLACK:
            for rank in set(range(len(self.pids))) - set(self.codes):
                os.kill(self.pids[rank], signal.SIGKILL)
        return len(self.codes) == len(self.pids)

    def outcome(self) -> Outcome:
        outputs = [path.read_text() for path in self.files]
        began = [float(text) for text in re.findall(r"^fault ([\d.]+)", outputs[self.case[2]], re.MULTILINE)]
        seconds = max(self.ends.values()) - (began[0] if began else 0.0)
        codes = [self.codes[rank] for rank in range(len(self.pids))]
        return Outcome(self.case, codes, outputs, seconds, sum(map(_has_members, self.pids)))


def _has_members(group: int) -> bool:
    """Is there a process left in the process group of a rank?"""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def serve(cases: Sequence[Case], folder: Path) -> tuple[Case, int] | None:
    """Run the cases, and print an outcome a line; in a rank, which is a fork of this process, its case and number."""
    import torch  # noqa: F401 imported once for all ranks

    import shardfuse.frontend.executor_cache  # noqa: F401 which imports what the first call needs

    gc.freeze()  # the end of a rank is to walk what is its own
    running: list[_Running] = []
    waiting = list(cases)
    while waiting or running:
        if waiting and len(running) < AT_ONCE:
            case = waiting.pop(0)
            port = _free_port()
            pids: list[int] = []
            files = [folder / f"{'-'.join(map(str, case))}-{rank}" for rank in range(world_size(case))]
            for rank, path in enumerate(files):
                pids.append(os.fork())
                if pids[-1] == 0:
                    _become(rank, world_size(case), port, path)
                    return case, rank
            running.append(_Running(case, pids, files))
        for each in [each for each in running if each.poll()]:
            running.remove(each)
            print(json.dumps(asdict(each.outcome())), flush=True)
        time.sleep(0.02)
    return None


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _become(rank: int, ranks: int, port: str, path: Path) -> None:
    """This process, a fork of the server, is a rank: of a process group of its own, with its output in a file."""
    os.setpgid(0, 0)
    keep_aside()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}


def run_cases(cases: Sequence[Case]) -> Iterator[Outcome]:
    """The outcomes of the cases, as they end."""
    env = environment() | {"OMP_NUM_THREADS": "1", "SHARDFUSE_HEARTBEAT_LIMIT": str(HEARTBEAT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "serve", json.dumps(cases), folder]
        server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
        assert server.stdout is not None
        try:
            for line in server.stdout:
                found = json.loads(line)
                yield Outcome(**{**found, "case": tuple(found["case"])})
            assert server.wait() == 0
        finally:
            server.kill()
            server.wait()


def main() -> int:
    bad = 0
    for outcome in run_cases(CASES):
        faults = outcome.faults(strict_limit(outcome.case))
        bad += bool(faults)
        print(outcome, *faults, sep="\n    ", flush=True)
        if faults:
            print(*outcome.outputs, sep="\n")
    print(f"{len(CASES)} cases, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        mine = serve(json.loads(sys.argv[2]), Path(sys.argv[3]))
        if mine is not None:
            (stage, fault, who), rank = mine
            work(stage, fault, is_guilty=rank == who)
    else:
        sys.exit(main())
