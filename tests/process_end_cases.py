"""What one rank does in the cases of test_process_end.py, which forks every rank from one process."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import serve

from shardfuse import DeviceMesh, FusionDefinition, ParallelType, finalize, initialize

kept: dict[str, object] = {}


def define() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.add(x, y))
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def leave_one_behind(rank: int, *, is_in_hand: bool) -> None:
    """Rank 0 runs a program once more than rank 1, whose process groups, and their connections, outlive its program."""
    mesh = DeviceMesh([0, 1])
    kept["here"] = dist.group.WORLD if is_in_hand else mesh.to_torch("cpu")
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.sum(x, [0]))
        x.set_device_mesh(mesh)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    for _ in range(2 - rank):
        fd.execute([torch.ones(2, 3)])


def main(case: str, folder: Path) -> None:
    world = initialize(timeout=600 if case.startswith("left") else 60)
    if world.rank == 1:
        atexit.register(lambda: (folder / "ended").write_text("in good order"))
        if case == "hang":
            atexit.register(time.sleep, 600)
    if case == "interrupt":
        (folder / f"ready{world.rank}").touch()
        time.sleep(100)
    if case == "collective":
        (folder / f"ready{world.rank}").touch()
        if world.rank == 0:
            dist.all_reduce(torch.ones(4))  # the other rank never comes to it
        time.sleep(100)
    if case == "handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        (folder / f"ready{world.rank}").touch()
        time.sleep(100)
    if case == "forked":
        child = os.fork()
        if child == 0:
            (folder / f"ready{world.rank}").touch()
            time.sleep(100)
        while not (folder / f"ready{world.rank}").exists():
            time.sleep(0.02)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        finalize()
        os.kill(os.getpid(), signal.SIGTERM)
    if case.startswith("left"):
        leave_one_behind(world.rank, is_in_hand=case == "left_with_a_group_in_hand")
        return
    print(f"rank {world.rank} says this without an end of line", end="")
    if world.rank == 1:
        define().execute([torch.ones(2, 3), torch.ones(4)])
    time.sleep(100)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever runs the tests may have had ignored
    mine = serve()
    if mine is not None:
        main(mine[0], Path(mine[1]))
