# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""Compiled kernels as the CUDA driver takes them, kept on disk: a process that finds all of its own imports no Triton.

That import, with what Triton does before it looks into its own cache, is most of the time of a first call.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ..config import VERSION, read_compiler_settings
from ..secure_files import read_sealed, write_sealed
from .triton_key import installed_triton

_WARP = 32
_TYPES = {"i32": "i", "i64": "q", "fp64": "d"}


@dataclass(frozen=True)
class Binary:
    """name: of the function in ``image``, a cubin.

    types: of the numbers behind its pointers, a letter each as ``Driver.launcher`` has them.  threads: of a program.
    shared: bytes of a program.
    """

    name: str
    types: str
    threads: int
    shared: int
    image: bytes


@dataclass(frozen=True)
class Asked:
    """What a kernel is compiled from.  text, name: its source, and the function in there.

    pointers: the element type of each.  alignments: of each a letter, ``w`` for whole words of 16 bytes, ``e`` for the
    element's own.  numbers: behind them, ``d`` for a float, ``q`` for an integer, of the types that the text says.
    options: of Triton.  capability: of the device.
    """

    text: str
    name: str
    pointers: tuple[torch.dtype, ...]
    alignments: str
    numbers: str
    options: tuple[tuple[str, int], ...]
    capability: tuple[int, int]


def binary_of(asked: Asked, directory: Path, compile_kernel: Callable[[], Any]) -> Binary | None:
    """From ``directory``, else made by ``compile_kernel``, which gives Triton's compiled kernel, and left there.

    ``None`` for a kernel that needs what only Triton's own entry hands over.
    """
    name = _name(asked)
    binary = _read(directory, name)
    if binary is None:
        binary = _from_triton(compile_kernel())
        if binary is not None:
            write_sealed(directory, name, _written(binary))
    return binary


def is_kept(asked: Asked, directory: Path) -> bool:
    """Is there a file, whatever is in it?"""
    return (directory / _name(asked)).exists()


def _name(asked: Asked) -> str:
    facts = repr((VERSION, installed_triton(), read_compiler_settings(), asked))
    return f"{asked.name}_{hashlib.sha256(facts.encode()).hexdigest()[:32]}.bin"


def _from_triton(compiled: Any) -> Binary | None:
    found = compiled.metadata
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    pointers = sum(kind.startswith("*") for kind in kinds)
    types = [_TYPES.get(kind) for kind in kinds[pointers:]]
    is_plain = not (found.global_scratch_size or found.profile_scratch_size or found.launch_pdl)
    if not is_plain or found.num_ctas != 1 or None in types:
        return None
    letters = "".join(cast("list[str]", types))
    return Binary(found.name, letters, _WARP * found.num_warps, found.shared, compiled.asm["cubin"])


def _written(binary: Binary) -> bytes:
    """All but the image as JSON, then the image."""
    head = {k: v for k, v in asdict(binary).items() if k != "image"}
    return json.dumps(head).encode() + b"\n" + binary.image


def _read(directory: Path, name: str) -> Binary | None:
    """``None`` where there is no such file, or not as it was written."""
    found = read_sealed(directory, name)
    if found is None:
        return None
    head, image = found.split(b"\n", 1)
    return Binary(**json.loads(head), image=image)
