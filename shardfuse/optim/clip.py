"""``clip_grad_norm_`` and ``get_total_norm``: torch's functions, over plain tensors and DTensors of any meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from ..executor.cache import LRUCache
from ..executor.uncompiled import uncompiled
from ..executor.written_kernels import has_kernels
from ..mesh import DeviceMesh
from ..mesh.groups import Team, world_key
from .counted_pieces import Spread, added, as_mesh, counted, local_of, note_failure_beside, places_on_meshes, spread_of
from .dense import ADDRESS, DTYPE, ELEMENTS, IS_CONTIGUOUS, LAYOUT, dense_strides, devices_of, in_order, repeats
from .gradient_norm import (
    NormKernels,
    ScaleKernels,
    added_up,
    check_finite,
    checked_bound,
    checked_exponent,
    norm_type_of,
    root_of,
    scale_of,
    total_by_torch,
)
from .kernel_text import KINDS
from .optim_errors import OptimizerArgumentError, OptimizerTensorError
from .tensor_lists import COLUMNS, Launcher, Table, as_numbers, column, overlapping, stretches
from .torch_update import foreach

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor.placement_types import Placement

LISTS = 16
"""Lists of gradients, by sizes and types, whose kernels are kept; the least recently used is dropped."""


@torch.no_grad()
@uncompiled
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | TorchDeviceMesh | None = None,
    placements: Sequence[Placement] | Placement | None = None,
) -> torch.Tensor:
    """Scale all gradients, in place, so that their norm is at most ``max_norm``; as ``torch.nn.utils.clip_grad_norm_``.

    parameters: tensors and DTensors, on meshes that may differ, all on one device; those without a gradient are passed
    over.  norm_type: any number above 0, or inf.  foreach: taken for torch's sake, and of no effect.
    mesh, placements: how the plain tensors among them are sharded, where they are pieces: each rank's ``Shard`` is
    counted, a ``Replicate`` once.  Left out, plain tensors are this rank's own, beside DTensors replicated.

    Returns the norm of all unsharded gradients before scaling, 0-dim, float32 (float64 where a gradient is), on every
    rank of the meshes bitwise the same.  On a GPU three kernels, one all-reduce where something is sharded, and no
    wait for the GPU but with error_if_nonfinite.  Collective: all ranks of the meshes call it, with their pieces of
    the same tensors in the same order.

    A DTensor of partial sums is added up for the norm, by a collective of its own, and stays partial sums.

    Raises OptimizerTensorError for gradients that are sparse, complex, on several devices or in each other's memory;
    OptimizerArgumentError; NonFiniteNormError, before anything is scaled.
    """
    call = "clip_grad_norm_"
    listed: list[torch.Tensor] = []

    def places() -> list[int]:
        return [k for p, k in zip(listed, places_on_meshes(listed), strict=True) if p.grad is not None]

    try:
        listed = _listed(call, "parameters", parameters)
        on_mesh = as_mesh(call, mesh, placements)
        bound = checked_bound(call, max_norm)
        check_tensors(call, "parameters", listed)
        gradients = [p.grad for p in listed if p.grad is not None]
        found = _Gradients(call, gradients, places, norm_type, bound, *on_mesh, parameters=listed)
        own = found.own_total()
    except Exception as error:
        taken = [p for p in listed if getattr(p, "grad", None) is not None or getattr(p, "requires_grad", False)]
        gradients = [p if p.grad is None else p.grad for p in taken] or [None]
        note_failure_beside([(g, mesh, placements) for g in gradients])
        if isinstance(error, OptimizerTensorError) and (k := _first_repeated(listed)) is not None:
            raise OptimizerTensorError.of_repeated_tensor(call, f"parameter {k}") from None
        raise
    total = added_up(own, found.exponent, found.team, found.max_norm)
    if error_if_nonfinite:
        check_finite(total, found.exponent, call)
    return found.scaled(total)


def _listed(call: str, argument: str, given: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Raises OptimizerArgumentError for what is no tensor, and none that there are several of."""
    if isinstance(given, torch.Tensor):
        return [given]
    try:
        each = iter(given)
    except TypeError:
        raise OptimizerArgumentError(call, argument, given, "a torch.Tensor, or a list of such") from None
    return list(each)  # an error of a generator is the caller's own


@torch.no_grad()
@uncompiled
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | TorchDeviceMesh | None = None,
    placements: Sequence[Placement] | Placement | None = None,
) -> torch.Tensor:
    """The norm of all ``tensors`` (gradients, say) as if they were one vector; as ``torch.nn.utils.get_total_norm``.

    Arguments, result, collectives and errors are those of ``clip_grad_norm_``; nothing is changed.  Tensors may share
    memory, or be listed twice, which counts twice.
    """
    call = "get_total_norm"
    listed: list[torch.Tensor] = []
    try:
        listed = _listed(call, "tensors", tensors)
        whose, on_mesh = partial(places_on_meshes, listed), as_mesh(call, mesh, placements)
        check_tensors(call, "tensors", listed)
        found = _Gradients(call, listed, whose, norm_type, math.inf, *on_mesh, only_read=True)
        own = found.own_total()
    except Exception:
        note_failure_beside([(t, mesh, placements) for t in listed or [None]])
        raise
    total = added_up(own, found.exponent, found.team, found.max_norm)
    if error_if_nonfinite:
        check_finite(total, found.exponent, call)
    return root_of(total, found.exponent, found.dtype)


@dataclass
class _Kernels:
    """Of one list, kept from call to call.  ``scale`` is made when it is first asked for."""

    launcher: Launcher
    norm: NormKernels
    table: Table
    scale: ScaleKernels | None = None


_kept: LRUCache[Hashable, _Kernels] = LRUCache(LISTS)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_captured: list[_Kernels] = []
"""Buffers that a CUDA graph holds addresses of: torch does not report when the last graph is released."""


class _Gradients:
    """The gradients of one call."""

    def __init__(
        self,
        call: str,
        given: Sequence[torch.Tensor],
        places: Callable[[], list[int]],
        norm_type: float,
        max_norm: float,
        mesh: DeviceMesh | None,
        placements: tuple[Placement, ...] | None,
        *,
        parameters: Sequence[torch.Tensor] = (),
        only_read: bool = False,
    ) -> None:
        self.exponent, self.max_norm = checked_exponent(call, norm_type), max_norm
        self.summands: list[torch.Tensor] = []  # of partial sums this rank's, where what they add up to is elsewhere
        if mesh is None and _PLAIN.issuperset(map(type, given)) and _PLAIN.issuperset(map(type, parameters)):
            self.mine, self.team, self.given = [True] * len(given), None, list(given)
            self.device = check_gradients(call, self.given, only_read=only_read)
            _check_places(call, self.given, only_read=only_read)
        else:
            pieces = [local_of(g) for g in given]
            # A rank that has no gradient makes its zero where the others have their sums.
            places_of_parameters = [local_of(p).device for p in parameters if p.requires_grad]
            is_alone = not pieces and places_of_parameters
            self.device = places_of_parameters[0] if is_alone else check_gradients(call, pieces, only_read=only_read)
            _check_places(call, pieces, only_read=only_read)
            wholes = [added(g, place) for g, place in zip(given, places(), strict=True)]
            self.given = list(map(local_of, wholes))
            moved = [ADDRESS(piece) != ADDRESS(g) for piece, g in zip(pieces, self.given, strict=True)]
            self.summands = [piece for piece, is_copy in zip(pieces, moved, strict=True) if is_copy]
            self.mine, self.team = self._counted(call, wholes, mesh, placements, parameters)
        self.sizes, dtypes = list(map(ELEMENTS, self.given)), list(map(DTYPE, self.given))
        self.dtype = norm_type_of(dtypes)
        self.kinds = [KINDS[dtype] * 17 for dtype in dtypes]  # as if of a parameter of the same type
        self.tensors = self.given
        if not all(map(IS_CONTIGUOUS, self.given)):
            self.tensors = [in_order(g, dense_strides(g), g.dtype) for g in self.given]
        self._by_kernels = bool(self.given) and has_kernels(self.device)

    @staticmethod
    def _counted(
        call: str,
        wholes: Sequence[torch.Tensor],
        mesh: DeviceMesh | None,
        placements: tuple[Placement, ...] | None,
        parameters: Sequence[torch.Tensor],
    ) -> tuple[list[bool], Team | None]:
        """As ``counted``, of gradients among ``parameters``, if any.

        Another rank may have the gradient that this one lacks: who counts what goes by all parameters.
        """
        listed = [p for p in parameters if p.grad is not None or p.requires_grad]
        is_there = [p.grad is not None for p in listed] if parameters else [True] * len(wholes)
        named = iter(enumerate(wholes))
        spreads: list[Spread | None] = []
        for k, found in enumerate(is_there):
            place, tensor = next(named) if found else (k, listed[k])
            name = f"gradient {place}" if found else f"parameter {place}"
            spreads.append(spread_of(tensor, mesh, placements, call, name, is_there=found))
        mine, team = counted(spreads)
        return [own for own, found in zip(mine, is_there, strict=True) if found], team

    def own_total(self) -> torch.Tensor:
        """The sum of powers over what this rank counts, one float64."""
        if self._by_kernels:
            with on(self.device):
                return self._total_by_kernels()
        counted_here = [g for g, is_mine in zip(self.tensors, self.mine, strict=True) if is_mine]
        return total_by_torch(counted_here, self.exponent, self.device)

    def _total_by_kernels(self) -> torch.Tensor:
        kernels = self.kernels = _kernels_for(self.sizes, self.kinds, self.mine, self.exponent, self.device)
        numbers = torch.zeros((1 + len(self.tensors), COLUMNS), dtype=torch.int64, device="cpu")
        numbers[0] = as_numbers([self.max_norm, self.exponent, *[0.0] * (COLUMNS - 2)], {})
        numbers[1:, 1] = column(list(map(ADDRESS, self.tensors)))
        table = kernels.table.put(numbers.view(-1), kernels.launcher.begin())
        self.groups, self.addresses = table[:COLUMNS].view(torch.float64), table[COLUMNS:]
        kernels.norm.partial_norms(self.addresses, self.groups)
        total = torch.empty(1, dtype=torch.float64, device=self.device)
        kernels.norm.finish(total)
        return total

    def scaled(self, total: torch.Tensor) -> torch.Tensor:
        """Scale the gradients, of partial sums each rank's; returns the norm."""
        if self.summands:
            foreach("mul_")(self.summands, scale_of(total, self.exponent, self.max_norm))
        norm: torch.Tensor | None = None
        if self._by_kernels:
            with on(self.device):
                if self.kernels.scale is None:
                    launcher = self.kernels.launcher
                    self.kernels.scale = ScaleKernels(launcher, self.sizes, self.kinds, self.exponent)
                norm = self.kernels.scale.scale(self.addresses, self.groups, total)
        elif self.tensors:
            foreach("mul_")(self.tensors, scale_of(total, self.exponent, self.max_norm))
        for given, tensor in zip(self.given, self.tensors, strict=True):
            if tensor is not given:
                given.copy_(tensor)
        return root_of(total, self.exponent, self.dtype) if norm is None else norm.to(self.dtype)


def _check_places(call: str, gradients: Sequence[torch.Tensor], *, only_read: bool) -> None:
    """Raises OptimizerTensorError for several elements in one place, that are to be written."""
    if only_read or all(map(IS_CONTIGUOUS, gradients)):
        return
    for k, g in enumerate(gradients):
        if repeats(g):
            raise OptimizerTensorError.of_repeated_elements(call, f"gradient {k}")


def check_gradients(call: str, gradients: Sequence[torch.Tensor], *, only_read: bool) -> torch.device:
    """The device that all of them are on.  only_read: they may share memory.  Raises OptimizerTensorError."""
    if not gradients:
        return torch.device("cpu")
    devices = devices_of(gradients)
    if len(devices) > 1:
        found = f"are on {' and '.join(map(str, devices))}"
        advice = "call it once for each device, or move them to one"
        raise OptimizerTensorError(call, "gradients", found, "one device", advice)
    layouts = list(map(LAYOUT, gradients))
    if layouts.count(torch.strided) < len(layouts) or not KINDS.keys() >= set(map(DTYPE, gradients)):
        for k, g in enumerate(gradients):
            check_gradient(call, f"gradient {k}", g)
    clash = None if only_read else overlapping(*stretches(gradients))
    if clash is not None:
        found = f"{clash[0]} and {clash[1]} share memory"
        raise OptimizerTensorError(call, "gradients", found, "memory of their own", "clone() one of them")
    return devices[0]


def _first_repeated(listed: Sequence[torch.Tensor]) -> int | None:
    """The place of the first of those tensors with a gradient that are listed more than once."""
    places: dict[int, int] = {}
    for k, p in enumerate(listed):
        if p.grad is not None and places.setdefault(id(p), k) != k:
            return places[id(p)]
    return None


def check_tensors(call: str, argument: str, listed: Sequence[object]) -> None:
    """Raises OptimizerArgumentError for what is no tensor."""
    for k, x in enumerate(listed):
        if not isinstance(x, torch.Tensor):
            raise OptimizerArgumentError(call, f"{argument}[{k}]", x, "a torch.Tensor")


def check_gradient(call: str, name: str, gradient: torch.Tensor) -> None:
    """Raises OptimizerTensorError."""
    if gradient.layout != torch.strided:
        found, advice = f"is {gradient.layout}", "make it dense (to_dense(), Embedding(sparse=False))"
        raise OptimizerTensorError(call, name, found, "a dense tensor", advice)
    if gradient.dtype not in KINDS:
        expected = ", ".join(str(d).removeprefix("torch.") for d in KINDS)
        advice = "leave it out, and let torch's own function have it"
        raise OptimizerTensorError(call, name, f"is of {gradient.dtype}", expected, advice)


def on(device: torch.device) -> AbstractContextManager[None]:
    """``device`` as the current one."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return cast("AbstractContextManager[None]", torch.cuda.device(device))


def _kernels_for(
    sizes: list[int], kinds: list[int], mine: list[bool], exponent: float, device: torch.device
) -> _Kernels:
    key = (device, exponent, tuple(sizes), tuple(kinds), tuple(mine), world_key())
    kernels = _kept.get(key)
    if kernels is None:
        launcher = Launcher(device)
        kernels = _Kernels(launcher, NormKernels(launcher, sizes, kinds, mine, exponent), Table(device))
        _kept.put(key, kernels)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(kernels)
    return kernels
