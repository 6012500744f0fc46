"""The host program of one rank: a flat, generated Python function over local tensors.

def program(T0, T1):
    if current_device() != 0: return on_device(program, T0, T1)
    stream = begin()
    queue = queue_now()
    T3 = empty((64, 1024), (1024, 1), float32)
    collective_0(queue, T0, T3)
    T4 = empty((64, 1024), (1024, 1), float32)
    kernel_1_0(stream, T3, T1, T4)
    del T3
    return (T4, )

A collective that has kernels to run beside starts on a stream of its own, and is waited for before its first reader::

    T3, done_0 = start(collective_0, T0)
    T4 = empty((64, 1024), (1024, 1), float32)
    kernel_1_0(stream, T1, T4)
    wait(done_0, T0, T3)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from ..allocation.layouts import layout_of
from ..analysis.communication_table import communication_of
from ..codegen.source import KernelSource
from ..errors import KernelCompileError
from ..ir.digits import extent
from ..ir.domain import BoundDomain
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Relabel, StreamCat, View
from ..ir.tensor_view import TensorView
from ..ops.evaluate import evaluate_local, view_of
from ..schedulers.plan import KernelPlan
from ..segments.segment import Segment
from .aliasing import alias_steps, own_steps
from .allocation_form import from_allocation, to_allocation
from .autocast import outside_autocast
from .batches import batch_launches
from .collective_steps import CollectiveSteps
from .driver import open_driver
from .evaluation import evaluation_of, one_or_all
from .fitting import Fit, fitted, launches_of
from .host_program import Program, bound_text, device_calls
from .host_scalars import host_steps, scalar_text
from .in_place_writes import has_its_room, in_same_order, reads_before_it_writes
from .kernel import Kernel
from .launch import index_of
from .program_tensors import Storage, arguments_of
from .steps import (
    BEGIN,
    Allocate,
    Bring,
    Call,
    Guard,
    LaunchBatch,
    LaunchKernel,
    Over,
    Rename,
    Return,
    Start,
    called,
    labels_of,
    last_sending_line,
    names_of,
    program_text,
)
from .storage import are_fresh, freed, only_addressed, result_of, share_workspace
from .stream_chunks import address_chunks
from .symmetric_slots import Region

Renamed = Mapping[BoundTensor, BoundTensor]


@dataclass
class ProgramBuilder(CollectiveSteps):
    """Writes the program of ``rank``."""

    replaceable: Mapping[BoundTensor, Sequence[BoundTensor]] = field(
        default_factory=dict[BoundTensor, Sequence[BoundTensor]]
    )
    """Outputs, and the inputs that each may be written over."""
    replaced: dict[BoundTensor, BoundTensor] = field(default_factory=dict[BoundTensor, BoundTensor])  # those that are
    taken: set[BoundTensor] = field(default_factory=set[BoundTensor])  # inputs whose memory is an output's
    moved: set[BoundTensor] = field(default_factory=set[BoundTensor])  # inputs that come on the CPU
    kernels: dict[Hashable, Kernel] = field(default_factory=dict[Hashable, Kernel])
    """By the name of the plan and the strides of its tensors."""
    region: Callable[[KernelPlan], Region] | None = None  # in which a segment's kernel exchanges with other ranks
    fit: Fit = fitted  # how a kernel is had

    def begin(self, forms: Sequence[TensorView | None], on_cpu: Sequence[bool] | None = None) -> None:
        """``forms``: for each input its TensorView where it comes by allocation rank, else ``None``.

        ``on_cpu``: is the input declared to come on the CPU, whatever the device?
        """
        if self.device.type == "cuda":
            self.steps.append(Guard(index_of(self.device), tuple(v.name for v in self.fusion.inputs)))
        for value, there in zip(self.fusion.inputs, on_cpu or (), strict=False):
            if there and isinstance(value, BoundTensor) and self.device.type != "cpu":
                self.moved.add(value)
                self.steps.append(Bring(value.name, value.name, self.device))
        self.steps += host_steps(self.fusion, self.device)
        for value, form in zip(self.fusion.inputs, forms, strict=True):
            if not isinstance(value, BoundTensor):
                continue
            self.meta[value] = self.samples[value]
            if form is not None and self.holds(value):
                name, convert = (value.name,), from_allocation(value.domain, self.rank)
                self.steps.append(Call(name, f"from_allocation_{value}", convert, name))
                self.contiguous(value)

    # segments

    def add(
        self,
        k: int,
        segment: Segment,
        scheduler: str,
        kernels: Sequence[KernelPlan],
        *,
        is_beside: bool = False,
        renamed: Renamed | None = None,
    ) -> None:
        """``is_beside``: a collective that runs on the communication stream.

        ``renamed``: where ``kernels`` are those of another segment, the tensors of this for each of its own.
        """
        if not is_beside:
            self.wait(segment.inputs)
        touched = (*segment.inputs, *segment.outputs) if scheduler == "communication" else segment.outputs
        if not any(map(self.holds, touched)):
            self.steps += [Rename(t.name, "None") for t in segment.outputs]
            return
        if isinstance(segment.exprs[0].op, StreamCat) and segment.outputs[0] in self.places:
            return  # made in place
        if scheduler == "communication":
            self.add_collective(k, segment, is_beside=is_beside)
        elif scheduler == "no_op":
            self.add_view(k, segment)
        elif (
            scheduler == "torch_call"
            or self.options.backend_for(self.device) == "torch"
            or (self.is_empty(segment) and not any(p.exchange for p in kernels))  # its peers wait for its words
        ):
            self.call(f"torch_{k}", segment, self.evaluation(segment))
        else:
            self.add_kernels(k, segment, kernels, renamed or {})

    def is_empty(self, segment: Segment) -> bool:
        """Has this rank nothing of what ``segment`` reads, makes, or only computes with?"""
        made = (t for e in segment.exprs for t in e.outputs)
        return any(0 in self.meta[t].shape for t in segment.inputs) or any(
            0 in t.domain.local_shape(self.rank) for t in made
        )

    def make(self, tensor: BoundTensor, source: KernelSource, *, is_own: bool = False) -> None:
        """Storage for ``tensor``, which the kernel of ``source`` writes, or that of the input that it replaces.

        is_own: it replaces none, as the kernel writes rows in it that it may still have to read in an input.
        """
        like, targets = self.meta[tensor], () if is_own else self.replaceable.get(tensor, ())
        target = next((t for t in targets if self.may_replace(tensor, t, source)), None)
        if target is None:
            self.storage[tensor] = Storage.KERNEL
            self.steps.append(Allocate.like(tensor.name, like))
        elif tensor in self.fusion.aliases:
            self.replaced[tensor] = target
            self.steps.append(Allocate.like(tensor.name, like, own=target.name))
        else:
            self.taken.add(target)
            self.storage[tensor] = Storage.FILLED
            self.steps.append(Over(tensor.name, target.name, tuple(like.shape), like.stride()))

    def may_replace(self, tensor: BoundTensor, target: BoundTensor, source: KernelSource) -> bool:
        """Is ``target`` here as it was given, laid out as ``tensor``, and read by the kernel before it is written?"""
        x, y = self.meta[tensor], self.samples[target]
        is_given = self.holds(target) and target not in (*self.moved, *self.taken) and self.meta[target] is y
        if tensor in self.fusion.aliases:
            alike = (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        else:
            alike = has_its_room(y, x)
        if alike and target in source.tensors:
            alike = in_same_order(target.domain.local_axes(), y, tensor.domain.local_axes(), x)
        return is_given and alike and reads_before_it_writes(source, target, tensor)

    def add_view(self, k: int, segment: Segment) -> None:
        """Runs nothing; the strides that come out are found on meta tensors."""
        function = self.views(segment)
        self.give_shape(segment.inputs)
        self.steps.append(Call(names_of(segment.outputs), f"view_{k}", function, arguments_of(segment)))
        made = function(*(self.meta[t] for t in segment.inputs))
        results = (made,) if isinstance(made, torch.Tensor) else cast(tuple[torch.Tensor, ...], made)
        for t, result in zip(segment.outputs, results, strict=True):
            self.meta[t] = result

    def views(self, segment: Segment) -> Callable[..., object]:
        """What gives the outputs for the inputs.  Of a view all but the tensor is looked up before."""
        each = [self.view(e) for e in segment.exprs]
        if len(each) == 1:
            return each[0]
        tensors = [*segment.inputs, *(e.output for e in segment.exprs)]
        steps = [(tensors.index(e.tensors[0]), view) for e, view in zip(segment.exprs, each, strict=True)]
        ends = [tensors.index(t) for t in segment.outputs]

        def run(*given: torch.Tensor) -> object:
            values = list(given)
            for k, view in steps:
                values.append(view(values[k]))
            return one_or_all([values[k] for k in ends])

        return run

    def view(self, expr: Expr) -> Callable[[torch.Tensor], torch.Tensor]:
        """The one result of ``expr`` for its one tensor."""
        if communication_of(expr) is not None:
            return cast("Callable[[torch.Tensor], torch.Tensor]", self.communication(expr))
        op, rank, given = expr.op, self.rank, expr.tensors[0]
        if isinstance(op, View | Relabel):
            return view_of(op, expr.output.domain.local_shape(rank))
        return lambda x: evaluate_local(expr, {given: x}, {}, rank, x.device)

    def evaluation(self, segment: Segment) -> Callable[..., object]:
        made = Storage.TORCH if len(segment.outputs) == 1 else Storage.SHARED
        self.storage |= dict.fromkeys([t for t in segment.outputs if t not in self.places], made)
        return evaluation_of(segment, self.rank, self.device)

    def add_kernels(self, k: int, segment: Segment, plans: Sequence[KernelPlan], renamed: Renamed) -> None:
        """Kernels, compiled now: one that cannot be is known before anything runs."""
        for t in (made for plan in plans for made in plan.segment.outputs):
            self.lay_out(renamed.get(t, t))
        try:
            plans, kernels = self.kernels_for(plans, renamed)
        except KernelCompileError as error:
            is_kept = bool(self.fusion.promises.invariant)  # by kernels alone
            if self.options.strict or is_kept or any(plan.exchange is not None for plan in plans):
                raise
            warnings.warn(f"{error}\nsegment {k} runs by torch instead", stacklevel=2)
            self.call(f"torch_{k}", segment, self.evaluation(segment))
            return
        if BEGIN not in self.steps:
            self.steps.append(BEGIN)
        for i, (plan, kernel) in enumerate(zip(plans, kernels, strict=True)):
            for own, t in ((t, renamed.get(t, t)) for t in plan.segment.outputs):
                if t not in self.places:
                    is_gathered = plan.exchange is not None and own is plan.exchange.gathered
                    self.make(t, kernel.source, is_own=is_gathered)
            region = self.region(plan) if plan.exchange is not None and self.region is not None else None
            launch = kernel.launcher() if region is None else region.launcher(kernel, plan.rank_exchange)
            cut = () if plan.exchange is None or plan.exchange.gathered is None else (plan.exchange.sent,)
            tensors = [(t, renamed.get(t, t)) for t in kernel.source.tensors]
            names = [self.gapless(given) if t in cut else given.name for t, given in tensors]
            arguments = (*names, *map(scalar_text, kernel.source.scalars))
            alone = kernel if region is None else None
            self.steps.append(LaunchKernel(f"kernel_{k}_{i}", launch, arguments, kernel.source.name, alone))

    def kernels_for(self, plans: Sequence[KernelPlan], renamed: Renamed) -> tuple[Sequence[KernelPlan], list[Kernel]]:
        """The kernels, and whose they are: stages are launches of their own where more programs would wait for each
        other than run at once."""
        try:
            return plans, [self.kernel_for(plan, renamed) for plan in plans]
        except KernelCompileError:
            apart = [one for plan in plans for one in launches_of(plan)]
            if len(apart) == len(plans):
                raise
            return apart, [self.kernel_for(plan, renamed) for plan in apart]

    def kernel_for(self, plan: KernelPlan, renamed: Renamed) -> Kernel:
        """The kernel of ``plan`` on the tensors that stand for its own; one for all that are laid out alike."""
        tensors = (*plan.segment.inputs, *plan.segment.outputs)
        key = (plan.name, *(self.meta[renamed.get(t, t)].stride() for t in tensors))
        if key not in self.kernels:
            self.kernels[key] = self.compiled(plan, renamed)
        return self.kernels[key]

    def compiled(self, plan: KernelPlan, renamed: Renamed | None = None) -> Kernel:
        meta = {t: self.meta_of(t, renamed or {}) for t in (*plan.segment.inputs, *plan.segment.outputs)}
        layouts = {t: layout_of(t.domain, self.rank, x.stride()) for t, x in meta.items()}
        return self.fit(plan, layouts, self.rank, self.options, self.device)

    def meta_of(self, tensor: BoundTensor, renamed: Renamed) -> torch.Tensor:
        """How a kernel's tensor is stored: as the one that stands for it, or as this rank's rows of that.

        Of whose shape without axes of one element the kernel's tensor has the axes, the one that is cut shorter.
        """
        given = self.meta[renamed.get(tensor, tensor)]
        shape = tensor.domain.local_shape(self.rank)
        if tensor not in renamed or given.shape == shape:
            return given
        whole = tuple(extent(axis) for axis in tensor.domain.logical)
        return given.new_empty_strided(shape, given.new_empty(whole).stride())

    # end

    def finish(self, forms: Sequence[tuple[int, ...] | None]) -> Program:
        """``forms``: for each output its shape where it is wanted by allocation rank, else ``None``."""
        self.wait([t for segment in self.started.values() for t in segment.outputs])
        self.give_shape(self.fusion.outputs)
        own = own_steps(self.fusion, self.replaced, self.samples, self.holds)
        layouts = {t.name: self.meta[t] for t, s in self.storage.items() if s is Storage.KERNEL}
        steps = [*own, *self.steps, *alias_steps(self.fusion, self.replaced, layouts, self.holds)]
        results: list[str | Call | None] = []
        domains: list[BoundDomain | None] = []
        for k, (t, form) in enumerate(zip(self.fusion.outputs, forms, strict=True)):
            if t not in self.fusion.aliases:
                domains.append(t.domain if form is None else None)
                results.append(self.result(k, t, form) if self.holds(t) else None)
        end, outputs, driver = Return(tuple(results)), names_of(self.fusion.outputs), None
        if self.device.type == "cuda" and BEGIN in steps:
            steps = share_workspace(address_chunks(steps, outputs), layouts, outputs)
            driver = open_driver(self.options.cache_directory)
        batched = steps if driver is None else batch_launches(steps, layouts, driver)
        inputs = [v.name for v in self.fusion.inputs]
        lines = [*freed(batched, outputs), end]
        text, apart = program_text(inputs, lines), program_text(inputs, [*freed(steps, outputs), end])
        functions = device_calls(self.device) | called([*steps, *batched, end])
        run = bound_text(text, functions)
        if any(isinstance(s, Start) or (isinstance(s, Call) and s.label) for s in steps):
            run = outside_autocast(run, self.device.type)
        sources = tuple(kernel.source.text for kernel in self.kernels.values())
        filled = {t.name: self.meta[t] for t, s in self.storage.items() if s is Storage.FILLED}
        return Program(
            run, text, sources, tuple(domains), cast("dict[str, Callable[..., object]]", functions),
            labels_of(steps), apart,
            launched={s.name: s.kernel for s in steps if isinstance(s, LaunchKernel) and s.kernel is not None},
            batches={s.name: s.launches for s in batched if isinstance(s, LaunchBatch)},
            by_address=only_addressed(inputs, [*steps, end]),
            is_fresh=are_fresh(results, layouts | filled),
            last_sending_line=last_sending_line(lines),
        )  # fmt: skip

    def result(self, k: int, tensor: BoundTensor, form: tuple[int, ...] | None) -> str | Call:
        """The ``k``-th output, as it is returned."""
        if form is not None:
            return Call((), f"to_allocation_{k}", to_allocation(tensor.domain, self.rank, form), (tensor.name,))
        return result_of(tensor, self.meta[tensor].stride(), self.rank, is_own=tensor in self.storage)
