"""Cross entropy of logits whose classes are sharded over the ranks, or on one GPU: time, and bytes for the backward.

Every rank runs this.  The peer is ``plain_lm.VocabularyParallelLoss``, three all-reduces of a number a row, eager and
under ``torch.compile``; torch's own loss stands beside them where there is one rank.  Times are of back-to-back calls,
the slowest rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn import functional

from shardfuse import DeviceMesh
from shardfuse.nn import CrossEntropyLoss

from .plain_lm import VocabularyParallelLoss
from .report import Row
from .reshard import everywhere, per_call
from .roundings import mismatch
from .workload import Case, Draw

OWN, PLAIN, COMPILED = "shardfuse", "three all-reduces", "three all-reduces, torch.compile"
TORCH, TORCH_COMPILED = "torch", "torch.compile"
CASES = ("8192x32000", "8192x128256", "2048x128256")
ROUNDS = 15
CHUNK = 512
"""Rows whose reference is in memory at once, in float64."""
ROUNDINGS = 4
"""Of a gradient, exp(x - log of the sum): where that difference is 4 to 8, its own rounding moves it by as many."""

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sharded:
    """whole: all logits, in the case's dtype; logits: this rank's classes; targets: a class of each row."""

    whole: Tensor
    logits: Tensor
    targets: Tensor
    mesh: DeviceMesh

    @staticmethod
    def drawn(case: Case, device: torch.device) -> Sharded:
        mesh = DeviceMesh(range(dist.get_world_size()))
        whole = Draw(device, 1000).normal(case.shape, case.dtype) * 3
        generator = torch.Generator().manual_seed(1001)
        targets = torch.randint(case.columns, (case.shape[0],), generator=generator).to(device)
        return Sharded(whole, mesh.shard_tensor(whole, 1).contiguous(), targets, mesh)

    def losses(self) -> dict[str, Loss]:
        """Each takes this rank's logits, and the targets."""
        size = self.mesh.size
        first = dist.get_rank() * self.logits.shape[1]
        own = CrossEntropyLoss(mesh=self.mesh, logits=Shard(-1)) if size > 1 else CrossEntropyLoss()

        def plain(logits: Tensor, targets: Tensor) -> Tensor:
            return VocabularyParallelLoss.apply(logits, targets, first)

        found: dict[str, Loss] = {OWN: own, PLAIN: plain, COMPILED: torch.compile(plain, dynamic=False)}
        if size == 1:
            found |= {TORCH: _torch_loss, TORCH_COMPILED: torch.compile(_torch_loss, dynamic=False)}
        return found

    def notes(self, losses: dict[str, Loss]) -> dict[str, str]:
        """Why a loss or its gradient is wrong, by the rule of ``roundings.py``; "" where it is right."""
        wide, found = 0.0, {name: self._of(loss) for name, loss in losses.items()}
        eager = [
            functional.cross_entropy(self.whole[r].float(), self.targets[r], reduction="sum") for r in self._rows()
        ]
        notes = dict.fromkeys(losses, "")
        for rows in self._rows():
            loss, gradient = self._reference(rows, torch.float64)
            theirs = self._reference(rows, torch.float32)[1].to(self.whole.dtype)
            wide += loss
            for name, (_, own) in found.items():
                notes[name] = notes[name] or mismatch(own[rows], gradient, theirs, n=ROUNDINGS) or ""
        total = torch.tensor(wide, dtype=torch.float64) / len(self.targets)
        mean = (torch.stack(eager).sum() / len(self.targets)).cpu()
        for name, (loss, _) in found.items():
            notes[name] = notes[name] or mismatch(loss.cpu().float(), total, mean, n=2) or ""
        return {name: "WRONG: " + note if note else "" for name, note in notes.items()}

    def _rows(self) -> list[slice]:
        return [slice(k, k + CHUNK) for k in range(0, len(self.targets), CHUNK)]

    def _of(self, loss: Loss) -> tuple[Tensor, Tensor]:
        logits = self.logits.clone().requires_grad_()
        found = loss(logits, self.targets)
        found.backward()
        assert logits.grad is not None
        return found.detach(), logits.grad

    def _reference(self, rows: slice, dtype: torch.dtype) -> tuple[float, Tensor]:
        """The sum of these rows' losses, and this rank's part of the gradient of the mean over all rows."""
        logits = self.whole[rows].to(dtype).requires_grad_()
        loss = functional.cross_entropy(logits, self.targets[rows], reduction="sum")
        (loss / len(self.targets)).backward()
        assert logits.grad is not None
        return loss.item(), self.mesh.shard_tensor(logits.grad, 1)


def run_losses(given: Sequence[Case], device: torch.device, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """The same rows on every rank.  ``given``: instead of the grid; classes that the ranks divide evenly."""
    for case in given or map(Case.parse, CASES):
        t = Sharded.drawn(case, device)
        losses = t.losses()
        notes = {name: _anywhere(note, device) for name, note in t.notes(losses).items()}
        logits = t.logits.clone().requires_grad_()
        with torch.no_grad():
            forward = per_call({n: _call(loss, t.logits, t.targets) for n, loss in losses.items()}, device, rounds)
        both = per_call(
            {n: _call(_with_backward(loss), logits, t.targets) for n, loss in losses.items()}, device, rounds
        )
        kept = {name: _bytes_kept(loss, logits, t.targets) for name, loss in losses.items()}
        for title, times in (("cross entropy, forward", forward), ("cross entropy, forward and backward", both)):
            yield [Row(title, str(case), n, 0, *times[n], note=notes[n], said=kept[n]) for n in losses]


def _anywhere(note: str, device: torch.device) -> str:
    """What is wrong on this rank, or that something is on another."""
    return "" if everywhere(not note, device) else note or "WRONG on another rank"


def _call(loss: Loss, logits: Tensor, targets: Tensor) -> Callable[[], object]:
    return lambda: loss(logits, targets)


def _with_backward(loss: Loss) -> Loss:
    def run(logits: Tensor, targets: Tensor) -> Tensor:
        logits.grad = None
        found = loss(logits, targets)
        found.backward()
        return found

    return run


def _bytes_kept(loss: Loss, logits: Tensor, targets: Tensor) -> str:
    """Between the forward and the backward, beyond the logits and the targets."""
    if logits.device.type != "cuda":
        return ""
    logits.grad = None
    torch.cuda.synchronize(logits.device)
    before = torch.cuda.memory_allocated(logits.device)
    found = loss(logits, targets)
    kept = torch.cuda.memory_allocated(logits.device) - before
    del found
    return f"{kept / len(targets):.1f} bytes a row kept for the backward"


def _torch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets)
