"""Whether what ranks computed together is right, how far from float64 it is, and whether its bits stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .reshard import everywhere, slowest
from .roundings import mismatch, spacing

Run = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Measured:
    """One workload at one case, on this rank.

    runs: by the names of implementations, what gives the results.  restore: of those that write over their inputs, what
    puts these back before a run that is checked.
    wide, eager: this rank's part of the results of the unsharded program, in float64 and by eager torch.
    is_replicated: have all ranks the same results?  has_gradients: do the runs record gradients?
    relative: are the elements of a row probabilities, each of which is held to its own magnitude?
    """

    runs: dict[str, Run]
    wide: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]
    restore: dict[str, Callable[[], object]] = field(default_factory=dict[str, Callable[[], object]])
    is_replicated: bool = False
    has_gradients: bool = False
    relative: bool = False


@dataclass(frozen=True)
class Verdict:
    """note: "" where all is well, else ``WRONG``, by the rule of ``roundings.py``, or ``DIFFERS``, with what does.

    roundings: the largest error over ranks and results (see ``largest_error``); None of what is wrong.
    """

    note: str
    roundings: float | None = None


def judged(measured: Measured, name: str, device: torch.device) -> Verdict:
    """Of two calls of one of the runs; the same on every rank, all of which ask."""
    found, again = _results(measured, name), _results(measured, name)
    wrong = _wrong(measured, found)
    if not everywhere(not wrong, device):
        return Verdict(f"WRONG: {wrong or 'on another rank'}")
    worst = max(largest_error(x, wide) for x, wide in zip(found, measured.wide, strict=True))
    (roundings,) = slowest([worst], device)
    if not everywhere(all(_same_bits(x, y) for x, y in zip(found, again, strict=True)), device):
        return Verdict("DIFFERS: from one call to the next", roundings)
    if measured.is_replicated and not everywhere(_are_first_ranks(found), device):
        return Verdict("DIFFERS: from rank to rank", roundings)
    return Verdict("", roundings)


def largest_error(found: Tensor, wide: Tensor) -> float:
    """The largest distance from ``wide``, float64 of the same shape, in roundings of ``found``'s dtype.

    A rounding is the spacing at the element, or at the root mean square of its row (the last axis), whichever is
    larger: an element near 0 is a difference of terms that are as large as the others in its row.
    """
    size = wide.abs().maximum(wide.square().mean(-1, keepdim=True).sqrt())
    return ((found.double() - wide).abs() / spacing(size, found.dtype)).max().item()


def _results(measured: Measured, name: str) -> list[Tensor]:
    """Kept: some runs give memory that the next one writes over."""
    if name in measured.restore:
        measured.restore[name]()
    return [t.detach().clone() for t in measured.runs[name]()]


def _wrong(measured: Measured, found: Sequence[Tensor]) -> str:
    """What the rule says of this rank's results.

    Of an element near 0 the terms that were added up are taken to be as large as the largest result in its row.
    """
    if len(found) != len(measured.wide):
        return f"{len(found)} results, expected {len(measured.wide)}"
    said = (
        mismatch(
            x,
            wide,
            eager,
            relative=measured.relative,
            terms=None if measured.relative else wide.abs().amax(-1, keepdim=True),
            signed=False,
        )
        for x, wide, eager in zip(found, measured.wide, measured.eager, strict=True)
    )
    return next((wrong for wrong in said if wrong), "")


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(_bytes(x), _bytes(y))


def _are_first_ranks(found: Sequence[Tensor]) -> bool:
    """Have the results the bits that they have on rank 0?"""
    first = [_bytes(x).clone() for x in found]
    for x in first:
        dist.broadcast(x, 0)
    return all(torch.equal(_bytes(x), y) for x, y in zip(found, first, strict=True))
