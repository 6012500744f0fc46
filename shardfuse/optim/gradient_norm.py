"""The norm of all gradients together, and clipping by it: two kernels, at most one all-reduce, and a third kernel.

    partials[k] = sum of |g|^p over chunk k                a kernel, a program a chunk
    total = sum of partials                                a kernel of one program; the order is always the same
    total = sum of totals over ranks                       where something is sharded
    g *= min(max_norm / (total^(1/p) + 1e-6), 1)           a kernel, or a factor in the optimiser's own

Nothing is read back by the host.  Sums are of float32 within a chunk and of float64 beyond it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, cast

import torch

from ..executor import collective_calls
from ..mesh.calls import Call
from ..mesh.groups import Team
from ..mesh.process import ledger_of
from ..source_line import caller_line
from .kernel_text import GENERAL_NORM_SHAPE, KINDS, NORM_SHAPE, SCALE_SHAPE, Use
from .optim_errors import NonFiniteNormError, OptimizerArgumentError
from .tensor_lists import LISTED_PARTIALS, Launch, Launcher, Walk, make_walk

_linalg = cast("Any", torch.linalg)  # untyped
NORMS = 16
"""Norms whose lines in the record of calls are kept: a program has one or two."""
EPSILON = 1e-6
"""Added to the norm that is divided by, as torch does."""


def order_of(exponent: float) -> int:
    """The kernels' number for the order of a norm: 2 and 1, 0 for infinity, 3 for any other."""
    return {2.0: 2, 1.0: 1, math.inf: 0}.get(exponent, 3)


def checked_exponent(call: str, norm_type: object) -> float:
    """``norm_type`` as a number.  Raises OptimizerArgumentError."""
    try:
        exponent = float(cast("Any", norm_type))
    except (TypeError, ValueError):
        exponent = math.nan
    if not exponent > 0:
        raise OptimizerArgumentError(call, "norm_type", norm_type, "a number above 0, or inf")
    return exponent


def checked_bound(call: str, max_norm: object) -> float:
    """``max_norm`` as a number, also from a tensor of one element.  Raises OptimizerArgumentError."""
    is_number = isinstance(max_norm, Real) or (isinstance(max_norm, torch.Tensor) and max_norm.numel() == 1)
    bound = float(cast("Any", max_norm)) if is_number else math.nan
    if not bound >= 0:
        raise OptimizerArgumentError(call, "max_norm", max_norm, "a number, 0 or more")
    return bound


def added_up(total: torch.Tensor, exponent: float, team: Team | None, max_norm: float) -> torch.Tensor:
    """The sums (the largest elements) of all ranks as one, on every rank bitwise the same.

    max_norm: the bound of the norm, which ranks have alike.

    The all-reduce is a call of the ranks' like that of a program: where one rank makes it alone, both say so and end.
    """
    if team is None:
        return total
    ledger = ledger_of(team.ranks)
    if ledger is not None:
        ledger.note(_call_of(exponent, max_norm))
    return collective_calls.all_reduce(total, "max" if exponent == math.inf else "sum", team)


@functools.lru_cache(maxsize=NORMS)
def _call_of(exponent: float, max_norm: float) -> Call:
    bound = f", max_norm {max_norm!r}" if math.isfinite(max_norm) else ""
    text = f"shardfuse.optim: all_reduce of the norm of gradients, norm_type {exponent:g}{bound}"
    return Call.of(text, line=caller_line(in_modules=True))


def root_of(total: torch.Tensor, exponent: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm, 0-dim, from the sum of powers."""
    total = total.reshape(())
    if exponent == math.inf:
        return total.to(dtype)
    return (total.sqrt() if exponent == 2 else total.pow(1 / exponent)).to(dtype)


def scale_of(total: torch.Tensor, exponent: float, max_norm: float) -> torch.Tensor:
    """Factor of gradients, 0-dim float64: at most 1; NaN where the norm is NaN, or infinite as the bound is."""
    scale = max_norm / (root_of(total, exponent, torch.float64) + EPSILON)
    return torch.clamp(scale, max=1.0)


def total_by_torch(gradients: Sequence[torch.Tensor], exponent: float, device: torch.device) -> torch.Tensor:
    """The sum of powers (the largest element) of these gradients, one float64, by torch's ops."""
    kept = [g for g in gradients if g.numel()]
    norms = [cast("torch.Tensor", _linalg.vector_norm(g, exponent, dtype=torch.float64)) for g in kept]
    if not norms:
        return torch.zeros(1, dtype=torch.float64, device=device)
    found = torch.stack(norms)
    return (found.amax() if exponent == math.inf else found.pow(exponent).sum()).reshape(1)


def check_finite(total: torch.Tensor, exponent: float, call: str) -> None:
    """Waits for the GPU.  Raises NonFiniteNormError."""
    found = root_of(total, exponent, torch.float64).item()
    if not math.isfinite(found):
        raise NonFiniteNormError(call, exponent, found)


def norm_type_of(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Of the norm of gradients of these types: float32, of float64 ones float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


class Parts:
    """The places of a list whose elements are computed with in one type, and the constants of the kernels over them.

    float64 tensors have kernels of their own: mixed with others they would have all computed in float64.
    """

    def __init__(self, kinds: Sequence[int]) -> None:
        wide = KINDS[torch.float64]
        self.taken = [[k & 15 == wide for k in kinds], [k & 15 != wide for k in kinds]]
        self.has_wide = any(self.taken[0])
        self.taken = [taken for taken in self.taken if any(taken)]
        self.kinds = [[k for k, is_taken in zip(kinds, taken, strict=True) if is_taken] for taken in self.taken]

    def use(self, part: int, order: int, *, clips: bool = False, interpreted: bool = False) -> Use:
        kinds = self.kinds[part]
        parameters, gradients = ({k & 15 for k in kinds}, {k >> 4 & 15 for k in kinds})
        return Use(
            order=order,
            parameters=sum(1 << k for k in parameters),
            gradients=sum(1 << k for k in gradients),
            clips=clips,
            interpreted=interpreted,
        )

    def dtype(self, part: int) -> torch.dtype:
        return torch.float64 if self.use(part, 2).is_double else torch.float32


class NormKernels:
    """The norm of gradients of these sizes.  kinds: of parameter and gradient; counted: those that this rank adds."""

    def __init__(
        self, launcher: Launcher, sizes: Sequence[int], kinds: Sequence[int], counted: Sequence[bool], exponent: float
    ) -> None:
        order = order_of(exponent)
        self.shape = GENERAL_NORM_SHAPE if order == 3 else NORM_SHAPE
        self.exponent = exponent
        parts = Parts(kinds)
        self._walks: list[tuple[Walk, Launch, int]] = []
        self.partial_count = 0
        for k, taken in enumerate(parts.taken):
            taken = [a and b for a, b in zip(taken, counted, strict=True)]
            walk = make_walk(sizes, kinds, [0] * len(sizes), taken, self.shape.chunk, launcher.device)
            if walk.programs:
                use = replace(parts.use(k, order, interpreted=launcher.is_interpreted), wide_sums=parts.has_wide)
                launch = launcher.bind("norm_partials", use, self.shape, walk.programs)
                self._walks.append((walk, launch, self.partial_count))
                self.partial_count += -(-walk.programs // LISTED_PARTIALS) * LISTED_PARTIALS
        # Zeros between parts stay zeros, which neither a sum nor a largest magnitude sees.
        self.partials = torch.zeros(max(self.partial_count, 1), dtype=torch.float64, device=launcher.device)
        self.finish_use = Use(order=order)
        self._finish: Launch | None = None
        self._launcher = launcher

    def partial_norms(self, addresses: torch.Tensor, groups: torch.Tensor) -> None:
        for walk, launch, first in self._walks:
            launch(addresses, walk.facts, walk.chunks, groups, self.partials[first : first + walk.programs])

    def finish(self, total: torch.Tensor) -> None:
        """The sum of all partial numbers to ``total``, one float64."""
        if self._finish is None:
            self._finish = self._launcher.bind("finish_norm", self.finish_use, self.shape, 1, (self.partial_count,))
        self._finish(self.partials, total)


class ScaleKernels:
    """Multiplies gradients of these sizes by the factor that bounds the norm, and writes the norm."""

    def __init__(self, launcher: Launcher, sizes: Sequence[int], kinds: Sequence[int], exponent: float) -> None:
        parts = Parts(kinds)
        self._walks: list[tuple[Walk, Launch, torch.dtype]] = []
        for k, taken in enumerate(parts.taken):
            walk = make_walk(sizes, kinds, [0] * len(sizes), taken, SCALE_SHAPE.chunk, launcher.device)
            if walk.programs:
                use = parts.use(k, order_of(exponent), interpreted=launcher.is_interpreted)
                launch = launcher.bind("scale_gradients", use, SCALE_SHAPE, walk.programs)
                self._walks.append((walk, launch, parts.dtype(k)))

    def scale(self, addresses: torch.Tensor, groups: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
        """The norm; ``None`` where this rank has no element, and so no kernel that writes it."""
        norm: torch.Tensor | None = None
        for walk, launch, dtype in reversed(self._walks):
            norm = torch.empty((), dtype=dtype, device=total.device)
            launch(addresses, walk.facts, walk.chunks, groups, total, norm)
        return norm
