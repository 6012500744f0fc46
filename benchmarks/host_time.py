#!/usr/bin/env python3
"""What the host takes for a call of a module on ranks, layer by layer: the module, autograd, the program, its lines.

    torchrun --standalone --nproc-per-node 2 benchmarks/host_time.py [dim]

Each figure is microseconds of one call, the host's clock alone, best of several batches, of which the GPU is waited for
outside of the clock.  Without a GPU collectives are calls of a library that does nothing, and so are allocations'
contents: what is left is what Python takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfuse import DeviceMesh, initialize
from shardfuse.executor import bound_collectives, program, program_tensors
from shardfuse.nn import AddRMSNorm, FusionTimer, RotaryEmbedding, SwiGLU
from shardfuse.nn.fused import BoundOp, FusedModule
from shardfuse.nn.fusion_run import FusionRun
from shardfuse.segments.segment import Segment

CALLS, BATCHES = 20, 10


def microseconds(run: Callable[[], object], device: torch.device) -> float:
    found: list[float] = []
    for _ in range(BATCHES):
        synchronize(device)
        began = perf_counter()
        for _ in range(CALLS):
            run()
        found.append((perf_counter() - began) / CALLS * 1e6)
    synchronize(device)
    return min(found)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def layers_of(module: FusedModule, tensors: Sequence[torch.Tensor], device: torch.device) -> dict[str, float]:
    """Microseconds of a call without and with gradients, of forward and backward, and of what they consist of."""
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]

    def call() -> Sequence[torch.Tensor]:
        found = module(*inputs)
        return found if isinstance(found, tuple) else (found,)

    def quiet() -> None:
        with torch.no_grad():
            call()

    gradients = [torch.ones_like(t) for t in call()]

    leaves = [*inputs, *module.parameters()]

    def both() -> None:
        torch.autograd.backward(call(), gradients)
        for t in leaves:
            t.grad = None

    for _ in range(4):
        both()
    found = {"no gradients": microseconds(quiet, device), "forward": microseconds(call, device)}
    found["forward and backward"] = microseconds(both, device)
    module.timer = FusionTimer()  # a change of settings, after which the module looks anew
    found["forward, timed"] = microseconds(call, device)
    module.timer = None
    for _ in range(4):
        both()
    (bound,) = (b for b in module._bound.values() if b is not None)
    given = module_tensors(module, bound, inputs, call)
    for k, name in enumerate(("forward", "backward")):
        found |= {f"{name}'s {what}": us for what, us in _parts(bound, k, given[k], device).items()}
    return found


def module_tensors(
    module: FusedModule, bound: BoundOp, inputs: Sequence[torch.Tensor], call: Callable[[], Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """What the programs of forward and backward are given, in a call that looks for them anew."""
    bound.forget()
    taken: list[list[torch.Tensor]] = [[], []]
    look = FusionRun.__call__

    def noted(self: FusionRun, timer: object, tensors: Sequence[torch.Tensor]) -> object:
        taken[bound.runs.index(self)] = [t.detach() for t in tensors]
        return look(self, timer, tensors)

    FusionRun.__call__ = noted
    try:
        results = call()
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    finally:
        FusionRun.__call__ = look
    return taken


def _parts(bound: BoundOp, k: int, tensors: Sequence[torch.Tensor], device: torch.device) -> dict[str, float]:
    with torch.no_grad():
        found = {"fusion": microseconds(lambda: bound.runs[k](None, tensors), device)}
        (again, _), *_ = [*bound.runs[k].again.values(), (None, [])]
        if again is None:
            return found
        given = bound.runs[k].with_leading([t.contiguous() for t in tensors])
        found["repeat"] = microseconds(lambda: again(given, True), device)
        made = again._made.program
        found["program"] = microseconds(lambda: made.run(*given), device)
        spent: dict[str, list[float]] = {}

        def watched(name: str, function: Callable[..., object]) -> Callable[..., object]:
            def run(*arguments: object) -> object:
                began = perf_counter()
                result = function(*arguments)
                spent.setdefault(name, []).append((perf_counter() - began) * 1e6)
                return result

            return run

        functions = {n: watched(n, f) if callable(f) else f for n, f in made.functions.items()}
        run = made.bound_to(functions)
        for _ in range(30):
            synchronize(device)
            run(*given)
        lines = {name: sorted(times)[len(times) // 4] * len(times) / 30 for name, times in spent.items()}
        return found | {f"  {name}": us for name, us in lines.items()}


def cases(dim: int, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[FusedModule, list]]:
    """The modules of a layer of examples/lm_model.py, with their tensors."""
    batch, sequence, ranks = 2, 64, mesh.size

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    norm = AddRMSNorm(
        dim, bias=True, mesh=mesh, input=Partial(), residual=Shard(0), output=Replicate(), output_grad=Partial(),
        parameters="local",
    ).to(device)  # fmt: skip
    replicated = AddRMSNorm(dim, mesh=mesh, input=Partial(), output=Replicate(), parameters="local").to(device)
    swiglu = SwiGLU(4 * dim, bias=True, mesh=mesh, input=Shard(-1), parameters="local").to(device)
    rotary = RotaryEmbedding(128)
    tables = rotary.tables(torch.arange(sequence, device=device))
    heads = [tensor(batch, 4, sequence, 128) for _ in range(2)]
    return {
        "AddRMSNorm, sequence": (norm, [tensor(sequence, batch, dim), tensor(sequence // ranks, batch, dim)]),
        "AddRMSNorm, replicated": (replicated, [tensor(sequence, dim), tensor(sequence, dim)]),
        "SwiGLU": (swiglu, [tensor(sequence, batch, 8 * dim // ranks)]),
        "RotaryEmbedding": (rotary, [*heads, *tables]),
    }


def main() -> None:
    world = initialize()
    device = world.device
    if device.type == "cpu":
        bound_collectives.may_bind = lambda device: True
        bound_collectives.stages_through_host = lambda group, device: False
        bound_collectives.nccl_channel = lambda *of: Nothing()
        program.evaluation_of = nothing_of
        program_tensors.in_place = as_it_is
    mesh = DeviceMesh(range(world.world_size))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dim = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    for name, (module, tensors) in cases(dim, mesh, device, dtype).items():
        found = layers_of(module, tensors, device)
        if world.rank == 0:
            print(name)
            for what, us in found.items():
                print(f"    {us:8.1f}  {what}")
        dist.barrier()


def nothing_of(segment: Segment, rank: int, device: torch.device) -> Callable[..., object]:
    """Stands for kernels."""
    made = [torch.zeros(t.domain.local_shape(rank), dtype=t.dtype.torch) for t in segment.outputs]
    return lambda *arguments: made[0] if len(made) == 1 else tuple(made)


def as_it_is(function: Callable[..., object], segment: Segment, places: object) -> Callable[..., object]:
    """Stands for what puts results of a kernel where they belong, which kernels on a GPU do themselves."""
    return function


class Nothing:
    """Stands for NCCL."""

    def _issue(self, *of: object) -> Callable[..., None]:
        return lambda queue, *tensors: None

    by_kernel = all_reduce = all_gather = reduce_scatter = all_to_all = group = _issue


if __name__ == "__main__":
    main()
