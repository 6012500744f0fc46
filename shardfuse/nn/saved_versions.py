# pyright: reportPrivateUsage=false
"""Do tensors still have the values that a backward reads?

Autograd compares versions of the tensors that a function saves.  A DTensor counts the changes that are made to it, and
its local tensor, which fusions read, does not count them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..errors import ChangedBeforeBackwardError

Watched = Sequence[tuple[torch.Tensor, int]]
"""Tensors, and the version that each had in the forward."""

_autograd: Any = cast("Any", torch._C)._autograd
_hooks: Callable[[bool], object] = _autograd._top_saved_tensors_default_hooks


def watch(origins: Sequence[torch.Tensor], saved: Sequence[int]) -> Watched:
    """The parameters among ``origins`` that are ``saved``, which has indices beyond them too.

    None where hooks take what is saved, and may give back a copy: autograd compares no versions then either.
    Activations are saved as they are; held here too, they would outlive what a backward lets go of.
    """
    if _hooks(True) is not None:
        return ()
    found = [origins[k] for k in saved if k < len(origins)]
    return [(t, t._version) for t in found if type(t) is not torch.Tensor]


def check_unchanged(watched: Watched) -> None:
    """Raises ChangedBeforeBackwardError."""
    for tensor, version in watched:
        if tensor._version != version:
            raise ChangedBeforeBackwardError(tuple(tensor.shape), tensor.dtype, tensor._version, version)
