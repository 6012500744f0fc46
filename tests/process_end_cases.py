"""What one rank does in the cases of test_process_end.py: `python process_end_cases.py CASE FOLDER`."""

from __future__ import annotations

import atexit
import sys
import time
from pathlib import Path

import torch

from shardfuse import DeviceMesh, FusionDefinition, ParallelType, initialize


def define() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.add(x, y))
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def main(case: str, folder: Path) -> None:
    world = initialize(timeout=60)
    if world.rank == 1:
        atexit.register(lambda: (folder / "ended").write_text("in good order"))
        if case == "hang":
            atexit.register(time.sleep, 600)
    if case == "interrupt":
        (folder / f"ready{world.rank}").touch()
        time.sleep(100)
    print(f"rank {world.rank} says this without an end of line", end="")
    if world.rank == 1:
        define().execute([torch.ones(2, 3), torch.ones(4)])
    time.sleep(100)


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever runs the tests may have had ignored
    main(sys.argv[1], Path(sys.argv[2]))
