"""A model's own norms, activations and gated MLPs replaced by shardfuse's, with the parameters that they have."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ..errors import ShardfuseError
from ..frontend.detection import has_dtensor
from ..frontend.promise_arguments import Invariant
from ..mesh.process import own_ledgers
from .batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from .fused import FusedModule
from .gated_mlp import GatedMLP, Tried, gated_mlp_of
from .gelu import GELU
from .group_norm import GroupNorm
from .handing_back import HOOKS, Before, check_own, hand_back, hand_tensors
from .layer_norm import LayerNorm
from .lookalikes import maker_for
from .norm import RMSNorm
from .promising import check_model, promise
from .sequential import Sequential, pairs_of
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


@dataclass(frozen=True)
class Joined:
    """A torch.nn.Sequential that computes some of its GroupNorms and the SiLUs behind them by one kernel each.

    ``name``: where it is in the model.  ``norms``: the names of these norms in it.
    """

    name: str
    module: Module
    norms: tuple[str, ...]


@dataclass
class Conversion:
    """What ``convert`` changed, and what it left.  ``model``: the model, or what took its place."""

    model: Module
    replaced: tuple[Replacement, ...]
    left: tuple[Left, ...]
    joined: tuple[Joined, ...] = ()

    def __post_init__(self) -> None:
        self._before = [Before.of(r.replacement, r.original) for r in self.replaced]

    def undo(self) -> Module:
        """Put the modules back that were replaced.

        They have the parameters and buffers of the replacements, the mode, and what has been assigned to those and
        hooked to those since.  Raises ModuleChangedError, before it changes anything, where torch has made another
        module of one since: ``fully_shard``, a parametrization.
        """
        for done, before in zip(self.replaced, self._before, strict=True):
            check_own(done.name, done.replacement, done.original, before)
        for whole in self.joined:
            if type(whole.module) is Sequential:  # else torch has made a class of that, which does the same without it
                cast(Any, whole.module).__class__ = torch.nn.Sequential
        self.joined = ()
        for done, before in reversed([*zip(self.replaced, self._before, strict=True)]):
            hand_back(done.replacement, done.original, before)
            if not done.name:
                self.model = done.original
            else:
                _put(self.model, done.name, done.original)
        self.replaced, self._before = (), []
        return self.model

    def __str__(self) -> str:
        lines = [f"{r.name or '(model)'}: {_kind(r.original)} -> {_kind(r.replacement)}" for r in self.replaced]
        lines += [f"{j.name or '(model)'}: {_joined_text(j.norms)}" for j in self.joined]
        return "\n".join([*lines, *(f"{k.name or '(model)'}: {_kind(k.module)} left, {k.reason}" for k in self.left)])


def convert(model: Module, *, invariant: Invariant = None) -> Conversion:
    """Replace what shardfuse.nn has in place of: norms, Softmax, GELU, and gated MLPs.

    Replaced are torch.nn's RMSNorm, LayerNorm, GroupNorm, BatchNorm1d, 2d and 3d, SyncBatchNorm, Softmax, LogSoftmax
    and GELU; classes whose name ends in RMSNorm or LayerNorm that have one vector ``weight``, maybe a ``bias``, and
    ``variance_epsilon`` or ``eps``; classes with GELU in their name; and MLPs of ``gate_proj``, ``up_proj``,
    ``down_proj`` and ``act_fn`` or ``activation_fn``.  A class that is not torch's is tried on random numbers first, in
    training and in evaluation, and replaced where its results, their dtypes and its gradients are those of the
    replacement.  An attribute that its forward reads is followed by its name (``variance_epsilon``), or refused where
    it is assigned later (a function, ``act_fn``); else the class is left, as is one whose forward writes an attribute,
    or uses a global that may change (a list).  A module that holds more than its kind does, or has hooks, or has
    arguments that the replacement refuses, is left.
    A GroupNorm and a SiLU behind it in a torch.nn.Sequential become one kernel: the Sequential stays the object that it
    is, and its class is one of shardfuse's, which calls both at once.
    Parameters and buffers are the same objects as before, under the same names: optimisers and checkpoints see no
    difference.  Other attributes are copied.  Each replacement and each module that was left is logged (logger
    "shardfuse.nn.convert"), and stands in the result, whose ``undo()`` puts everything back.
    ``invariant``: what the replacements promise (``promise``).
    Raises ArgumentError for a model that is no module, and DefinitionError.
    """
    check_model("convert", model)
    replaced: list[Replacement] = []
    left: list[Left] = []
    known: dict[int, Found] = {}
    tried: dict[Hashable, Tried] = {}
    everything: list[tuple[str, Module]] = list(cast(Any, model).named_modules(remove_duplicate=False))
    for name, module in everything:
        if any(name.startswith(f"{done.name}." if done.name else "") for done in replaced):
            continue  # a part of what is replaced as a whole
        if id(module) not in known:
            known[id(module)] = _replacement(module, tried)
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
    joined = _join(everything, left)
    whole = known[id(model)]
    return Conversion(whole if isinstance(whole, Module) else model, tuple(replaced), tuple(left), joined)


def _join(everything: Sequence[tuple[str, Module]], left: list[Left]) -> tuple[Joined, ...]:
    """Have each torch.nn.Sequential in which SiLU is behind a GroupNorm of shardfuse's call both at once."""
    joined: list[Joined] = []
    for name, module in everything:
        if not isinstance(module, torch.nn.Sequential) or isinstance(module, Sequential):
            continue
        names = list(module._modules)  # pyright: ignore[reportPrivateUsage] - with those that are there twice
        norms = tuple(names[k] for k in pairs_of(list(module)))
        if not norms:
            continue
        reason = _not_joined(module)
        if reason is None:
            module.__class__ = Sequential
            joined.append(Joined(name, module, norms))
            log.info("%s: %s", name or "(model)", _joined_text(norms))
        else:
            left.append(Left(name, module, reason))
            log.info("%s: %s left, %s", name or "(model)", _kind(module), reason)
    return tuple(joined)


def _joined_text(norms: Sequence[str]) -> str:
    return f"GroupNorm and SiLU in one kernel, at {', '.join(norms)}"


def _not_joined(module: Module) -> str | None:
    if "forward" in vars(module):
        return "its forward has been replaced in this one instance"
    return None if type(module) is torch.nn.Sequential else "a class of its own: GroupNorm and SiLU stay two kernels"


def _kind(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _put(model: Module, name: str, module: Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent).register_module(last, module)


def _replacement(module: Module, tried: dict[Hashable, Tried]) -> Found:
    """What takes the module's place; a reason where its kind has something but this one has not; else None.

    tried: what trials of gated MLPs have shown so far.
    """
    if isinstance(module, FusedModule | GatedMLP):
        return None
    make, lost = _TORCH.get(type(module)), list[Module]()
    if make is None:
        base = next((kind for kind in _TORCH if isinstance(module, kind)), None)
        if base is not None:
            return f"a class of its own, which may compute something else than torch.nn.{base.__name__}"
        make = maker_for(module)
        if make is None and {"gate_proj", "up_proj", "down_proj"} <= set(dict(module.named_children())):
            make = partial(gated_mlp_of, tried=tried)
            lost = [part for name, part in module.named_children() if not name.endswith("_proj")]
    if make is None:
        return None
    reason = _kept_by_caller(module, lost)
    if reason is not None:
        return reason
    try:
        found = make(module)
    except ShardfuseError as refused:
        return f"it is refused: {refused}"
    if not isinstance(found, GatedMLP | FusedModule):
        return found
    others = _others(found, module)
    if others:
        return f"it holds {', '.join(others)}"
    found.input_name = _input_name(module) or ""
    return _with_state(found, module)


def _kept_by_caller(module: Module, parts: list[Any]) -> str | None:
    """What the caller has done to this one module, or its parts, that would be lost."""
    if any(map(_has_hooks, (module, *parts))):
        return "it has hooks, which would no longer run"
    if any("forward" in part.__dict__ for part in (module, *parts)):
        return "its forward has been replaced in this one instance"
    if _input_name(module) is None:
        return "its forward does not take one tensor alone"
    if any(has_dtensor((p,)) for p in module.parameters(recurse=False)):
        return "its parameters are DTensors: make the module with mesh= instead"
    return None


def _input_name(module: Module) -> str | None:
    """What the one argument of its forward is called; None where there are more."""
    taken = list(inspect.signature(module.forward).parameters.values())
    is_one = len(taken) == 1 and taken[0].kind in (taken[0].POSITIONAL_ONLY, taken[0].POSITIONAL_OR_KEYWORD)
    return taken[0].name if is_one else None


def _others(found: Module, module: Module) -> list[str]:
    """What would be lost or made: names of children, parameters and buffers that one of the two has.

    A tensor that is an attribute of the module, in the place of a parameter that it has not, is one too.
    """
    names = [] if isinstance(found, GatedMLP) else [name for name, _ in module.named_children()]
    for has, will in ((module._parameters, found._parameters), (module._buffers, found._buffers)):  # pyright: ignore[reportPrivateUsage]
        had, kept = [*_there(has), *(name for name in will if vars(module).get(name) is not None)], _there(will)
        names += [name for name in had if name not in kept] + [f"no {name}" for name in kept if name not in had]
    unsaved = module._non_persistent_buffers_set ^ found._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    return [*names, *sorted(unsaved)]


def _there(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor is not None]


def _with_state(found: Module, module: Module) -> Module:
    """``found`` with the parameters, buffers, mode and further attributes of ``module``."""
    hand_tensors(module, found)
    for name, value in module.__dict__.items():
        if not hasattr(found, name):
            object.__setattr__(found, name, value)
    found.train(module.training)
    return found


def _has_hooks(module: Module) -> bool:
    return any(getattr(module, name, None) for name in (*HOOKS, "parametrizations"))


def _rms_norm(given: Module) -> Found:
    module = cast("torch.nn.RMSNorm", given)
    if len(module.normalized_shape) != 1:
        return f"it norms {len(module.normalized_shape)} dims"
    return RMSNorm(module.normalized_shape[0], module.eps, module.elementwise_affine, device="meta")


def _layer_norm(given: Module) -> Found:
    module = cast("torch.nn.LayerNorm", given)
    has_bias = cast("torch.Tensor | None", module.bias) is not None
    return LayerNorm(module.normalized_shape, module.eps, module.elementwise_affine, has_bias, device="meta")


def _group_norm(given: Module) -> Found:
    module = cast("torch.nn.GroupNorm", given)
    has_bias = cast("torch.Tensor | None", module.bias) is not None
    return GroupNorm(module.num_groups, module.num_channels, module.eps, module.affine, device="meta", bias=has_bias)


def _batch_norm(make: Any) -> Callable[[Module], Found]:
    def of(given: Module) -> Found:
        module = cast("torch.nn.BatchNorm2d", given)
        if make is SyncBatchNorm and own_ledgers() is None:
            return (
                "ranks may have batches of different sizes, which is noticed where shardfuse.initialize() makes the "
                "process group: put shardfuse.nn.SyncBatchNorm there yourself where they have not"
            )
        options = module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        group = (cast(Any, module).process_group,) if make is SyncBatchNorm else ()
        has_bias = cast("torch.Tensor | None", module.bias) is not None
        return make(*options, *group, device="meta", bias=has_bias)

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
