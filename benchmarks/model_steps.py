"""One model of the suites ``models`` and ``packages`` in a process of its own.

``python -m benchmarks.model_steps WHAT NAME [BACKEND]``, of which WHAT is ``first``, the time of the first step under
one backend, with the caches as they are; or ``steps``: losses, memory and, once it is this process's turn on its GPU,
the times of steps under both backends.  Prints JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import shardfuse.compile

from .model_cases import ModelCase, model_cases
from .model_gradients import eager_gradients, gradient_errors, gradients_of
from .model_profile import kernels_of, write_profiles
from .package_cases import package_cases
from .timing import synchronize

OWN, PEER, EAGER = "shardfuse", "inductor", "eager"
STEPS = 20
"""Of gradient descent, over which losses are compared."""
ROUNDS = 15


@dataclass(frozen=True)
class Step:
    """Forward, loss and backward; ``update``: by plain gradient descent.  ``seconds``: of ``torch.compile`` itself."""

    model: nn.Module
    run: Callable[[], Tensor]
    rate: float
    seconds: float = 0.0

    def update(self) -> None:
        held = [p for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(held, [p.grad for p in held], alpha=-self.rate)


def step_of(case: ModelCase, device: torch.device, backend: str | Callable[..., object] | None) -> Step:
    """``backend``: of torch.compile; None for eager torch."""
    model, inputs = case.model(device), case.inputs(device)
    began = time.perf_counter()
    call = model if backend is None else torch.compile(model, backend=backend, dynamic=False)
    seconds = time.perf_counter() - began

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast):
            loss = call(*inputs)
        loss.backward()
        return loss.detach()

    return Step(model, run, case.rate, seconds)


@dataclass(frozen=True)
class Compiled:
    """Of one backend: seconds of the first step, graphs and breaks that Dynamo counted, regions and their ops."""

    seconds: float
    graphs: int
    breaks: int
    regions: int
    taken: int
    ops: int


def first_step(case: ModelCase, device: torch.device, backend: str) -> tuple[Step, Compiled]:
    """The seconds are those of ``torch.compile`` too: it imports Inductor there, and for other backends in the step."""
    from torch._dynamo.utils import counters

    counters.clear()
    shardfuse.compile.report(clear=True)
    step = step_of(case, device, backend)
    synchronize(device)
    began = time.perf_counter()
    torch.manual_seed(2)
    step.run()
    synchronize(device)
    spent = step.seconds + time.perf_counter() - began
    found = shardfuse.compile.report()
    ops = sum(n for r in found.taken for _, n in r.ops)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return step, Compiled(spent, graphs, breaks, len(found.regions), len(found.taken), ops)


def losses(step: Step, steps: int = STEPS) -> list[float]:
    """Over so many steps, each with random numbers of its own."""
    found: list[Tensor] = []
    for k in range(steps):
        torch.manual_seed(100 + k)
        found.append(step.run())
        step.update()
    return [loss.item() for loss in found]


def peak_bytes(step: Step, device: torch.device) -> int:
    """The most that a step takes beyond what stands before it."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step.run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def search_convolutions(steps: dict[str, Step]) -> None:
    """As convolutions are trained.  A search among other processes on the GPU would find what is fast there by chance,
    and one search serves both backends: it is kept by shapes."""
    torch.backends.cudnn.benchmark = True
    for step in steps.values():
        step.run()


def timed(steps: dict[str, Step], device: torch.device, rounds: int = ROUNDS) -> dict[str, tuple[float, float, float]]:
    """Microseconds: the median, the 20th and the 80th of a hundred.  Every round each has a turn of two steps, of which
    the second is timed: it starts with the host as far ahead as it is in a row of steps."""
    taken: dict[str, list[Callable[[], float]]] = {name: [] for name in steps}
    for k in range(rounds):
        for name in steps if k % 2 else reversed(steps):
            steps[name].run()
            taken[name].append(_between_events(steps[name].run, device))
    synchronize(device)
    found: dict[str, tuple[float, float, float]] = {}
    for name, reads in taken.items():
        us = sorted(read() for read in reads)
        found[name] = median(us), us[len(us) // 5], us[len(us) * 4 // 5]
    return found


def host_us(step: Step, device: torch.device, rounds: int = ROUNDS) -> float:
    """Microseconds until the host has issued a step, the median; the GPU has nothing to do before."""
    found: list[float] = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        step.run()
        found.append((time.perf_counter() - began) * 1e6)
    synchronize(device)
    return median(found)


def _between_events(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        spent = (time.perf_counter() - began) * 1e6
        return lambda: spent
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    return lambda: start.elapsed_time(end) * 1e3


def measure(
    case: ModelCase, device: torch.device, turn: Callable[[], Iterator[None]], profiles: Path | None = None
) -> dict[str, object]:
    """``turn``: a context in which no other process has the GPU.  ``profiles``: a folder for tables of kernels."""
    exact = eager_gradients(case, device, exact=True)
    beside = eager_gradients(case, device, exact=False)
    eager = losses(step_of(case, device, None))
    made = {name: first_step(case, device, name) for name in (PEER, OWN)}
    steps = {name: step for name, (step, _) in made.items()}
    found: dict[str, object] = {name: asdict(compiled) for name, (_, compiled) in made.items()}
    errors = gradient_errors(case, *(gradients_of(steps[name].model) for name in (OWN, PEER)), beside, exact)
    del exact, beside
    found["gradients"] = [asdict(e) for e in errors]
    found["losses"] = {EAGER: eager, **{name: losses(step) for name, step in steps.items()}}
    found["bytes"] = {name: peak_bytes(step, device) for name, step in steps.items()}
    with turn():
        search_convolutions(steps)
        found["us"] = timed(steps, device)
        found["host"] = {name: host_us(step, device) for name, step in steps.items()}
        launches = {name: kernels_of(step.run, device) for name, step in steps.items() if device.type == "cuda"}
        found["kernels"] = {name: sum(us for _, us in each) for name, each in launches.items()}
        if profiles is not None:
            write_profiles(profiles, case.name, launches, str(shardfuse.compile.report()))
    return found


@contextmanager
def turn_on(directory: Path, gpu: int, case: str, count: int) -> Iterator[None]:
    """The GPU for this process alone: once all ``count`` processes of the suite have compiled, one after another."""
    (directory / f"{case}.ready").touch()
    while len(list(directory.glob("*.ready"))) < count:
        time.sleep(0.05)
    with (directory / f"gpu{gpu}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("first", "steps"))
    parser.add_argument("name")
    parser.add_argument("backend", nargs="?", default=OWN)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--turns", type=Path, help="a folder that the processes of a suite share")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--profile", type=Path, help="a folder for tables of kernels")
    options = parser.parse_args()
    case = (model_cases(layers=options.layers) | package_cases())[options.name]
    device = torch.device("cuda", options.gpu)
    torch.cuda.set_device(device)
    torch.compile(lambda x: x * 2 + 1, backend=OWN)(torch.ones(8, device=device))  # what is imported at first
    if options.what == "first":
        print(json.dumps(asdict(first_step(case, device, options.backend)[1])))
        return 0
    turn = partial(turn_on, options.turns, options.gpu, case.name, options.count)
    found = measure(case, device, turn, options.profile)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
