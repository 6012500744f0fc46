"""The program that a rank runs for a plan and one call: its steps are written, and its kernels compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from ..compiler import Plan
from ..executor.binding import Bound, check_local_shape
from ..executor.fitting import Fit, fitted
from ..executor.kernel import Kernel
from ..executor.options import CompileOptions
from ..executor.program import ProgramBuilder
from ..executor.replicas import ReplicaCheck
from ..executor.stream_chunks import places_of
from ..executor.symmetric_slots import Region, region_of
from ..ir.expr import BoundTensor
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from ..passes.recorded_domains import allocation_shape
from ..schedulers.overwritten_inputs import replaceable
from ..schedulers.plan import KernelPlan
from ..segments.segment import read_once
from .bound_call import BoundCall, Made
from .counted_calls import counted
from .exchanges import sent_in

Kernels = dict[Hashable, Kernel]
"""Those of one plan that are compiled, as `ProgramBuilder` finds them."""


def built(fusion: Fusion, call: BoundCall, plan: Plan, options: CompileOptions, kernels: Kernels) -> Made:
    """The program of ``plan`` for ``call``.  kernels: as of `builder_of`."""
    builder = builder_of(fusion, call, plan, options, kernels, region_of)
    forms = [
        allocation_shape(tv, t, call.rank) if tv.allocation_rank else None
        for tv, t in zip(fusion.outputs, plan.fusion.outputs, strict=True)
    ]
    program = builder.finish(forms)
    if options.check_replicas and len(call.ranks) > 1 and call.rank in call.ranks:
        check = ReplicaCheck(plan.fusion, call.ranks, call.bound.device)
        program = replace(program, body=check.around(program.body))
    return Made(counted(fusion, program, call, is_sending=bool(sent_in(plan, options))), plan)


def check_shares(
    fusion: Fusion, plan: Plan, bound: Bound, sizes: Mapping[TensorView, Sequence[int]], rank: int
) -> None:
    """Raises ``InputError`` for a tensor that is not this rank's share of the input that ``plan`` was made for."""
    for k, (declared, tensor) in enumerate(zip(fusion.inputs, plan.fusion.inputs, strict=True)):
        tv = declared.val
        if not isinstance(tv, TensorView) or (tv.domain.mesh is not None and rank not in tv.domain.mesh.ranks):
            continue
        assert isinstance(tensor, BoundTensor), "a tensor is bound to a tensor"
        check_local_shape(k, tv, tensor.domain, bound.local_shapes[tv], rank, sizes[tv])


def builder_of(
    fusion: Fusion, call: BoundCall, plan: Plan, options: CompileOptions, kernels: Kernels,
    region: Callable[[KernelPlan], Region] | None = None, fit: Fit = fitted,
) -> ProgramBuilder:  # fmt: skip
    """A builder with all segments added.  kernels: those that are compiled already; the others are added to it.

    region: where a kernel exchanges with other ranks; left out, there is no place yet, and kernels are compiled alone.
    fit: how kernels are had.
    """
    bound, rank = call.bound, call.rank
    check_shares(fusion, plan, bound, call.sizes, rank)
    inputs = dict(zip((i.val for i in fusion.inputs), plan.fusion.inputs, strict=True))
    samples: dict[BoundTensor, torch.Tensor] = {}
    for tv, value in bound.tensors.items():
        tensor = inputs[tv]
        assert isinstance(tensor, BoundTensor), "a tensor is bound to a tensor"
        samples[tensor] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    segments = [s.segment for s in plan.segments]
    places = places_of([(s.segment, s.scheduler) for s in plan.segments], rank)
    planned = [(s.segment, s.scheduler, s.kernels) for s in plan.segments]
    written_over = replaceable(plan.fusion, planned, [inputs[tv] for tv in fusion.given_up])
    builder = ProgramBuilder(
        plan.fusion, rank, bound.device, options, samples, places, replaceable=written_over,
        read_once=read_once(segments, plan.fusion.outputs), kernels=kernels, region=region, fit=fit,
    )  # fmt: skip
    builder.begin(
        [tv if isinstance(tv, TensorView) and tv.allocation_rank else None for tv in inputs],
        [isinstance(tv, TensorView) and tv.is_cpu for tv in inputs],
    )
    for k, s in enumerate(plan.segments):
        builder.add(k, s.segment, s.scheduler, s.kernels, is_beside=s.is_beside, renamed=s.renamed)
    return builder
