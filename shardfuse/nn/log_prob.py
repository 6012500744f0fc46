"""Log-probability of given classes, and entropy, of logits that are whole or sharded by rows or by classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import torch

from ..frontend import FusionDefinition
from ..mesh import DeviceMesh
from . import traced
from .fused import FusedOp
from .logits_fusions import LogitsSpec, cooled, give_strays, is_class, is_target, logits_and_target
from .loss import CrossEntropyLoss
from .placement import define, give
from .settings import Setting, checked_module

if TYPE_CHECKING:
    from .placement import Placements


_NO_WEIGHT = -1000.0
"""A logarithm whose exponential is 0 in float64 too: a class of no weight has this one in place of minus infinity."""


@checked_module
class LogProb(CrossEntropyLoss):
    """The log-probability of each row's target, and the entropy of its distribution, over the last axis.

    The first result is log softmax(logits / temperature)[target].

    entropy: whether the entropy, -sum(p * log p) in nats, is a second result.  Both have gradients.
    ignore_index: rows with this target have the log-probability 0, the entropy 0, and no gradient.
    mesh, logits, num_classes: as of ``CrossEntropyLoss``, and so is the treatment of a target that is no class.

    One exchange of a few numbers a row where classes are sharded, none backward; 16 bytes a row are kept for the
    backward in addition to the logits, 20 with the entropy.  Results are float32 or float64.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.
    """

    family = "log_prob"
    entropy: Setting[bool] = Setting()

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        logits: Placements | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        ignore_index: int = -100,
        num_classes: int | None = None,
    ) -> None:
        super().__init__(
            mesh=mesh, logits=logits, reduction="none", ignore_index=ignore_index, num_classes=num_classes,
            temperature=temperature,
        )  # fmt: skip
        self.__dict__["entropy"] = entropy  # past what checks the setting of a module that is made
        self.describe()

    def settings(self) -> dict[str, object]:
        options = {"temperature": self.temperature, "entropy": self.entropy, "ignore_index": self.ignore_index}
        return {"mesh": self.mesh, "logits": self._logits, **options, "num_classes": self.num_classes}

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, logits: torch.Tensor, target: torch.Tensor, *, unsharded: Sequence[int] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """logits: [..., classes] (local), target: [...] (local) -> [...] (local), with ``entropy`` two of them.

        ``unsharded``: the shape of the whole logits, where local ones are shards that differ in size.
        """
        if self.is_decomposed():
            self.check_plain(logits=logits)
            self._check_target(logits, target)
            options = (self.ignore_index, self.temperature)
            found = traced.log_prob(logits, target, *options, entropy=self.entropy)
        else:
            found = self.called(logits, target, unsharded)
        return cast("tuple[torch.Tensor, torch.Tensor]", found) if self.entropy else found[0]

    @property
    def result_count(self) -> int:
        return 1 + self.entropy

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        logits, target = tensors
        return log_prob_op(self.spec_of(partial(LogProbSpec, entropy=self.entropy), logits, target, unsharded))

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, entropy={self.entropy}, mesh={self.mesh}"


@dataclass(frozen=True, kw_only=True)
class LogProbSpec(LogitsSpec):
    """All that the fusions depend on.  entropy: is it a result too?"""

    entropy: bool


@lru_cache(maxsize=256)
def log_prob_op(spec: LogProbSpec) -> FusedOp:
    """(logits, target) -> (log-probability[, entropy][, strays]); extras are (maximum, log_sum)."""
    results = 1 + spec.entropy + spec.counts_strays
    saved = (0, 1, 2 + results, 3 + results, *((3,) if spec.entropy else ()))
    gradients = (spec.rows,) * (1 + spec.entropy)
    return FusedOp(_forward(spec), _backward(spec), results, saved, (spec.placement, spec.rows), gradients, (0,))


def _forward(spec: LogProbSpec) -> FusionDefinition:
    """The entropy is log(sum) - sum(e * s) / sum with s = logits - maximum, e = exp(s) and sum = sum(e)."""
    with FusionDefinition() as fd:
        logits, target = logits_and_target(fd, spec)
        of_target = is_target(fd, spec, target)
        maximum = fd.ops.max(logits, [-1], keepdim=True)
        shifted = fd.ops.sub(logits, maximum)
        weights = fd.ops.exp(shifted)
        total = fd.ops.sum(weights, [-1], keepdim=True)
        log_sum = fd.ops.log(total)
        chosen = fd.ops.sum(fd.ops.where(of_target, logits, 0.0), [-1], keepdim=True)
        found = [fd.ops.sub(fd.ops.sub(chosen, maximum), log_sum)]
        if spec.entropy:
            # A class of no weight, a logit of minus infinity, adds nothing.
            moments = fd.ops.where(fd.ops.eq(weights, 0.0), 0.0, fd.ops.mul(weights, shifted))
            mean = fd.ops.div(fd.ops.sum(moments, [-1], keepdim=True), total)
            found.append(fd.ops.sub(log_sum, mean))
        counted, known = fd.ops.ne(target, spec.ignore_index), is_class(fd, spec, target)
        for result in found:
            result = fd.ops.where(counted, fd.ops.where(known, result, math.nan), 0.0)
            give(fd, result, spec.mesh, spec.rows)
        give_strays(fd, spec, counted, known)
        give(fd, maximum, spec.mesh, spec.rows)
        give(fd, log_sum, spec.mesh, spec.rows)
    return fd


def _backward(spec: LogProbSpec) -> FusionDefinition:
    """(gradients, logits, target, maximum, log_sum[, entropy]) -> d logits.

    With p = exp(l) the probabilities: (1 at the target - p) * g of the log-probability, -p * (l + entropy) * g of the
    entropy; both over the temperature.  The gradient g of a row whose target is no class is NaN.
    """
    with FusionDefinition() as fd:
        gradients = [define(fd, spec.mesh, spec.rows, spec.row_shape, spec.compute) for _ in range(1 + spec.entropy)]
        logits, target = logits_and_target(fd, spec)
        of_target = fd.ops.cast(is_target(fd, spec, target), dtype=spec.compute)
        gradients[0] = fd.ops.where(is_class(fd, spec, target), gradients[0], math.nan)
        maximum, log_sum = (define(fd, spec.mesh, spec.rows, spec.row_shape, spec.compute) for _ in range(2))
        logs = fd.ops.sub(fd.ops.sub(logits, maximum), log_sum)
        probability = fd.ops.exp(logs)
        if spec.entropy:
            entropy = define(fd, spec.mesh, spec.rows, spec.row_shape, spec.compute)
            away = fd.ops.add(fd.ops.maximum(logs, _NO_WEIGHT), entropy)
            each = fd.ops.add(fd.ops.mul(away, gradients[1]), gradients[0])
            d_logits = fd.ops.sub(fd.ops.mul(of_target, gradients[0]), fd.ops.mul(probability, each))
        else:
            d_logits = fd.ops.mul(fd.ops.sub(of_target, probability), gradients[0])
        d_logits = cooled(fd, spec, d_logits)
        d_logits = fd.ops.where(fd.ops.ne(target, spec.ignore_index), d_logits, 0.0)
        give(fd, fd.ops.cast(d_logits, dtype=spec.dtype), spec.mesh, spec.placement)
    return fd
