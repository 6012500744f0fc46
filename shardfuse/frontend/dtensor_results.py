"""What the outputs of a fusion are as DTensors, and how pieces are exchanged around a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..analysis.communication_table import Communication
from ..ir.tensor_view import TensorView
from .moves import Entering, Move


def entering_moves(entering: Mapping[int, Entering]) -> tuple[Communication, ...]:
    """How pieces are exchanged before a run."""
    return tuple(piece.move.communication(piece.local.dtype) for piece in entering.values())


def leaving_moves(made: Sequence[TensorView], results: Sequence[Result]) -> tuple[Communication, ...]:
    """How they are after it."""
    exits = [(tv, result.move) for tv, result in zip(made, results, strict=True)]
    return tuple(move.communication(tv.dtype.torch) for tv, move in exits if move is not None)


@dataclass(frozen=True)
class Results:
    """``moved``: how pieces of ``each`` are exchanged behind a run."""

    each: tuple[Result, ...]
    moved: tuple[Communication, ...]


@dataclass(frozen=True)
class Result:
    """An output as a DTensor.  ``spec``: torch's word for all but the local tensor, ``None`` for what is none.

    ``move``: what it takes to torch's pieces.
    """

    spec: Any
    move: Move | None

    def of(self, local: torch.Tensor | None) -> torch.Tensor | None:
        """Without `DTensor.from_local`, which takes longer than a small collective."""
        from torch.distributed.tensor import DTensor

        if self.spec is None:
            return local
        if local is None:  # outside of its mesh
            meta = self.spec.tensor_meta
            local = nothing_of(len(meta.shape), meta.dtype, self.spec.mesh.device_type)
        elif self.move is not None:
            local = self.move.leave(local)
        return cast("Any", DTensor)(local, self.spec, requires_grad=False)


def nothing_of(ndim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """What torch has of a DTensor on a rank outside of its mesh: no elements, of a single number a zero."""
    return torch.zeros((0,) if ndim else (), dtype=dtype, device=device)
