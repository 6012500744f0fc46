"""One AdamW step of a list of parameters: what stays the same is looked at once, the rest in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..executor.written_kernels import has_kernels
from ..mesh import DeviceMesh
from . import torch_update
from .clip import check_gradient, on
from .columns import Columns, Order
from .counted_pieces import counted, local_of, placements_of, places_on_meshes, redistributed, spread_of
from .dense import ADDRESS, ELEMENTS, LAYOUT, dense_strides, devices_of, has_strides, is_dense
from .gradient_norm import added_up, check_finite, norm_type_of, root_of, scale_of, total_by_torch
from .optim_errors import OptimizerTensorError
from .tensor_lists import overlapping, stretches
from .update_kernels import Clipping, Listed, UpdateKernels

CALL = "AdamW.step"


@dataclass(frozen=True)
class Parameter:
    """A parameter, with or without a gradient.  mesh, placements: what its group says of a plain tensor."""

    tensor: torch.Tensor
    group: int
    name: str
    mesh: DeviceMesh | None
    placements: Any
    amsgrad: bool
    has_master: bool


class Update:
    """Steps of parameters that stay the same ones.

    Gradients and states may be other tensors in every step, and parameters may move.  What has another type or order in
    memory than the kernels go by is copied for the step.
    """

    def __init__(self, parameters: Sequence[Parameter], exponent: float | None) -> None:
        self.parameters = parameters
        self.tensors = [p.tensor for p in parameters]
        weights = [local_of(t) for t in self.tensors]
        self._check(weights)
        self.device = devices_of(weights)[0]
        self.placements = [placements_of(t) for t in self.tensors]
        self.has_dtensors = any(p is not None for p in self.placements)
        self._on_meshes = places_on_meshes(self.tensors)
        self.shapes = [w.shape for w in weights]
        self.strides = [dense_strides(w) for w in weights]
        dtypes = [w.dtype for w in weights]
        wide = [torch.float64 if d == torch.float64 else torch.float32 for d in dtypes]
        self.order = Order(
            self.device, dtypes, wide, self.shapes, self.strides, is_contiguous=all(w.is_contiguous() for w in weights)
        )
        has_amsgrad, has_masters = any(p.amsgrad for p in parameters), any(p.has_master for p in parameters)
        self._amsgrads = [p.amsgrad for p in parameters] if has_amsgrad else []
        mine, team = counted([spread_of(p.tensor, p.mesh, p.placements, CALL, p.name) for p in parameters])
        sizes, groups = list(map(ELEMENTS, weights)), [p.group for p in parameters]
        self.listed = Listed(self.device, sizes, dtypes, groups, mine, team, has_amsgrad, has_masters)
        self._places = list(map(ADDRESS, weights))
        self._check_apart(weights)
        self._specs: list[object] = [None] * len(weights)
        self._kernels = UpdateKernels(self.listed, exponent, CALL) if has_kernels(self.device) else None

    def step(
        self, gradients: Sequence[torch.Tensor | None], states: Sequence[dict[str, Any]],
        groups: Sequence[dict[str, Any]], clipping: Clipping | None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Returns the norm before clipping, where it was asked for.  gradients, states: of each parameter."""
        if self.has_dtensors:
            gradients = [None if g is None else self._local_gradient(k, g) for k, g in enumerate(gradients)]
        given = [g for g in gradients if g is not None]
        if list(map(LAYOUT, given)).count(torch.strided) < len(given):
            for p, g in zip(self.parameters, gradients, strict=True):
                if g is not None:
                    check_gradient(CALL, f"the gradient of {p.name}", g)
        columns = Columns.of(
            self.tensors, gradients, states, amsgrads=self._amsgrads, has_masters=self.listed.has_masters
        )
        if self.has_dtensors:
            columns.localise()
        staged = self.order.apply(columns)
        self._check_order()
        with on(self.device):
            if self._kernels is not None:
                norm = self._kernels.run(columns, groups, clipping)
            else:
                norm = self._by_torch(columns, groups, clipping)
        for target, copy in staged:
            target.copy_(copy)
        return norm

    def _local_gradient(self, k: int, gradient: torch.Tensor) -> torch.Tensor:
        """Of a DTensor this rank's part, redistributed where the gradient is not sharded as the parameter is.

        torch has whole gradients of a row-parallel embedding's table, which are cut, and partial sums of the weight of
        a norm of sharded rows, which are added up.  Raises OptimizerTensorError where one of the two is no DTensor, or
        is on another mesh.
        """
        spec, placements = getattr(gradient, "_spec", None), self.placements[k]
        if spec is None and placements is None:
            return gradient
        if spec is None or spec is not self._specs[k]:
            own: Any = getattr(self.tensors[k], "_spec", None)
            if spec is None or placements is None or spec.mesh != own.mesh:
                name, advice = f"the gradient of {self.parameters[k].name}", "make it a DTensor of that mesh first"
                raise OptimizerTensorError(CALL, name, f"is {_shown(spec)}", f"as the parameter {_shown(own)}", advice)
            if tuple(spec.placements) != placements:
                return local_of(redistributed(gradient, placements, self._on_meshes[k]))
            self._specs[k] = spec
        return local_of(gradient)

    def fits(self) -> bool:
        """Are the parameters still of the types and shapes that were looked at?  They may have moved."""
        weights = [local_of(t) for t in self.tensors] if self.has_dtensors else self.tensors
        places = list(map(ADDRESS, weights))
        if places != self._places:
            listed = self.listed
            known = zip(weights, listed.dtypes, self.shapes, self.strides, strict=True)
            if any((w.dtype, w.shape) != (d, s) or (is_dense(w) and not has_strides(w, t)) for w, d, s, t in known):
                return False
            if devices_of(weights) != [self.device]:
                return False
            self._check_apart(weights)
            self._places = places
        return True

    def _check(self, weights: Sequence[torch.Tensor]) -> None:
        devices = devices_of(weights)
        if len(devices) > 1:
            found, advice = f"are on {' and '.join(map(str, devices))}", "make an optimiser for each device"
            raise OptimizerTensorError(CALL, "parameters", found, "one device", advice)
        for p, w in zip(self.parameters, weights, strict=True):
            check_gradient(CALL, p.name, w)

    def _check_order(self) -> None:
        """Raises OptimizerTensorError for what was found as the tensors were put in order, before any is written."""
        if self.order.misfit is not None:
            k, key, found = self.order.misfit
            expected, advice = f"{list(self.shapes[k])}", "load a state that was saved with parameters of these shapes"
            raise OptimizerTensorError(
                CALL, f"the state {key!r} of {self.parameters[k].name}", f"is of shape {found}", expected, advice
            )
        if self.order.repeated is not None:
            k, key = self.order.repeated
            name = self.parameters[k].name
            raise OptimizerTensorError.of_repeated_elements(
                CALL, name if key is None else f"the state {key!r} of {name}"
            )

    def _check_apart(self, weights: Sequence[torch.Tensor]) -> None:
        clash = overlapping(*stretches(weights))
        if clash is not None:
            first, second = (self.parameters[k].name for k in clash)
            if weights[clash[0]] is weights[clash[1]]:
                raise OptimizerTensorError.of_repeated_tensor(CALL, first)
            advice = "list one tensor that holds both, or clone() one of them"
            raise OptimizerTensorError(CALL, second, f"shares memory with {first}", "memory of its own", advice)

    def _by_torch(
        self, columns: Columns, groups: Sequence[dict[str, Any]], clipping: Clipping | None
    ) -> torch.Tensor | None:
        norm, scale, listed = None, None, self.listed
        if clipping is not None:
            pairs = zip(columns.gradients, listed.mine, strict=True)
            here = [g for g, is_mine in pairs if is_mine and g is not None]
            total = added_up(
                total_by_torch(here, clipping.exponent, self.device), clipping.exponent, listed.team, clipping.max_norm
            )
            if clipping.raises:
                check_finite(total, clipping.exponent, CALL)
            norm = root_of(total, clipping.exponent, norm_type_of(listed.dtypes))
            if clipping.max_norm != math.inf:  # which only measures
                scale = scale_of(total, clipping.exponent, clipping.max_norm)
        if self.device.type == "meta":
            return norm
        factors: list[torch_update.Factors] = []
        for p, gradient, step in zip(self.parameters, columns.gradients, columns.steps, strict=True):
            if gradient is not None:
                step += 1
                factors.append(_factors(groups[p.group], step.item()))
        torch_update.update(columns.rows(), factors, scale)
        return norm


def _factors(group: dict[str, Any], step: float) -> torch_update.Factors:
    beta1, beta2 = map(float, group["betas"])
    return torch_update.Factors.of(
        step, float(group["lr"]), (beta1, beta2), group["eps"], group["weight_decay"], group["maximize"]
    )


def _shown(spec: Any) -> str:
    if spec is None:
        return "a plain tensor"
    return f"a DTensor of placements ({', '.join(map(repr, spec.placements))}) on {spec.mesh}"
