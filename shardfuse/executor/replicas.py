"""Are replicated inputs the same on all ranks that hold them?  Asked before each run under SHARDFUSE_CHECK=replicas.

1. Every rank takes a digest of the bytes of each input: 128 bits, so NaN and the sign of zero count too.
2. All ranks of the program gather all digests.
3. Every rank compares those of each input over the mesh dimensions that do not shard it, for all ranks of its mesh:
   from like digests all conclude the same, and raise the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ..errors import InputError
from ..ir.expr import BoundFusion, BoundTensor
from ..mesh import Team
from .collective_calls import all_gather

Digest = tuple[int, int]


@dataclass(frozen=True)
class ReplicaCheck:
    """Of one program.  ``ranks``: those that run it.  ``device``: whose tensors they exchange."""

    fusion: BoundFusion
    ranks: tuple[int, ...]
    device: torch.device

    def around(
        self, run: Callable[..., tuple[torch.Tensor | None, ...]]
    ) -> Callable[..., tuple[torch.Tensor | None, ...]]:
        """``run`` after the check of its arguments."""

        def checked(*arguments: object) -> tuple[torch.Tensor | None, ...]:
            self.check(arguments)
            return run(*arguments)

        return checked

    def check(self, arguments: Sequence[object]) -> None:
        """Raise InputError, on all ranks, where replicas differ.  Collective; waits for the device."""
        own = torch.tensor([digest(a) for a in arguments], dtype=torch.int64, device=self.device)
        gathered = all_gather(own[None], 0, Team.of(self.ranks))
        found = cast("list[list[Digest]]", gathered.tolist())  # pyright: ignore[reportUnknownMemberType]
        told = dict(zip(self.ranks, found, strict=True))
        for k, value in enumerate(self.fusion.inputs):
            for holders in self.replicas(value):
                first, *others = holders
                differ = [rank for rank in others if told[rank][k] != told[first][k]]
                if differ:
                    what = f"other values on {_ranks(differ)} than on rank {first}"
                    expected = f"the same on {_ranks(holders)}, which hold replicas of it"
                    remedy = "seed or broadcast it alike, or say how it is sharded"
                    raise InputError(k, value.name, what, expected, remedy)

    def replicas(self, value: object) -> list[tuple[int, ...]]:
        """The sets of ranks that hold one piece each of an input; a number is held by all."""
        if not isinstance(value, BoundTensor):
            return [self.ranks]
        mesh = value.domain.mesh
        if mesh is None:
            return [self.ranks]
        free = [p for p in mesh.parallel_types if not value.domain.digits_on(p)]
        return list(dict.fromkeys(mesh.box(rank, free) for rank in mesh.ranks)) if free else []


def digest(value: object) -> Digest:
    """128 bits of a tensor's bytes, in order of its elements, or of a number."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        data = repr(value).encode()
    found = hashlib.blake2b(data, digest_size=16).digest()
    return int.from_bytes(found[:8], "big", signed=True), int.from_bytes(found[8:], "big", signed=True)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
