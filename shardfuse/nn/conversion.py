"""A model's own norms, activations and gated MLPs replaced by shardfuse's, with the parameters that they have."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..frontend.detection import has_dtensor
from ..frontend.promise_arguments import Invariant
from .batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from .default_eps import rms_norm_eps
from .fused import FusedModule
from .gated_mlp import GatedMLP, gated_mlp_of, is_close
from .gelu import GELU
from .group_norm import GroupNorm
from .layer_norm import LayerNorm
from .norm import RMSNorm
from .promising import promise
from .softmax import LogSoftmax, Softmax

log = logging.getLogger("shardfuse.nn.convert")

Module = torch.nn.Module
Found = Module | str | None
"""What takes a module's place, or why nothing does, or None for a module that is none of those that are replaced."""


@dataclass(frozen=True)
class Replacement:
    """A module that was replaced.  ``name``: where it is in the model, as ``named_modules()`` has it."""

    name: str
    original: Module
    replacement: Module


@dataclass(frozen=True)
class Left:
    """A module of a kind that is replaced, and why this one was not."""

    name: str
    module: Module
    reason: str


@dataclass
class Conversion:
    """What ``convert`` changed, and what it left.  ``model``: the model, or what took its place."""

    model: Module
    replaced: tuple[Replacement, ...]
    left: tuple[Left, ...]

    def undo(self) -> Module:
        """Put the modules back that were replaced; their parameters are those that have been trained since."""
        for done in reversed(self.replaced):
            done.original.train(done.replacement.training)
            if not done.name:
                self.model = done.original
            else:
                _put(self.model, done.name, done.original)
        self.replaced = ()
        return self.model

    def __str__(self) -> str:
        lines = [f"{r.name or '(model)'}: {_kind(r.original)} -> {_kind(r.replacement)}" for r in self.replaced]
        return "\n".join([*lines, *(f"{k.name or '(model)'}: {_kind(k.module)} left, {k.reason}" for k in self.left)])


def convert(model: Module, *, invariant: Invariant = None) -> Conversion:
    """Replace what shardfuse.nn has in place of: norms, Softmax, GELU, and gated MLPs.

    Replaced are torch.nn's RMSNorm, LayerNorm, GroupNorm, BatchNorm1d, 2d and 3d, SyncBatchNorm, Softmax, LogSoftmax
    and GELU; classes whose name ends in RMSNorm that have one vector ``weight`` and ``variance_epsilon`` or ``eps``;
    and MLPs of ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``.  A class that is not torch's is tried on
    random numbers first, and replaced where it computes what the replacement does.
    Parameters and buffers are the same objects as before, under the same names: optimisers and checkpoints see no
    difference.  Each replacement and each module that was left is logged (logger "shardfuse.nn.convert"), and stands in
    the result, whose ``undo()`` puts everything back.  ``invariant``: what the replacements promise (``promise``).
    """
    replaced: list[Replacement] = []
    left: list[Left] = []
    known: dict[int, Found] = {}
    everything: list[tuple[str, Module]] = list(cast(Any, model).named_modules(remove_duplicate=False))
    for name, module in everything:
        if any(name.startswith(f"{done.name}." if done.name else "") for done in replaced):
            continue  # a part of what is replaced as a whole
        if id(module) not in known:
            known[id(module)] = _replacement(module)
        found = known[id(module)]
        if isinstance(found, Module):
            replaced.append(Replacement(name, module, found))
            log.info("%s: %s -> %s", name or "(model)", _kind(module), _kind(found))
        elif found is not None:
            left.append(Left(name, module, found))
            log.info("%s: %s left, %s", name or "(model)", _kind(module), found)
    for done in replaced:
        if invariant is not None:
            promise(done.replacement, invariant=invariant)
        if done.name:
            _put(model, done.name, done.replacement)
    whole = known[id(model)]
    return Conversion(whole if isinstance(whole, Module) else model, tuple(replaced), tuple(left))


def _kind(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _put(model: Module, name: str, module: Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent).register_module(last, module)


def _replacement(module: Module) -> Found:
    """What takes the module's place; a reason where its kind has something but this one has not; else None."""
    if isinstance(module, FusedModule | GatedMLP):
        return None
    make = _TORCH.get(type(module))
    if make is None:
        base = next((kind for kind in _TORCH if isinstance(module, kind)), None)
        if base is not None:
            return f"a class of its own, which may compute something else than torch.nn.{base.__name__}"
        if _looks_like_rms_norm(module):
            make = _rms_norm_like
        elif {"gate_proj", "up_proj", "down_proj"} <= set(dict(module.named_children())):
            make = gated_mlp_of
    if make is None:
        return None
    if _has_hooks(module):
        return "it has hooks, which would no longer run"
    if any(has_dtensor((p,)) for p in module.parameters(recurse=False)):
        return "its parameters are DTensors: make the module with mesh= instead"
    found = make(module)
    return _with_state(found, module) if isinstance(found, Module) else found


def _with_state(found: Module, module: Module) -> Module:
    """``found`` with the parameters, buffers and mode of ``module``."""
    if not isinstance(found, GatedMLP):
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            setattr(found, name, tensor)
    found.train(module.training)
    return found


def _has_hooks(module: Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "parametrizations")
    return any(getattr(module, name, None) for name in names)


def _rms_norm(given: Module) -> Found:
    module = cast("torch.nn.RMSNorm", given)
    if len(module.normalized_shape) != 1:
        return f"it norms {len(module.normalized_shape)} dims"
    eps = module.eps
    if eps is None:  # torch takes that of the input's dtype, which is the weight's
        eps = rms_norm_eps(module.weight.dtype if module.elementwise_affine else torch.float32)
    return RMSNorm(module.normalized_shape[0], eps, module.elementwise_affine, device="meta")


def _layer_norm(given: Module) -> Found:
    module = cast("torch.nn.LayerNorm", given)
    has_bias = cast("torch.Tensor | None", module.bias) is not None
    return LayerNorm(module.normalized_shape, module.eps, module.elementwise_affine, has_bias, device="meta")


def _group_norm(given: Module) -> Found:
    module = cast("torch.nn.GroupNorm", given)
    return GroupNorm(module.num_groups, module.num_channels, module.eps, module.affine, device="meta")


def _batch_norm(make: Any) -> Callable[[Module], Found]:
    def of(given: Module) -> Found:
        module = cast("torch.nn.BatchNorm2d", given)
        options = module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        if make is SyncBatchNorm:
            return make(*options, cast(Any, module).process_group, device="meta")
        return make(*options, device="meta")

    return of


def _softmax(make: Callable[[int], Module]) -> Callable[[Module], Found]:
    def of(given: Module) -> Found:
        dim = cast("torch.nn.Softmax", given).dim
        return "its dim follows from the input's dims" if dim is None else make(dim)

    return of


def _gelu(given: Module) -> Found:
    return GELU(cast(Any, given).approximate)


_TORCH: dict[type[Module], Callable[[Module], Found]] = {
    torch.nn.RMSNorm: _rms_norm,
    torch.nn.LayerNorm: _layer_norm,
    torch.nn.GroupNorm: _group_norm,
    torch.nn.BatchNorm1d: _batch_norm(BatchNorm1d),
    torch.nn.BatchNorm2d: _batch_norm(BatchNorm2d),
    torch.nn.BatchNorm3d: _batch_norm(BatchNorm3d),
    torch.nn.SyncBatchNorm: _batch_norm(SyncBatchNorm),
    torch.nn.Softmax: _softmax(Softmax),
    torch.nn.LogSoftmax: _softmax(LogSoftmax),
    torch.nn.GELU: _gelu,
}


def _looks_like_rms_norm(module: Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and not list(module.children())


def _rms_norm_like(module: Module) -> Found:
    """An RMSNorm in the place of a class that computes one, of weight or of 1 + weight."""
    state = module.state_dict()
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(state) != ["weight"] or state["weight"].ndim != 1 or not isinstance(eps, float):
        return "it has not one vector called weight, and variance_epsilon or eps"
    size = state["weight"].shape[0]
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(size, generator=generator), torch.randn(3, size, generator=generator)
    try:
        trial = copy.deepcopy(module).to_empty(device="cpu").float()
        trial.load_state_dict({"weight": weight})
        with torch.no_grad():
            got = trial(x)
    except Exception as error:  # noqa: BLE001 the caller's code may raise anything; the reason is reported
        return f"it failed on {list(x.shape)} random numbers: {error}"
    unit = torch.nn.functional.rms_norm(x, (size,), None, eps)
    for offset in (0.0, 1.0):
        if is_close(got, unit * (offset + weight)):
            return RMSNorm(size, eps, zero_centered=offset == 1.0, device="meta")
    return "it computes something else than an RMSNorm"
