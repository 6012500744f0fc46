# pyright: reportPrivateUsage=false
"""Tensors of other types than torch's own, and what else takes ops in torch's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types of tensors that are handed to a fusion as they are."""
_core: Any = torch._C
forward_ad: Any = torch.autograd.forward_ad
modes: Callable[[], int] = _core._len_torch_dispatch_stack
in_functorch: Callable[[], bool] = _core._are_functorch_transforms_active
is_wrapped: Callable[[torch.Tensor], bool] = _core._functorch.is_functorch_wrapped_tensor
"""By a transform that may have ended, whose tensor was kept."""


def are_torchs(tensors: Sequence[torch.Tensor]) -> bool:
    """Are they torch's own tensors, outside of modes and of torch.func: what an autograd function knows?"""
    is_outside = not modes() and not in_functorch()
    return is_outside and PLAIN.issuperset(map(type, tensors)) and not any(map(is_wrapped, tensors))


plain_metadata_of = attrgetter("shape", "dtype", "device")
"""What matters of torch's own tensors: one call of C's."""


def metadata_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What matters of a tensor of another type; a DTensor's spec holds its mesh, placements, shape and dtype."""
    spec: object = getattr(tensor, "_spec", None)
    local: Any = tensor if spec is None else cast("Any", tensor)._local_tensor
    return (type(tensor), cast("type[object]", type(local)), spec, local.shape, local.dtype, local.device)


Specs = list[tuple[int, object]]
"""The mesh, placements, shape and dtype that a DTensor has as one object of its own, by its place among tensors."""


def specs_of(tensors: Sequence[torch.Tensor]) -> Specs | None:
    """Of the DTensors; None where there are tensors of other types beside those and torch's own."""
    if PLAIN.issuperset(map(type, tensors)):
        return []
    found = [(k, cast(object, getattr(t, "_spec", None))) for k, t in enumerate(tensors) if type(t) not in PLAIN]
    return None if any(spec is None for _, spec in found) else found


def is_traced(tensor: torch.Tensor) -> bool:
    """Does it stand for values that are elsewhere or to come: is it fake, functional, or a subclass that dispatches?"""
    kind: Any = type(tensor)
    is_plain = kind.__torch_dispatch__ is _core._disabled_torch_dispatch_impl
    return not is_plain and getattr(tensor, "wait", None) is None


is_batched: Callable[[torch.Tensor], bool] = _core._functorch.is_batchedtensor
"""Does it stand for many, by torch.vmap?"""
is_batched_by_the_older: Callable[[torch.Tensor], bool] = _core._functorch.is_legacy_batchedtensor
"""By the vmap of ``is_grads_batched``?"""
