"""Is a result right?  Element by element against float64, by the rule of ``benchmarks/roundings.py``, and as one norm.

The reference is computed in pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, prod, sqrt

import torch

from .roundings import mismatch
from .workload import Case, Compared

PIECE = 1 << 25
"""Elements of the largest input in one piece: 256 MB as float64."""


@dataclass
class _Sums:
    """Squares of the differences and of the reference."""

    difference: float = 0.0
    reference: float = 0.0

    def add(self, out: torch.Tensor, ref: torch.Tensor) -> None:
        self.difference += (out.double() - ref).square().sum().item()
        self.reference += ref.square().sum().item()

    @property
    def error(self) -> float:
        """NaN and infinite results count as infinite."""
        if not (isfinite(self.difference) and isfinite(self.reference)):
            return inf
        return sqrt(self.difference / self.reference) if self.reference else sqrt(self.difference)


@dataclass
class Verdict:
    """error: ``||out - ref|| / ||ref||``.  wrong: what the rule says of an element.  other: not of the dtype, or not in
    the memory format that was asked for.  Sentences; empty where there is nothing to say."""

    error: float
    wrong: str = ""
    other: str = ""

    @property
    def note(self) -> str:
        if self.wrong:
            return f"WRONG: {self.wrong}"
        return f"OTHER: {self.other}" if self.other else ""


def judge(
    workload: Compared,
    case: Case,
    inputs: Sequence[torch.Tensor],
    results: dict[str, list[torch.Tensor]],
    any_format: Collection[str] = (),
) -> dict[str, list[Verdict]]:
    """For each implementation a verdict on each output, by the rule of ``benchmarks/roundings.py``.

    The reference is float64, and what is allowed beside the workload's roundings is eager torch's own error on the same
    inputs, row by row.  Signs of zeros are not compared here.  An output of another dtype is held to that dtype.
    any_format: implementations that are not asked for a memory format.
    """
    eager = workload.comparable(workload.eager(case, *inputs))
    results = {name: workload.comparable(outputs) for name, outputs in results.items()}
    sums = {name: [_Sums() for _ in outputs] for name, outputs in results.items()}
    verdicts = {
        name: [
            _of_kind(case, out, want, workload.any_format or name in any_format)
            for out, want in zip(outputs, eager, strict=False)
        ]
        for name, outputs in results.items()
    }
    for k, at, ref in _references(workload, case, inputs):
        for name, outputs in results.items():
            if len(outputs) != len(eager) or outputs[k].shape != eager[k].shape:
                verdicts[name] = [Verdict(inf, _shapes(outputs, eager)) for _ in eager]
                continue
            verdict = verdicts[name][k]
            sums[name][k].add(outputs[k][at], ref)
            verdict.error = sums[name][k].error
            verdict.wrong = verdict.wrong or broken(workload, outputs[k][at], ref, eager[k][at])
    return verdicts


def errors(
    workload: Compared, case: Case, inputs: Sequence[torch.Tensor], results: dict[str, list[torch.Tensor]]
) -> dict[str, list[float]]:
    """For each implementation the error of each output as one norm.  A result of another shape has an infinite one."""
    return {name: [v.error for v in of] for name, of in judge(workload, case, inputs, results).items()}


def _of_kind(case: Case, out: torch.Tensor, wanted: torch.Tensor, any_format: bool) -> Verdict:
    """Dtype and memory format."""
    said = [f"{out.dtype} where {wanted.dtype} was asked for"] if out.dtype != wanted.dtype else []
    if not (any_format or case.is_arranged(out)):
        said.append(f"strides {list(out.stride())} of shape {list(out.shape)}")
    return Verdict(inf, other=", ".join(said))


def _shapes(outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str:
    found, expected = ([list(t.shape) for t in tensors] for tensors in (outputs, wanted))
    return f"shapes {found}, expected {expected}"


def broken(workload: Compared, out: torch.Tensor, ref: torch.Tensor, eager: torch.Tensor) -> str:
    """What the rule says of ``out``, ``ref`` being float64's; empty where it is right.

    A row, in which eager torch's largest error counts, is of the last dim; of activations all that is in a channel.

    Of an element near 0 the terms that were added up are taken to be as large as the largest result in its row.
    """
    if ref.ndim > 3:
        out, ref, eager = (t.flatten(2) for t in (out, ref, eager))
    terms = ref.abs().amax(-1, keepdim=True) if ref.ndim and ref.numel() and not workload.relative else None
    found = mismatch(
        out,
        ref,
        eager.to(out.dtype),
        n=workload.roundings,
        rows=-1 if ref.ndim else None,
        relative=workload.relative,
        terms=terms,
        signed=False,
    )
    return found or ""


Piece = tuple[int, slice | tuple[()], torch.Tensor]
"""The number of an output, where in it the piece is, and the piece in float64."""


def _references(workload: Compared, case: Case, inputs: Sequence[torch.Tensor]) -> Iterator[Piece]:
    """Piece by piece; outputs that are sums over the pieces at the end."""
    totals: dict[int, torch.Tensor] = {}
    start = 0
    for piece in _pieces(workload, inputs):
        rows = 0
        found = _reference(workload, case, piece)
        for k, (ref, summed) in enumerate(zip(found, workload.sums or [False] * len(found), strict=True)):
            if summed:
                totals[k] = totals[k] + ref if k in totals else ref
                continue
            rows = ref.shape[0] if ref.ndim else 0
            yield k, slice(start, start + rows) if ref.ndim else (), ref
        start += rows
    for k, total in totals.items():
        yield k, (), total


def _pieces(workload: Compared, inputs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The inputs cut along dim 0 where the workload says so."""
    if not any(workload.rows):
        yield list(inputs)
        return
    cut = [t for t, rows in zip(inputs, workload.rows, strict=True) if rows]
    rows = cut[0].shape[0]
    step = max(rows * PIECE // max(prod(t.shape) for t in cut), 1)
    for start in range(0, rows, step):
        yield [t[start : start + step] if c else t for t, c in zip(inputs, workload.rows, strict=True)]


def _reference(workload: Compared, case: Case, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """In float64, for this piece."""
    first = inputs[0].shape[0] if any(workload.rows[:1]) else case.shape[0]
    piece = replace(case, dtype=torch.float64, shape=(first, *case.shape[1:]))
    wide = (t.double() if t.is_floating_point() else t for t in inputs)
    return workload.comparable(workload.reference(piece, *wide))
