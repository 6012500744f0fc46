"""What one rank does in the cases of test_process.py: `python process_cases.py CASE`, started by some launcher.

Or `serve`, and the ranks of all cases are forked from that process.

Prints `fault SECONDS` (since the epoch) when a rank does what it should not.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from forked_ranks import serve

from shardfuse import FusionDefinition, ParallelType
from shardfuse.executor.collective_calls import all_reduce
from shardfuse.mesh import DeviceMesh, Team, process
from shardfuse.mesh.process import ProcessContext, fail, finalize, initialize
from shardfuse.rank_errors import ForkedProcessError


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


def make_way() -> None:
    """nvFuser's communicator, then a default process group of the program's own; one fusion in both."""
    from shardfuse.compat import nvfuser_direct  # that no other case needs

    communicator = nvfuser_direct.Communicator.instance()
    rank, size = communicator.rank(), communicator.size()
    with nvfuser_direct.FusionDefinition() as fd:
        x = fd.define_tensor([size, 3])
        fd.add_output(fd.ops.sum(x, [0]))
    x.set_device_mesh(nvfuser_direct.multidevice.DeviceMesh(range(size)))
    x.axis(0).parallelize(nvfuser_direct.ParallelType.mesh_x)
    own = torch.full((1, 3), rank + 1.0)
    expected = [sum(range(1, size + 1))] * 3
    assert fd.execute([own])[0].tolist() == expected
    paths = [tempfile.mktemp()]
    dist.broadcast_object_list(paths)
    before = dist.group.WORLD
    dist.init_process_group("gloo", init_method=f"file://{paths[0]}", rank=rank, world_size=size)
    assert dist.group.WORLD is not before
    assert nvfuser_direct.Communicator.instance().size() == dist.get_world_size() == size
    assert fd.execute([own])[0].tolist() == expected
    communicator.barrier()
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo", init_method=f"file://{paths[0]}", rank=rank, world_size=size)
    assert fd.execute([own])[0].tolist() == expected
    dist.destroy_process_group()


def fork_after_a_run(rank: int, size: int) -> None:
    """A process that is forked from a rank is refused a fusion of several ranks that has run, and runs one of none."""
    with FusionDefinition() as alone:
        alone.add_output(alone.ops.sum(alone.define_tensor([-1, 3]), [1]))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        x.set_device_mesh(DeviceMesh(range(size)))
        x.outer_split(1, size)
        x.axis(1).parallelize(ParallelType.mesh_x)
        fd.add_output(fd.ops.sum(x, [1]))
    own = torch.ones(4, 3)
    for _ in range(2):
        assert fd.execute([own])[0].tolist() == [3.0 * size] * 4
        assert alone.execute([own])[0].tolist() == [3.0] * 4
    child = os.fork()
    if child == 0:
        assert alone.execute([own])[0].tolist() == [3.0] * 4
        for _ in range(2):
            with pytest.raises(ForkedProcessError, match=f"forked from rank {rank}"):
                fd.execute([own])
        os._exit(0)
    deadline = time.monotonic() + 60  # seconds, of which it takes few: a collective there would never end
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)
    assert fd.execute([own])[0].tolist() == [3.0 * size] * 4


def main(case: str) -> None:
    context = initialize(timeout=60)
    life = process._find_life()
    assert life is not None
    assert life.watchdog is not None
    assert len(life.watchdog._board.records) == context.world_size - 1  # from the start on, whoever ends is known
    reduce_over_all(context)
    if case == "finish":  # one rank finishes long before the other, by finalize() first, then by its end
        fork_after_a_run(context.rank, context.world_size)
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
    mine = serve() if sys.argv[1] == "serve" else sys.argv[1:]
    if mine == ["make_way"]:
        make_way()
    elif mine:
        main(mine[0])
