"""One AdamW step of a list of parameters: what is looked up in every call, and the kernels that it launches."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ..mesh import DeviceMesh
from . import eager
from .clip import check_gradient, check_gradients, on
from .dense import dense_strides, has_strides, in_order, is_dense
from .errors import OptimizerTensorError
from .kernel_text import KINDS, UPDATE_SHAPE
from .norm import (
    NormKernels,
    Parts,
    added_up,
    check_finite,
    norm_type_of,
    order_of,
    root_of,
    scale_of,
    total_by_torch,
)
from .pieces import counted, local_of, placements_of, spread_of
from .walk import COLUMNS, Launch, Launcher, Table, Walk, as_numbers, column, has_kernels, make_walk, overlapping
from .walk import storage_of

CALL = "AdamW.step"
KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "step")
"""Of a parameter's state, in the order of a row of addresses behind parameter and gradient."""


@dataclass(frozen=True)
class Clipping:
    """max_norm: infinite where only the norm is wanted."""

    max_norm: float
    exponent: float
    raises: bool


@dataclass(frozen=True)
class Parameter:
    """A parameter that has a gradient.  mesh, placements: what its group says of a plain tensor."""

    tensor: torch.Tensor
    group: int
    name: str
    mesh: DeviceMesh | None
    placements: Any
    amsgrad: bool
    has_master: bool


class Update:
    """Steps of parameters that stay the same ones: their shapes, types and places in memory order are looked at once.

    Gradients and states may be other tensors in every step, and parameters may move; where they have another type or
    order in memory than the parameter, they are copied.
    """

    def __init__(
        self, parameters: Sequence[Parameter], states: Sequence[dict[str, Any]], exponent: float | None
    ) -> None:
        self.parameters, self.states, self.exponent = parameters, states, exponent
        self.tensors = [p.tensor for p in parameters]
        weights = [local_of(t) for t in self.tensors]
        self.device = check_gradients(CALL, [])
        self.device = self._checked(weights)
        self.placements = [placements_of(t) for t in self.tensors]
        self.has_dtensors = any(p is not None for p in self.placements)
        self.dtypes = [w.dtype for w in weights]
        self.sizes = [w.numel() for w in weights]
        self.strides = [dense_strides(w) for w in weights]
        self.is_plain = [w.is_contiguous() for w in weights]
        self.all_plain = all(self.is_plain)
        self.wide = [torch.float64 if d == torch.float64 else torch.float32 for d in self.dtypes]
        spreads = [spread_of(p.tensor, p.mesh, p.placements, CALL, p.name) for p in parameters]
        self.mine, self.team = counted(spreads)
        self._places = [storage_of(w) for w in weights]
        self._check_apart(weights)
        self._seen_specs: list[object] = [None] * len(weights)
        self._kernels = _Kernels(self) if has_kernels(self.device) else None

    def step(
        self, gradients: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]], clipping: Clipping | None
    ) -> torch.Tensor | None:
        """Returns the norm before clipping, where it was asked for."""
        given = self._given(gradients)
        rows, staged = self._rows(given)
        with on(self.device):
            if self._kernels is not None:
                norm = self._kernels.run(rows, groups, clipping)
            else:
                norm = self._by_torch(rows, groups, clipping)
        for target, copy in staged:
            target.copy_(copy)
        return norm

    def _given(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's gradients, checked.  Raises OptimizerTensorError."""
        if self.has_dtensors:
            gradients = [self._local_gradient(k, g) for k, g in enumerate(gradients)]
        if list(map(_LAYOUT, gradients)) != [torch.strided] * len(gradients) or any(
            map(operator.ne, map(_DEVICE, gradients), itertools.repeat(self.device))
        ):
            for p, g in zip(self.parameters, gradients, strict=True):
                check_gradient(CALL, f"the gradient of {p.name}", g)
            check_gradients(CALL, gradients)
        return list(gradients)

    def _local_gradient(self, k: int, gradient: torch.Tensor) -> torch.Tensor:
        spec, placements = getattr(gradient, "_spec", None), self.placements[k]
        if spec is not self._seen_specs[k]:
            if spec is None or placements is None or tuple(cast("Any", spec).placements) != placements:
                name = f"the gradient of {self.parameters[k].name}"
                has = "a plain tensor" if spec is None else f"({', '.join(map(str, cast('Any', spec).placements))})"
                wants = "a plain tensor" if placements is None else f"({', '.join(map(str, placements))})"
                advice = "call redistribute(placements=...) on it first, which adds partial sums up"
                raise OptimizerTensorError(CALL, name, f"has placements {has}", f"the parameter's, {wants}", advice)
            self._seen_specs[k] = spec
        return gradient if spec is None else local_of(gradient)

    def _rows(self, gradients: list[torch.Tensor]) -> tuple[_Columns, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The tensors of a step, in one order in memory each; and those that a copy stands for, to be written back."""
        states = self.states
        columns = _Columns(
            list(self.tensors) if not self.has_dtensors else [local_of(t) for t in self.tensors],
            gradients,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [s.get("max_exp_avg_sq") if p.amsgrad else None for p, s in zip(self.parameters, states, strict=True)]
            if any(p.amsgrad for p in self.parameters)
            else [],
            [s["master"] if p.has_master else None for p, s in zip(self.parameters, states, strict=True)]
            if any(p.has_master for p in self.parameters)
            else [],
            [s["step"] for s in states],
        )
        if self.has_dtensors:
            columns.localise()
        if list(map(storage_start, columns.weights)) != [start for start, _ in self._places]:
            self._places = [storage_of(w) for w in columns.weights]
            self._check_shapes(columns.weights)
            self._check_apart(columns.weights)
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        every = columns.all_tensors()
        if self.all_plain and columns.are_of(self.dtypes, self.wide) and all(map(_CONTIGUOUS, every)):
            return columns, staged
        for tensors, is_written, dtypes in columns.with_types(self.dtypes, self.wide):
            for k, tensor in enumerate(tensors):
                if tensor is not None:
                    tensors[k] = in_order(tensor, self.strides[k], dtypes[k])
                    if is_written and tensors[k] is not tensor:
                        staged.append((tensor, cast(torch.Tensor, tensors[k])))
        return columns, staged

    def _checked(self, weights: Sequence[torch.Tensor]) -> torch.device:
        devices = list(dict.fromkeys(w.device for w in weights))
        if len(devices) > 1:
            found, advice = f"are on {' and '.join(map(str, devices))}", "make an optimiser for each device"
            raise OptimizerTensorError(CALL, "parameters", found, "one device", advice)
        for p, w in zip(self.parameters, weights, strict=True):
            check_gradient(CALL, p.name, w)
        return devices[0] if devices else torch.device("cpu")

    def _check_shapes(self, weights: Sequence[torch.Tensor]) -> None:
        """A parameter that was given other data may have another shape: then nothing fits any more."""
        for p, w, size, strides in zip(self.parameters, weights, self.sizes, self.strides, strict=True):
            if w.numel() != size or (is_dense(w) and not has_strides(w, strides)):
                found, advice = f"has become one of shape {list(w.shape)}", "make a new optimiser, or keep its shape"
                raise OptimizerTensorError(CALL, p.name, found, f"{size} elements in the order of before", advice)

    def _check_apart(self, weights: Sequence[torch.Tensor]) -> None:
        clash = overlapping([at if is_dense(w) else (0, 0) for at, w in zip(self._places, weights, strict=True)])
        if clash is not None:
            first, second = (self.parameters[k].name for k in clash)
            advice = "list one tensor that holds both, or clone() one of them"
            raise OptimizerTensorError(CALL, first, f"shares memory with {second}", "memory of its own", advice)

    def _by_torch(
        self, columns: _Columns, groups: Sequence[dict[str, Any]], clipping: Clipping | None
    ) -> torch.Tensor | None:
        norm, scale = None, None
        if clipping is not None:
            here = [g for g, is_mine in zip(columns.gradients, self.mine, strict=True) if is_mine]
            total = added_up(total_by_torch(here, clipping.exponent, self.device), clipping.exponent, self.team)
            if clipping.raises:
                check_finite(total, clipping.exponent, CALL)
            norm = root_of(total, clipping.exponent, norm_type_of(self.dtypes))
            scale = scale_of(total, clipping.exponent, clipping.max_norm)
        factors: list[eager.Factors] = []
        for p, step in zip(self.parameters, columns.steps, strict=True):
            g = groups[p.group]
            step += 1
            beta1, beta2 = map(float, g["betas"])
            factors.append(
                eager.Factors.of(
                    step.item(), float(g["lr"]), (beta1, beta2), g["eps"], g["weight_decay"], g["maximize"]
                )
            )
        eager.update(columns.rows(), factors, scale)
        return norm


storage_start = cast("Callable[[torch.Tensor], int]", torch.Tensor.data_ptr)
_LAYOUT, _DEVICE = operator.attrgetter("layout"), operator.attrgetter("device")
_CONTIGUOUS = cast("Callable[[torch.Tensor], bool]", torch.Tensor.is_contiguous)


@dataclass
class _Columns:
    """The tensors of a step by what they are; ``largest`` and ``masters`` are empty where no parameter has one."""

    weights: list[Any]
    gradients: list[Any]
    firsts: list[Any]
    seconds: list[Any]
    largest: list[Any]
    masters: list[Any]
    steps: list[Any]

    def localise(self) -> None:
        for tensors in (self.firsts, self.seconds, self.largest, self.masters):
            tensors[:] = [None if t is None else local_of(t) for t in tensors]

    def all_tensors(self) -> list[torch.Tensor]:
        more = [t for t in (*self.largest, *self.masters) if t is not None]
        return [*self.weights, *self.gradients, *self.firsts, *self.seconds, *more]

    def are_of(self, dtypes: list[torch.dtype], wide: list[torch.dtype]) -> bool:
        """Are parameters and gradients of ``dtypes``, and states of ``wide``?"""
        for tensors, expected in ((self.gradients, dtypes), (self.firsts, wide), (self.seconds, wide)):
            if list(map(_DTYPE, tensors)) != expected:
                return False
        more = (zip(t, wide, strict=True) for t in (self.largest, self.masters) if t)
        return all(t is None or t.dtype == dtype for t, dtype in itertools.chain(*more))

    def with_types(
        self, dtypes: list[torch.dtype], wide: list[torch.dtype]
    ) -> list[tuple[list[Any], bool, list[torch.dtype]]]:
        """Each column, whether it is written, and the types that it is to have."""
        gradients = [
            g.dtype if g.dtype in KINDS and (g.dtype == torch.float64) == (d == torch.float64) else d
            for g, d in zip(self.gradients, dtypes, strict=True)
        ]
        states = (self.firsts, self.seconds, self.largest, self.masters)
        return [(self.weights, True, dtypes), (self.gradients, False, gradients), *((s, True, wide) for s in states)]

    def rows(self) -> list[eager.Row]:
        none = [None] * len(self.weights)
        columns = (self.weights, self.gradients, self.firsts, self.seconds, self.largest or none, self.masters or none)
        return [eager.Row(*row) for row in zip(*columns, strict=True)]


_DTYPE = operator.attrgetter("dtype")


class _Kernels:
    """What an update launches on one device."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.launcher = Launcher(update.device)
        self.table = Table(update.device)
        self.kinds: list[int] = []
        self.count = len(update.tensors)
        self.factors = torch.zeros(max(self.count, 1) * COLUMNS, dtype=torch.float64, device=update.device)

    def run(self, columns: _Columns, groups: Sequence[dict[str, Any]], clipping: Clipping | None) -> torch.Tensor | None:
        gradients = list(map(_DTYPE, columns.gradients))
        if not self.kinds or gradients != self.gradient_types:
            self.gradient_types = gradients
            self._bind(None if clipping is None else clipping.exponent)
        numbers = self._numbers(columns, groups, clipping)
        table = self.table.put(numbers, self.launcher.begin())
        first = (1 + len(groups)) * COLUMNS
        rows, addresses = table[:first].view(torch.float64), table[first:]
        total: torch.Tensor = self.factors
        if self.norm is None or clipping is None:
            self.prepare(addresses, self.facts, rows, self.factors)
        else:
            own = torch.empty(1, dtype=torch.float64, device=self.update.device)
            self.norm.partial_norms(addresses, rows)
            self.prepare(self.norm.partials, own, addresses, self.facts, rows, self.factors)
            total = added_up(own, clipping.exponent, self.update.team)
            if clipping.raises:
                check_finite(total, clipping.exponent, CALL)
        norm: torch.Tensor | None = None
        for walk, launch, dtype in reversed(self.walks):
            norm = torch.empty((), dtype=dtype, device=self.update.device)
            launch(addresses, walk.facts, walk.chunks, self.factors, rows, total, norm)
        if clipping is None:
            return None
        dtype = norm_type_of(self.update.dtypes)
        return root_of(total, clipping.exponent, dtype) if norm is None else norm.to(dtype)

    def _bind(self, exponent: float | None) -> None:
        u, launcher = self.update, self.launcher
        pairs = zip(u.dtypes, self.gradient_types, strict=True)
        self.kinds = [KINDS[p] | KINDS[g] << 4 for p, g in pairs]
        order = 2 if exponent is None else order_of(exponent)
        groups = [p.group for p in u.parameters]
        parts = Parts(self.kinds)
        self.walks: list[tuple[Walk, Launch, torch.dtype]] = []
        self.facts = torch.empty(0, dtype=torch.int64)
        for k, taken in enumerate(parts.taken):
            walk = make_walk(u.sizes, self.kinds, groups, taken, UPDATE_SHAPE.chunk, u.device)
            self.facts = walk.facts
            if walk.programs:
                use = replace(
                    parts.use(k, order, clips=exponent is not None, interpreted=launcher.is_interpreted),
                    amsgrad=any(p.amsgrad for p in u.parameters),
                    master=any(p.has_master for p in u.parameters),
                )
                self.walks.append((walk, launcher.bind("adamw", use, UPDATE_SHAPE, walk.programs), parts.dtype(k)))
        self.norm = None if exponent is None else NormKernels(launcher, u.sizes, self.kinds, u.mine, exponent)
        if self.norm is None:
            self.prepare = launcher.bind("prepare_steps", self._use(order), UPDATE_SHAPE, 1, (self.count,))
        else:
            name, counts = "finish_norm_and_prepare", (self.norm.partial_count, self.count)
            self.prepare = launcher.bind(name, self._use(order), UPDATE_SHAPE, 1, counts)

    def _use(self, order: int) -> Any:
        return replace(Parts([0]).use(0, order), interpreted=self.launcher.is_interpreted)

    def _numbers(
        self, columns: _Columns, groups: Sequence[dict[str, Any]], clipping: Clipping | None
    ) -> torch.Tensor:
        """The table of a step: a row for the norm, one for each group, one of addresses for each parameter."""
        head = len(groups) + 1
        numbers = torch.zeros((head + self.count, COLUMNS), dtype=torch.int64)
        numbers[:head] = self._head(groups, clipping).view(head, COLUMNS)
        for place, tensors in enumerate((columns.weights, columns.gradients, columns.firsts, columns.seconds)):
            numbers[head:, place] = column(list(map(storage_start, tensors)))
        for place, tensors in ((4, columns.largest), (5, columns.masters)):
            if tensors:
                numbers[head:, place] = column([0 if t is None else t.data_ptr() for t in tensors])
        numbers[head:, 6] = column(list(map(storage_start, columns.steps)))
        return numbers.view(-1)

    def _head(self, groups: Sequence[dict[str, Any]], clipping: Clipping | None) -> torch.Tensor:
        norm = (math.inf, 2.0) if clipping is None else (clipping.max_norm, clipping.exponent)
        values, integers = [*norm, *[0.0] * (COLUMNS - 2)], dict[int, int]()
        for k, group in enumerate(groups, 1):
            lr = group["lr"]
            if isinstance(lr, torch.Tensor) and lr.device == self.update.device and lr.device.type == "cuda":
                integers[k * COLUMNS + 1] = lr.data_ptr()
                integers[k * COLUMNS + 7] = int(lr.dtype == torch.float64)
                lr = 0.0
            sign = -1.0 if group["maximize"] else 1.0
            beta1, beta2 = map(float, group["betas"])
            values += [float(lr), 0.0, beta1, beta2, group["eps"], group["weight_decay"], sign, 0.0]
        return as_numbers(values, integers)
