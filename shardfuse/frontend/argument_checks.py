"""What is looked at once for arguments of a new kind: layouts, devices, and whether ranks have to exchange sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..allocation.global_sizes import Unknown, global_sizes
from ..errors import DefinitionError, InputError
from ..executor.agreement import failures_told
from ..executor.binding import Argument
from ..ir.caller_lines import lines_named
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from ..mesh import world_size


def check_layouts(fusion: Fusion, arguments: Sequence[Argument], ranks: Sequence[int]) -> None:
    """Raises ``InputError``, which is reported to ``ranks``, for tensors that have no strides, or no one shape."""
    for k, (declared, a) in enumerate(zip(fusion.inputs, arguments, strict=False)):
        if isinstance(a, torch.Tensor) and (a.layout is not torch.strided or a.is_nested):
            kind = f"a nested tensor of layout {a.layout}" if a.is_nested else f"a tensor of layout {a.layout}"
            with failures_told(ranks):
                raise InputError(
                    k, declared.val.name, kind, "a tensor of layout torch.strided", "call to_dense() or pad it"
                )


def check_device(fusion: Fusion, arguments: Sequence[Argument], device: torch.device) -> None:
    """Raises ``DefinitionError`` for tensors where no program runs."""
    if device.type not in ("cpu", "cuda"):
        inputs = [
            f"input {k}, {i.val.name}" for k, (i, a) in enumerate(zip(fusion.inputs, arguments, strict=True))
            if isinstance(a, torch.Tensor) and a.device == device
        ]  # fmt: skip
        found = f"{inputs[0] if inputs else 'outputs'} on {device}"
        raise DefinitionError("execute", found, "cpu or cuda (explain() takes tensors without data)")


def check_known(fusion: Fusion, unknown: Sequence[Unknown]) -> None:
    """Raises ``InputError`` for a size that is: a plan is made without the other ranks, who could tell it."""
    for one in unknown:
        index, found = [i.val for i in fusion.inputs].index(one.tv), f"an uneven one, {one.local} long"
        expected = f"a shard that tells the unsharded size of axis {one.axis}"
        raise InputError(index, one.tv.name, found, expected, "declare it, or pass sizes={...} with the inputs")


def asks_other_ranks(fusion: Fusion) -> bool:
    """May running the fusion need an exchange of sizes?  Then every call asks: no rank may skip it on its own hit."""
    probe = {i.val: [n if n > 0 else 2 for n in i.val.shape] for i in fusion.inputs if isinstance(i.val, TensorView)}
    return bool(global_sizes(fusion, probe, {})[1])


def check_meshes(fusion: Fusion) -> None:
    """Raises ``MeshExceedsWorldError`` for a mesh of ranks that the world does not have."""
    for tv in fusion.tensors():
        if tv.domain.mesh is not None:
            with lines_named(fusion, tv):
                tv.domain.mesh.validate_in_world(world_size())


def ranks_of(fusion: Fusion) -> tuple[int, ...]:
    """The ranks of all meshes of the fusion, ascending: those that have to run the same program."""
    meshes = [tv.domain.mesh for tv in fusion.tensors() if tv.domain.mesh is not None]
    return tuple(sorted(dict.fromkeys(r for mesh in meshes for r in mesh.ranks)))


def is_all_on_meshes(fusion: Fusion) -> bool:
    """Is every output connected by ops to a tensor that has a mesh, so that a rank on none of the meshes makes none?"""
    reached = {tv for tv in fusion.tensors() if tv.domain.mesh is not None}
    known = 0
    while len(reached) > known:
        known = len(reached)
        for r in (*fusion.records, *reversed(fusion.records)):  # what reads a tensor, then what it is made of
            beside = [v for v in (*r.inputs, *r.outputs) if isinstance(v, TensorView)]
            if not reached.isdisjoint(beside):
                reached.update(beside)
    return reached.issuperset(fusion.outputs)
