# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""A torch.nn.Sequential of which a GroupNorm and the SiLU behind it are one kernel, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from .group_norm import GroupNorm
from .module_hooks import has_no_hooks

Module = torch.nn.Module


class Sequential(torch.nn.Sequential):
    """As torch.nn.Sequential, of which it has everything but ``forward``.

    The norm and the activation stay modules of their own: one that is called by itself, by an index or in a slice of
    the sequence, gives what it gave.  So do those with hooks, which have to see the tensor in between.
    """

    def forward(self, input: Any) -> Any:
        if torch.compiler.is_compiling():  # which fuses what they decompose into
            return super().forward(input)
        modules = list(self)
        at = 0
        while at < len(modules):
            module: Any = modules[at]
            if are_joined(modules, at):
                module, at = cast(GroupNorm, module).with_silu(), at + 1
            input, at = module(input), at + 1
        return input


def pairs_of(modules: Sequence[Module]) -> list[int]:
    """The places of norms of which each is one kernel with what is behind it."""
    return [k for k in range(len(modules)) if are_joined(modules, k)]


def are_joined(modules: Sequence[Module], at: int) -> bool:
    """Are the module at this place and the one behind it a GroupNorm, on no mesh, and a SiLU, each called plainly?"""
    if type(modules[at]) is not GroupNorm or at + 1 == len(modules) or type(modules[at + 1]) is not torch.nn.SiLU:
        return False
    norm = cast(GroupNorm, modules[at])
    return norm.mesh is None and norm.activation is None and all(map(_is_plain, modules[at : at + 2]))


def _is_plain(module: Module) -> bool:
    """Does a call of it come to its class's ``forward``, and to nothing beside?"""
    return "forward" not in vars(module) and has_no_hooks(module)
