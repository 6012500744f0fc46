"""An optimiser's step over the tensors of a transformer: GPU time, as a share of a copy's, and time on the host.

Rows of one case: the step alone, and with the gradients' norm and clipping by it.  Bytes are those that have to move:
a step in float32 reads parameter, gradient and both moments and writes all but the gradient, 28 bytes an element;
clipping reads the gradient once more.  *host* is what a call takes until it returns, on tensors so small that the GPU
never is what it waits for, with gradients at other addresses in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from shardfuse import optim

from .peers.copy import copies
from .report import Row
from .roundings import assert_near
from .timing import measure, synchronize

OWN = "shardfuse"
MAX_NORM = 1.0
LR = 1e-3
HOST_ROUNDS = 30
LAYER = ((1536, 512), (512, 512), (2816, 512), (512, 1408), (512,), (512,), (1536,), (512,))
"""Of a transformer of 512 channels: 8 tensors, 3.2 M elements."""


@dataclass(frozen=True)
class Listed:
    """A case: which tensors, of which type."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def bytes(self, *, clips: bool) -> int:
        """Moments are float32 whatever the parameters are."""
        size = self.dtype.itemsize
        return self.elements * (2 * size + size + 16 + (size if clips else 0))


CASES = (
    Listed("1000 tensors float32", LAYER * 125, torch.float32),
    Listed("8 tensors of 2^26 float32", ((8192, 8192),) * 8, torch.float32),
    Listed("1000 tensors bfloat16", LAYER * 125, torch.bfloat16),
)
TINY = Listed("1000 tensors of 16 float32", ((16,),) * 1000, torch.float32)


def run_optimiser(
    seconds: float, device: torch.device, cases: Sequence[Listed] = CASES, called: Listed = TINY
) -> Iterator[list[Row]]:
    """Rows case by case, in about ``seconds`` of timing.  called: what time on the host is measured with."""
    for case in cases:
        yield [*_timed(case, seconds / len(cases), device)]
        if device.type == "cuda":
            torch.cuda.empty_cache()
    yield _host_rows(device, called)


class _Steps:
    """Parameters with gradients, and ways to update them."""

    def __init__(self, case: Listed, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def drawn() -> list[torch.Tensor]:
            # In float32 and rounded, so that all types have the same numbers.
            return [torch.randn(s, device=device, generator=generator).to(case.dtype) for s in case.shapes]

        self.parameters = [torch.nn.Parameter(x) for x in drawn()]
        self.gradients = [drawn(), drawn()]
        self.turn = 0
        self.swap()

    def swap(self) -> None:
        """Give the parameters gradients at other addresses, as a backward does."""
        self.turn ^= 1
        for parameter, gradient in zip(self.parameters, self.gradients[self.turn], strict=True):
            parameter.grad = gradient


def _own(steps: _Steps, *, clips: bool) -> Callable[[], object]:
    return optim.AdamW(steps.parameters, lr=LR, max_norm=MAX_NORM if clips else None).step


def _by_torch(steps: _Steps, *, clips: bool, fused: bool) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(steps.parameters, lr=LR, fused=fused, foreach=not fused)
    if not clips:
        return optimizer.step

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(steps.parameters, MAX_NORM, foreach=True)
        optimizer.step()

    return step


def _runs(case: Listed, device: torch.device) -> dict[str, tuple[_Steps, Callable[[], object]]]:
    """Each has parameters of its own, with the same values."""
    found: dict[str, tuple[_Steps, Callable[[], object]]] = {}
    for clips in (False, True):
        kind = "clip + step" if clips else "step"
        for peer in (OWN, "torch fused", "torch foreach"):
            steps = _Steps(case, device)
            made = _own(steps, clips=clips) if peer == OWN else _by_torch(steps, clips=clips, fused="fused" in peer)
            found[f"{peer}: {kind}"] = steps, made
    return found


def _timed(case: Listed, seconds: float, device: torch.device) -> Iterator[Row]:
    runs = _runs(case, device)
    wrong = {name: _why_wrong(case, steps, run, "clip" in name) for name, (steps, run) in runs.items() if OWN in name}
    timed = measure({name: run for name, (_, run) in runs.items()}, seconds, device)
    for name, found in timed.items():
        peer, kind = name.split(": ")
        moved = case.bytes(clips=kind != "step")
        note = wrong.get(name, "")
        if peer != OWN and case.dtype != torch.float32:
            note = "OTHER: its moments are bfloat16, and so rounded"
        yield Row(f"adamw {kind}", case.name, peer, moved, found.us, found.low, found.high, note=note)
    del runs
    for clips in (False, True):
        moved = case.bytes(clips=clips)
        ways = {c.name: c.run for c in copies(moved, device)}
        fastest = min(measure(ways, seconds / 20, device).values(), key=lambda t: t.us)
        kind = "clip + step" if clips else "step"
        yield Row(f"adamw {kind}", case.name, "copy", moved, fastest.us, fastest.low, fastest.high)


def _why_wrong(case: Listed, steps: _Steps, run: Callable[[], object], clips: bool) -> str:
    """The first step, against float64; "" where every element is right."""
    before = [p.detach().double() for p in steps.parameters]
    gradients = [g.double() for g in steps.gradients[steps.turn]]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    scale = min(MAX_NORM / (norm.item() + 1e-6), 1.0) if clips else 1.0
    run()
    for k, (parameter, old, gradient) in enumerate(zip(steps.parameters, before, gradients, strict=True)):
        g = gradient * scale
        expected = old * (1 - LR * 1e-2) - LR * g / (g.abs() + 1e-8)
        try:
            assert_near(parameter.detach(), expected, n=2, terms=2 * (old.abs() + expected.abs() + LR))
        except AssertionError as error:
            return f"WRONG: tensor {k}: {str(error)[:100]}"
    return ""


def _host_rows(device: torch.device, case: Listed) -> list[Row]:
    found: list[Row] = []
    for name, (steps, run) in _runs(case, device).items():
        peer, kind = name.split(": ")
        taken: list[float] = []
        for _ in range(HOST_ROUNDS + 3):
            steps.swap()
            synchronize(device)
            began = perf_counter()
            run()
            taken.append((perf_counter() - began) * 1e6)
        found.append(Row(f"adamw {kind}, host", case.name, peer, 0, median(taken[3:]), min(taken[3:]), max(taken[3:])))
    return found
