"""Lines of a host program that hand tensors to collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ..ir.expr import BoundTensor, Expr
from ..segments.segment import Segment
from . import resharding
from .bound_collectives import BoundStep
from .host_program import label_of
from .launch import queue_on
from .storage import storage_text
from .stream_chunks import Place


class CollectiveLines:
    """The part of a `ProgramBuilder` that writes them."""

    rank: int
    device: torch.device
    places: Mapping[BoundTensor, Place]
    lines: list[str]
    labels: dict[str, str]
    names: dict[str, object]
    meta: dict[BoundTensor, torch.Tensor]
    read_once: Collection[BoundTensor]
    new: set[BoundTensor]
    allocated: set[BoundTensor]
    loose: set[BoundTensor]

    def add_call(self, name: str, segment: Segment, function: Callable[..., object], *, done: str = "") -> None:
        raise NotImplementedError

    def lay_out(self, tensor: BoundTensor) -> None:
        raise NotImplementedError

    def contiguous(self, tensor: BoundTensor) -> None:
        raise NotImplementedError

    def give_shape(self, tensors: Sequence[BoundTensor]) -> None:
        raise NotImplementedError

    def add_collective(self, k: int, segment: Segment, *, is_beside: bool) -> None:
        """A line that hands tensors over, where they may go to NCCL as they are; else a function of them."""
        step = self.collective(segment)
        if is_beside or not isinstance(step, BoundStep):
            self.add_call(f"collective_{k}", segment, step, done=f"done_{k}" if is_beside else "")
            return
        if "queue_now" not in self.names:
            self.names["queue_now"] = queue_on(self.device)
            self.lines.append("queue = queue_now()")
        name, handed, after = f"collective_{k}", ["queue"], list[str]()
        self.give_shape(segment.inputs)
        for t, c, source in zip(segment.outputs, step.collectives, step.sources, strict=True):
            given = segment.inputs[source]
            if c.is_in_place and t not in self.places:
                self.contiguous(t)
                handed += [self.gapless(given)] * 2
                after.append(f"{t} = {handed[-1]}")
                self.take_over(t, given)
                continue
            self.lay_out(t)
            if t not in self.places:
                self.lines.append(f"{t} = {storage_text(self.meta[t], self.device, self.names)}")
                self.allocated.add(t)
            handed += [self.gapless(given), str(t)]
        self.names[name], self.labels[name] = step.run, label_of(segment)
        self.lines += [f"{name}({', '.join(handed)})", *after]

    def take_over(self, tensor: BoundTensor, source: BoundTensor) -> None:
        """``tensor`` is what was made for ``source``, which nothing else reads: made in its shape where kernels did."""
        made, wanted = (f"{source} = {storage_text(self.meta[t], self.device, self.names)}" for t in (source, tensor))
        if made in self.lines and self.meta[source].is_contiguous():
            self.lines[self.lines.index(made)] = wanted
            self.allocated.add(tensor)
        elif self.meta[source].shape != self.meta[tensor].shape:
            self.loose.add(tensor)

    def gapless(self, tensor: BoundTensor) -> str:
        """The name of its values as they lie in memory one behind the other."""
        if self.meta[tensor].is_contiguous():
            return str(tensor)
        self.lines.append(f"{tensor}_gapless = {tensor}.contiguous()")
        return f"{tensor}_gapless"

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
        return (place is not None and source in place.partial) or (source in self.read_once and source in self.new)
