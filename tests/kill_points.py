"""Kills one of three ranks at a random moment: `python tests/kill_points.py [POINTS [SEED]]`.

Every rank compares programs through the store, binds them and runs their collectives, over and over at new sizes; one
is killed on the way.  Every survivor has to end within the world's timeout and three seconds more, and to name
the rank that died.  Prints a line a point; ends with 1 where a survivor did not.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

WORLD = 3
TIMEOUT = 5.0
"""Seconds that a collective waits."""
GRACE = 3.0
"""Seconds more that a survivor has to end."""


@dataclass(frozen=True)
class Point:
    """``victim`` was killed ``after`` seconds of work; ``seconds``: until the last survivor ended."""

    victim: int
    after: float
    seconds: float
    outputs: dict[int, str]

    @property
    def faults(self) -> list[str]:
        """What the survivors did wrong."""
        found = [] if self.seconds < TIMEOUT + GRACE else [f"the last survivor ended after {self.seconds:.1f} s"]
        for rank, text in self.outputs.items():
            if not re.search(rf"rank {self.victim}\b", text):
                found.append(f"rank {rank} does not name rank {self.victim}: {text[-300:]!r}")
        return found


def work() -> None:
    """One rank, for ever: a fusion of an all-reduce, an all-to-all and a norm over a sharded axis, at new sizes."""
    import torch

    from shardfuse import DeviceMesh, FusionDefinition, ParallelType, initialize

    context = initialize(timeout=TIMEOUT)
    mesh = DeviceMesh(range(WORLD))
    print("ready", flush=True)
    for k in range(1_000_000):
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, WORLD * (k % 7 + 1)])
            var, mean = fd.ops.var_mean(x, [1], correction=0, keepdim=True)
            y = fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5)))
            moved = fd.ops.set(y)
            fd.add_output(moved)
            fd.add_output(fd.ops.sum(y, [0, 1]))
            for tv, axis in ((x, 1), (moved, 0)):
                tv.set_device_mesh(mesh)
                tv.outer_split(axis, WORLD)
                tv.axis(axis).parallelize(ParallelType.mesh_x)
        for rows in (WORLD, 2 * WORLD):
            fd.execute([torch.full((rows, k % 7 + 1), float(context.rank))])


def kill_at(victim: int, after: float) -> Point:
    """Start the ranks, kill ``victim`` so many seconds after all are ready, and wait for the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"PYTHONPATH": str(Path(__file__).parents[1]), "SHARDFUSE_HEARTBEAT_LIMIT": str(TIMEOUT)}
    shared |= {"LOCAL_WORLD_SIZE": str(WORLD), "PYTHONUNBUFFERED": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "work"], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None
            while "ready" not in (line := rank.stdout.readline()):
                assert line, "a rank ended before it was ready"
        time.sleep(after)
        ranks[victim].send_signal(signal.SIGKILL)
        began = time.monotonic()
        outputs = {k: rank.communicate(timeout=60)[0] for k, rank in enumerate(ranks) if k != victim}
        return Point(victim, after, time.monotonic() - began, outputs)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main(points: int, seed: int) -> int:
    rng = random.Random(seed)
    bad = 0
    for k in range(points):
        point = kill_at(rng.randrange(WORLD), rng.uniform(0, 1.5))
        bad += bool(point.faults)
        print(
            f"point {k}: rank {point.victim} killed after {point.after:.2f} s, all ended in {point.seconds:.1f} s",
            *point.faults,
            flush=True,
        )
    print(f"{points} points, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work()
    else:
        sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 50, int(sys.argv[2]) if sys.argv[2:] else 0))
