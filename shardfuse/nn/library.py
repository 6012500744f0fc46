"""The modules as ops of torch.library, for torch.compile, torch.export and torch's dispatch modes.

    shardfuse::rms_norm_v1(Tensor[] tensors, str settings, SymInt[]? unsharded) -> Tensor[]
    shardfuse::rms_norm_backward_v1(Tensor[] gradients, Tensor[] saved, str settings, str dtypes, SymInt[] sizes,
                                    SymInt[]? unsharded) -> Tensor[]

Both are functional: outputs are new and contiguous.  The first gives the results and what the backward reads; the
second the gradients, of tensors whose ``dtypes`` and ``sizes`` are given.  ``settings`` is a module's text, from which
another process makes the module again: a cache of compiled graphs holds nothing else of it.  Autocast leaves both
alone, as they compute in float32 or float64 whatever they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch.library import Library, fallthrough_kernel
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ..errors import CompiledElsewhereError, SecondDerivativeError
from ..mesh.groups import world_key
from .fused import BoundOp, FusedModule
from .inductor_fallback import with_fallback
from .saved_versions import check_not_written, traced_writes
from .settings import parsed
from .timer import FusionTimer

_MODULES = 1024
_BOUND = 256
Sizes = Sequence[int]

_library: Any = Library("shardfuse", "FRAGMENT")
_torch_library: Any = torch.library
_families: dict[str, type[FusedModule]] = {}


def define(module: type[FusedModule]) -> None:
    """The two ops of a family of modules."""
    name, backward = f"{module.family}_v1", f"{module.family}_backward_v1"
    name_family(module)
    drawn = (torch.Tag.nondeterministic_seeded,) if module.is_random else ()
    _library.define(
        f"{name}(Tensor[] tensors, str settings, SymInt[]? unsharded) -> Tensor[]",
        tags=(torch.Tag.pt2_compliant_tag, *drawn),
    )
    _library.define(
        f"{backward}(Tensor[] gradients, Tensor[] saved, str settings, str dtypes, SymInt[] sizes, "
        "SymInt[]? unsharded) -> Tensor[]",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    ops = _Ops(module.family)
    ways: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
        (name, ops.forward, ops.fake_forward),
        (backward, ops.backward, ops.fake_backward),
    ]
    for op, run, fake in ways:
        for device in ("CPU", "CUDA"):
            _library.impl(op, run, device)
            _library.impl(op, fallthrough_kernel, f"Autocast{device}")
        _torch_library.register_fake(f"shardfuse::{op}", with_fallback(op, fake), lib=_library)
    _torch_library.register_autograd(f"shardfuse::{name}", ops.differentiate, setup_context=ops.keep, lib=_library)
    _torch_library.register_autograd(f"shardfuse::{backward}", ops.refuse, lib=_library)
    module.library_op, module.defined = getattr(torch.ops.shardfuse, name).default, module


def name_family(module: type[FusedModule]) -> None:
    """Have ``module_of`` find modules of a family."""
    _families[module.family] = module


def module_of(family: str, settings: str) -> FusedModule:
    """The module of these settings, in this process group."""
    return _module(world_key(), family, settings)


class _Ops:
    """What the two ops of a family do."""

    def __init__(self, family: str) -> None:
        self.family = family

    def forward(self, tensors: Sequence[torch.Tensor], settings: str, unsharded: Sizes | None) -> list[torch.Tensor]:
        bound, timer = self._bound(tensors, settings, unsharded)
        return list(bound.fresh_forward(timer, tensors))

    def fake_forward(
        self, tensors: Sequence[torch.Tensor], settings: str, unsharded: Sizes | None
    ) -> list[torch.Tensor]:
        module = module_of(self.family, settings)
        op = module.promised_op(module.bind(tensors, unsharded))
        return op.shapes.empty(tensors, module.whole(tensors, unsharded))

    def backward(
        self,
        gradients: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        settings: str,
        dtypes: str,
        sizes: Sizes,
        unsharded: Sizes | None,
    ) -> list[torch.Tensor]:
        module = module_of(self.family, settings)
        key = (dtypes, tuple(sizes), None if unsharded is None else tuple(unsharded))
        bound = module.described.get(key)
        if bound is None:
            with _disable_current_modes():
                like = _described(dtypes, sizes)
            bound, _ = self._bound(like, settings, unsharded)
            if len(module.described) >= _BOUND:
                module.described.clear()
            module.described[key] = bound
        return list(bound.runs[1].fresh(module.timer, (*gradients, *saved)))

    def fake_backward(
        self,
        gradients: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        settings: str,
        dtypes: str,
        sizes: Sizes,
        unsharded: Sizes | None,
    ) -> list[torch.Tensor]:
        like = _described(dtypes, sizes)
        order = module_of(self.family, settings).bind(like, unsharded).order
        return [
            gradients[0].new_empty(like[order.index(k)].shape, dtype=like[order.index(k)].dtype)
            for k in sorted(set(order))
        ]

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
        """``setup_context`` of the forward."""
        tensors, settings, unsharded = cast("tuple[list[torch.Tensor], str, Sizes | None]", inputs)
        module = module_of(self.family, settings)
        ctx.op = op = module.promised_op(module.bind(tensors, unsharded))
        candidates = (*tensors, *output)
        saved = [candidates[k] for k in op.saved]
        ctx.save_for_backward(*saved)
        ctx.writes = traced_writes(saved)
        ctx.settings, ctx.unsharded, ctx.tensors = settings, unsharded, len(tensors)
        ctx.dtypes = " ".join(f"{str(t.dtype).removeprefix('torch.')}:{t.ndim}" for t in tensors)
        ctx.sizes = [n for t in tensors for n in t.shape]

    def differentiate(self, ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[object, ...]:
        op = getattr(torch.ops.shardfuse, f"{self.family}_backward_v1").default
        given, saved = list(gradients[: len(ctx.op.gradients)]), list(ctx.saved_tensors)
        check_not_written(saved, ctx.writes)
        found = op(given, saved, ctx.settings, ctx.dtypes, ctx.sizes, ctx.unsharded)
        rest = [None] * (ctx.tensors - len(ctx.op.order))
        return [*(found[k] for k in ctx.op.order), *rest], None, None

    def refuse(self, ctx: Any, *gradients: object) -> None:
        raise SecondDerivativeError(f"shardfuse::{self.family}_v1")

    def _bound(
        self, tensors: Sequence[torch.Tensor], settings: str, unsharded: Sizes | None
    ) -> tuple[BoundOp, FusionTimer | None]:
        module = module_of(self.family, settings)
        key = (None if unsharded is None else tuple(unsharded), *((t.shape, t.dtype, t.device) for t in tensors))
        bound = module.bound_for(key, tensors, unsharded)
        assert bound is not None, "an op is run on plain tensors"
        return bound, module.timer


@lru_cache(maxsize=_MODULES)
def _module(world: tuple[int, int], family: str, settings: str) -> FusedModule:
    """The module of these settings, made once in a process group: fusions are bound to its ranks."""
    arguments, rank = parsed(settings)
    if rank is not None and rank != world[0]:
        raise CompiledElsewhereError(f"{family}_v1", rank, world[0])
    common = {name: arguments.pop(name) for name in ("timer", "promises") if name in arguments}
    with _disable_current_modes():
        module = _families[family].made_again(arguments)
    module.set_common(common)
    return module


def _described(dtypes: str, sizes: Sizes) -> list[torch.Tensor]:
    """Tensors of these dtypes and sizes, without data."""
    found: list[torch.Tensor] = []
    for word in dtypes.split(" "):
        name, _, ndim = word.partition(":")
        shape, sizes = sizes[: int(ndim)], sizes[int(ndim) :]
        found.append(torch.empty(shape, dtype=getattr(torch, name), device="meta"))
    return found
