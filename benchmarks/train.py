"""A training step of the main job's model on ranks, forward and backward, beside the same model in plain torch.

Every rank runs this.  The model is `examples/lm_model.py`, tensor and sequence parallel over all ranks, in bfloat16;
the peer is `plain_lm.py`, eager and under ``torch.compile`` with Inductor and with ``backend="shardfuse"``, on the same
weights; shardfuse's modules are measured as they are and under ``torch.compile`` with Inductor.  Times are of steps
that follow one another, the slowest rank's, medians over the rounds.  ``loss`` in a note: the largest difference from
the eager peer's, over the first steps of gradient descent; ``GiB``: the most memory that a step takes beyond what
stands before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardfuse import DeviceMesh
from shardfuse.compile import backend

from .plain_lm import PlainModel
from .report import Row
from .reshard import per_call
from .workload import Case

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from lm_model import LanguageModel, ModelConfig, UnshardedLanguageModel

OWN = "shardfuse"
ROUNDS = 9
SHAPES = {
    1024: (8, 2, 1024, 32_000),
    2048: (6, 1, 2048, 64_000),
    4096: (4, 1, 4096, 128_256),
}
"""By dim: layers, sequences in a batch, tokens in a sequence, classes."""
TRAINED = 8
"""Steps over which losses are compared."""
SAME = 0.05
"""How far apart losses may be: both models round activations to bfloat16 at other places."""


@dataclass(frozen=True)
class Step:
    """forward and backward, as a step has them; update: by plain gradient descent."""

    model: torch.nn.Module
    run: Callable[[], torch.Tensor]

    def update(self, rate: float) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(p.grad, alpha=rate)


def run_train(given: Sequence[Case], device: torch.device, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """The same rows on every rank.  ``given``: shapes of dim alone, instead of all."""
    for dim in [case.shape[0] for case in given] or SHAPES:
        yield _rows(dim, device, rounds)
        torch._dynamo.reset()


def _rows(dim: int, device: torch.device, rounds: int) -> list[Row]:
    layers, batch, sequence, classes = SHAPES.get(dim, (2, 2, 32, 64))
    heads = max(dim // 128, dist.get_world_size())
    config = ModelConfig(dim, layers, heads, (8 * dim // 3 + 255) // 256 * 256, sequence, classes)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(classes, (batch, sequence), generator=generator).to(device) for _ in range(2))
    own, weights = _own_model(config, device, dtype)
    graphed, _ = _own_model(config, device, dtype)

    def plain() -> PlainModel:
        return PlainModel(layers, weights, own.rotary, dtype).to(device)

    eager, fused, regions = plain(), plain(), plain()
    steps = {
        OWN: _step(own, own, tokens, targets),
        "shardfuse, torch.compile": _step(graphed, torch.compile(graphed), tokens, targets),
        "torch, eager": _step(eager, eager, tokens, targets),
        "torch.compile": _step(fused, torch.compile(fused), tokens, targets),
        "torch.compile, backend shardfuse": _step(regions, torch.compile(regions, backend=backend), tokens, targets),
    }
    case, rows = f"dim {dim}, {layers} layers, {batch} x {sequence} tokens, {classes} classes", []
    memory = {name: _peak(step, device) for name, step in steps.items()}
    timed = per_call({name: step.run for name, step in steps.items()}, device, rounds)
    losses = {name: _losses(step) for name, step in steps.items()}
    for name in steps:
        apart = max(abs(a - b) for a, b in zip(losses[name], losses["torch, eager"], strict=True))
        rate = batch * sequence / timed[name][0] * 1e6
        told = f"{case}; {rate:.0f} tokens/s, {memory[name] / 2**30:.2f} GiB, loss within {apart:.4f}"
        rows.append(Row("train", f"dim {dim}", name, 0, *timed[name], note="" if apart < SAME else f"WRONG: {told}"))
        if dist.get_rank() == 0:
            print(f"{name}: {told}", file=sys.stderr)
    return rows


def _own_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[LanguageModel, dict[str, torch.Tensor]]:
    """The sharded model, and this rank's pieces of its weights."""
    mesh = DeviceMesh(range(dist.get_world_size()))
    own = LanguageModel(config, mesh).to(device)
    own.dtype = dtype
    whole = UnshardedLanguageModel(config, seed=0)
    own.load_unsharded({name: w.detach().to(device) for name, w in whole.named_parameters()})
    pieces = {name: getattr(p, "to_local", lambda p=p: p)().detach() for name, p in own.named_parameters()}
    return own, pieces


def _step(
    model: torch.nn.Module, call: Callable[..., torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
) -> Step:
    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = call(tokens, targets)
        loss.backward()
        if isinstance(model, PlainModel):
            model.reduce_small_gradients()
        return loss

    return Step(model, run)


def _peak(step: Step, device: torch.device) -> int:
    for _ in range(3):
        step.run()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def _losses(step: Step) -> list[float]:
    found: list[float] = []
    for _ in range(TRAINED):
        found.append(step.run().item())
        step.update(0.1)
    return found
