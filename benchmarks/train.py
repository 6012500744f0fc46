"""A training step of the main job's model on ranks, forward and backward, beside the same model in plain torch.

Every rank runs this.  The model is `examples/lm_model.py`, tensor and sequence parallel over all ranks, in bfloat16;
the peer is `plain_lm.py`, eager and under ``torch.compile`` with Inductor and with ``backend="shardfuse"``, on the same
weights; shardfuse's modules are measured as they are and under ``torch.compile`` with Inductor.  *In a graph*: the
whole step, forward and backward, is one CUDA graph.  Times are of eight steps that follow one another, the slowest
rank's, medians over the rounds; ``GiB``: the most memory that a step takes beyond what is allocated before it.  *GPU
busy*: for how much of profiled steps some kernel runs on the first rank's GPU, also one that waits for other ranks.

Whether a step is right, `trained.Trained` says: its loss and gradients at the first weights and at those that the
reference, the eager peer in the next wider dtype, has after some steps of gradient descent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from shardfuse import DeviceMesh
from shardfuse.compile import backend

from .gpu_gaps import as_text, profiled
from .plain_lm import PlainModel
from .report import Row
from .reshard import everywhere, per_call
from .trained import Step, Trained
from .workload import Case

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from lm_model import LanguageModel, ModelConfig, sharded_dim

OWN, EAGER, IN_A_GRAPH = "shardfuse", "torch, eager", ", in a graph"
STEPS = (
    OWN, EAGER, f"{OWN}, in a graph", f"{EAGER}, in a graph", "torch.compile", "shardfuse, torch.compile",
    "torch.compile, backend shardfuse", "torch.compile, in a graph",
)  # fmt: skip
"""What is measured, what takes long to compile last; graphs on GPUs alone."""
ROUNDS, FOLLOWING = 9, 8
"""FOLLOWING: steps behind which the host waits for the GPU, as it does to print a loss; else it is ahead."""
SHAPES = {
    1024: (8, 2, 1024, 32_000),
    2048: (6, 1, 2048, 64_000),
    4096: (4, 1, 4096, 128_256),
}
"""By dim: layers, sequences in a batch, tokens in a sequence, classes."""
PROFILED, GAPS = 3, 8
"""Steps of which a trace is taken, and how many of the largest gaps are printed."""

Wrap = Callable[[torch.nn.Module], Callable[..., torch.Tensor]]


def run_train(
    given: Sequence[Case], device: torch.device, rounds: int = ROUNDS, only: Sequence[str] = ()
) -> Iterator[list[Row]]:
    """The same rows on every rank.

    ``given``: shapes of dim alone, instead of all.  ``only``: of ``STEPS``; eager torch's, which the others are judged
    by, is always measured.
    """
    for dim in [case.shape[0] for case in given] or SHAPES:
        yield _rows(_Sized.of(dim, device), rounds, only)
        torch._dynamo.reset()


def _as_it_is(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    return model


@dataclass(frozen=True)
class _Sized:
    """The model of one dim, and what a step takes."""

    dim: int
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    tokens: torch.Tensor
    targets: torch.Tensor
    rotary: torch.Tensor
    weights: dict[str, torch.Tensor]

    @staticmethod
    def of(dim: int, device: torch.device) -> _Sized:
        layers, batch, sequence, classes = SHAPES.get(dim, (2, 2, 32, 64))
        heads = max(dim // 128, dist.get_world_size())
        config = ModelConfig(dim, layers, heads, (8 * dim // 3 + 255) // 256 * 256, sequence, classes)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        tokens, targets = (torch.randint(classes, (batch, sequence), generator=generator).to(device) for _ in range(2))
        own = LanguageModel(config, DeviceMesh(range(dist.get_world_size()))).to(device)
        return _Sized(dim, config, dtype, device, tokens, targets, own.rotary, _drawn(own, config))

    def __str__(self) -> str:
        tokens = " x ".join(map(str, self.tokens.shape))
        return f"dim {self.dim}, {self.config.layers} layers, {tokens} tokens, {self.config.vocabulary} classes"

    def own(self, wrap: Wrap = _as_it_is) -> Step:
        model = LanguageModel(self.config, DeviceMesh(range(dist.get_world_size()))).to(self.device)
        model.dtype = self.dtype
        for name, parameter in model.named_parameters():
            parameter.data.copy_(self.weights[name])
        return _step(model, wrap(model), self.tokens, self.targets)

    def plain(
        self,
        wrap: Wrap = _as_it_is,
        dtype: torch.dtype | None = None,
    ) -> Step:
        model = PlainModel(self.config.layers, self.weights, self.rotary, dtype or self.dtype).to(self.device)
        return _step(model, wrap(model), self.tokens, self.targets)

    def make(self, name: str) -> Step | None:
        """None for a peer that torch does not capture."""
        made = self.own if name.startswith(OWN) else self.plain
        if name.endswith(", in a graph"):
            return _captured(
                OWN if name.startswith(OWN) else name, made(torch.compile if "compile" in name else _as_it_is)
            )
        if name.endswith("backend shardfuse"):
            return made(partial(torch.compile, backend=backend))
        return made(torch.compile) if "torch.compile" in name else made()


def _ready(sized: _Sized, rounds: int, only: Sequence[str]) -> tuple[dict[str, Step], dict[str, int]]:
    """The steps, and the bytes that each takes.  Prints when each is compiled, and times of those that are not."""
    steps, memory = dict[str, Step](), dict[str, int]()
    for name in STEPS:
        if (only and name not in (*only, EAGER)) or (name.endswith("in a graph") and sized.device.type != "cuda"):
            continue
        if "torch.compile" in name and steps and not any("torch.compile" in other for other in steps):
            first = per_call({n: step.run for n, step in steps.items()}, sized.device, min(rounds, 3))
            _print(f"dim {sized.dim}: {_milliseconds(first)}")
        began = perf_counter()
        step = sized.make(name)
        if step is not None:
            steps[name], memory[name] = step, _peak(step, sized.device)
            _print(f"dim {sized.dim}: {name} is ready after {perf_counter() - began:.0f} s")
    return steps, memory


def _rows(sized: _Sized, rounds: int, only: Sequence[str]) -> list[Row]:
    steps, memory = _ready(sized, rounds, only)
    timed = per_call({name: step.run for name, step in steps.items()}, sized.device, rounds, FOLLOWING)
    _print(f"dim {sized.dim}: {_milliseconds(timed)}")
    if OWN in steps:
        _told_gaps(steps[OWN], sized.device)
    busy = {name: _busy(step, sized.device) for name, step in steps.items()}
    wider = torch.float32 if sized.dtype is torch.bfloat16 else torch.float64
    reference = Trained.of(sized.plain(dtype=wider))
    eager = Trained.of(steps[EAGER], reference.weights)
    rows: list[Row] = []
    for name, step in steps.items():  # one by one: gradients of all at two weights are more than a GPU holds
        trained = eager if name == EAGER else Trained.of(step, reference.weights)
        is_right = everywhere(trained.is_right(reference, eager), sized.device)
        rate = sized.tokens.numel() / timed[name][0] * 1e6
        told = (
            f"{sized}; {rate:.0f} tokens/s, {memory[name] / 2**30:.2f} GiB, {busy[name]}"
            f"{trained.told(reference, eager)}"
        )
        implementation = name.removesuffix(IN_A_GRAPH)  # of which those in graphs are compared with one another
        workload = "train" if implementation == name else f"train{IN_A_GRAPH}"
        note = "" if is_right else f"WRONG: {told}"
        rows.append(Row(workload, f"dim {sized.dim}", implementation, 0, *timed[name], note=note))
        _print(f"{name}: {told}")
        del trained  # before the next one has gradients
    return rows


def _milliseconds(timed: Mapping[str, tuple[float, float, float]]) -> str:
    return ", ".join(f"{name} {us / 1e3:.2f} ms" for name, (us, _, _) in timed.items())


def _print(text: str) -> None:
    """On the first rank."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _captured(name: str, step: Step) -> Step | None:
    """The step as one CUDA graph; None for a peer that torch does not capture, which is said."""
    try:
        return _in_a_graph(step)
    except RuntimeError as error:
        if name == OWN:
            raise
        print(f"{name} is not captured: {error}", file=sys.stderr)
        return None


def _in_a_graph(step: Step) -> Step:
    """The step as one CUDA graph, which has its memory for itself."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step.run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step.run()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return Step(step.model, replay)


def _drawn(model: LanguageModel, config: ModelConfig) -> dict[str, torch.Tensor]:
    """This rank's weights, drawn where they are as `UnshardedLanguageModel` draws all; what is replicated is alike."""
    weights = dict[str, torch.Tensor]()
    for k, (name, parameter) in enumerate(model.named_parameters()):
        weight = torch.full_like(parameter, 1.0 if name.endswith("weight") else 0.0)
        if weight.ndim > 1:
            rank = 0 if sharded_dim(name) is None else dist.get_rank()
            scale = (2 * config.layers) ** -0.5 if name.endswith((".out", ".down")) else 1.0
            weight.normal_(std=0.02 * scale, generator=torch.Generator(weight.device).manual_seed(1000 * k + rank))
        weights[name] = weight
    return weights


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


def _busy(step: Step, device: torch.device) -> str:
    """For how much of steps that are profiled, and take longer for it, the GPU is busy, in words; nothing on a CPU."""
    if device.type != "cuda":
        return ""
    (timeline,) = profiled(step.run, PROFILED, with_host=False)
    return f"GPU busy {timeline.busy / timeline.span:.0%} of profiled steps, "


def _told_gaps(step: Step, device: torch.device) -> None:
    """Print where the GPU waited for the host in steps that are profiled, and for which of its functions."""
    if device.type == "cuda":
        (timeline,) = profiled(step.run, PROFILED, with_host=True)
        _print(as_text(timeline, GAPS))


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
