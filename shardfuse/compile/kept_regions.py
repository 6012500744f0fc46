"""Regions on disk: a process that loads a compiled graph from torch's cache runs its regions without planning them.

What is kept is the program as it was bound (``executor/kept_programs.py``), in the cache folder, sealed.  It is found
by all that it was made from: the region's text, the layouts of its inputs, the device, the settings, the installation,
and the sources of shardfuse.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..config import VERSION, read_compiler_settings
from ..device import device_here
from ..executor.binding import Argument
from ..executor.host_program import Program
from ..executor.kept_programs import as_data, from_data
from ..executor.kernel import read_versions
from ..executor.options import CompileOptions
from ..secure_files import read_sealed, write_sealed
from .region_op import program_of


@functools.cache
def sources_hash() -> str:
    """Of all sources of shardfuse: they say how a region is planned and its kernels are written."""
    found = hashlib.sha256(VERSION.encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


sources_hash()  # what is imported now, whatever is installed while the process runs
SIZES = 64
"""Of arguments, for which a process keeps a region: others are planned, as files are not deleted."""
_kept: Counter[str] = Counter()
"""By text, how many this process has written."""


class KeptRegion:
    """The place on disk of ``text`` for these arguments; none where kernels are tuned, or do not run on a GPU.

    Programs are the same for all values of a number of which no shape is made.
    """

    def __init__(
        self, text: str, given_up: tuple[int, ...], arguments: Sequence[Argument], options: CompileOptions
    ) -> None:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        self._directory, self._text = options.cache_directory, text
        self._device = next((t.device for t in tensors if t.device.type == "cuda"), None)
        self._name: str | None = None
        if self._device is None or options.autotune or options.backend_for(self._device) != "triton":
            return
        in_shapes = program_of(text).shape_numbers if len(tensors) < len(arguments) else ()
        layouts = [
            (tuple(t.shape), t.stride(), t.dtype, t.device)
            if isinstance(t, torch.Tensor)
            else (type(t), t if k in in_shapes else None)
            for k, t in enumerate(arguments)
        ]
        where = (
            device_here(self._device),
            read_compiler_settings(),
            read_versions(),
            replace(options, cache_directory=Path()),
        )
        facts = repr((sources_hash(), text, given_up, layouts, where))
        self._name = f"region_{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"

    def read(self) -> Program | None:
        if self._name is None or self._device is None:
            return None
        content = read_sealed(self._directory, self._name)
        return None if content is None else from_data(content, self._device, self._directory)

    def write(self, program: Program) -> None:
        content = None if self._name is None else as_data(program)
        if self._name is not None and content is not None and _kept[self._text] < SIZES:
            _kept[self._text] += 1
            write_sealed(self._directory, self._name, content)
