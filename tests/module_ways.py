"""What the modules of shardfuse.nn are tried under, on plain tensors and on ranks; docs/modules.md shows the table."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardfuse.errors import SecondDerivativeError

Found = list[Tensor]
"""Results, then gradients of the arguments and of the parameters."""


@dataclass(frozen=True)
class Trial:
    """A module, its arguments (leaves where they are floating), and the gradients of its results."""

    module: torch.nn.Module
    arguments: Sequence[Tensor]
    gradients: Sequence[Tensor]

    @property
    def device(self) -> torch.device:
        return self.arguments[0].device


Call = Callable[..., Tensor | tuple[Tensor, ...]]


def run(trial: Trial, call: Call | None = None) -> Found:
    """Forward and backward."""
    trial.module.zero_grad()
    arguments = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in trial.arguments]
    results = (trial.module if call is None else call)(*arguments)
    results = (results,) if isinstance(results, Tensor) else results
    torch.autograd.backward(results, [g.to(r.dtype) for g, r in zip(trial.gradients, results, strict=True)])
    found = [*results, *(t.grad for t in arguments if t.requires_grad), *(p.grad for p in trial.module.parameters())]
    assert all(t is not None for t in found)
    return [t.detach() for t in found]


def compiled(trial: Trial) -> Found:
    torch._dynamo.reset()
    return run(trial, torch.compile(trial.module, fullgraph=True, backend="aot_eager"))


def dynamic(trial: Trial) -> Found:
    """With another batch size first, which is the size that the graph is compiled for."""
    torch._dynamo.reset()
    call = torch.compile(trial.module, fullgraph=True, backend="aot_eager", dynamic=True)
    larger = (
        [torch.cat([t] * 3) for t in trial.arguments],
        [torch.cat([g] * 3) if g.ndim else g for g in trial.gradients],
    )
    run(Trial(trial.module, *larger), call)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return run(trial, call)


def autocast(trial: Trial) -> Found:
    def call(*arguments: Tensor) -> Tensor | tuple[Tensor, ...]:
        with torch.autocast(trial.device.type, dtype=torch.bfloat16):
            return trial.module(*arguments)

    return run(trial, call)


def checkpointed(trial: Trial, *, use_reentrant: bool) -> Found:
    return run(trial, partial(checkpoint, trial.module, use_reentrant=use_reentrant))


def on_meta(trial: Trial) -> Found:
    """Made without storage, then given some."""
    values = [p.detach().clone() for p in trial.module.parameters()]
    module = copy.deepcopy(trial.module).to("meta").to_empty(device=trial.device)
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
    with torch.no_grad():
        for p, value in zip(module.parameters(), values, strict=True):
            p.copy_(value)
    return run(Trial(module, trial.arguments, trial.gradients))


def copied(trial: Trial) -> Found:
    run(trial)  # a module that has run keeps its fusions, which are no part of a copy
    return run(Trial(copy.deepcopy(trial.module), trial.arguments, trial.gradients))


def pickled(trial: Trial) -> Found:
    run(trial)
    return run(Trial(pickle.loads(pickle.dumps(trial.module)), trial.arguments, trial.gradients))


def saved(trial: Trial) -> Found:
    run(trial)
    file = io.BytesIO()
    torch.save(trial.module, file)
    file.seek(0)
    return run(Trial(torch.load(file, weights_only=False), trial.arguments, trial.gradients))


def exported(trial: Trial) -> Found:
    program = torch.export.export(trial.module, tuple(trial.arguments))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert len(torch.export.load(file).graph.nodes) == len(program.graph.nodes)
    ops = [str(n.target) for n in program.graph.nodes if "shardfuse" in str(n.target)]
    assert len(ops) == (getattr(trial.module, "mesh", None) is not None), "plain tensors decompose"
    return run(trial, program.module())


def accumulated(trial: Trial) -> Found:
    """Gradients of two backwards add up in ``.grad``: those of a half of the gradient each."""
    halves = [g * 0.5 for g in trial.gradients]

    def call(*arguments: Tensor) -> Tensor | tuple[Tensor, ...]:
        first = trial.module(*arguments)
        torch.autograd.backward(first, halves)
        return trial.module(*arguments)

    return run(Trial(trial.module, trial.arguments, halves), call)


def differentiated_twice(trial: Trial) -> str:
    """The error of a gradient penalty, whose first gradient is of a loss that is linear in the results."""
    arguments = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in trial.arguments]
    results = trial.module(*arguments)
    total = sum(r.sum() for r in ((results,) if isinstance(results, Tensor) else results))
    (first,) = torch.autograd.grad(total, arguments[:1], create_graph=True)
    try:
        torch.autograd.grad(total + first.square().sum(), arguments[:1])
    except SecondDerivativeError as error:
        return str(error)
    return ""


WAYS: dict[str, Callable[[Trial], Found]] = {
    "torch.compile, fullgraph": compiled,
    "torch.compile, dynamic batch": dynamic,
    "autocast": autocast,
    "checkpoint, reentrant": partial(checkpointed, use_reentrant=True),
    "checkpoint, not reentrant": partial(checkpointed, use_reentrant=False),
    "meta device, to_empty, reset_parameters": on_meta,
    "copy.deepcopy": copied,
    "pickle": pickled,
    "torch.save, torch.load": saved,
    "torch.export": exported,
    "gradient accumulation": accumulated,
}
TWICE = re.compile(r"shardfuse\.nn\.[\w.]+ has no second derivative: call torch's module where create_graph=True")

_DECOMPOSED = "yes, by torch's own ops, which the compiler fuses with what is around them"
_OPAQUE = "yes, as one op of the graph each way"
TABLE: dict[str, tuple[str, str]] = {
    "torch.compile, fullgraph": (_DECOMPOSED, _OPAQUE),
    "torch.compile, dynamic batch": ("yes, one compile for all sizes", "yes, one compile for all sizes of even shards"),
    "autocast": ("yes; it changes nothing inside but the type of matrix products", "yes; it changes nothing inside"),
    "checkpoint, reentrant": ("yes", "yes"),
    "checkpoint, not reentrant": ("yes", "yes"),
    "meta device, to_empty, reset_parameters": ("yes", "yes"),
    "copy.deepcopy": ("yes", "yes"),
    "pickle": ("yes", "yes"),
    "torch.save, torch.load": ("yes", "yes"),
    "torch.export": (_DECOMPOSED, "yes, as one op, for the rank that exports; loading it imports `shardfuse.nn`"),
    "gradient accumulation": ("yes", "yes"),
    "DistributedDataParallel": ("yes", 'with `parameters="local"`; torch broadcasts no DTensors (NotImplementedError)'),
    "fully_shard (FSDP2)": ("yes", "yes, on another dimension of the mesh that the module's is a part of"),
    "parallelize_module": ("made with `mesh=` instead; PlacementError says so", "yes, between layers that it shards"),
    "double backward": ("no; SecondDerivativeError", "no; SecondDerivativeError"),
}


def table() -> str:
    """As docs/modules.md has it."""
    rows = [f"| {way} | {plain} | {sharded} |" for way, (plain, sharded) in TABLE.items()]
    return "\n".join(["| under | on plain tensors | on a mesh |", "| --- | --- | --- |", *rows])
