"""GPUs, and how they reach each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import torch

from ...mesh.peer_memory import has_atomics
from .finding import Finding, ok
from .variables import hides_gpus
from .versions import answer

AREA = "GPUs"
_LINK = re.compile(r"NV\d+|SYS|NODE|PHB|PXB|PIX|X")


def gpus() -> Iterator[Finding]:
    """Each GPU, the driver, and the links between GPUs."""
    driver = answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if driver:
        yield ok(AREA, "driver", driver.splitlines()[0])
    if not torch.cuda.is_available():
        yield _none(has_driver=bool(driver) or any(Path("/dev").glob("nvidia[0-9]*")))
        return
    count = torch.cuda.device_count()
    for k in range(count):
        found = cast(Any, torch.cuda).get_device_properties(k)
        text = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors"
        text += f", compute capability {found.major}.{found.minor}"
        if (found.major, found.minor) < (8, 0):
            yield Finding(AREA, f"GPU {k}", "warning", text, "bfloat16 and asynchronous copies want an A100 or newer")
        else:
            yield ok(AREA, f"GPU {k}", text)
    if count > 1:
        yield peers(count, [(a, b) for a, b in permutations(range(count), 2) if _reaches(a, b)])
        yield links(answer(["nvidia-smi", "topo", "-m"]), count)
        yield exchange([(a, b) for a, b in permutations(range(count), 2) if not _is_joined(a, b)])


def _reaches(a: int, b: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(a, b))


def _is_joined(a: int, b: int) -> bool:
    """By NVLink, over which kernels of ``a`` write to the memory of ``b``?"""
    try:
        return _reaches(a, b) and has_atomics(a, b)
    except RuntimeError:
        return False


def exchange(apart: list[tuple[int, int]]) -> Finding:
    """By what ranks on these GPUs exchange statistics and partial sums.  apart: pairs that no NVLink joins."""
    if not apart:
        return ok(AREA, "exchange", "kernels of ranks exchange statistics over NVLink, without collectives")
    pairs = ", ".join(f"{a}-{b}" for a, b in apart)
    return ok(AREA, "exchange", f"by collectives where a job has some of these pairs, which no NVLink joins: {pairs}")


def _none(*, has_driver: bool) -> Finding:
    if has_driver and hides_gpus():
        return ok(AREA, "GPU", "hidden by CUDA_VISIBLE_DEVICES: fusions run on torch, ranks communicate through gloo")
    if not has_driver:
        return ok(AREA, "GPU", "none: fusions run on torch, ranks communicate through gloo")
    if torch.version.cuda is None:
        remedy = "install a torch that is built for CUDA to use them"
        return Finding(AREA, "GPU", "warning", "this machine has GPUs, and this torch is built for CPUs alone", remedy)
    try:
        torch.cuda.init()  # pyright: ignore[reportUnknownMemberType]
        reason = "it says no more"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    remedy = "see that `nvidia-smi` lists them, and that the driver is new enough for torch's CUDA"
    return Finding(AREA, "GPU", "fault", f"this machine has GPUs, and torch cannot use them: {reason}", remedy)


def peers(count: int, reached: list[tuple[int, int]]) -> Finding:
    """Which GPUs read each other's memory, as a matrix: a row a GPU, 1 where it reaches the GPU of the column."""
    rows = [" ".join("-" if a == b else "1" if (a, b) in reached else "0" for b in range(count)) for a in range(count)]
    text = " / ".join(rows)
    if len(reached) == count * (count - 1):
        return ok(AREA, "peer access", text)
    remedy = "NCCL takes the way through host memory: see IOMMU and ACS settings, or the container's"
    return Finding(AREA, "peer access", "warning", text, remedy)


def links(topology: str | None, count: int) -> Finding:
    """The kind of each link, of ``nvidia-smi topo -m``: NV18 is 18 NVLinks, PIX to SYS are ways through PCIe."""
    if topology is None:
        return Finding(AREA, "links", "warning", "nvidia-smi topo -m gives no answer", "see that it runs by itself")
    kinds: dict[str, list[str]] = {}
    for line in topology.splitlines():
        name, *cells = line.split()[: count + 1] or [""]
        if re.fullmatch(r"GPU\d+", name) and len(cells) == count and all(map(_LINK.fullmatch, cells)):
            row = int(name[3:])
            for column in range(row + 1, count):
                kinds.setdefault(cells[column], []).append(f"{row}-{column}")
    if not kinds:
        return Finding(AREA, "links", "warning", "nvidia-smi topo -m is not understood", "read what it prints")
    return ok(AREA, "links", "; ".join(f"{kind}: {', '.join(pairs)}" for kind, pairs in sorted(kinds.items())))
