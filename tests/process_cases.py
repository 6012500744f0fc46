"""What one rank does in the cases of test_process.py: `python process_cases.py CASE`, started by some launcher.

Prints `fault SECONDS` (since the epoch) when a rank does what it should not.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from shardfuse.executor.communication import all_reduce
from shardfuse.mesh import DeviceMesh, Team
from shardfuse.mesh.process import ProcessContext, fail, finalize, initialize


def reduce_over_all(context: ProcessContext) -> None:
    team = Team.of(range(context.world_size))
    total = all_reduce(torch.full((4,), float(context.rank), device=context.device), "sum", team)
    assert total.tolist() == [sum(range(context.world_size))] * 4


def misbehave(case: str, context: ProcessContext) -> None:
    print(f"fault {time.time()}", flush=True)
    match case:
        case "raise":
            raise ValueError("a bug\nin two lines")
        case "refuse_on_all":
            DeviceMesh([[0, 1], [2, 3]]).validate_in_world(context.world_size)
        case "fail":
            fail("cannot go on")
        case "leave" | "leave_0":
            sys.exit(0)
        case "kill" | "kill_0":
            os.kill(os.getpid(), signal.SIGKILL)
        case "quit":
            os._exit(0)


def main(case: str) -> None:
    context = initialize(timeout=60)
    reduce_over_all(context)
    if case == "finish":  # one rank finishes long before the other, by finalize() first, then by its end
        time.sleep(context.rank * 0.5)
        finalize()
        assert initialize() == initialize()
        reduce_over_all(context)
        time.sleep((1 - context.rank) * 3.5)
        return
    guilty = 0 if case.endswith("_0") else 1
    if context.rank == guilty or case.endswith("_on_all"):
        misbehave(case, context)
    reduce_over_all(context)
    print("went on", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
