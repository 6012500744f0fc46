"""A module's two fusions for tensors of known metadata, and their node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..executor.agreement import failures_told
from ..executor.aliasing import apart
from ..executor.plain_arguments import all_waited
from ..executor.uncompiled import uncompiled
from ..frontend.counted_calls import RefusalsNoted
from .fusion_run import FusionRun, Known, with_leading
from .saved_versions import Watched, check_unchanged, watch
from .second_derivatives import Once, apply_of_c, backward_as_it_is
from .shaping import Shaping, Views, viewed
from .tensor_kinds import PLAIN, forward_ad, is_wrapped
from .timer import FusionTimer
from .transforms import check_no_tangent, check_no_transform, check_one_gradient

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from .fused import FusedOp

Take = Callable[[torch.Tensor], torch.Tensor]
Tensors = Sequence[torch.Tensor]


class _Fused(torch.autograd.Function):
    """Of calls that are not compiled: it takes the host a sixth of what the autograd formula of an op does."""

    @staticmethod
    @uncompiled
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx,
        bound: BoundOp,
        timer: FusionTimer | None,
        watched: Watched,
        known: Known | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        kept: Any = ctx
        made, saved = bound.recorded(kept, timer, tensors, known)
        kept.call = bound, timer, watched, len(tensors)
        kept.save_for_backward(*saved)
        return made

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[object, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept: Any = ctx
        call: tuple[BoundOp, FusionTimer | None, Watched, int] = kept.call
        bound, timer, watched, count = call
        try:
            if watched:
                check_unchanged(watched)
            saved, order = kept.saved_tensors, bound.op.order
        except Exception:
            with RefusalsNoted(bound.op, bound.op.team), failures_told(bound.op.team):
                raise
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                made = bound.gradients(timer, gradients, saved)
            found = cast("Any", Once).apply(bound.name, len(made), *made, *gradients[: len(bound.op.gradients)], *saved)
        else:
            found = bound.gradients(timer, gradients, saved)
        return None, None, None, None, *[found[k] for k in order], *(None,) * (count - len(order))


_apply: Callable[..., Tensors] = apply_of_c(_Fused)
backward_as_it_is(_Fused)


class BoundOp:
    """A FusedOp for tensors of known metadata: what a call needs is looked up when it is made.

    takes: for each tensor how its local tensor is had of it, None for itself; no entries where all are plain.
    shaping: how what the fusions take is had of those, None for themselves.
    known: the program of the last call, by local tensors that are known again; one while no gradients are recorded, one
    while they are.  That of the last backward is found by the gradients and what was saved.
    name: of the module, as errors call it; a profiler shows its runs by the last part of that.
    """

    __slots__ = (
        "_backward_known",
        "_is_strange",
        "_views",
        "known",
        "name",
        "op",
        "runs",
        "shaping",
        "takes",
        "unsharded",
    )

    def __init__(
        self,
        op: FusedOp,
        unsharded: Sequence[int] | None,
        tensors: Tensors,
        takes: Sequence[Take | None] = (),
        shaping: Shaping | None = None,
        *,
        name: str,
    ) -> None:
        is_uneven = any(p.uneven for p in (*op.arguments, *op.gradients))
        self.op, self.takes, self.shaping, self.name = op, tuple(takes), shaping, name
        self._views = Views() if shaping is None else shaping.views(op.saved, len(op.gradients))
        self.unsharded = unsharded if is_uneven else None
        self._is_strange = any(type(t) not in PLAIN for t in tensors)
        label = f"shardfuse::{name.rpartition('.')[2]}"
        names = label, f"{label} backward"
        for fd, owner in zip(op.fusions, (self.name, f"the backward of {self.name}"), strict=False):
            fd.fusion.first_owner = fd.fusion.first_owner or owner
        placed = zip(op.fusions, (op.arguments, op.gradients), names, strict=False)
        # what a caller's hooks give back for saved tensors may be anything
        self.runs = tuple(
            FusionRun(fd, at, self.unsharded, is_known=fd is op.forward, name=own) for fd, at, own in placed
        )
        self.forget()

    def forget(self) -> None:
        """The next call, and its backward, ask for the metadata of their tensors again."""
        self.known: list[Known | None] = [None, None]
        self._backward_known: Known | None = None

    def __call__(self, timer: FusionTimer | None, tensors: Tensors, origins: Tensors = ()) -> Tensors:
        """The results; recorded for autograd where one of the tensors, as given, requires a gradient.

        origins: the tensors whose values these have, in their order, where others count the changes.
        """
        if self.takes:
            origins = origins or tensors
            tensors = self.taken(tensors)
        is_recording = torch.is_grad_enabled()
        known = self.known[is_recording]
        if known is not None and known.check(*tensors):
            return self.again(known, timer, tensors, origins)
        if is_recording and any(t.requires_grad for t in tensors):
            watched = watch(origins, tensors, self.op.saved)
            check_no_transform()
            check_no_tangent(tensors)
            is_quick = PLAIN.issuperset(map(type, tensors)) and not any(map(is_wrapped, tensors))
            apply = _apply if is_quick else cast("Any", _Fused).apply
            return apply(self, timer, watched, None, *tensors)
        check_no_tangent(tensors)
        return self._quietly(timer, tensors, None)

    def again(self, known: Known, timer: FusionTimer | None, tensors: Tensors, origins: Tensors) -> Tensors:
        """The same of local tensors that ``known.check`` knows."""
        if forward_ad._current_level >= 0:
            check_no_tangent(tensors)
        if known.is_recorded:
            return _apply(self, timer, watch(origins, tensors, self.op.saved), known, *tensors)
        return self._quietly(timer, tensors, known)

    def _quietly(self, timer: FusionTimer | None, tensors: Tensors, known: Known | None) -> Tensors:
        """The results, of which nothing is recorded."""
        outputs = self.forward(timer, tensors, known, is_recorded=False)
        results = outputs if len(outputs) == self.op.results else outputs[: self.op.results]
        return results if self.shaping is None else self.shaping.leave(results)

    def taken(self, tensors: Tensors) -> Tensors:
        """The local tensors."""
        return [t if take is None else take(t) for t, take in zip(tensors, self.takes, strict=True)]

    def recorded(
        self, ctx: Any, timer: FusionTimer | None, tensors: Tensors, known: Known | None
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """The results of a node of autograd, and what that has to save."""
        op, shaping = self.op, self.shaping
        outputs = self.forward(timer, tensors, known, is_recorded=True)
        candidates = *tensors, *outputs
        results = outputs if len(outputs) == op.results else outputs[: op.results]
        if shaping is not None and self._views.has_results:
            results = shaping.leave_alone(results)
        made = tuple(results)
        if len(made) > len(op.gradients):  # autograd would fill zeros in for those that backward leaves out
            ctx.mark_non_differentiable(*made[len(op.gradients) :])
            ctx._materialize_non_diff_grads = False
        return made, [candidates[k] for k in op.saved]

    def forward(
        self, timer: FusionTimer | None, tensors: Tensors, known: Known | None, *, is_recorded: bool
    ) -> Tensors:
        """The results and the extras.  known: as of ``again``, where that has asked."""
        if known is not None:
            entered = viewed(self._views.enter, tensors) if self._views.enter else tensors
            given = with_leading(entered, known.leading) if known.leading else entered
            outputs = known.again(given) if timer is None else known.timed(timer, given)
            if outputs is not None:
                return [apart(x, entered) for x in outputs] if self.op.is_view else outputs
        given = all_waited(tensors) if self._is_strange else tensors
        entered = viewed(self._views.enter, given) if self._views.enter else given
        outputs, again = self.runs[0](timer, entered)
        if again is not None:
            is_recording = is_recorded or torch.is_grad_enabled()  # which it is not within a node
            known = self.runs[0].known(tensors, entered, is_recorded=is_recorded)
            if known is not None:
                is_as_given = not (is_recorded or self._views.enter or known.leading or self.shaping is not None)
                known = known._replace(is_direct=is_as_given and not self.op.is_view)
            self.known[is_recording] = known
        return [apart(x, entered) for x in outputs] if self.op.is_view else outputs

    def fresh_forward(self, timer: FusionTimer | None, tensors: Tensors) -> Tensors:
        """The same as the fusion gives them of what it takes, contiguous, each in a storage of its own."""
        if self._is_strange:
            tensors = all_waited(tensors)
        return self.runs[0].fresh(timer, tensors)

    def gradients(self, timer: FusionTimer | None, gradients: Tensors, saved: Tensors) -> Tensors:
        """The gradients of the tensors of a call.  gradients: those of its results; of integers there are none.

        Raises TransformError for a batch of them.
        """
        count, views, known = len(self.op.gradients), self._views, self._backward_known
        tensors = (*gradients, *saved) if len(gradients) == count else (*gradients[:count], *saved)
        found = None
        if known is not None and known.check(*tensors):
            entered = viewed(views.backward, tensors) if views.backward else tensors
            entered = with_leading(entered, known.leading) if known.leading else entered
            found = known.again(entered) if timer is None else known.timed(timer, entered)
        if found is None:
            check_one_gradient(gradients)
            arrived = all_waited(tensors)
            entered = viewed(views.backward, arrived) if views.backward else arrived
            found, again = self.runs[1](timer, entered)
            if again is not None:
                self._backward_known = self.runs[1].known(tensors, entered, is_recorded=False)
        return viewed(views.found, found) if views.found else found
