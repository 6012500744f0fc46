"""What the tuner chose for a segment: a record that other ranks get by the store, later processes by a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from ..codegen.source import KernelSource
from ..config import VERSION
from ..schedulers.schedule import Schedule
from ..schedulers.schedule_record import record_of, schedule_of
from ..secure_files import read_sealed, write_sealed
from .kernel import read_versions


@dataclass(frozen=True)
class Tuned:
    """The choice for one segment.

    kernel: name of its first kernel as it was proposed.  proposed, chosen: the schedules of its scheduler and of the
    tuner.  proposed_us, us: the microseconds of each, of all kernels of the segment.  tried: how many other schedules
    were compiled, gave the same result, and were timed; 0 where the choice was found on disk.
    """

    kernel: str
    proposed: Schedule
    chosen: Schedule
    proposed_us: float
    us: float
    tried: int

    def to_json(self) -> str:
        schedules = {"proposed": record_of(self.proposed), "chosen": record_of(self.chosen)}
        return json.dumps({**vars(self), **schedules})

    @staticmethod
    def from_json(text: str) -> Tuned | None:
        """``None`` for a text that is no such record."""
        try:
            found = json.loads(text)
        except ValueError:
            return None
        if not isinstance(found, dict):
            return None
        record = cast("dict[str, object]", found)
        proposed_us, us = record.get("proposed_us"), record.get("us")
        proposed, chosen = schedule_of(record.get("proposed")), schedule_of(record.get("chosen"))
        kernel, tried = record.get("kernel"), record.get("tried")
        if not isinstance(kernel, str) or not isinstance(tried, int) or proposed is None or chosen is None:
            return None
        if not isinstance(proposed_us, float) or not isinstance(us, float) or min(proposed_us, us) < 0:
            return None
        return Tuned(kernel, proposed, chosen, proposed_us, us, tried)


def choice_name(sources: Sequence[KernelSource], device: torch.device) -> str:
    """The file of a segment whose proposed kernels are ``sources``: by their text and sizes, device and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = [f"shardfuse {VERSION} {read_versions()}", name]
    facts += [f"{s.integers} {s.grid} {s.num_warps} {s.num_stages} {s.max_registers} {s.mailbox}" for s in sources]
    facts += [s.text for s in sources]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
    return f"tuned/{digest}.json"


def read_choice(directory: Path, name: str) -> Tuned | None:
    """What was kept; ``None`` where nothing was, or it is not as it was written."""
    found = read_sealed(directory, name)
    return None if found is None else Tuned.from_json(found.decode())


def write_choice(directory: Path, name: str, tuned: Tuned) -> None:
    """By one atomic rename: of several that write at once the last stays, whole."""
    write_sealed(directory, name, tuned.to_json().encode())
