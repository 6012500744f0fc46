"""Cross entropy over logits that are whole, or sharded over a mesh by rows or by classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch

from ..errors import ModuleArgumentError, ModuleInputError, PlacementError
from ..frontend import FusionDefinition
from ..frontend.detection import has_dtensor
from ..ir import DataType
from ..mesh import DeviceMesh
from . import traced
from .checks import Checks
from .dtensor_autograd import Given, Result, on_local_tensors
from .fused import PLAIN, FusedModule, FusedOp
from .logits_fusions import LogitsSpec, give_strays, logits_and_target
from .loss_fusions import REDUCTIONS, LossSpec, Reduction, Targets, gradient_of_logits, loss_of_rows
from .of_linear import TakesProducts
from .placement import TensorPlacement, define, give
from .settings import Setting, checked_module

if TYPE_CHECKING:
    from .placement import Placements

S = TypeVar("S", bound=LogitsSpec)


TORCHS = ("weight", "size_average", "reduce")
"""Options of torch's loss that this one has not."""


def check_torchs(name: str, weight: object = None, size_average: object = None, reduce: object = None) -> None:
    """Raise ModuleArgumentError for options that torch's loss has and this has not."""
    if weight is not None:
        expected = (
            'None, as classes have no weights here: without label smoothing, weigh the losses of reduction="none" by '
            "weight[target], or 0 where the target is ignored, and divide their sum by the sum of these weights"
        )
        raise ModuleArgumentError(name, "weight", weight, expected)
    for argument, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None:
            raise ModuleArgumentError(name, argument, value, "None, and reduction= in its place")


class StrayTargetError(ModuleInputError):
    """A target is neither a class nor ignored.

    strays: how many there are on all ranks; this one may have none.  Targets of the same rows have to be the same on
    every rank that has them: then every rank of the mesh raises.
    """

    def __init__(self, module: str, target: torch.Tensor, classes: int, ignore_index: int, strays: int) -> None:
        self.classes, self.ignore_index, self.strays = classes, ignore_index, strays
        is_stray = ((target < 0) | (target >= classes)) & (target != ignore_index)
        at = cast("list[list[int]]", is_stray.nonzero().tolist())[:1]  # pyright: ignore[reportUnknownMemberType]
        where = f"on this rank first {int(target[tuple(at[0])])} at {at[0]}" if at else "on other ranks"
        self.module, self.argument = module, "target"
        super(ModuleInputError, self).__init__(
            f"{module}: target has {strays} values that are no classes ({where}), expected 0 to {classes - 1}, or "
            f"ignore_index={ignore_index}: correct them, or pass ignore_index= as they have it"
        )

    def within(self, module: str, target: torch.Tensor) -> StrayTargetError:
        """The error of ``module``, whose ``target``, the same on every rank, has that of this one as a part."""
        strays = ((target < 0) | (target >= self.classes)) & (target != self.ignore_index)
        return StrayTargetError(module, target, self.classes, self.ignore_index, int(strays.sum()) or self.strays)


def check_options(checks: Checks, reduction: str, label_smoothing: float, z_loss: float, temperature: float) -> None:
    """Raise ModuleArgumentError for an option of a loss that is out of range."""
    checks.check_argument("reduction", reduction, reduction in REDUCTIONS, '"mean", "sum" or "none"')
    checks.check_argument("label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "a share from 0 to 1")
    checks.check_argument("z_loss", z_loss, 0 <= z_loss < math.inf, "0 or more")
    checks.check_argument("temperature", temperature, 0 < temperature < math.inf, "a number above 0")


@checked_module
class CrossEntropyLoss(TakesProducts, FusedModule):
    """Cross entropy over the last axis of the logits: -log softmax(logits)[target].

    reduction: "mean" over the targets that are not ``ignore_index`` (NaN where all are), "sum", or "none".
    label_smoothing: share of the target's weight that is spread evenly over all classes.
    z_loss: weight of the square of log(sum(exp(logits))), which is added to each row's loss (PaLM has 1e-4).
    temperature: logits are divided by it first.
    mesh, logits: on a mesh, how the logits are placed: ``Shard(-1)`` shards the classes, another Shard the rows (of the
    targets too), Replicate neither; one placement or a sequence with one per mesh dimension.
    num_classes: unsharded number of classes; needed only where they are cut into parts that differ in size.
    weight, size_average, reduce: torch's; None, as anything else is refused.
    logits: [..., classes] (local) in float64, float32, bfloat16 or float16, computed in float32 or float64; target:
    [...] (local) of int64.  The loss is float32 or float64, the same on every rank.

    A target that is neither a class nor ``ignore_index``: on a CPU a call raises ModuleInputError, on every rank of the
    mesh where ranks of the same rows have the same targets, as replicas have to be; a rank whose copy differs raises
    alone.  On a GPU, where the host would have to wait, its row's loss and gradient are NaN, so a mean or sum is.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.
    """

    family = "cross_entropy"
    reduction: Setting[Reduction] = Setting()
    ignore_index: Setting[int] = Setting()
    label_smoothing: Setting[float] = Setting()
    num_classes: Setting[int | None] = Setting()
    z_loss: Setting[float] = Setting()
    temperature: Setting[float] = Setting()

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        logits: Placements | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        num_classes: int | None = None,
        z_loss: float = 0.0,
        temperature: float = 1.0,
        weight: object = None,
        size_average: object = None,
        reduce: object = None,
    ) -> None:
        super().__init__()
        check_torchs(type(self).__name__, weight, size_average, reduce)
        if self._is_computed_here() and not hasattr(type(self), "weight"):
            self.register_buffer("weight", None)  # as torch's loss has it
        check_options(self, reduction, label_smoothing, z_loss, temperature)
        self.z_loss, self.temperature = z_loss, temperature
        self.mesh, self.ignore_index, self.num_classes = mesh, ignore_index, num_classes
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self._logits = TensorPlacement.of_whole_values("logits", logits, mesh, "a loss")
        self._counts_strays = True
        self.describe()

    def _is_computed_here(self) -> bool:
        """Or by the forward of a subclass, which may have uses of its own for what torch's loss has?"""
        return type(self).forward is CrossEntropyLoss.forward

    def __setattr__(self, name: str, value: object) -> None:
        if name in TORCHS and self._is_computed_here():
            check_torchs(type(self).__name__, **{name: value})
        super().__setattr__(name, value)  # pyright: ignore[reportArgumentType]

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """As torch's.  Raises ModuleArgumentError for weights of classes."""
        if name in TORCHS and self._is_computed_here():
            check_torchs(type(self).__name__, **{name: tensor})
        super().register_buffer(name, tensor, persistent)

    def settings(self) -> dict[str, object]:
        options = {"reduction": self.reduction, "ignore_index": self.ignore_index, "num_classes": self.num_classes}
        options |= {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss, "temperature": self.temperature}
        return {"mesh": self.mesh, "logits": self._logits, **options}

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        """A compiled graph does not wait for the number of stray targets: they make NaN, as on a GPU."""
        made = cls(**settings)
        made._counts_strays = False
        return made

    @property
    def logits_placement(self) -> TensorPlacement:
        """Where the logits live."""
        return self._logits

    def forward(
        self, logits: torch.Tensor, target: torch.Tensor, *, unsharded: Sequence[int] | None = None
    ) -> torch.Tensor:
        """logits: [..., classes] (local), target: [...] (local) -> a scalar, or [...] (local) with reduction "none".

        ``unsharded``: the shape of the whole logits, where local ones are shards that differ in size.
        """
        if self.is_decomposed():
            self.check_plain(logits=logits)
            self._check_target(logits, target)
            return traced.cross_entropy(
                logits, target, self.reduction, self.ignore_index, self.label_smoothing, self.z_loss, self.temperature
            )
        return self.called(logits, target, unsharded)[0]

    def called(
        self, logits: torch.Tensor, target: torch.Tensor, unsharded: Sequence[int] | None
    ) -> tuple[torch.Tensor, ...]:
        """The results of a call that is not traced: of local tensors, or of DTensors as DTensors."""
        if (type(logits) in PLAIN and type(target) in PLAIN) or not has_dtensor((logits, target)):
            return self._results(logits, target, unsharded=unsharded)
        rows = self._logits.resolve("logits", logits.ndim).without(logits.ndim - 1)
        given = [Given("logits", logits, self._logits), Given("target", target, rows)]
        shape = self._unsharded(logits, target)
        self.check_said(unsharded, shape, "logits" if has_dtensor((logits,)) else "target")
        at = rows if self.reduction == "none" else rows.replicated()
        result = Result(shape[:-1] if self.reduction == "none" else (), at, at)
        here = partial(self._results, unsharded=shape)
        return on_local_tensors(here, self.mesh, given, [result] * self.result_count)

    @property
    def result_count(self) -> int:
        """How many results a call has."""
        return 1

    def _results(
        self, logits: torch.Tensor, target: torch.Tensor, *, unsharded: Sequence[int] | None
    ) -> tuple[torch.Tensor, ...]:
        of_rows = self.reduction == "none"
        if logits.ndim == 1:
            sizes = () if self.mesh is None else self.mesh.shape
            if any(n > 1 and d == 0 for n, d in zip(sizes, self._logits.shards, strict=True)):
                raise PlacementError("logits", ("Shard(0)",), "the axis of classes", "shard that axis as Shard(-1)")
            whole = None if unsharded is None else (1, *unsharded)
            found = self._results(logits[None], target[None], unsharded=whole)
            return tuple(t[0] for t in found) if of_rows else found
        if target.ndim != logits.ndim - 1:
            self._check_target(logits, target)
        outputs = self.checked_results(logits, target, unsharded)
        return tuple(t[..., 0] for t in outputs) if of_rows else outputs

    def checked_results(
        self, logits: torch.Tensor, target: torch.Tensor, unsharded: Sequence[int] | None
    ) -> tuple[torch.Tensor, ...]:
        """As the fusion makes them, the last axis of rows' kept.  Raises ModuleInputError for stray targets."""
        outputs, count = self.run((logits, target[..., None]), unsharded), self.result_count
        if len(outputs) == count + 1 and outputs[count].item():
            classes = self._classes(logits) if unsharded is None else unsharded[-1]
            strays = int(outputs[count].item())
            raise StrayTargetError(type(self).__name__, target, classes, self.ignore_index, strays)
        return tuple(outputs[:count])

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        return _op(self.loss_spec(tensors, unsharded))

    def loss_spec(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> LossSpec:
        """What the fusions of (logits, target [..., 1]) depend on.  Raises ModuleInputError."""
        logits, target = tensors
        own = {"reduction": self.reduction, "label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return self.spec_of(partial(LossSpec, **own), logits, target, unsharded)

    def _check_target(self, logits: torch.Tensor, target: torch.Tensor) -> None:
        if logits.ndim == 0:
            raise ModuleInputError(type(self).__name__, "logits", "no dims", "[..., classes]", "pass rows of classes")
        if target.dtype != torch.int64:
            raise ModuleInputError(type(self).__name__, "target", f"dtype {target.dtype}", "torch.int64", "cast it")
        advice = (
            "classes are along the last axis (logits.movedim(1, -1) of torch's [N, C, d]), with a target for each row"
        )
        self.check_same("target", target, "the logits' rows", logits.shape[:-1], advice)

    def _unsharded(self, logits: torch.Tensor, target: torch.Tensor) -> tuple[int, ...]:
        """The shape of the logits, as the DTensors among the two tell it."""
        if not has_dtensor((logits,)):
            return (*target.shape, self._classes(logits))
        if has_dtensor((target,)) and target.shape != logits.shape[:-1]:
            found, expected = f"shape {tuple(target.shape)}", f"{tuple(logits.shape[:-1])}, the logits' rows"
            raise ModuleInputError(type(self).__name__, "target", found, expected, "pass a target for each row")
        return tuple(logits.shape)

    def _classes(self, logits: torch.Tensor) -> int:
        """Unsharded number of classes, of local logits."""
        if self.num_classes is not None:
            return self.num_classes
        parts = self._logits.resolve("logits", logits.ndim).parts(self.mesh, logits.ndim - 1)
        return logits.shape[-1] * parts

    def spec_of(
        self, make: Callable[..., S], logits: torch.Tensor, target: torch.Tensor, unsharded: Sequence[int] | None
    ) -> S:
        """What the fusions of such tensors, target [..., 1], depend on.  Raises ModuleInputError."""
        self._check_target(logits, target[..., 0])
        placement = self._logits.resolve("logits", logits.ndim).for_shape(self.mesh, unsharded)
        classes = self._classes(logits) if unsharded is None else unsharded[-1]
        if classes == 0:
            raise ModuleInputError(type(self).__name__, "logits", "no classes", "one or more", "pass [..., classes]")
        along = placement.only(logits.ndim - 1)
        self.check_size("logits", logits, -1, along.local_shape(self.mesh, (classes,))[0])
        return make(
            ndim=logits.ndim,
            mesh=self.mesh,
            placement=placement,
            dtype=self.check_dtype("logits", logits),
            classes=int(classes),
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            counts_strays=self._counts_strays and logits.device.type == "cpu",
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction}, ignore_index={self.ignore_index}, mesh={self.mesh}"


@lru_cache(maxsize=256)
def _op(spec: LossSpec) -> FusedOp:
    # The tensors are (logits, target), the outputs (loss[, strays], maximum, log_sum[, count]).
    results = 1 + spec.counts_strays
    extras = range(2 + results, 4 + results + (spec.reduction == "mean"))
    gradient = spec.loss[1]
    arguments = (spec.placement, spec.rows)
    return FusedOp(_forward(spec), _backward(spec), results, (0, 1, *extras), arguments, (gradient,), (0,))


def _forward(spec: LossSpec) -> FusionDefinition:
    """(logits, target) -> (loss[, strays], maximum, log_sum[, count]).  log_sum = log(sum(exp(logits - maximum))).

    maximum and log_sum are kept apart, since their sum is rounded to the maximum's size; a mean divides by the count.
    """
    with FusionDefinition() as fd:
        logits, target = logits_and_target(fd, spec)
        targets = Targets.of(fd, spec, target)
        rows = loss_of_rows(fd, spec, logits, targets)
        loss = rows.loss
        count = None
        if spec.reduction != "none":
            loss = fd.ops.sum(loss, list(range(spec.ndim)))
        if spec.reduction == "mean":
            count = fd.ops.sum(fd.ops.cast(targets.counted, dtype=DataType.Int), list(range(spec.ndim)))
            count = fd.ops.cast(count, dtype=spec.compute)
            loss = fd.ops.div(loss, count)
        give(fd, loss, spec.mesh, spec.loss[1])
        give_strays(fd, spec, targets.counted, targets.known)
        give(fd, rows.maximum, spec.mesh, spec.rows)
        give(fd, rows.log_sum, spec.mesh, spec.rows)
        if count is not None:
            give(fd, count, spec.mesh, spec.scalar)
    return fd


def _backward(spec: LossSpec) -> FusionDefinition:
    """(d loss, logits, target, maximum, log_sum[, count]) -> d logits.

    d logits = (softmax - the target's weights) * d loss [/ count] [/ temperature].
    """
    shape, placement = spec.loss
    with FusionDefinition() as fd:
        gradient = define(fd, spec.mesh, placement, shape, spec.compute)
        logits, target = logits_and_target(fd, spec)
        maximum = define(fd, spec.mesh, spec.rows, spec.row_shape, spec.compute)
        log_sum = define(fd, spec.mesh, spec.rows, spec.row_shape, spec.compute)
        if spec.reduction == "mean":
            gradient = fd.ops.div(gradient, define(fd, spec.mesh, spec.scalar, [], spec.compute))
        targets = Targets.of(fd, spec, target)
        softmax = fd.ops.exp(fd.ops.sub(fd.ops.sub(logits, maximum), log_sum))
        d_logits = gradient_of_logits(fd, spec, targets, softmax, maximum, log_sum, gradient)
        give(fd, d_logits, spec.mesh, spec.placement)
    return fd
