"""Programs of kernels alone as data: a later process runs one without planning, and without writing its kernels.

A program is a short text of allocations and launches.  Together with the text, grid and numbers of each kernel that is
all it takes; the kernels' cubins are kept beside it (``binaries.py``).  A program that calls anything else, as torch's
ops or collectives, is not kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ..codegen.source import KernelSource
from ..ir.dtype import DataType
from .driver import open_driver
from .host_program import DEVICE_CALLS, Program, bound_text, device_calls
from .kernel import Kernel

_FORM = 3
"""Of what is written: another one is not read."""


@dataclass(frozen=True)
class _Typed:
    """Stands for a tensor or a number of a kernel, of which nothing else is asked."""

    dtype: DataType
    ndim: int = 0


def as_data(program: Program) -> bytes | None:
    """``None`` where something else than kernels runs in it."""
    dtypes = {name: f for name, f in program.functions.items() if isinstance(f, torch.dtype)}
    known = {*DEVICE_CALLS, *dtypes, *program.launched, *program.batches}
    if not program.launched or not known.issuperset(program.functions):
        return None
    kernels = list(dict.fromkeys(program.launched.values()))
    found = {
        "form": _FORM,
        "text": program.text,
        "apart": program.apart,
        "dtypes": sorted(dtypes),
        "kernels": [_described(kernel.source) for kernel in kernels],
        "launched": {name: kernels.index(kernel) for name, kernel in program.launched.items()},
        "batches": program.batches,
        "by_address": sorted(program.by_address),
    }
    return json.dumps(found).encode()


def from_data(content: bytes, device: torch.device, directory: Path) -> Program | None:
    """The program of ``as_data``, its kernels loaded on ``device``.  ``None`` where they need more than the driver."""
    found: dict[str, Any] = json.loads(content)
    driver = open_driver(directory)
    if found["form"] != _FORM or driver is None:
        return None
    kernels = [Kernel(_source(kernel), directory) for kernel in found["kernels"]]
    for kernel in kernels:
        kernel.compile(device)
    launched = {name: kernels[k] for name, k in cast("dict[str, int]", found["launched"]).items()}
    names = device_calls(device)
    names.update({name: getattr(torch, name) for name in found["dtypes"]})
    names.update({name: kernel.launcher() for name, kernel in launched.items()})
    batches = {name: tuple(parts) for name, parts in cast("dict[str, list[str]]", found["batches"]).items()}
    for name, parts in batches.items():
        names[name] = driver.batch(tuple(cast("Callable[..., None]", names[part]) for part in parts))
    functions = cast("Mapping[str, Callable[..., object]]", names)
    run = bound_text(found["text"], names)
    return Program(
        run, found["text"], functions=functions, apart=found["apart"], launched=launched, batches=batches,
        by_address=frozenset(found["by_address"]), kernels=tuple(kernel.source.text for kernel in kernels),
    )  # fmt: skip


def _described(source: KernelSource) -> dict[str, Any]:
    """All but its schedule and its accesses, which say how its text was written."""
    plain = replace(source, tensors=(), scalars=(), schedule=None, accesses=())
    tensors = [(t.dtype.name, t.ndim) for t in source.tensors]
    return asdict(plain) | {"tensors": tensors, "scalars": [s.dtype.name for s in source.scalars]}


def _source(found: Mapping[str, Any]) -> KernelSource:
    given: dict[str, Any] = {**found, "integers": tuple(found["integers"])}
    given["tensors"] = tuple(_Typed(DataType[t], ndim) for t, ndim in found["tensors"])
    given["scalars"] = tuple(_Typed(DataType[t]) for t in found["scalars"])
    return KernelSource(**given)
