"""Outputs that are written into an input's storage: by the kernel that makes them, or all at once when a call ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ..ir.expr import BoundFusion, BoundTensor
from .in_place_writes import are_one, memory_of, owners, replace
from .packing import copy_all

Holds = Callable[[BoundTensor], bool]


def own_lines(
    fusion: BoundFusion,
    replaced: Mapping[BoundTensor, BoundTensor],
    samples: Mapping[BoundTensor, torch.Tensor],
    names: dict[str, object],
    holds: Holds,
) -> list[str]:
    """The first line: which of the inputs that kernels write over have memory of their own."""
    if not replaced:
        return []
    targets = list(replaced.values())
    others = [v for v in fusion.inputs if isinstance(v, BoundTensor) and holds(v) and v not in targets]
    found = "".join(f"own_{t}, " for t in targets)
    names.update(own=owners([samples[t] for t in (*targets, *others)], len(targets)), replace=replace)
    return [f"{found}= own({', '.join(map(str, (*targets, *others)))})"]


def alias_lines(
    fusion: BoundFusion,
    replaced: Mapping[BoundTensor, BoundTensor],
    made: Collection[str],
    names: dict[str, object],
    holds: Holds,
) -> list[str]:
    """The last lines: every output apart from what is written to, then the writes.

    made: the names of tensors in storage of the program's own, which are apart as they are.
    """
    pairs = [(out, target) for out, target in fusion.aliases.items() if holds(out) and holds(target)]
    if not pairs:
        return []
    names["apart"] = apart
    targets = _listed([target for _, target in pairs])
    outputs = [t for t in dict.fromkeys(fusion.outputs) if holds(t) and t not in replaced and t.name not in made]
    copied = [(out, target) for out, target in pairs if out not in replaced]
    lines = [f"{t} = apart({t}, ({targets}))" for t in outputs]
    lines += [f"replace({target}, {out})" for out, target in pairs if out in replaced]
    if copied:
        names["copy_all"] = copy_all
        lines.append(f"copy_all(({_listed([t for _, t in copied])}), ({_listed([out for out, _ in copied])}))")
    return lines


def apart(x: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """``x``, or a copy of it where it is in memory that is about to be written to."""
    here = memory_of(x)
    return x.clone() if any(are_one(memory_of(t), here) for t in targets) else x


def _listed(tensors: Sequence[BoundTensor]) -> str:
    return "".join(f"{t}, " for t in tensors).rstrip()
