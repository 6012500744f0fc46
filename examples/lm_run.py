"""What a run leaves behind: metrics, a picture of them, a checkpoint; and what it shows while it goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lm_model import LanguageModel

from shardfuse.mesh import fail

IMPATIENCE = 3.0  # seconds; a SIGINT within them is the launcher's, about the same Ctrl-C, and no second one


class UnreadableError(Exception):
    """A file of an earlier run is not what a run leaves there."""

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(
            f"--resume: {path} cannot be read: {found}: put a whole one in its place, or start anew without --resume"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Where the file cannot be written, end the run on all ranks with a line that names it: one rank alone writes."""
    try:
        yield
    except OSError as error:
        fail(
            f"cannot write {path}: {error.strerror or error}: make room or get the right to write there, or name "
            "another folder by --runs; a checkpoint that is there is whole, and --resume goes on from it"
        )


class Interruption:
    """Ctrl-C ends the run after the step that is under way, the same on every rank; a second one at once."""

    def __init__(self) -> None:
        self._at: float | None = None
        signal.signal(signal.SIGINT, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._at is not None and now - self._at > IMPATIENCE:
            raise KeyboardInterrupt
        self._at = self._at or now

    def has_come(self) -> bool:
        """On any rank.  Every rank asks after every step."""
        flag = torch.tensor([float(self._at is not None)])
        if dist.get_world_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())


class RunLog:
    """``metrics.jsonl`` of a run, a line a step: {"step", "loss", "tokens_per_s", "fusion_share"[, "validation"]}.

    Rank 0 writes it.  A run that goes on from a checkpoint keeps the lines up to that and writes the others anew.
    """

    def __init__(self, directory: Path, *, first_step: int, is_writer: bool) -> None:
        self.directory = directory
        self.path = directory / "metrics.jsonl"
        self.is_writer = is_writer
        if is_writer:
            with writing(self.path):
                directory.mkdir(parents=True, exist_ok=True)
                kept = [line for line in self.read() if line["step"] <= first_step]
                self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def read(self) -> list[dict[str, float]]:
        """Its lines; one that a run could not finish, the last, is left out."""
        if not self.path.exists():
            return []
        *lines, _ = self.path.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def write(self, line: dict[str, float]) -> None:
        if self.is_writer:
            with writing(self.path), self.path.open("a") as file:
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
        with writing(path):
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
        with writing(path):
            try:
                with unfinished.open("wb") as file:  # torch does not say why, of a file that it opens itself
                    torch.save({"step": step, "made_with": made_with, "weights": weights}, file)
                os.replace(unfinished, path)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What ``save_checkpoint`` wrote.  Raises UnreadableError, on every rank, for anything else."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of what is no checkpoint torch may read anything
        raise UnreadableError(path, str(error).partition("\n")[0] or "it ends too early") from error
    if not isinstance(saved, dict) or set(saved) != {"step", "made_with", "weights"}:
        raise UnreadableError(path, "it is no checkpoint of this program")
    return saved


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
