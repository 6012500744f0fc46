"""Steps of a host program that hand tensors to collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..ir.expr import BoundTensor, Expr
from ..segments.segment import Segment
from . import resharding
from .bound_collectives import CollectiveCall
from .host_program import label_of
from .program_tensors import ProgramTensors, Storage
from .steps import QUEUE_NOW, Allocate, Communicate, Rename, Step


class CollectiveSteps(ProgramTensors):
    """A program's collectives."""

    def add_collective(self, k: int, segment: Segment, *, is_beside: bool) -> None:
        """A step that hands tensors over, where they may go to NCCL as they are; else a function of them."""
        call = self.collective(segment)
        if is_beside or not isinstance(call, CollectiveCall):
            self.call(f"collective_{k}", segment, call, done=f"done_{k}" if is_beside else "", is_sending=True)
            return
        # what runs beside other work leaves that the GPU: NCCL takes few of its multiprocessors
        call.run.by_kernels = self.options.exchange != "nccl"
        if QUEUE_NOW not in self.steps:
            self.steps.append(QUEUE_NOW)
        handed, after = list[str](), list[Step]()
        self.give_shape(segment.inputs)
        for t, c, source in zip(segment.outputs, call.collectives, call.sources, strict=True):
            given = segment.inputs[source]
            if c.is_in_place and t not in self.places:
                self.contiguous(t)
                handed += [self.gapless(given)] * 2
                after.append(Rename(t.name, handed[-1]))
                self.take_over(t, given)
                continue
            self.lay_out(t)
            if t not in self.places:
                self.allocate(t)
            handed += [self.gapless(given), t.name]
        self.steps += [Communicate(f"collective_{k}", call.run, tuple(handed), label_of(segment)), *after]

    def take_over(self, tensor: BoundTensor, source: BoundTensor) -> None:
        """``tensor`` is what was made for ``source``, which nothing else reads: made in its shape where kernels did."""
        made, wanted = (Allocate.like(source.name, self.meta[t]) for t in (source, tensor))
        if made in self.steps and self.meta[source].is_contiguous():
            self.steps[self.steps.index(made)] = wanted
            self.storage[tensor] = Storage.FILLED
        elif self.meta[source].shape != self.meta[tensor].shape:
            self.loose.add(tensor)

    def gapless(self, tensor: BoundTensor) -> str:
        """The name of its values as they lie in memory one behind the other."""
        if self.meta[tensor].is_contiguous():
            return tensor.name
        name = f"{tensor}_gapless"
        self.steps.append(Rename(name, tensor.name, "contiguous()"))
        return name

    def collective(self, segment: Segment) -> Callable[..., object]:
        if len(segment.exprs) == 1:
            return self.communication(segment.exprs[0])
        readers = Counter(e.tensors[0] for e in segment.exprs)  # of which each would write over what the other reads
        placed = [e.tensors[0] for e in segment.exprs if readers[e.tensors[0]] == 1 and self.may_be_in_place(e)]
        inputs = segment.inputs
        return resharding.prepare_packed(segment.exprs, inputs, segment.outputs, self.rank, self.device, placed)

    def communication(self, expr: Expr) -> Callable[..., object]:
        return resharding.prepare(expr, self.rank, self.device, in_place=self.may_be_in_place(expr))

    def may_be_in_place(self, expr: Expr) -> bool:
        """May a reduction be written over what it reads?"""
        source = expr.tensors[0]
        place = self.places.get(source)  # of partial sums where their sum belongs
        is_own = self.storage.get(source) in (Storage.KERNEL, Storage.TORCH)
        return (place is not None and source in place.partial) or (source in self.read_once and is_own)
