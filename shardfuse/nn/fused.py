"""Autograd around two fusions, the modules that hold them, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch
from torch.autograd.function import once_differentiable

from ..errors import ModuleInputError, PlacementError, ShardfuseError
from ..executor.agreement import failures_told
from ..executor.arguments import waited
from ..executor.uncompiled import uncompiled
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..ir import DataType, TensorView
from ..mesh import DeviceMesh
from ..source_line import caller_line
from .dtensor import Given
from .placement import TensorPlacement

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

Sizes = Mapping[TensorView, Sequence[int]]

_SUPPORTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class FusionTimer:
    """Seconds spent in the fusions, with their collectives, of the modules that it watches.

    On a CPU by the clock; on a GPU by events on the current stream, read (and waited for) by ``seconds()``.
    """

    def __init__(self) -> None:
        self._clocked = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def watch(self, module: torch.nn.Module) -> Self:
        """Time every fused module in ``module`` from now on."""
        for part in module.modules():
            if isinstance(part, FusedModule):
                part.timer = self
        return self

    def seconds(self) -> float:
        """Seconds since the last ``reset()``."""
        if self._events:
            self._events[-1][1].synchronize()
        self._clocked += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
        self._events.clear()
        return self._clocked

    def reset(self) -> None:
        """Start again from zero."""
        self._clocked = 0.0
        self._events.clear()

    def run(self, fusion: FusionDefinition, arguments: list[torch.Tensor], sizes: Sizes | None) -> list[torch.Tensor]:
        """``fusion.execute(arguments, sizes=sizes)``, timed."""
        if arguments[0].is_cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            outputs = fusion.execute(arguments, sizes=sizes)
            end.record()
            self._events.append((start, end))
        else:
            began = perf_counter()
            outputs = fusion.execute(arguments, sizes=sizes)
            self._clocked += perf_counter() - began
        return outputs


@dataclass(frozen=True)
class FusedOp:
    """Two fusions that are each other's derivative, on local tensors.

    forward: (tensors) -> (results..., extras...), of which the first ``results`` are the op's.
    backward: (gradients of the results..., saved...) -> gradients.
    saved: what backward reads, as indices into (tensors..., results..., extras...).
    arguments: where each tensor lives; gradients: where the gradient of each result does.
    order: for each of the first tensors, which output of backward is its gradient; the others have none.
    is_view: may a result lie in the storage of a tensor?  Then a copy of it is the result, which the caller may change.
    """

    forward: FusionDefinition
    backward: FusionDefinition
    results: int
    saved: tuple[int, ...]
    arguments: tuple[TensorPlacement, ...]
    gradients: tuple[TensorPlacement, ...]
    order: tuple[int, ...]
    is_view: bool = False

    def apply(
        self, timer: FusionTimer | None, unsharded: Sequence[int] | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The results, recorded for autograd.

        ``unsharded``: the shape of the activations, where it is known; it says what uneven shards are parts of.
        """
        apply = cast("Callable[..., tuple[torch.Tensor, ...]]", _Fused.apply)  # pyright: ignore[reportUnknownMemberType]
        is_uneven = any(p.uneven for p in (*self.arguments, *self.gradients))
        return apply(self, timer, unsharded if is_uneven else None, *tensors)


class _Saved(Protocol):
    """What ``_Fused`` keeps between forward and backward."""

    op: FusedOp
    timer: FusionTimer | None
    unsharded: Sequence[int] | None
    tensors: int
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Fused(torch.autograd.Function):
    @staticmethod
    @uncompiled
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx,
        op: FusedOp,
        timer: FusionTimer | None,
        unsharded: Sequence[int] | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        kept = cast("_Saved", ctx)
        tensors = tuple(map(waited, tensors))
        outputs = _execute(op.forward, timer, unsharded, tensors, op.arguments)
        if op.is_view:
            outputs = [_apart(x, tensors) for x in outputs]
        candidates = (*tensors, *outputs)
        kept.op, kept.timer, kept.unsharded, kept.tensors = op, timer, unsharded, len(tensors)
        kept.save_for_backward(*(candidates[k] for k in op.saved))
        return tuple(outputs[: op.results])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[object, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept = cast("_Saved", ctx)
        op = kept.op
        given = (*map(waited, gradients[: len(op.gradients)]), *kept.saved_tensors)  # those of integers are none
        found = _execute(op.backward, kept.timer, kept.unsharded, given, op.gradients)
        return None, None, None, *(found[k] for k in op.order), *(None,) * (kept.tensors - len(op.order))


def _apart(x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    here = x.untyped_storage().data_ptr()
    return x.clone() if any(t.untyped_storage().data_ptr() == here for t in others) else x


def _execute(
    fusion: FusionDefinition,
    timer: FusionTimer | None,
    unsharded: Sequence[int] | None,
    tensors: Sequence[torch.Tensor],
    placements: Sequence[TensorPlacement],
) -> list[torch.Tensor]:
    """Run a fusion on local tensors; those beyond ``placements`` are handed over as they are."""
    arranged = [placement.arrange(t) for placement, t in zip(placements, tensors, strict=False)]
    arranged += [t.contiguous() for t in tensors[len(placements) :]]
    sizes = None if unsharded is None else _sizes(fusion, unsharded)
    device = arranged[0].device.type
    # Under autocast torch would choose other dtypes for the ops of a fusion that is evaluated by torch.
    plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    with plain:
        return fusion.execute(arranged, sizes=sizes) if timer is None else timer.run(fusion, arranged, sizes)


def _sizes(fusion: FusionDefinition, unsharded: Sequence[int]) -> Sizes:
    """The unsharded shapes of the inputs: the sizes that they leave open are those of the activations' last dims."""
    inputs = [i.val for i in fusion.fusion.inputs if isinstance(i.val, TensorView)]
    return {tv: [n if n >= 0 else unsharded[k - tv.ndim] for k, n in enumerate(tv.shape)] for tv in inputs}


class FusedModule(torch.nn.Module):
    """A module whose forward and backward are fusions.  ``timer``: where their time is counted, if anywhere.

    What it refuses on one rank, before there is a program to compare, is told to the other ranks of its mesh.  Its
    errors name the line of the caller's program that made it.
    """

    timer: FusionTimer | None = None
    mesh: DeviceMesh | None = None

    def __init__(self) -> None:
        super().__init__()
        line = caller_line(in_modules=True)
        self._made_at = () if line is None else (f"{line}  # {type(self).__name__}",)

    def __call__(self, *tensors: object, **named: object) -> Any:
        try:
            return super().__call__(*tensors, **named)
        except ShardfuseError as error:
            error.at(self._made_at)
            if isinstance(error, ModuleInputError | PlacementError):
                with failures_told(() if self.mesh is None else self.mesh.ranks):
                    raise
            raise

    def check_dtype(self, argument: str, tensor: torch.Tensor) -> DataType:
        """The tensor's dtype.  Raises ModuleInputError unless it is one of the four that fusions compute norms in."""
        if tensor.dtype not in _SUPPORTED:
            expected = f"one of {', '.join(map(str, _SUPPORTED))}"
            raise ModuleInputError(type(self).__name__, argument, f"dtype {tensor.dtype}", expected, "cast it")
        return DataType.from_torch(tensor.dtype)

    def check_size(self, argument: str, tensor: torch.Tensor, dim: int, expected: int) -> None:
        """Raise ModuleInputError unless ``tensor`` has ``expected`` elements along ``dim``."""
        if tensor.ndim == 0 or tensor.shape[dim] != expected:
            found, wanted = f"shape {tuple(tensor.shape)}", f"{expected} along dim {dim}"
            advice = "pass this rank's local tensor, or make the module for this size"
            raise ModuleInputError(type(self).__name__, argument, found, wanted, advice)

    def unsharded_of(self, given: Sequence[Given]) -> tuple[int, ...]:
        """The shape of those that are DTensors.  Raises ModuleInputError where they differ."""
        first, *others = (g for g in given if has_dtensor((g.tensor,)))
        for other in others:
            self.check_same(other.name, other.tensor, first.name, first.tensor.shape)
        return tuple(first.tensor.shape)

    def check_same(self, argument: str, tensor: torch.Tensor, other_name: str, other: Sequence[int]) -> None:
        """Raise ModuleInputError unless ``tensor`` has the shape of the other."""
        if tensor.shape != torch.Size(other):
            found, wanted = f"shape {tuple(tensor.shape)}", f"{tuple(other)}, the shape of {other_name}"
            raise ModuleInputError(type(self).__name__, argument, found, wanted, "pass local tensors of one placement")
