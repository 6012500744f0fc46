"""What is measured of a module or a function: its result alone, and with the gradients of all that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from .workload import OWN, Case, Compared, Compiler, Draw, Own, Run, Tensors, moved_bytes

Function = Callable[..., Any]
"""Of a case and the inputs, or of the inputs alone; gives a tensor, or tuples of them."""
Make = Callable[[Case, Sequence[Tensor]], Function]
"""(case, inputs) -> the function that is called with these inputs."""
BACKWARD = ", forward + backward"


@dataclass(frozen=True, kw_only=True)
class Called(Compared):
    """Modules and functions of shardfuse that compute the same; the first one goes by the name of shardfuse.

    makes: by the names that they have in ``shardfuse.nn``.  forward: the same in torch, of a case and the inputs.
    results: how many there are.  fixed: how many of the inputs, the last ones, have no gradient.
    multiplies: are matrices multiplied, or a few rows of a table read?  A copy of the inputs then says nothing.
    is_backward: with gradients?  The inputs are then followed by the gradients of the results, and the results by the
    gradients of the inputs.  shown: the outputs without what is drawn anew in each call.
    """

    makes: dict[str, Make]
    forward: Function
    results: int = 1
    fixed: int = 0
    multiplies: bool = False
    is_backward: bool = False
    shown: Callable[[Sequence[Tensor]], list[Tensor]] = list

    def own(self, case: Case, inputs: Sequence[Tensor]) -> Own:
        names = [OWN, *(f"{OWN}, {name}" for name in list(self.makes)[1:])]
        made = zip(names, self.makes.values(), strict=True)
        return Own({name: partial(self._run, case, inputs, make) for name, make in made})

    def compiled(self, case: Case, inputs: Sequence[Tensor], compiler: Compiler) -> Run:
        """The compiler is given the forward, as users give it a module."""
        graph = compiler(lambda *given: several(self.forward(case, *given)))
        return self._run(case, inputs, lambda case, given: graph)

    def comparable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return self.shown(outputs)

    def moved(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """The inputs are read by the forward and by the backward, which comes when all of the other is done."""
        if self.multiplies:
            return 0
        return moved_bytes([*inputs, *(inputs[: -self.results] if self.is_backward else ())], outputs)

    def in_torch(self, case: Case, *inputs: Tensor) -> Tensors:
        return tuple(self._run(case, inputs, lambda case, given: partial(self.forward, case))())

    def _run(self, case: Case, inputs: Sequence[Tensor], make: Make) -> Run:
        if not self.is_backward:
            call = make(case, inputs)
            return lambda: several(call(*inputs))
        given, upstream = inputs[: -self.results], inputs[-self.results :]
        learned = len(given) - self.fixed
        leaves = [Parameter(t) if k < learned and t.is_floating_point() else t for k, t in enumerate(given)]
        wanted = [t for t in leaves if t.requires_grad]
        call = make(case, leaves)

        def run() -> Tensors:
            made = several(call(*leaves))
            return *(t.detach() for t in made), *torch.autograd.grad(made, wanted, upstream)

        return run


def called(*, name: str, has_backward: bool = True, **of: Any) -> tuple[Called, ...]:
    """Of what a Called is made of, but ``eager`` and ``reference``: the forward, and forward and backward."""

    def unused(*_: object) -> Tensors:
        raise AssertionError("replaced below")

    alone = Called(name=name, eager=unused, reference=unused, **of)
    ways = [alone, *([_with_backward(alone)] if has_backward else [])]
    return tuple(replace(way, eager=way.in_torch, reference=way.in_torch, sums=()) for way in ways)


def _with_backward(alone: Called) -> Called:
    def arguments(case: Case, draw: Draw) -> list[Tensor]:
        inputs = alone.arguments(case, draw)
        with torch.no_grad():
            made = several(alone.forward(case, *inputs))
        return [*inputs, *(as_laid_out(draw.normal(t.shape, t.dtype), t) for t in made)]

    return replace(alone, name=f"{alone.name}{BACKWARD}", arguments=arguments, is_backward=True)


def as_laid_out(drawn: Tensor, like: Tensor) -> Tensor:
    """With the strides of ``like``."""
    return torch.empty_like(like).copy_(drawn)


def several(made: Tensor | Sequence[Any]) -> Tensors:
    """Tensors that may be in tuples, one after the other."""
    return (made,) if isinstance(made, Tensor) else tuple(t for part in made for t in several(part))


def module(build: Callable[[Case], Module], *names: str) -> Make:
    """Makes a module whose parameters or buffers of these names are the last of the inputs."""

    def make(case: Case, inputs: Sequence[Tensor]) -> Function:
        with inputs[0].device:
            made = build(case)
        count = len(inputs) - len(names)
        for name, tensor in zip(names, inputs[count:], strict=True):
            owner, _, attribute = name.rpartition(".")
            holder = made.get_submodule(owner)
            is_buffer = attribute in dict(holder.named_buffers(recurse=False))
            is_made = is_buffer or isinstance(tensor, Parameter)
            setattr(holder, attribute, tensor if is_made else Parameter(tensor, requires_grad=False))
        return lambda *given: made(*given[:count])

    return make


def function(call: Function) -> Make:
    """Of a function of a case and the inputs."""
    return lambda case, inputs: partial(call, case)
