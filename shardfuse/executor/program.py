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
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from ..allocation.layouts import layout_of, strides_of
from ..analysis.communication_table import communication_of
from ..codegen.source import KernelSource
from ..errors import KernelCompileError
from ..ir.domain import BoundDomain
from ..ir.expr import BoundFusion, BoundTensor
from ..ir.op import StreamCat
from ..ir.tensor_view import TensorView
from ..ops.evaluate import evaluate_local
from ..schedulers.plan import KernelPlan
from ..segments.segment import Segment
from .aliasing import alias_lines, own_lines
from .allocation_form import from_allocation, to_allocation
from .autocast import outside_autocast
from .batches import batch_launches
from .bound_collectives import Unbound
from .collective_lines import CollectiveLines
from .driver import open_driver
from .evaluation import evaluation_of, one_or_all
from .fitting import fitted, launches_of
from .host_program import Program, bound_text, label_of
from .host_scalars import host_lines, scalar_text
from .in_place_writes import in_same_order, is_dense, reads_before_it_writes
from .kernel import Kernel
from .launch import begin_on, guard_lines
from .options import CompileOptions
from .storage import are_fresh, freed, over_text, result_text, share_workspace, storage_text
from .stream_chunks import Place, address_chunks, in_place
from .streams import start_and_wait
from .symmetric_slots import Region

Renamed = Mapping[BoundTensor, BoundTensor]


@dataclass
class ProgramBuilder(CollectiveLines):
    """Writes the program of ``rank``.  ``samples``: a meta tensor for each input, with its strides."""

    fusion: BoundFusion
    rank: int
    device: torch.device
    options: CompileOptions
    samples: Mapping[BoundTensor, torch.Tensor]
    places: Mapping[BoundTensor, Place] = field(default_factory=dict[BoundTensor, Place])
    """Chunks that are made in a part of what they are put together to."""
    lines: list[str] = field(default_factory=list[str])
    labels: dict[str, str] = field(default_factory=dict[str, str])
    names: dict[str, object] = field(default_factory=dict[str, object])
    sources: list[str] = field(default_factory=list[str])
    meta: dict[BoundTensor, torch.Tensor] = field(default_factory=dict[BoundTensor, torch.Tensor])
    replaceable: Mapping[BoundTensor, Sequence[BoundTensor]] = field(
        default_factory=dict[BoundTensor, Sequence[BoundTensor]]
    )
    """Outputs, and the inputs that each may be written over."""
    replaced: dict[BoundTensor, BoundTensor] = field(default_factory=dict[BoundTensor, BoundTensor])  # those that are
    taken: set[BoundTensor] = field(default_factory=set[BoundTensor])  # inputs whose memory is an output's
    moved: set[BoundTensor] = field(default_factory=set[BoundTensor])  # inputs that come on the CPU
    kernels: dict[Hashable, Kernel] = field(default_factory=dict[Hashable, Kernel])
    """By the name of the plan and the strides of its tensors."""
    launched: dict[str, Kernel] = field(default_factory=dict[str, Kernel])
    """Kernels that exchange nothing with other ranks, by the names of their launches."""
    handed_on: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """What kernels make, by name, with its layout."""
    evaluated: list[BoundTensor] = field(default_factory=list[BoundTensor])
    read_once: Collection[BoundTensor] = ()
    """What one segment alone reads, and no caller."""
    new: set[BoundTensor] = field(default_factory=set[BoundTensor])
    """What stands in storage of its own: made by kernels, or by a segment that torch evaluates into one tensor."""
    allocated: set[BoundTensor] = field(default_factory=set[BoundTensor])
    """What collectives fill."""
    loose: set[BoundTensor] = field(default_factory=set[BoundTensor])
    """What may stand in another shape, as kernels read it by its address."""
    region: Callable[[KernelPlan], Region] | None = None  # in which a segment's kernel exchanges with other ranks
    started: dict[str, Segment] = field(default_factory=dict[str, Segment])
    """Collectives that nothing has waited for, in order."""

    def begin(self, forms: Sequence[TensorView | None], on_cpu: Sequence[bool] | None = None) -> None:
        """``forms``: for each input its TensorView where it comes by allocation rank, else ``None``.

        ``on_cpu``: is the input declared to come on the CPU, whatever the device?
        """
        self.lines += guard_lines(self.device, [v.name for v in self.fusion.inputs], self.names)
        for value, there in zip(self.fusion.inputs, on_cpu or (), strict=False):
            if there and isinstance(value, BoundTensor) and self.device.type != "cpu":
                self.names["home"] = self.device
                self.moved.add(value)
                self.lines.append(f"{value} = {value}.to(home)")
        self.lines += host_lines(self.fusion, self.names, self.device)
        for value, form in zip(self.fusion.inputs, forms, strict=True):
            if not isinstance(value, BoundTensor):
                continue
            self.meta[value] = self.samples[value]
            if form is not None and self.holds(value):
                self.names[f"from_allocation_{value}"] = from_allocation(value.domain, self.rank)
                self.lines.append(f"{value} = from_allocation_{value}({value})")
                self.contiguous(value)

    def holds(self, tensor: BoundTensor) -> bool:
        """Is any of ``tensor`` on this rank's mesh?"""
        return tensor.domain.mesh is None or self.rank in tensor.domain.mesh.ranks

    def contiguous(self, tensor: BoundTensor) -> None:
        """``tensor`` is stored as its allocation domain says."""
        shape = tensor.domain.local_shape(self.rank)
        strides = strides_of(tensor.domain, self.rank)
        strides = strides or torch.empty(shape, device="meta").stride()
        self.meta[tensor] = torch.empty_strided(shape, strides, dtype=tensor.dtype.torch, device="meta")

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
            self.lines += [f"{t} = None" for t in segment.outputs]
            return
        if isinstance(segment.exprs[0].op, StreamCat) and segment.outputs[0] in self.places:
            return  # made in place
        if scheduler == "communication":
            self.add_collective(k, segment, is_beside=is_beside)
        elif scheduler == "no_op":
            self.add_view(k, segment)
        elif scheduler == "torch_call" or self.options.backend_for(self.device) == "torch" or self.is_empty(segment):
            self.add_call(f"torch_{k}", segment, self.evaluation(segment))
            self.new.update(segment.outputs if len(segment.outputs) == 1 else ())
        else:
            self.add_kernels(k, segment, kernels, renamed or {})

    def is_empty(self, segment: Segment) -> bool:
        """Has this rank nothing of what ``segment`` reads, makes, or only computes with?"""
        made = (t for e in segment.exprs for t in e.outputs)
        return any(0 in self.meta[t].shape for t in segment.inputs) or any(
            0 in t.domain.local_shape(self.rank) for t in made
        )

    def add_call(self, name: str, segment: Segment, function: Callable[..., object], *, done: str = "") -> None:
        """``done``: for a collective that starts now and is waited for later, the name of what is waited for."""
        placed = [t for t in segment.outputs if t in self.places]
        self.give_shape(segment.inputs)
        self.labels[name] = label_of(segment)
        self.names[name] = in_place(function, segment, self.places) if placed else function
        for t in segment.outputs:
            if self.holds(t):
                self.lay_out(t)
        results = ", ".join(map(str, segment.outputs))
        arguments = self.arguments(segment, placed)
        if done:
            if "start" not in self.names:
                self.names["start"], self.names["wait"] = start_and_wait(self.device)
            self.lines.append(f"{results}, {done} = start({name}, {arguments})")
            self.started[done] = segment
        else:
            self.lines.append(f"{results} = {name}({arguments})")

    def lay_out(self, tensor: BoundTensor) -> None:
        """``tensor`` is stored as its domain says, or in its place, which the first of its chunks makes."""
        place = self.places.get(tensor)
        if place is None:
            self.contiguous(tensor)
        elif place.whole not in self.meta:
            self.contiguous(place.whole)
            self.meta.update(zip(place.parts, place.cut(self.meta[place.whole]), strict=True))
            self.make(place.whole)
            self.allocated.add(place.whole)
            self.names[f"chunks_{place.whole}"] = place.cut
            self.lines.append(f"{', '.join(map(str, place.parts))} = chunks_{place.whole}({place.whole})")

    def make(self, tensor: BoundTensor, source: KernelSource | None = None) -> None:
        """Storage for ``tensor``, or that of the input that it replaces.  ``source``: the kernel that writes it."""
        made = storage_text(self.meta[tensor], self.device, self.names)
        targets = () if source is None else self.replaceable.get(tensor, ())
        target = next((t for t in targets if source is not None and self.may_replace(tensor, t, source)), None)
        if target is not None and tensor in self.fusion.aliases:
            self.replaced[tensor] = target
            made = f"{target} if own_{target} else {made}"
        elif target is not None:
            self.taken.add(target)
            self.allocated.add(tensor)
            made = over_text(target, self.meta[tensor], self.names)
        elif source is not None:
            self.handed_on[str(tensor)] = self.meta[tensor]
            self.new.add(tensor)
        self.lines.append(f"{tensor} = {made}")

    def may_replace(self, tensor: BoundTensor, target: BoundTensor, source: KernelSource) -> bool:
        """Is ``target`` here as it was given, laid out as ``tensor``, and read by the kernel before it is written?"""
        x, y = self.meta[tensor], self.samples[target]
        is_given = self.holds(target) and target not in (*self.moved, *self.taken) and self.meta[target] is y
        if tensor in self.fusion.aliases:
            alike = (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        else:
            alike = is_dense(y) and is_dense(x) and y.numel() == x.numel()
        if alike and target in source.tensors:
            alike = in_same_order(target.domain.local_axes(), y, tensor.domain.local_axes(), x)
        return is_given and alike and reads_before_it_writes(source, target, tensor)

    def wait(self, tensors: Sequence[BoundTensor]) -> None:
        """Wait for the collectives that make ``tensors``: for the last, with which those before it have ended."""
        names = list(self.started)
        wanted = [k for k, name in enumerate(names) if any(t in self.started[name].outputs for t in tensors)]
        if not wanted:
            return
        ended = [self.started.pop(name) for name in names[: wanted[-1] + 1]]
        touched = dict.fromkeys(t for s in ended for t in (*s.inputs, *s.outputs) if self.holds(t))
        self.lines.append(f"wait({', '.join([names[wanted[-1]], *map(str, touched)])})")

    def arguments(self, segment: Segment, placed: Sequence[BoundTensor] = ()) -> str:
        """``placed``: what is written into."""
        scalars = [s.name for s in segment.scalars if s.value is None]
        return ", ".join([*map(str, segment.inputs), *scalars, *map(str, placed)])

    def give_shape(self, tensors: Sequence[BoundTensor]) -> None:
        """``tensors`` are read by more than their address from here on."""
        for t in tensors:
            if t in self.loose:
                self.loose.discard(t)
                self.lines.append(f"{t} = {t}.view({tuple(self.meta[t].shape)})")

    def add_view(self, k: int, segment: Segment) -> None:
        """Runs nothing; the strides that come out are found on meta tensors."""
        function = self.views(segment)
        self.give_shape(segment.inputs)
        self.names[f"view_{k}"] = function
        outputs = ", ".join(map(str, segment.outputs))
        self.lines.append(f"{outputs} = view_{k}({self.arguments(segment)})")
        made = function(*(self.meta[t] for t in segment.inputs))
        results = (made,) if isinstance(made, torch.Tensor) else cast(tuple[torch.Tensor, ...], made)
        for t, result in zip(segment.outputs, results, strict=True):
            self.meta[t] = result

    def views(self, segment: Segment) -> Callable[..., object]:
        slices = {e: self.communication(e) for e in segment.exprs if communication_of(e) is not None}
        rank = self.rank

        def run(*tensors: torch.Tensor) -> object:
            env = dict(zip(segment.inputs, tensors, strict=True))
            for e in segment.exprs:
                x = env[e.tensors[0]]
                made = slices[e](x) if e in slices else evaluate_local(e, env, {}, rank, x.device)
                env[e.output] = cast(torch.Tensor, made)
            return one_or_all([env[t] for t in segment.outputs])

        return run

    def evaluation(self, segment: Segment) -> Callable[..., object]:
        self.evaluated += [t for t in segment.outputs if t not in self.places]
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
            self.add_call(f"torch_{k}", segment, self.evaluation(segment))
            return
        if "begin" not in self.names:
            self.names["begin"] = begin_on(self.device)
            self.lines.append("stream = begin()")
        for i, (plan, kernel) in enumerate(zip(plans, kernels, strict=True)):
            for t in (renamed.get(t, t) for t in plan.segment.outputs):
                if t not in self.places:
                    self.make(t, kernel.source)
            region = self.region(plan) if plan.exchange is not None and self.region is not None else None
            self.names[f"kernel_{k}_{i}"] = kernel.launcher() if region is None else region.launcher(kernel, plan)
            self.labels[f"kernel_{k}_{i}"] = kernel.source.name
            if region is None:
                self.launched[f"kernel_{k}_{i}"] = kernel
            tensors = [str(renamed.get(t, t)) for t in kernel.source.tensors]
            arguments = ", ".join(["stream", *tensors, *map(scalar_text, kernel.source.scalars)])
            self.lines.append(f"kernel_{k}_{i}({arguments})")

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
            self.sources.append(self.kernels[key].source.text)
        return self.kernels[key]

    def compiled(self, plan: KernelPlan, renamed: Renamed | None = None) -> Kernel:
        meta = {t: self.meta[(renamed or {}).get(t, t)] for t in (*plan.segment.inputs, *plan.segment.outputs)}
        layouts = {t: layout_of(t.domain, self.rank, x.stride()) for t, x in meta.items()}
        return fitted(plan, layouts, self.rank, self.options, self.device)

    # end

    def finish(self, forms: Sequence[tuple[int, ...] | None]) -> Program:
        """``forms``: for each output its shape where it is wanted by allocation rank, else ``None``."""
        results: list[str] = []
        domains: list[BoundDomain | None] = []
        self.wait([t for segment in self.started.values() for t in segment.outputs])
        self.give_shape(self.fusion.outputs)
        self.lines = [*own_lines(self.fusion, self.replaced, self.samples, self.names, self.holds), *self.lines]
        self.lines += alias_lines(self.fusion, self.replaced, self.handed_on, self.names, self.holds)
        for k, (t, form) in enumerate(zip(self.fusion.outputs, forms, strict=True)):
            if t in self.fusion.aliases:
                continue
            domains.append(t.domain if form is None else None)
            if form is not None and self.holds(t):
                self.names[f"to_allocation_{k}"] = to_allocation(t.domain, self.rank, form)
                results.append(f"to_allocation_{k}({t})")
            else:
                results.append(self.result(t) if self.holds(t) else "None")
        result = f"return ({''.join(f'{r}, ' for r in results)})"
        lines, driver = self.lines, None
        if self.device.type == "cuda" and "begin" in self.names:
            outputs = [t.name for t in self.fusion.outputs]
            lines = address_chunks(lines, self.meta, outputs)
            lines = share_workspace(lines, self.handed_on, outputs, self.names)
            driver = open_driver(self.options.cache_directory)
        batches: dict[str, tuple[str, ...]] = {}
        batched = lines if driver is None else batch_launches(lines, self.handed_on, self.names, driver, batches)
        text = self.text(batched, result)
        functions = cast(dict[str, Callable[..., object]], self.names)
        by_torch = [name for name in self.labels if not isinstance(functions[name], Unbound)]
        run = outside_autocast(bound_text(text, functions), self.device.type, by_torch)
        made = {t.name: self.meta[t] for t in self.fusion.outputs if t in self.allocated or t.name in self.handed_on}
        about = (tuple(self.sources), tuple(domains), functions, self.labels, self.text(lines, result))
        fresh = are_fresh(results, made)
        return Program(run, text, *about, launched=self.launched, batches=batches, is_fresh=fresh)

    def result(self, tensor: BoundTensor) -> str:
        is_own = tensor.name in self.handed_on or tensor in self.evaluated or tensor in self.allocated
        return result_text(tensor, self.meta[tensor].stride(), self.rank, is_own, self.names)

    def text(self, lines: Sequence[str], result: str) -> str:
        head = ", ".join(v.name for v in self.fusion.inputs)
        body = "\n    ".join([*freed(lines, [t.name for t in self.fusion.outputs]), result])
        return f"def program({head}):\n    {body}\n"
