"""Outputs that are written into an input's storage: by the kernel that makes them, or all at once when a call ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ..ir.expr import BoundFusion, BoundTensor
from .in_place_writes import are_one, memory_of, owners, replace
from .packing import copy_all
from .steps import Call, Step, names_of

Holds = Callable[[BoundTensor], bool]


def own_steps(
    fusion: BoundFusion,
    replaced: Mapping[BoundTensor, BoundTensor],
    samples: Mapping[BoundTensor, torch.Tensor],
    holds: Holds,
) -> list[Step]:
    """The first step: which of the inputs that kernels write over have memory of their own."""
    if not replaced:
        return []
    targets = list(replaced.values())
    others = [v for v in fusion.inputs if isinstance(v, BoundTensor) and holds(v) and v not in targets]
    own = owners([samples[t] for t in (*targets, *others)], len(targets))
    found = tuple(f"own_{t}" for t in targets)
    return [Call(found, "own", own, names_of((*targets, *others)), gives_list=True)]


def alias_steps(
    fusion: BoundFusion, replaced: Mapping[BoundTensor, BoundTensor], made: Collection[str], holds: Holds
) -> list[Step]:
    """The last steps: every output apart from what is written to, then the writes.

    made: the names of tensors in storage of the program's own, which are apart as they are.
    """
    pairs = [(out, target) for out, target in fusion.aliases.items() if holds(out) and holds(target)]
    if not pairs:
        return []
    targets = names_of(target for _, target in pairs)
    outputs = [t for t in dict.fromkeys(fusion.outputs) if holds(t) and t not in replaced and t.name not in made]
    copied = [(out, target) for out, target in pairs if out not in replaced]
    steps = [Call((t.name,), "apart", apart, (t.name, targets)) for t in outputs]
    steps += [Call((), "replace", replace, names_of((target, out))) for out, target in pairs if out in replaced]
    if copied:
        given = names_of(target for _, target in copied), names_of(out for out, _ in copied)
        steps.append(Call((), "copy_all", copy_all, given))
    return list[Step](steps)


def apart(x: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """``x``, or a copy of it where it is in memory that is about to be written to."""
    here = memory_of(x)
    return x.clone() if any(are_one(memory_of(t), here) for t in targets) else x
