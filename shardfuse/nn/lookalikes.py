"""Classes of other libraries that compute a norm or a GELU of shardfuse's: known by a name, and tried before belief."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from .attributes_read import Read, attributes_read
from .gelu import GELU, Approximation
from .layer_norm import LayerNorm
from .norm import RMSNorm
from .settings import plain
from .stand_in import StandIn, clashes
from .trial import Case, Wanted, apart, why_other

Module = torch.nn.Module

_EPS = ("variance_epsilon", "eps")
_HAS_WEIGHT = ("with_scale", "elementwise_affine")
"""What classes call whether there is a weight: there is one."""


@dataclass(frozen=True)
class _Candidate:
    """What may take a module's place.  ``wanted``: what it computes; ``make``: makes it, on the meta device."""

    wanted: Wanted
    make: Callable[[], StandIn]


@dataclass(frozen=True)
class _Known:
    """Of the state that a forward reads: what the replacement has too, by which names, and what cannot be changed."""

    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    fixed: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()


def _of_norm(read: Read) -> _Known:
    """One eps, and switches that say that there is a weight."""
    eps = [name for name in _EPS if name in read.state][:1]
    aliases = {name: "eps" for name in eps if name != "eps"}
    return _Known(aliases, tuple(name for name in _HAS_WEIGHT if name in read.state), tuple(eps))


def maker_for(module: Module) -> Callable[[Module], Module | str] | None:
    """What makes that which takes the place of such a module, or says why nothing does; None for other classes."""
    name = type(module).__name__
    if list(module.children()):
        return None
    if name.endswith(("RMSNorm", "LayerNorm")):
        return _norm_like
    return _gelu_like if "GELU" in name.upper() else None


def _norm_like(module: Module) -> Module | str:
    """An RMSNorm, of weight or of 1 + weight, or a LayerNorm in the place of a class that computes one."""
    state = module.state_dict()
    eps = plain(next((getattr(module, name) for name in _EPS if hasattr(module, name)), None))
    is_known = list(state) in (["weight"], ["weight", "bias"]) and all(p.ndim == 1 for p in state.values())
    if not is_known or not isinstance(eps, float):
        return "it has not one vector called weight (and a bias), and variance_epsilon or eps"
    size = state["weight"].shape[0]
    candidates = [_layer_norm(size, eps, "bias" in state)]
    if "bias" not in state:
        candidates = [*(_rms_norm(size, eps, offset) for offset in (0.0, 1.0)), *candidates]
    return _chosen(module, candidates, size, _CASES, "an RMSNorm or LayerNorm", _of_norm)


def _rms_norm(size: int, eps: float, offset: float) -> _Candidate:
    make = partial(RMSNorm, size, eps, zero_centered=offset == 1.0, device="meta")
    return _Candidate(partial(_root_mean_square, eps, offset), make)


def _root_mean_square(eps: float, offset: float, module: Module, x: torch.Tensor) -> torch.Tensor:
    """Rounded once, as the replacement is."""
    norm = cast(Any, module)
    scaled = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], None, eps) * (offset + norm.weight.float())
    return (scaled if getattr(norm, "bias", None) is None else scaled + norm.bias.float()).to(x.dtype)


def _layer_norm(size: int, eps: float, has_bias: bool) -> _Candidate:
    return _Candidate(partial(_layer_normed, eps), partial(LayerNorm, size, eps, bias=has_bias, device="meta"))


def _layer_normed(eps: float, module: Module, x: torch.Tensor) -> torch.Tensor:
    norm = cast(Any, module)
    bias = None if getattr(norm, "bias", None) is None else norm.bias.float()
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], norm.weight.float(), bias, eps).to(x.dtype)


def _gelu_like(module: Module) -> Module | str:
    """A GELU in the place of a class that computes one, exactly or by tanh."""
    candidates = [_Candidate(partial(_gelu, kind), partial(GELU, kind)) for kind in ("none", "tanh")]
    return _chosen(module, candidates, 64, _GELU_CASES, "a GELU", lambda _: _Known())


def _gelu(approximate: Approximation, _: Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype)


_CASES = (
    Case((1,)), Case((2, 1)), Case((3,)), Case((2, 3), 1e-4), Case((2, 2, 3), 1e6), Case((2,), has_nan=True),
    Case((3,), dtype=torch.bfloat16), Case((2, 3), dtype=torch.float16),
)  # fmt: skip
_GELU_CASES = (
    Case(()), Case((3,)), Case((2, 3), 1e-4), Case((2, 2, 3), 30.0), Case((2,), 1e12), Case((2,), has_nan=True),
    Case((3,), dtype=torch.bfloat16), Case((2, 3), dtype=torch.float16),
)  # fmt: skip


def _chosen(
    module: Module,
    candidates: Sequence[_Candidate],
    size: int,
    cases: Sequence[Case],
    kinds: str,
    known: Callable[[Read], _Known],
) -> Module | str:
    """The first candidate that computes what the module does, or why none does.  known: what it has of what is read."""
    reasons = list[str]()
    for candidate in candidates:
        try:
            reason = why_other(module, candidate.wanted, size, cases, 1.0)
            read = Read() if reason is not None else attributes_read(module, size, cases)
            adds_bias = "bias" in read.state and why_other(_biased(module), candidate.wanted, size, cases, 1.0) is None
            narrows = reason is None and _narrows(module, size)
        except Exception as error:  # noqa: BLE001 the caller's code may raise anything; the reason is reported
            return f"it failed on random numbers: {error}"
        if reason is not None:
            reasons.append(reason)
            continue
        has, found = known(read), candidate.make()
        followed = (*has.aliases, *has.fixed, *has.followed, *(("bias",) if adds_bias else ()))
        further = [name for name in read.state if name not in followed]
        further += [name for name in read.functions if name in vars(module) and clashes(found, name)]
        if (why := read.why_not(further, kinds)) is not None:
            return why
        if narrows:
            return "it casts float32 inputs to the type of its weight"
        found.stand_for(module, has.aliases, (*has.fixed, *read.functions))
        return found
    latest = max(reasons, key=lambda reason: max(k for k, case in enumerate(cases) if str(case) in reason))
    return f"it computes something else than {kinds}: {latest}"


def _biased(norm: Module) -> Module:
    """A copy of a norm whose bias is None, with a bias, which a caller may assign."""
    made: Any = copy.deepcopy(norm)
    made.bias = torch.nn.Parameter(torch.empty_like(made.weight))
    return made


def _narrows(module: Module, size: int) -> bool:
    """Does it give a float32 input's result in the 16 bits that its weight has now?  What comes next may rely on it."""
    weight = next(module.parameters(), None)
    if weight is None or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    with apart(), torch.no_grad():
        trial = copy.deepcopy(module).to_empty(device="cpu")
        made: object = trial(torch.ones(1, size, dtype=torch.float32))
    return isinstance(made, torch.Tensor) and made.dtype != torch.float32
