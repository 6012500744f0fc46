"""Outputs that are written into an input's storage, at the end of a call and all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..ir.expr import BoundFusion, BoundTensor


def alias_lines(fusion: BoundFusion, names: dict[str, object], holds: Callable[[BoundTensor], bool]) -> list[str]:
    """Lines of the program: every output apart from what is written to, then the writes."""
    pairs = [(out, target) for out, target in fusion.aliases.items() if holds(out) and holds(target)]
    if not pairs:
        return []
    names["apart"] = apart
    targets = ", ".join(target.name for _, target in pairs)
    outputs = [t for t in dict.fromkeys(fusion.outputs) if holds(t)]
    return [
        *(f"{t} = apart({t}, ({targets},))" for t in outputs),
        *(f"{target}.copy_({out})" for out, target in pairs),
    ]


def apart(x: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """``x``, or a copy of it where it lies in storage that is about to be written to."""
    here = x.untyped_storage().data_ptr()
    return x.clone() if any(t.untyped_storage().data_ptr() == here for t in targets) else x
