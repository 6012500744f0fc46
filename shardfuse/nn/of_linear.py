# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false
"""A module of a linear layer's result, with that layer, as one node of autograd.

A node costs the host more than a launch, each way: Python is entered anew, and what goes between two nodes is checked
by autograd.  What a column- or row-parallel matmul makes is read by one module alone, whose node may hold the matmul
too.  Kernels, collectives, their order and what is saved are those of the two nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..executor.plain_arguments import set_grad_enabled
from ..executor.tensor_guard import Check, check_of
from ..executor.uncompiled import uncompiled
from .linear import gradients_of, has_own_node, linear, multiplied
from .module_hooks import has_no_hooks
from .refused_calls import refuse
from .saved_versions import Watched, check_unchanged, watch
from .second_derivatives import apply_of_c, backward_as_it_is, once
from .tensor_kinds import PLAIN, forward_ad, is_wrapped, modes

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from .bound_op import BoundOp
    from .fusion_run import Known
    from .timer import FusionTimer

_PACKAGE = f"{__package__}."


class TakesProducts(torch.nn.Module):
    """A module whose ``forward`` hands its first tensor on to ``FusedModule.run``, and does nothing else with it.

    hands_on: does this one, or does it view the tensor first?
    """

    hands_on: bool = True
    _fits: Check | None = None
    """Knows x and weight of a call whose product has a node of its own."""

    def of_linear(self, x: Tensor, weight: Tensor, *others: Any, **named: Any) -> Any:
        """The module of ``functional.linear(x, weight)`` in place of its first tensor, and of its other arguments.

        Results and gradients are those of the two calls; recorded for autograd as one, which costs the host less, where
        they are plain tensors, the weight is of another dtype than x, and the module has no hooks.
        """
        module: Any = self
        if torch.compiler.is_compiling() or not (_is_as_defined(module) and self._has_own_node(x, weight)):
            return module(linear(x, weight), *others, **named)
        product = Product(x, weight)
        handed_on.product = product
        try:
            found = module.forward(product.made, *others, **named)
        except Exception as error:
            refuse(module, error, (product.made, *others), named)
            raise
        finally:
            handed_on.product = None
        # What became of it is not known where no fusion ran on it as it is.
        return found if product.is_taken else module(linear(x, weight), *others, **named)

    def _has_own_node(self, x: Tensor, weight: Tensor) -> bool:
        fits = self._fits
        if fits is not None and fits(x, weight):
            return torch.is_grad_enabled() and forward_ad._current_level < 0 and not modes()
        is_so = has_own_node(x, weight)
        if is_so:
            vars(self)["_fits"] = check_of((x, weight))
        return is_so


def _is_as_defined(module: Any) -> bool:
    """Does a call of it come to a ``forward`` of this package's, and to nothing beside?"""
    is_forward_ours = type(module).forward.__module__.startswith(_PACKAGE) and "forward" not in vars(module)
    return module.hands_on and is_forward_ours and has_no_hooks(module)


class Product:
    """A linear layer's result that autograd has not seen, on its way through a module's ``forward``."""

    __slots__ = ("cast_weight", "is_taken", "made", "rows", "weight", "x")

    @uncompiled
    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.x, self.weight, self.is_taken = x, weight, False
        set_grad_enabled(False)  # a gradient is recorded: `has_own_node` has asked
        try:
            self.rows, self.cast_weight, self.made = multiplied(x, weight, None)
        finally:
            set_grad_enabled(True)

    def through(
        self, bound: BoundOp, timer: FusionTimer | None, tensors: Sequence[Tensor], origins: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The results of ``bound``, recorded with the product.  tensors: of which that is the first."""
        self.is_taken = True
        if bound.takes:
            origins, tensors = origins or tensors, bound.taken(tensors)
        is_quick = PLAIN.issuperset(map(type, tensors)) and not any(map(is_wrapped, tensors))
        apply = _apply if is_quick else cast("Any", _OfLinear).apply
        watched = watch(origins, tensors, bound.op.saved)
        return apply(bound, timer, watched, None, self, self.x, self.weight, *tensors[1:])

    def again(
        self, bound: BoundOp, known: Known, timer: FusionTimer | None, tensors: Sequence[Tensor],
        origins: Sequence[Tensor],
    ) -> Sequence[Tensor]:  # fmt: skip
        """The same of local tensors that ``known.check`` knows."""
        self.is_taken = True
        watched = watch(origins, tensors, bound.op.saved)
        return _apply(bound, timer, watched, known, self, self.x, self.weight, *tensors[1:])


class _HandedOn(threading.local):
    """To the module that this thread calls: others may call that module meanwhile."""

    product: Product | None = None


handed_on = _HandedOn()


class _OfLinear(torch.autograd.Function):
    """Keeps what the module's backward reads, and behind it what the product's gradients that are asked for do."""

    @staticmethod
    @uncompiled
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, bound: BoundOp, timer: FusionTimer | None, watched: Watched, known: Known | None,
        product: Product, x: Tensor, weight: Tensor, *others: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        kept: Any = ctx
        needs_x, needs_weight = kept.needs_input_grad[5:7]
        made, saved = bound.recorded(kept, timer, (product.made, *others), known)
        of_product = product.rows if needs_weight else None, product.cast_weight if needs_x else None
        kept.save_for_backward(*saved, *of_product)
        kept.call = bound, timer, watched, len(others)
        kept.shape, kept.weight_dtype = x.shape, weight.dtype
        return made

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[object, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept: Any = ctx
        call: tuple[BoundOp, FusionTimer | None, Watched, int] = kept.call
        bound, timer, watched, count = call
        if watched:
            check_unchanged(watched)
        saved = list(kept.saved_tensors)  # once: a checkpoint's hooks unpack no tensor twice
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                made = _made(kept, bound, timer, gradients, [*saved])
            # what is saved of the product, and the cast weight, are not of the graph
            is_of_more = all(kept.needs_input_grad[5:7]) or _reads_product(bound, count)
            made = once(bound.name, made, (*gradients[: len(bound.op.gradients)], *saved), kept if is_of_more else None)
        else:
            made = _made(kept, bound, timer, gradients, saved)
        return None, None, None, None, None, *made, *(None,) * (count + 1 - len(bound.op.order))


_apply: Callable[..., Sequence[Tensor]] = apply_of_c(_OfLinear)
backward_as_it_is(_OfLinear)


def _reads_product(bound: BoundOp, others: int) -> bool:
    """Does the module's backward read the product, or what was made of it?  It has so many tensors beside."""
    return any(k == 0 or k > others for k in bound.op.saved)


def _made(
    kept: Any, bound: BoundOp, timer: FusionTimer | None, gradients: Sequence[Tensor], saved: list[Tensor]
) -> list[Tensor | None]:
    """The gradients of the layer's input and weight, and of the module's other tensors that have one.

    ``saved`` is emptied: what was kept for the module is let go before the matmuls, as that of a node of its own is.
    Beside the gradients of a loss, its logits would be the largest tensor of a step.
    """
    cast_weight, rows = saved.pop(), saved.pop()
    found = bound.gradients(timer, gradients, saved)
    saved.clear()
    kept.maybe_clear_saved_tensors()  # unless the graph is kept
    first, *others = bound.op.order
    of_x, of_weight = gradients_of(found[first], rows, cast_weight, kept.shape, kept.weight_dtype)
    return [of_x, of_weight, *[found[k] for k in others]]
