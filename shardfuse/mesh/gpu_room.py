# pyright: reportPrivateUsage=false
"""How many multiprocessors kernels that wait for other ranks may take, so that NCCL always finds the others.

A kernel of NCCL waits for other ranks too, with all of its programs.  Kernels of several process groups may run at a
time, and beside them one kernel that exchanges; ranks may start them in different orders.  Where there is room for all
at once, none waits for the end of another, which might wait on another rank for the first.  NCCL has one program of
several hundred threads on a multiprocessor, and one kernel at a time for each communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shardfuse.config import read_least_nccl_programs, read_nccl_programs

_c10d = cast("Any", c10d)

_MOST = 64
"""Programs of a kernel of NCCL.  Source: NCCL's user guide, ``NCCL_MAX_CTAS``."""
_MOST_OF = {(9, 0): 32}
"""By the compute capability of GPUs that were looked at.  On 2 x H200 NCCL 2.28 launches up to 24 programs, each of 544
threads with 96 registers; of 24 channels it makes 32 for send and receive, a power of two (``paths.cc``)."""


class GpuRoom:
    """Of ``device``, that of this rank; on a CPU there is always room.  groups: how many have kernels of NCCL here."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._left, self.groups = device, 0, 0
        self._known = -1
        self._last: ref[dist.ProcessGroup] | None = None

    def left(self) -> int:
        """Multiprocessors that NCCL never needs, 0 or less for none; counted anew once there are other groups.

        Every call asks.  New groups stand last: as many as there were, of which the last is the same, are the same.
        Neither their number tells alone, where one takes the place of another, nor torch's count of the names that it
        has given: groups that only some ranks make, and those of a split, have names of their ranks.
        """
        groups: dict[dist.ProcessGroup, object] = _c10d._world.pg_map
        last = next(reversed(groups), None)
        if len(groups) != self._known or self._last is None or self._last() is not last:
            all_there_are, most = _multiprocessors(self._device)
            taken = programs_of_groups(tuple(groups), most)
            self._left, self.groups = all_there_are - sum(taken), len(taken)
            self._known, self._last = len(groups), None if last is None else ref(last)
        return self._left


def _multiprocessors(device: torch.device) -> tuple[int, int]:
    """All of a GPU, and how many a kernel of NCCL takes at most."""
    if device.type != "cuda":
        return 1 << 30, 0
    found = cast("Any", torch.cuda).get_device_properties(device)
    return int(found.multi_processor_count), _MOST_OF.get((found.major, found.minor), _MOST)


def programs_of_groups(groups: Sequence[dist.ProcessGroup], most: int) -> list[int]:
    """Programs of the largest kernel of NCCL for each process group that has other ranks; ``most`` where nothing says.

    A least number that is more than the most one counts: NCCL may take no notice of either then.
    """
    bound, always = read_nccl_programs(), read_least_nccl_programs()
    found = list[int]()
    for group in groups:
        if group.size() < 2 or "nccl" not in c10d.get_backend_config(group):
            continue
        config = getattr(getattr(_backend(group), "options", None), "config", None)
        asked = cast("int | None", getattr(config, "max_ctas", None))
        asked = asked if bound is None and asked is not None and asked > 0 else bound
        least = max(always, cast("int | None", getattr(config, "min_ctas", None)) or 0)  # undefined is negative
        found.append(min(_MOST, max(most if asked is None else asked, least)))
    return found


def _backend(group: dist.ProcessGroup) -> object | None:
    """NCCL's; ``None`` where it is not made yet."""
    try:
        return cast("Any", group)._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
