"""What a rank tells the others of a program that they compare, see ``agreement.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..config import VERSION
from .options import CompileOptions

OK = "ok"
Told = tuple[str, str, str, int]
"""What a rank tells of a comparison: the digest of its text, its verdict, the digest of what followed, its number."""


class Made(list[str]):
    """What followed from a text, a fact a line, which has to be the same on all ranks.

    number: what this rank has to say besides, which may differ.  most: of all ranks' numbers, once they are agreed;
    ``None`` where the text was agreed on before.
    """

    number: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Comparison:
    """The k-th comparison of a team.  ``made``: what followed from the text here, a fact a line.

    ``call``: the text of the call that comes next, where that is another one.
    """

    ranks: tuple[int, ...]
    text: str = ""
    made: tuple[str, ...] = ()
    call: str | None = None
    k: int = 0
    number: int = 0

    def key(self, rank: int, what: str = "") -> str:
        return f"{digest(str(self.ranks))}/{self.k}/{what}{rank}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe(
    script: str,
    sizes: Mapping[str, Sequence[int]],
    numbers: Mapping[str, object],
    options: CompileOptions,
    device: torch.device,
) -> str:
    """What all ranks must have alike, a fact a line.

    ``sizes``: the unsharded shape of each input by name; ``numbers``: the scalar inputs that shapes depend on.
    """
    head = [
        f"shardfuse {VERSION}, torch {torch.__version__}",
        f"device: {device.type}",
        f"options: backend={options.backend}, interpret={options.interpret}, strict={options.strict}, "
        f"autotune={options.autotune}, ranks_per_node={options.ranks_per_node}, "
        f"check_replicas={options.check_replicas}, exchange={options.exchange}",
        *(f"{name}: unsharded {list(shape)}" for name, shape in sizes.items()),
        *(f"{name} = {value!r}" for name, value in numbers.items()),
    ]
    return "\n".join([*head, *script.splitlines()])
