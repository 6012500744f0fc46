"""Train a byte-level language model on the Python standard library's sources, sharded over all ranks.

    scripts/launch.sh                                2 ranks, on the GPUs if there are two, else on the CPU
    scripts/launch.sh --nproc 4 --preset gpu         4 ranks, and a model worth a GPU
    python examples/train_lm.py                      one rank

Every norm, residual, bias, activation and loss reduction of the model is a shardfuse fusion (see lm_model.py), and the
optimiser's step is shardfuse's too; matmuls and attention are torch's.  A run leaves metrics.jsonl, loss.png and
checkpoint.pt in runs/<name>/.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_data import Batch, Corpus
from lm_model import LanguageModel, ModelConfig, UnshardedLanguageModel, sharded_dim
from lm_run import (
    Interruption,
    ProgressBar,
    RunLog,
    UnreadableError,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from torch.distributed.tensor import Replicate, Shard

from shardfuse import DeviceMesh, initialize, optim
from shardfuse.nn import FusionTimer

CHECK_STEPS = 20
CHECK_TOLERANCE = 1e-4
VALIDATION_BATCHES = 8
BETAS = (0.9, 0.95)
MAX_NORM = 1.0


class BadCallError(Exception):
    """What was asked for cannot be done; the same on every rank."""


class CheckFailedError(Exception):
    """The sharded model and the unsharded one do not learn the same; the same on every rank."""


class StoppedError(Exception):
    """Ctrl-C; the same on every rank."""


@dataclass(frozen=True)
class Training:
    """The model, and how it is trained: ``batch`` sequences a step, matmuls and activations in ``dtype``."""

    model: ModelConfig
    batch: int
    steps: int
    learning_rate: float
    corpus_bytes: int
    dtype: str


PRESETS = {
    "cpu": Training(
        model=ModelConfig(dim=128, layers=4, heads=4, hidden=384, sequence=128),
        batch=8,
        steps=200,
        learning_rate=3e-3,
        corpus_bytes=8_000_000,
        dtype="float32",
    ),
    "gpu": Training(
        model=ModelConfig(dim=1024, layers=12, heads=16, hidden=2816, sequence=1024),
        batch=16,
        steps=600,
        learning_rate=6e-4,
        corpus_bytes=40_000_000,
        dtype="bfloat16",
    ),
}

CHECK_HELP = f"""train the same model unsharded in eager torch beside the first {CHECK_STEPS} steps, and end the run
where a loss differs by more than {CHECK_TOLERANCE:g}, relatively; these steps are in float32, whatever --dtype says
(on)"""


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="cpu", help="sizes of model and training (cpu)")
    add("--layers", type=positive, help="layers of the model (the preset's)")
    add("--steps", type=positive, help="training steps (the preset's)")
    add("--batch", type=positive, help="sequences in a batch (the preset's)")
    add("--dtype", choices=["float32", "bfloat16"], help="of matmuls and activations (the preset's)")
    add("--seed", type=int, default=0, help="of weights and batches (0)")
    add("--mesh-size", type=positive, help="how many ranks the model is sharded over (all)")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help=CHECK_HELP)
    add("--runs", type=Path, default=Path("runs"), help="the folder of all runs (runs)")
    add("--name", default="lm", help="the run's own folder in it (lm)")
    add("--eval-every", type=positive, default=50, help="steps between two looks at the held-out files (50)")
    add("--save-every", type=positive, default=100, help="steps between two checkpoints (100)")
    add("--stop-after", type=positive, help="save and end after this step; --resume goes on from there (never)")
    add("--resume", action="store_true", help="go on from the run's checkpoint")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def settle(options: argparse.Namespace, ranks: int) -> Training:
    """The preset with what the options change.  Raises BadCallError where so many ranks cannot share the model."""
    preset = PRESETS[options.preset]
    model = dataclasses.replace(preset.model, layers=options.layers or preset.model.layers)
    for name, size in model.sharded_sizes().items():
        if size % ranks:
            raise BadCallError(f"{ranks} ranks do not divide the model's {name}, {size}: use another number of ranks")
    return dataclasses.replace(
        preset,
        model=model,
        steps=options.steps or preset.steps,
        batch=options.batch or preset.batch,
        dtype=options.dtype or preset.dtype,
    )


def make_mesh(size: int | None, world_size: int) -> DeviceMesh:
    """A 1-D mesh of ``size`` ranks, all by default.  Raises BadCallError where those are not just the world's."""
    size = size or world_size
    if size > world_size:
        raise BadCallError(f"--mesh-size {size} is more than the world's {world_size} ranks: start {size} ranks")
    if size < world_size:
        idle = world_size - size
        raise BadCallError(
            f"--mesh-size {size} leaves {idle} of the world's {world_size} ranks idle: start {size} ranks"
        )
    return DeviceMesh(list(range(size)))


def make_optimizer(model: LanguageModel, training: Training) -> torch.optim.Optimizer:
    """AdamW, with the gradients clipped within the step, in three kernels on a GPU and one small all-reduce.

    The model's parameters are plain tensors, so each group says what its tensors are pieces of: the norm of all
    gradients counts every rank's piece of a sharded parameter, and a replicated one once.
    """
    groups: dict[tuple[float, int | None], list[torch.nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        groups.setdefault((weight_decay(weight), sharded_dim(name)), []).append(weight)
    listed = [
        {
            "params": weights,
            "weight_decay": decay,
            "mesh": model.mesh,
            "placements": Replicate() if dim is None else Shard(dim),
        }
        for (decay, dim), weights in groups.items()
    ]
    return optim.AdamW(listed, lr=training.learning_rate, betas=BETAS, max_norm=MAX_NORM)


def make_unsharded_optimizer(model: UnshardedLanguageModel, training: Training) -> torch.optim.Optimizer:
    """The same by torch."""
    groups = [{"params": [weight], "weight_decay": weight_decay(weight)} for weight in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=BETAS)

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def weight_decay(weight: torch.nn.Parameter) -> float:
    """Matrices decay, norms' weights and biases do not."""
    return 0.1 if weight.ndim > 1 else 0.0


def learning_rate(training: Training, step: int) -> float:
    """Up in the first tenth of the steps (100 at most), then down along a cosine, to a tenth."""
    warmup = min(100, training.steps // 10 + 1)
    progress = max(0, step - warmup) / max(1, training.steps - warmup)
    return training.learning_rate * min(step / warmup, 0.55 + 0.45 * math.cos(math.pi * progress))


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, training: Training, step: int, batch: Batch
) -> float:
    """One update; returns the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(training, step)
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Check:
    """The same model unsharded in eager torch, trained beside the sharded one on the same batches."""

    def __init__(self, model: UnshardedLanguageModel, training: Training) -> None:
        self.model = model
        self.optimizer = make_unsharded_optimizer(model, training)
        self.training = training
        self.largest = 0.0
        self.line = ""

    def compare(self, step: int, loss: float, batch: Batch) -> None:
        """Train a step, and compare its loss with the sharded model's.  Raises CheckFailedError."""
        eager = train_step(self.model, self.optimizer, self.training, step, batch)
        self.largest = max(abs(loss - eager) / abs(eager), self.largest)
        self.line = (
            f"check: {step} steps, loss {loss:.6f} "
            f"(unsharded eager {eager:.6f}, largest relative difference {self.largest:.1e})"
        )
        if not self.largest <= CHECK_TOLERANCE:
            raise CheckFailedError(f"{self.line}: that is over {CHECK_TOLERANCE:g}")


class Run:
    """One run: the model, what it learns from, and what it writes down."""

    def __init__(self, options: argparse.Namespace, mesh: DeviceMesh, rank: int, device: torch.device) -> None:
        self.options, self.device, self.is_first = options, device, rank == 0
        self.training = settle(options, mesh.size)
        self.directory = options.runs / options.name
        self.checkpoint = self.directory / "checkpoint.pt"
        saved = self.read_checkpoint()
        self.corpus = Corpus(self.training.corpus_bytes)
        unsharded = UnshardedLanguageModel(self.training.model, options.seed)
        self.model = LanguageModel(self.training.model, mesh)
        self.model.load_unsharded(dict(unsharded.named_parameters()))
        self.model.to(device)
        self.model.timer = self.timer = FusionTimer().watch(self.model)
        self.optimizer = make_optimizer(self.model, self.training)
        self.done = load_checkpoint(saved, self.model, self.optimizer) if saved else 0
        self.check = Check(unsharded.to(device), self.training) if options.check and not saved else None
        self.log = RunLog(self.directory, first_step=self.done, is_writer=self.is_first)
        if self.is_first and not saved:
            self.checkpoint.unlink(missing_ok=True)  # an older run's
        parameters = sum(weight.numel() for weight in unsharded.parameters())
        self.say(
            f"{mesh.size} {'rank' if mesh.size == 1 else 'ranks'} on {device.type}, {parameters / 1e6:.1f} M parameters"
        )
        self.say(str(self.corpus))
        if saved:
            self.say(f"going on after step {self.done}")

    def train(self) -> None:
        """All steps that are not done yet.  Raises StoppedError after Ctrl-C, with a checkpoint of the last step."""
        options, steps = self.options, self.training.steps
        last = min(steps, options.stop_after or steps)
        bar = ProgressBar(steps, is_shown=self.is_first)
        interruption = Interruption()
        lines: list[dict[str, float]] = []
        for step in range(self.done + 1, last + 1):
            line = self.step(step)
            lines.append(line)
            bar.show(step, f"loss {line['loss']:.4f}  {line['tokens_per_s']:,.0f} tokens/s")
            if self.check is not None and step == min(CHECK_STEPS, last):
                bar.clear()
                self.say(self.check.line)
                self.check = None
            if step % options.eval_every == 0 or step == last:
                line["validation"] = self.validation_loss()
                bar.clear()
                self.say(summary(lines, steps))
                lines.clear()
            self.log.write(line)
            is_interrupted = interruption.has_come()
            if step % options.save_every == 0 or step == last or is_interrupted:
                self.save(step)
            if is_interrupted and step < last:
                bar.clear()
                raise StoppedError(f"interrupted: {self.checkpoint} is of step {step}, --resume goes on from there")
        if self.is_first:
            self.say(self.log.draw())
        self.say(f"final loss {line['loss']:.4f}, validation {line['validation']:.4f}")

    def step(self, step: int) -> dict[str, float]:
        """One step; returns its line of metrics."""
        is_checked = self.options.check and step <= CHECK_STEPS
        self.model.dtype = torch.float32 if is_checked else getattr(torch, self.training.dtype)
        batch = self.corpus.training_batch(self.options.seed, step, self.training.batch, self.model.sequence)
        batch = self.on_device(batch)
        self.timer.reset()
        began = time.perf_counter()
        loss = train_step(self.model, self.optimizer, self.training, step, batch)
        seconds = time.perf_counter() - began
        if self.check is not None:
            self.check.compare(step, loss, batch)
        return {
            "step": step,
            "loss": loss,
            "tokens_per_s": round(batch[0].numel() / seconds, 1),
            "fusion_share": round(self.timer.seconds() / seconds, 4),
        }

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over windows spread evenly over the held-out files."""
        losses: list[float] = []
        for k in range(VALIDATION_BATCHES):
            batch = self.corpus.validation_batch(k, VALIDATION_BATCHES, self.training.batch, self.model.sequence)
            losses.append(self.model(*self.on_device(batch)).item())
        return sum(losses) / len(losses)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """The checkpoint to go on from, if that was asked for.  Raises BadCallError where it does not fit."""
        if not self.options.resume:
            return None
        if not self.checkpoint.exists():
            raise BadCallError(
                f"--resume: there is no {self.checkpoint}: run without --resume first, or give its --name"
            )
        saved = read_checkpoint(self.checkpoint)
        if saved["made_with"] != self.made_with():
            raise BadCallError(
                f"--resume: {self.checkpoint} was made with {saved['made_with']}: give that run's options"
            )
        if saved["step"] >= min(self.training.steps, self.options.stop_after or self.training.steps):
            raise BadCallError(f"--resume: {self.checkpoint} is of step {saved['step']}, nothing is left to do")
        return saved

    def save(self, step: int) -> None:
        save_checkpoint(self.checkpoint, step, self.made_with(), self.model, self.optimizer, is_writer=self.is_first)

    def made_with(self) -> dict[str, int]:
        """What has to be the same for a run to go on."""
        sizes = dataclasses.asdict(self.training.model)
        return {**sizes, "batch": self.training.batch, "seed": self.options.seed}

    def on_device(self, batch: Batch) -> Batch:
        tokens, targets = batch
        return tokens.to(self.device), targets.to(self.device)

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)


def summary(lines: list[dict[str, float]], steps: int) -> str:
    """Means over some steps' lines of metrics, as a line of text."""
    last = lines[-1]
    loss, speed, share = (
        sum(line[key] for line in lines) / len(lines) for key in ("loss", "tokens_per_s", "fusion_share")
    )
    return (
        f"step {last['step']:>{len(str(steps))}}/{steps}  loss {loss:.4f}  validation {last['validation']:.4f}  "
        f"{speed:,.0f} tokens/s  {share:.0%} of the time in fusions"
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    world = initialize()
    try:
        run = Run(options, make_mesh(options.mesh_size, world.world_size), world.rank, world.device)
        if world.world_size > 1:
            run.say(f"ranks exchange statistics and sums by {world.exchange}")
        run.train()
    except (BadCallError, CheckFailedError, StoppedError, UnreadableError) as error:
        # Every rank has come here, so one of them says why; any other error is for initialize() to report.
        if world.rank == 0:
            print(f"train_lm.py: {error}", file=sys.stderr, flush=True)
        codes = {CheckFailedError: 1, StoppedError: 128 + signal.SIGINT}
        return codes.get(type(error), 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
