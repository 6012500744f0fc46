# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
"""``shardfuse::region_v1``: a fusion as one functional op, which graphs of torch.compile hold in place of a region.

    region_v1(str program, Tensor[] inputs, SymInt[] sizes) -> Tensor[]

``program``: the printed text of a definition, from which it is rebuilt once in a process; so generated code that torch
keeps on disk runs in any other process.  ``inputs``: its tensors, in order.  ``sizes``: the shapes of all outputs, one
after another, then the scalar inputs of the definition.  Outputs are new tensors, laid out as the program says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from itertools import islice
from typing import cast

import torch

from ..frontend.definition import FusionDefinition
from ..ir.tensor_view import TensorView
from .ledger import note_cached_text
from .program_text import rebuilt


class Program:
    """A rebuilt definition and the layouts of its outputs."""

    def __init__(self, text: str, fd: FusionDefinition | None = None) -> None:
        self.text = text
        self.fd = rebuilt(text) if fd is None else fd
        self.ranks = [tv.ndim for tv in self.fd.fusion.outputs]
        self.size_count = sum(self.ranks)

    def giving_up(self, places: Sequence[int]) -> Program:
        """The same, of which outputs may be stored over these inputs.  It is planned once for both."""
        fusion = copy(self.fd.fusion)
        fusion.given_up = tuple(cast(TensorView, fusion.inputs[k].val) for k in places)
        other = FusionDefinition.recording(fusion)
        other.fec.plans = self.fd.fec.plans
        return Program(self.text, other)

    @cached_property
    def orders(self) -> list[list[int]]:
        """For each output its dims, the outermost in memory first."""
        return [memory_order(tv) for tv in self.fd.fusion.outputs]

    @cached_property
    def shape_numbers(self) -> tuple[int, ...]:
        """Places, among all inputs, of numbers that shapes are made of: what is bound holds for their values only."""
        in_shapes = self.fd.fusion.shape_scalars()
        return tuple(k for k, i in enumerate(self.fd.fusion.inputs) if i.val in in_shapes)

    def empty_outputs(self, sizes: Sequence[int | torch.SymInt], device: torch.device) -> list[torch.Tensor]:
        """Outputs of these shapes with nothing in them."""
        rest = iter(sizes)
        found: list[torch.Tensor] = []
        for tv, order in zip(self.fd.fusion.outputs, self.orders, strict=True):
            shape = list(islice(rest, tv.ndim))
            strides: list[int | torch.SymInt] = [1] * tv.ndim
            step: int | torch.SymInt = 1
            for d in reversed(order):
                strides[d] = step
                step = step * shape[d]
            found.append(torch.empty_strided(shape, strides, dtype=tv.dtype.torch, device=device))
        return found


def memory_order(tv: TensorView) -> list[int]:
    """The dims of ``tv``, the outermost in memory first."""
    allocation = tv.domain.allocation
    return list(range(tv.ndim)) if allocation is None else [tv.domain.logical.index(axis) for axis in allocation]


_programs: dict[tuple[str, tuple[int, ...]], Program] = {}


def program_of(text: str, given_up: tuple[int, ...] = ()) -> Program:
    """The program of a text, rebuilt at first.  ``given_up``: places of inputs that outputs may be stored over."""
    found = _programs.get((text, given_up))
    if found is None:
        made = program_of(text).giving_up(given_up) if given_up else Program(text)
        found = _programs.setdefault((text, given_up), made)
    return found


def run_region(program: str, inputs: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """Run the fusion: new tensors, none of which shares storage with an input."""
    note_cached_text(program)
    found = program_of(program)
    return found.fd.execute([*inputs, *sizes[found.size_count :]])


def fake_region(program: str, inputs: list[torch.Tensor], sizes: list[int | torch.SymInt]) -> list[torch.Tensor]:
    """What ``run_region`` gives, without data."""
    found = program_of(program)
    devices = [x.device for x in inputs]
    device = next((d for d in devices if d.type != "cpu"), devices[0])
    return found.empty_outputs(sizes[: found.size_count], device)


_library = torch.library.Library("shardfuse", "FRAGMENT")


def define_op(name: str, parameters: str, run: Callable[..., object], fake: Callable[..., object]) -> None:
    """Add the op ``shardfuse::name``, which gives a list of new tensors; its inputs keep the strides that they have."""
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    _library.define(f"{name}({parameters}) -> Tensor[]", tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfuse::{name}", fake, lib=_library)


define_op("region_v1", "str program, Tensor[] inputs, SymInt[] sizes", run_region, fake_region)

REGION = torch.ops.shardfuse.region_v1.default
