"""What a run leaves behind: metrics, a picture of them, a checkpoint; and what it shows while it goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lm_model import LanguageModel


class RunLog:
    """``metrics.jsonl`` of a run, a line a step: {"step", "loss", "tokens_per_s", "fusion_share"[, "validation"]}.

    Rank 0 writes it.  A run that goes on from a checkpoint keeps the lines up to that and writes the others anew.
    """

    def __init__(self, directory: Path, *, first_step: int, is_writer: bool) -> None:
        self.directory = directory
        self.path = directory / "metrics.jsonl"
        self.is_writer = is_writer
        if is_writer:
            directory.mkdir(parents=True, exist_ok=True)
            kept = [line for line in self.read() if line["step"] <= first_step]
            self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def read(self) -> list[dict[str, float]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def write(self, line: dict[str, float]) -> None:
        if self.is_writer:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def draw(self) -> str:
        """Draw the loss curves; returns a line that says where they are, or why there is no picture."""
        try:
            import matplotlib
        except ImportError:
            return "no picture of the loss curves: matplotlib is not installed"
        matplotlib.use("Agg")
        from matplotlib import pyplot

        lines = self.read()
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], linewidth=0.8, label="training")
        seen = [line for line in lines if "validation" in line]
        axes.plot([line["step"] for line in seen], [line["validation"] for line in seen], marker="o", label="held out")
        axes.set(xlabel="step", ylabel="loss (nats per byte)", title=self.directory.name)
        axes.grid(alpha=0.3)
        axes.legend()
        path = self.directory / "loss.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        return f"loss curves: {path}"


class ProgressBar:
    """One line on stderr that is drawn over; silent where stderr is not a terminal."""

    def __init__(self, total: int, *, is_shown: bool) -> None:
        self.total = total
        self.is_shown = is_shown and sys.stderr.isatty()

    def show(self, done: int, text: str) -> None:
        if self.is_shown:
            filled = 30 * done // self.total
            bar = "█" * filled + "░" * (30 - filled)
            print(f"\r\x1b[K{bar} {done}/{self.total}  {text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def save_checkpoint(
    path: Path,
    step: int,
    made_with: dict[str, int],
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    *,
    is_writer: bool,
) -> None:
    """Write the whole model with its optimizer's moments, gathered from all ranks: any number of ranks can go on.

    made_with: what a run has to share to go on.  An older file stays whole until the new one takes its place.
    """
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        pieces = {"weight": weight.detach()}
        pieces |= {key: x for key, x in optimizer.state[weight].items() if x.shape == weight.shape}
        whole = {key: model.gather(name, piece) for key, piece in pieces.items()}
        if is_writer:
            weights[name] = {key: tensor.cpu() for key, tensor in whole.items()}
    if is_writer:
        unfinished = path.with_suffix(".unfinished")
        torch.save({"step": step, "made_with": made_with, "weights": weights}, unfinished)
        os.replace(unfinished, path)


@torch.no_grad()
def load_checkpoint(checkpoint: dict[str, Any], model: LanguageModel, optimizer: torch.optim.Optimizer) -> int:
    """Take this rank's pieces of a checkpoint; returns the step after which it was written.

    Batches depend on seed and step alone, so this is all the state that a run has.
    """
    for name, weight in model.named_parameters():
        whole = checkpoint["weights"][name]
        pieces = {key: model.shard(name, tensor).to(weight.device).clone() for key, tensor in whole.items()}
        weight.copy_(pieces.pop("weight"))
        if pieces:
            optimizer.state[weight] = {"step": torch.tensor(float(checkpoint["step"])), **pieces}
    return checkpoint["step"]
