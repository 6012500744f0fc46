"""The tensors of a host program that is being written: how each is stored, and the steps so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from ..allocation.layouts import strides_of
from ..ir.expr import BoundFusion, BoundTensor
from ..segments.segment import Segment
from .host_program import label_of
from .options import CompileOptions
from .steps import Allocate, Call, Cut, Rename, Start, Step, names_of
from .stream_chunks import Place, in_place


class Storage(Enum):
    """What made the storage of a tensor that is no view."""

    KERNEL = auto()
    """The program, for a kernel that writes all of it."""
    FILLED = auto()
    """The program, for collectives or chunks; or the caller, who gave the tensor up that it was."""
    TORCH = auto()
    """torch, which evaluates a segment of this one output."""
    SHARED = auto()
    """torch, which evaluates a segment of several outputs, and may give them one storage."""


@dataclass
class ProgramTensors:
    """Of ``rank``.  ``samples``: a meta tensor for each input, with its strides."""

    fusion: BoundFusion
    rank: int
    device: torch.device
    options: CompileOptions
    samples: Mapping[BoundTensor, torch.Tensor]
    places: Mapping[BoundTensor, Place] = field(default_factory=dict[BoundTensor, Place])
    """Chunks that are made in a part of what they are put together to."""
    read_once: Collection[BoundTensor] = ()
    """What one segment alone reads, and no caller."""
    steps: list[Step] = field(default_factory=list[Step])
    meta: dict[BoundTensor, torch.Tensor] = field(default_factory=dict[BoundTensor, torch.Tensor])
    storage: dict[BoundTensor, Storage] = field(default_factory=dict[BoundTensor, Storage])
    """Tensors that are not in it may be views."""
    loose: set[BoundTensor] = field(default_factory=set[BoundTensor])
    """What may stand in another shape, as kernels read it by its address."""
    started: dict[str, Segment] = field(default_factory=dict[str, Segment])
    """Collectives that nothing has waited for, in order."""

    def holds(self, tensor: BoundTensor) -> bool:
        """Is any of ``tensor`` on this rank's mesh?"""
        return tensor.domain.mesh is None or self.rank in tensor.domain.mesh.ranks

    def contiguous(self, tensor: BoundTensor) -> None:
        """``tensor`` is stored as its allocation domain says."""
        shape = tensor.domain.local_shape(self.rank)
        strides = strides_of(tensor.domain, self.rank)
        strides = strides or torch.empty(shape, device="meta").stride()
        self.meta[tensor] = torch.empty_strided(shape, strides, dtype=tensor.dtype.torch, device="meta")

    def lay_out(self, tensor: BoundTensor) -> None:
        """``tensor`` is stored as its domain says, or in its place, which the first of its chunks makes."""
        place = self.places.get(tensor)
        if place is None:
            self.contiguous(tensor)
        elif place.whole not in self.meta:
            self.contiguous(place.whole)
            parts = place.cut(self.meta[place.whole])
            self.meta.update(zip(place.parts, parts, strict=True))
            self.allocate(place.whole)
            offsets = tuple(int(x.storage_offset()) * x.element_size() for x in parts)
            self.steps.append(Cut(names_of(place.parts), place.whole.name, place.cut, offsets))

    def allocate(self, tensor: BoundTensor) -> None:
        """Storage that is filled by a collective, or part by part."""
        self.storage[tensor] = Storage.FILLED
        self.steps.append(Allocate.like(tensor.name, self.meta[tensor]))

    def give_shape(self, tensors: Sequence[BoundTensor]) -> None:
        """``tensors`` are read by more than their address from here on."""
        for t in tensors:
            if t in self.loose:
                self.loose.discard(t)
                self.steps.append(Rename(t.name, t.name, f"view({tuple(self.meta[t].shape)})"))

    def call(
        self, name: str, segment: Segment, function: Callable[..., object], *, done: str = "", is_sending: bool = False
    ) -> None:
        """``done``: for a collective that starts now and is waited for later, the name of what is waited for."""
        placed = [t for t in segment.outputs if t in self.places]
        self.give_shape(segment.inputs)
        for t in segment.outputs:
            if self.holds(t):
                self.lay_out(t)
        run = in_place(function, segment, self.places) if placed else function
        call = Call(
            names_of(segment.outputs), name, run, arguments_of(segment, placed), label_of(segment), sends=is_sending
        )
        self.steps.append(Start(call, done) if done else call)
        if done:
            self.started[done] = segment

    def wait(self, tensors: Sequence[BoundTensor]) -> None:
        """Wait for the collectives that make ``tensors``: for the last, with which those before it have ended."""
        names = list(self.started)
        wanted = [k for k, name in enumerate(names) if any(t in self.started[name].outputs for t in tensors)]
        if not wanted:
            return
        ended = [self.started.pop(name) for name in names[: wanted[-1] + 1]]
        touched = dict.fromkeys(t for s in ended for t in (*s.inputs, *s.outputs) if self.holds(t))
        self.steps.append(Call((), "wait", None, (names[wanted[-1]], *names_of(touched))))


def arguments_of(segment: Segment, placed: Sequence[BoundTensor] = ()) -> tuple[str, ...]:
    """``placed``: what is written into."""
    scalars = [s.name for s in segment.scalars if s.value is None]
    return (*names_of(segment.inputs), *scalars, *names_of(placed))
