"""DTensors in and out: placements become the shardings of inputs, and shardings of outputs become placements.

    DTensor [8, 12] of (Shard(0), _StridedShard(1, sf=3)) on (2, 4)    T0[i0/4@mesh_y, i0%4, i1/4, i1%4@mesh_x]

1. An input about which the definition says nothing gets the sharding of the DTensor; one about which it says something
   has to come so.  Each combination of placements has a copy of the fusion of its own, made at its first use.
2. A Partial DTensor is an input with one more axis for each mesh dimension of partial values, reduced first.
3. An output's placements are read off the domain that the plan gave it, and its sizes are the unsharded ones.

torch.distributed.tensor is slow to import: nothing here imports it before somebody has made a DTensor.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch

from ..analysis.communication_table import Communication
from ..compiler import Plan
from ..errors import InputCountError, InputError, ShapeError
from ..executor.agreement import asked_alone, failures_told
from ..executor.binding import Argument
from ..executor.cache import LRUCache
from ..executor.choices import Tuned
from ..executor.host_program import Program
from ..executor.options import CompileOptions
from ..executor.plain_arguments import received_one, resolved, without_graph
from ..executor.timeline import Timeline
from ..executor.tuning import Tuner
from ..ir.caller_lines import lines_named
from ..ir.digits import extent
from ..ir.domain import BoundDomain, TensorDomain
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from ..mesh import DeviceMesh
from ..mesh.groups import world_key
from ..mesh.process import ledger_of
from .argument_checks import ranks_of
from .counted_calls import RefusalsNoted, note_failed
from .detection import has_dtensor
from .dtensor_results import Result, Results, entering_moves, leaving_moves, nothing_of
from .executor_cache import PROGRAMS, FusionExecutorCache
from .given import Given, as_given, given_of
from .inputs import take
from .moves import Entering, move_out
from .placements import placements_of, unsharded_strides
from .shard_order import dtensor_of, left_to_right, shard_order_of, spec_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


VARIANTS = 64
"""Combinations of placements of which one fusion keeps a copy of its own, with its programs."""


class DTensorExecutor:
    """Runs a fusion on DTensors.  ``said``: the domains that the definition gave its inputs, by place."""

    def __init__(self, fusion: Fusion, said: Sequence[TensorDomain | None], options: CompileOptions) -> None:
        self.fusion = fusion
        self.said = said
        self.options = options
        self.variants: LRUCache[Hashable, _Variant] = LRUCache(VARIANTS)
        self.given: LRUCache[Hashable, Given] = LRUCache(PROGRAMS)
        self.seen: LRUCache[Hashable, Given] = LRUCache(PROGRAMS)
        self.last_variant: _Variant | None = None
        """Of the last call; ``None`` where that was of plain tensors."""

    @property
    def last(self) -> FusionExecutorCache | None:
        return None if self.last_variant is None else self.last_variant.cache

    @property
    def moved(self) -> tuple[Communication, ...]:
        """How the last call exchanged pieces of DTensors that torch cuts elsewhere, before and after."""
        return () if self.last_variant is None else self.last_variant.moved

    def execute(
        self,
        arguments: Sequence[Argument],
        sizes: Mapping[TensorView, Sequence[int]] | None,
        device: torch.device | None,
    ) -> list[torch.Tensor | None]:
        """As `FusionExecutorCache.execute`; outputs are DTensors.

        Raises PlacementError for placements that no sharding is, and InputError for such as the definition contradicts.
        """
        with without_graph(self.fusion, arguments):
            last = self.last_variant  # as whose call one counts that is refused before its own variant is known
            with RefusalsNoted(last.cache, last.team) if last else RefusalsNoted(None, _ranks_of(arguments)):
                variant = self.variant(arguments)
            try:
                with variant.cache.turn():
                    outputs = variant.run(arguments, self.by_place(sizes or {}), device)
            except ShapeError as error:
                _name_plain(error, self.fusion, arguments)
                raise
        self.last_variant = variant
        return outputs

    def tune(
        self,
        arguments: Sequence[Argument],
        sizes: Mapping[TensorView, Sequence[int]] | None,
        device: torch.device | None,
        tuner: Tuner,
    ) -> list[Tuned]:
        """As `FusionExecutorCache.tune`.  Raises what `execute` does."""
        with without_graph(self.fusion, arguments):
            variant = self.variant(arguments)
            values, said, _ = variant.local(arguments, self.by_place(sizes or {}))
            tuned = variant.cache.tune(values, said, device, tuner)
        self.last_variant = variant
        return tuned

    def timeline(self, arguments: Sequence[Argument], sizes: Mapping[TensorView, Sequence[int]] | None) -> Timeline:
        """As `FusionExecutorCache.timeline`.  Raises what `execute` does."""
        with without_graph(self.fusion, arguments):
            variant = self.variant(arguments)
            values, said, entering = variant.local(arguments, self.by_place(sizes or {}))
            with variant.cache.turn():
                values = [entering[k].inside() if k in entering else v for k, v in enumerate(values)]
                found = variant.cache.timeline(values, said)
        self.last_variant = variant
        return found

    def plan_for(
        self, arguments: Sequence[Argument], sizes: Mapping[TensorView, Sequence[int]] | None
    ) -> tuple[Plan, tuple[Communication, ...]]:
        """The plan, and how pieces that torch cuts elsewhere are exchanged.  Raises what `execute` does."""
        with asked_alone():
            variant = self.variant(arguments)
            values, said, entering = variant.local(arguments, self.by_place(sizes or {}))
        plan = variant.cache.plan_for(values, said)
        return plan, variant.exchanges(plan, entering)

    def variant(self, arguments: Sequence[Argument]) -> _Variant:
        """The copy of the fusion for the placements of ``arguments``."""
        if len(arguments) != len(self.fusion.inputs):
            with failures_told(_ranks_of(arguments)), lines_named(self.fusion):
                raise InputCountError(len(arguments), [i.val.name for i in self.fusion.inputs])
        given = [self.of(k, cast("DTensor", a)) if has_dtensor((a,)) else None for k, a in enumerate(arguments)]
        key = tuple(given)
        variant = self.variants.get(key)
        if variant is None:  # threads that come here at once each make one, as ranks do that are threads
            shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else () for a in arguments]
            fusion = self.copy()
            with failures_told(_ranks_of(arguments)), lines_named(fusion):
                variant = _Variant(fusion, given, shapes, self.options)
            self.variants.put(key, variant)
        return variant

    def of(self, k: int, dtensor: DTensor) -> Given:
        """What argument ``k`` says of itself.  Kept by shape: a call is as fast as to look up what was seen.

        And by the world: a mesh is equal to that of the same ranks in another, which finds no groups in this one.
        """
        seen = dtensor.device_mesh, dtensor.placements, dtensor.shape, shard_order_of(dtensor)
        world = world_key()
        given = self.seen.get((world, seen))
        if given is None:
            with failures_told(_ranks_of((dtensor,))), lines_named(self.fusion):
                placements = left_to_right(f"input {k}, {self.fusion.inputs[k].val.name}", *seen)
            given = given_of(dtensor, placements)
            said = world, given.mesh, given.placements, given.cuts, given.elsewhere
            known = self.given.get(said)
            if known is None:
                self.given.put(said, given)
            given = known or given
            self.seen.put((world, seen), given)
        return given

    def copy(self) -> Fusion:
        """The fusion as it was defined."""
        meshes = [tv.domain.mesh for tv in self.fusion.tensors() if tv.domain.mesh is not None]
        memo = {id(mesh): mesh for mesh in meshes}
        fusion, said = copy.deepcopy((self.fusion, list(self.said)), memo)
        for declared, domain in zip(fusion.inputs, said, strict=True):
            if isinstance(declared.val, TensorView) and domain is not None:
                declared.val.domain = domain
        fusion.reopen()
        return fusion

    def by_place(self, sizes: Mapping[TensorView, Sequence[int]]) -> dict[int, Sequence[int]]:
        return {
            k: sizes[i.val]
            for k, i in enumerate(self.fusion.inputs)
            if isinstance(i.val, TensorView) and i.val in sizes
        }


class _Variant:
    """The fusion for one combination of placements."""

    def __init__(
        self, fusion: Fusion, given: Sequence[Given | None], shapes: Sequence[tuple[int, ...]], options: CompileOptions
    ) -> None:
        self.given = given
        self.results: WeakKeyDictionary[Program, Results] = WeakKeyDictionary()
        """What the outputs of a program are as DTensors, once it has run."""
        self.moved: tuple[Communication, ...] = ()
        self.torch_meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], TorchDeviceMesh] = {}
        meshes = [tv.domain.mesh for tv in fusion.tensors() if tv.domain.mesh is not None]
        for k, (g, shape) in enumerate(zip(given, shapes, strict=True)):
            if g is not None:
                mesh = _known(meshes, DeviceMesh.from_torch(g.mesh))
                self.torch_meshes[mesh.ranks, mesh.shape] = g.mesh
                take(fusion, k, g, mesh, shape)
        self.cache, self.team = FusionExecutorCache(fusion, options), ranks_of(fusion)
        self.made = [tv for tv in fusion.outputs if tv not in fusion.aliases]
        replaced = list(fusion.aliases.values())
        self.written = [k for k, declared in enumerate(fusion.inputs) if declared.val in replaced]
        """The inputs that outputs are written over."""

    def local(
        self, arguments: Sequence[Argument], said: Mapping[int, Sequence[int]]
    ) -> tuple[list[Argument], dict[TensorView, Sequence[int]], dict[int, Entering]]:
        """This rank's pieces, the unsharded sizes that they do not tell, and those that are still to be exchanged."""
        sizes: dict[TensorView, Sequence[int]] = {}
        values: list[Argument] = []
        entering: dict[int, Entering] = {}
        for k, (argument, given, declared) in enumerate(
            zip(arguments, self.given, self.cache.fusion.inputs, strict=True)
        ):
            tv = declared.val
            if given is None or not isinstance(argument, torch.Tensor) or not isinstance(tv, TensorView):
                values.append(received_one(k, tv.name, argument))
                if k in said and isinstance(tv, TensorView):
                    sizes[tv] = said[k]
                continue
            if k in said and tuple(said[k]) != (shape := tuple(argument.shape)):
                expected, remedy = (
                    f"of shape {list(said[k])}, as sizes= says",
                    "leave it out of sizes=: it tells its own",
                )
                with failures_told(self.team):
                    raise InputError(k, tv.name, f"a DTensor of {list(shape)}", expected, remedy)
            local, is_member = _local(k, tv.name, argument), given.mesh.get_coordinate() is not None
            if not is_member:  # nothing is read of it but how many dims it has
                local = local.new_empty((0,) * argument.ndim)
            elif given.elsewhere:
                entering[k] = Entering.of(k, declared, given, tuple(argument.shape), local)
                local = entering[k].move.like(local)
            values.append(local[(None,) * len(given.partial)])
            if given.is_uneven or not is_member:
                sizes[tv] = (*(given.mesh.size(d) for d in given.partial), *argument.shape)
        return values, sizes, entering

    def run(
        self, arguments: Sequence[Argument], said: Mapping[int, Sequence[int]], device: torch.device | None
    ) -> list[torch.Tensor | None]:
        with RefusalsNoted(self.cache, self.team):
            values, sizes, entering = self.local(arguments, said)
            values = resolved(self.cache.fusion, values)
        program = self.cache.program(values, sizes, device)
        is_entered, is_noted = False, bool(entering) or program.note is not None
        if entering:
            self.note(program)
        try:
            values = [entering[k].inside() if k in entering else v for k, v in enumerate(values)]
            is_entered = True
            outputs = program.run(*values)
            results = self.leave(program, values, entering, outputs)
            if results.moved and not entering:
                self.note(program)
                is_noted = True
            return [result.of(x) for x, result in zip(outputs, results.each, strict=True)]
        except Exception as error:
            if not is_entered or self.is_exchanged_behind(program, entering):
                note_failed(self.team, program, error, is_noted=is_noted)
            raise

    def leave(
        self,
        program: Program,
        values: Sequence[Argument],
        entering: Mapping[int, Entering],
        outputs: Sequence[torch.Tensor | None],
    ) -> Results:
        """What ``outputs`` are as DTensors, once what was written over is where it came from."""
        for k in self.written:
            if k in entering:
                entering[k].write_back(cast(torch.Tensor, values[k]))
        results = self.results.get(program)
        if results is None:
            parts = zip(outputs, self.made, program.domains, strict=True)
            found = tuple(self.result(x, tv, domain) for x, tv, domain in parts)
            results = self.results[program] = Results(found, leaving_moves(self.made, found))
        self.moved = (*entering_moves(entering), *results.moved) if entering else results.moved
        return results

    def is_exchanged_behind(self, program: Program, entering: Mapping[int, Entering]) -> bool:
        """Do ranks exchange pieces behind a run of it?"""
        parts = zip(self.made, program.domains, strict=True)
        results = [self.result(None, tv, domain) for tv, domain in parts]
        return bool(leaving_moves(self.made, results)) or any(k in entering for k in self.written)

    def note(self, program: Program) -> None:
        """Note a call around which ranks exchange pieces as one of theirs, where they send nothing within."""
        ledger = ledger_of(self.team) if program.note is None else None
        self.cache.sends = True
        if ledger is not None:
            ledger.note(program.call)

    def exchanges(self, plan: Plan, entering: Mapping[int, Entering]) -> tuple[Communication, ...]:
        """Those before and after a run of ``plan``."""
        domains = {tv: t.domain for tv, t in zip(self.cache.fusion.outputs, plan.fusion.outputs, strict=True)}
        results = [self.result(None, tv, None if tv.allocation_rank else domains[tv]) for tv in self.made]
        return (*entering_moves(entering), *leaving_moves(self.made, results))

    def result(self, local: torch.Tensor | None, tv: TensorView, domain: BoundDomain | None) -> Result:
        """What an output of ``domain`` is as a DTensor."""
        if domain is None:
            return Result(None, None)
        if local is None:
            local = self.nothing_of(tv, domain)
        if local is None:
            return Result(None, None)
        return self.wrapped(local, domain)

    def nothing_of(self, tv: TensorView, domain: BoundDomain) -> torch.Tensor | None:
        """What a rank outside of the mesh has of an output, as torch has it; ``None`` on a mesh of no DTensor."""
        mesh = domain.mesh and self.torch_meshes.get((domain.mesh.ranks, domain.mesh.shape))
        return None if mesh is None else nothing_of(len(domain.logical), tv.dtype.torch, mesh.device_type)

    def wrapped(self, local: torch.Tensor, domain: BoundDomain) -> Result:
        from torch.distributed.tensor import Replicate

        strides, move = unsharded_strides(domain), None
        if domain.mesh is None:
            mesh = next(iter(self.torch_meshes.values()))
            placements: list[Placement] = [Replicate()] * mesh.ndim
        else:
            mesh = self.torch_mesh(domain.mesh, local.device.type)
            said, is_doubtful = placements_of(domain)
            placements = as_given(said, self.given)
            if (is_doubtful or placements != said) and mesh.get_coordinate() is not None:
                order = sorted(range(len(strides)), key=lambda d: -strides[d])
                move = move_out(domain, placements, order, local.device)
        shape = tuple(extent(axis) for axis in domain.logical)
        piece = local if move is None else local.new_empty(move.shape)
        return Result(spec_of(dtensor_of(piece, mesh, placements, shape, strides)), move)

    def torch_mesh(self, mesh: DeviceMesh, device_type: str) -> TorchDeviceMesh:
        key = mesh.ranks, mesh.shape
        if key not in self.torch_meshes:
            self.torch_meshes[key] = mesh.to_torch(device_type)
        return self.torch_meshes[key]


def _name_plain(error: ShapeError, fusion: Fusion, arguments: Sequence[Argument]) -> None:
    """Sizes that do not fit may be those of a whole tensor, which was taken for this rank's piece."""
    for k, (declared, a) in enumerate(zip(fusion.inputs, arguments, strict=True)):
        if isinstance(a, torch.Tensor) and a.ndim and not has_dtensor((a,)):
            error.add_note(
                f"input {k}, {declared.val.name}, is a plain tensor beside DTensors, and taken for this rank's piece: "
                "pass what is whole as a DTensor of Replicate()"
            )


def _ranks_of(arguments: Sequence[Argument]) -> tuple[int, ...]:
    """Those of the meshes of the DTensors among the arguments."""
    meshes = (DeviceMesh.from_torch(cast("DTensor", a).device_mesh) for a in arguments if has_dtensor((a,)))
    return tuple(dict.fromkeys(rank for mesh in meshes for rank in mesh.ranks))


def _known(meshes: list[DeviceMesh], mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of these ranks that the fusion has already, whatever its dimensions are called there."""
    found = next((m for m in meshes if (m.ranks, m.shape) == (mesh.ranks, mesh.shape)), None)
    if found is None:
        meshes.append(mesh)
    return found or mesh


def _local(k: int, name: str, dtensor: torch.Tensor) -> torch.Tensor:
    """This rank's tensor of input ``k``, after the collective that may still be filling it."""
    return cast(torch.Tensor, received_one(k, name, cast("DTensor", dtensor).to_local()))
