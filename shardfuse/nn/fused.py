"""Autograd around two fusions, and the modules that hold them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch

from ..executor.aliasing import apart
from ..executor.plain_arguments import all_waited
from ..executor.uncompiled import uncompiled
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from ..source_line import caller_line
from .checks import Checks
from .dtensor_autograd import Given
from .fusion_run import FusionRun
from .of_linear import handed_on
from .output_shapes import OutputShapes
from .placement import TensorPlacement
from .promising import PromisingModule
from .refused_calls import refuse
from .saved_versions import Watched, check_behind, check_unchanged, watch
from .second_derivatives import Once, apply_of_c, backward_as_it_is
from .settings import Setting, printed
from .shaping import Shaping, Views, viewed
from .tensor_kinds import PLAIN as PLAIN
from .tensor_kinds import is_traced, is_wrapped, metadata_of, modes, plain_metadata_of
from .timer import FusionTimer
from .transforms import check_no_tangent, check_no_transform, check_not_traced, check_one_gradient

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

Take = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FusedOp:
    """Two fusions that are each other's derivative, on local tensors.

    forward: (tensors) -> (results..., extras...), of which the first ``results`` are the op's.
    backward: (gradients of the results..., saved...) -> gradients.
    saved: what backward reads, as indices into (tensors..., results..., extras...).
    arguments: where each tensor lives; gradients: where the gradient of each result does.
    order: for each of the first tensors, which output of backward is its gradient; the others have none.
    follows: for each output of forward the tensor that its dims are like, where forward cuts or regroups dims.
    ones: dims, counted from the end, of which all outputs have one element though that tensor has more.
    is_view: may a result lie in the storage of a tensor?  Then a copy of it is the result, which the caller may change.
    deferred: the same with the gradients of parameters as this rank's summands of them.
    """

    forward: FusionDefinition
    backward: FusionDefinition
    results: int
    saved: tuple[int, ...]
    arguments: tuple[TensorPlacement, ...]
    gradients: tuple[TensorPlacement, ...]
    order: tuple[int, ...]
    is_view: bool = False
    follows: tuple[int, ...] = ()
    ones: tuple[int, ...] = ()
    deferred: Callable[[], FusedOp] | None = None

    @cached_property
    def fusions(self) -> tuple[FusionDefinition, FusionDefinition]:
        return self.forward, self.backward

    @cached_property
    def shapes(self) -> OutputShapes:
        """Of the outputs of ``forward``."""
        return OutputShapes(self.forward.fusion, self.arguments, self.follows, self.ones)

    def apply(
        self, timer: FusionTimer | None, unsharded: Sequence[int] | None, *tensors: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """The results, recorded for autograd.

        ``unsharded``: the shape of the activations, where it is known; it says what uneven shards are parts of.
        """
        return BoundOp(self, unsharded, tensors)(timer, tensors)


class _Fused(torch.autograd.Function):
    """Of calls that are not compiled: it takes the host a sixth of what the autograd formula of an op does."""

    @staticmethod
    @uncompiled
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, bound: BoundOp, timer: FusionTimer | None, watched: Watched, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        kept: Any = ctx
        made, saved = bound.recorded(kept, timer, tensors)
        kept.call = bound, timer, watched, len(tensors)
        ctx.save_for_backward(*saved)
        return made

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[object, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept: Any = ctx
        call: tuple[BoundOp, FusionTimer | None, Watched, int] = kept.call
        bound, timer, watched, count = call
        if watched:
            check_unchanged(watched)
        check_one_gradient(gradients)
        op, saved = bound.op, kept.saved_tensors
        given = all_waited(gradients[: len(op.gradients)])  # those of integers are none
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                made = bound.gradients(timer, given, saved)
            found = cast("Any", Once).apply(len(made), *made, *given, *saved)
        else:
            found = bound.gradients(timer, given, saved)
        return None, None, None, *[found[k] for k in op.order], *(None,) * (count - len(op.order))


_apply: Callable[..., Sequence[torch.Tensor]] = apply_of_c(_Fused)
backward_as_it_is(_Fused)


def _record(
    bound: BoundOp, timer: FusionTimer | None, watched: Watched, tensors: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """``_Fused.apply``; without asking for what only torch.func has, half of its time."""
    check_no_transform()
    check_no_tangent(tensors)
    is_quick = PLAIN.issuperset(map(type, tensors)) and not any(map(is_wrapped, tensors))
    apply = _apply if is_quick else cast("Any", _Fused).apply
    return apply(bound, timer, watched, *tensors)


class BoundOp:
    """A FusedOp for tensors of known metadata: what a call needs is looked up when it is made.

    takes: for each tensor how its local tensor is had of it, None for itself; no entries where all are plain.
    shaping: how what the fusions take is had of those, None for themselves.
    """

    __slots__ = ("_is_strange", "_views", "op", "runs", "shaping", "takes", "unsharded")

    def __init__(
        self,
        op: FusedOp,
        unsharded: Sequence[int] | None,
        tensors: Sequence[torch.Tensor],
        takes: Sequence[Take | None] = (),
        shaping: Shaping | None = None,
    ) -> None:
        is_uneven = any(p.uneven for p in (*op.arguments, *op.gradients))
        self.op, self.takes, self.shaping = op, tuple(takes), shaping
        self._views = Views() if shaping is None else shaping.views(op.saved)
        self.unsharded = unsharded if is_uneven else None
        self._is_strange = any(type(t) not in PLAIN for t in tensors)
        self.runs = (
            FusionRun(op.forward, op.arguments, self.unsharded, is_known=True),
            # what a caller's hooks give back for saved tensors may be anything
            FusionRun(op.backward, op.gradients, self.unsharded, is_known=False),
        )

    def __call__(
        self, timer: FusionTimer | None, tensors: Sequence[torch.Tensor], origins: Sequence[torch.Tensor] = ()
    ) -> Sequence[torch.Tensor]:
        """The results; recorded for autograd where one of the tensors, as given, requires a gradient.

        origins: the tensors whose values these have, in their order, where others count the changes.
        """
        if self.takes:
            origins = origins or tensors
            tensors = self.taken(tensors)
        if torch.is_grad_enabled():
            for t in tensors:
                if t.requires_grad:
                    return _record(self, timer, watch(origins, tensors, self.op.saved), tensors)
        check_no_tangent(tensors)
        results = self.forward(timer, self.entered(tensors))[: self.op.results]
        return results if self.shaping is None else self.shaping.leave(results)

    def taken(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The local tensors."""
        return [t if take is None else take(t) for t, take in zip(tensors, self.takes, strict=True)]

    def recorded(
        self, ctx: Any, timer: FusionTimer | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """The results of a node of autograd, and what that has to save."""
        op, shaping = self.op, self.shaping
        outputs = self.forward(timer, self.entered(tensors))
        candidates = *tensors, *outputs
        results = outputs if len(outputs) == op.results else outputs[: op.results]
        if shaping is not None and self._views.has_results:
            results = shaping.leave_alone(results)
        made = tuple(results)
        if len(made) > len(op.gradients):  # autograd would fill zeros in for those that backward leaves out
            ctx.mark_non_differentiable(*made[len(op.gradients) :])
            ctx._materialize_non_diff_grads = False
        return made, [candidates[k] for k in op.saved]

    def entered(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """As the forward fusion takes them."""
        if self._is_strange:
            tensors = all_waited(tensors)
        return viewed(self._views.enter, tensors) if self._views.enter else tensors

    def forward(self, timer: FusionTimer | None, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results and the extras, of what has ``entered``."""
        outputs = self.runs[0](timer, tensors)[0]
        return [apart(x, tensors) for x in outputs] if self.op.is_view else outputs

    def fresh_forward(self, timer: FusionTimer | None, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The same, contiguous, each in a storage of its own."""
        if self._is_strange:
            tensors = all_waited(tensors)
        return self.runs[0].fresh(timer, tensors)

    def gradients(
        self, timer: FusionTimer | None, given: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The gradients of the tensors of a call.  given: those of its results."""
        saved, views = all_waited(saved), self._views
        if views.gradients:
            given = viewed(views.gradients, given)
        if views.saved:
            saved = viewed(views.saved, saved)
        found = self.runs[1](timer, (*given, *saved))[0]
        return viewed(views.found, found) if views.found else found


_MISSED: Any = object()
_BOUND = 256
"""Sizes for which one module keeps its fusions; a batch size is one of them."""


class FusedModule(Checks, PromisingModule):
    """A module whose forward and backward are fusions.

    A call looks its tensors' metadata up and runs the fusions that are bound for them (``run``); what is not found is
    checked and bound (``bind``).  Under torch.compile it is one op of the graph, ``shardfuse::<family>_v1``, that knows
    the module by the text of its settings.

    What it refuses on one rank, before there is a program to compare, the other ranks of its mesh are told.  Its errors
    name the line of the caller's program that made it.
    """

    family: ClassVar[str] = ""
    """The name of its op."""
    library_op: ClassVar[Any] = None
    defined: ClassVar[Any] = None
    """The class of which a module is made again from its settings, where this is a subclass of it."""
    is_random: ClassVar[bool] = False
    """May a call draw random numbers?"""
    mesh: Setting[DeviceMesh | None] = Setting()
    text: str
    """The settings, printed."""

    def __init__(self) -> None:
        super().__init__()
        line = caller_line(in_modules=True)
        self.made_at = () if line is None else (f"{line}  # {type(self).__name__}",)
        self._bound: dict[Hashable, BoundOp | None] = {}
        self.described: dict[Hashable, BoundOp] = {}
        """The settings of tensors that are passed as text to an op of torch's."""

    def __call__(self, *tensors: object, **named: object) -> Any:
        if named and self.input_name in named:
            tensors = (named.pop(self.input_name), *tensors)
        try:
            return super().__call__(*tensors, **named)
        except Exception as error:
            refuse(self, error, tensors, named)
            raise

    @property
    def checked_name(self) -> str:
        return type(self).__name__

    def settings(self) -> dict[str, object]:
        """The arguments that make such a module: numbers, strings, None, a DeviceMesh and TensorPlacements."""
        raise NotImplementedError

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        """A module of these settings, to bind fusions by; its parameters are never read."""
        return cls(**settings)

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        """Check local tensors (their metadata alone), in the order of the op, and find the fusions for them.

        Raises ModuleInputError and PlacementError.
        """
        raise NotImplementedError

    def whole(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> Sequence[int] | None:
        """The unsharded shape of the activations, where the caller has said it or local tensors tell it."""
        return unsharded

    def take(self, parameter: torch.Tensor) -> Take | None:
        """How the local tensor is had of a parameter that is a DTensor; None for any other tensor."""
        return None

    def describe(self) -> None:
        """Print the settings; what was bound for others is let go of.  Each module's __init__ ends with it."""
        self._bound.clear()
        self.described.clear()
        if not self.family:
            return
        self.__dict__["text"] = printed({**self.settings(), **self.common_settings()})

    def run(
        self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None, shaping: Shaping | None = None,
        origins: Sequence[torch.Tensor] = (),
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        """The results on local tensors, or parameters that are DTensors, in the order of the op.

        shaping: between them and the op's, where they have other dims.  unsharded, origins: as the op has them.
        """
        if torch.compiler.is_compiling():
            return self.as_op([self.traced(t) for t in tensors], unsharded, shaping)
        of_each = plain_metadata_of if PLAIN.issuperset(map(type, tensors)) else metadata_of
        key = (unsharded if unsharded is None else tuple(unsharded), shaping, *map(of_each, tensors))
        bound = self._bound.get(key, _MISSED)
        if bound is _MISSED:
            bound = self.bound_for(key, tensors, unsharded, shaping)
        if bound is None or modes() or tensors[0].is_meta:
            takes = map(self.take, tensors)
            local = [t if take is None else take(t) for t, take in zip(tensors, takes, strict=True)]
            results = self.as_op(local, unsharded, shaping)
            if bound is not None:
                check_behind(results, watch(origins or tensors, tensors, bound.op.saved))
            return results
        product = handed_on.product
        if product is not None and product.made is tensors[0]:
            return product.through(bound, self.timer, tensors, origins)
        return bound(self.timer, tensors, origins)

    def bound_for(
        self, key: Hashable, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None,
        shaping: Shaping | None = None,
    ) -> BoundOp | None:  # fmt: skip
        """The fusions for such tensors; None where they hold no data, so that torch has to take the op."""
        bound = self._bound.get(key, _MISSED)
        if bound is _MISSED:
            if len(self._bound) >= _BOUND:
                self._bound.clear()
            bound = self._bound[key] = self._bind(tensors, unsharded, shaping)
        return bound

    def as_op(
        self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None, shaping: Shaping | None
    ) -> Sequence[torch.Tensor]:
        """The results on local tensors, and what the backward reads, as one op of torch's dispatcher."""
        entered = list(tensors if shaping is None else shaping.enter(tensors))
        results = self.library_op(entered, self.text, None if unsharded is None else list(unsharded))
        return results if shaping is None else shaping.leave(results)

    def traced(self, parameter: torch.Tensor) -> torch.Tensor:
        """The local tensor of a parameter that is a DTensor, in words that torch.compile knows."""
        return parameter

    def _bind(
        self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None, shaping: Shaping | None
    ) -> BoundOp | None:
        check_not_traced()
        takes = [self.take(t) for t in tensors]
        with torch.no_grad():
            local = [t if take is None else take(t) for t, take in zip(tensors, takes, strict=True)]
        entered = local if shaping is None else shaping.enter(local)
        op = self.bind(entered, unsharded)
        if unsharded is not None:
            self.check_whole(unsharded, self.mesh, op.arguments, entered[0], shaping is not None)
        if shaping is not None and shaping.is_deferred:
            assert op.deferred is not None, "whoever asks for it knows that there is one"
            op = op.deferred()
        op = self.promised_op(op)
        if any(is_traced(t) for t in local):
            return None
        taken = takes if any(take is not None for take in takes) else ()
        return BoundOp(op, self.whole(entered, unsharded), local, taken, shaping)

    def __getstate__(self) -> dict[str, object]:
        """Without what is bound to this process, or to other modules."""
        return {**self.__dict__, "_bound": {}, "described": {}, "bucket": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]
        self.describe()

    def unsharded_of(self, given: Sequence[Given]) -> tuple[int, ...]:
        """The shape of those that are DTensors.  Raises ModuleInputError where they differ."""
        first, *others = (g for g in given if has_dtensor((g.tensor,)))
        for other in others:
            self.check_same(other.name, other.tensor, first.name, first.tensor.shape)
        return tuple(first.tensor.shape)
