"""Numerics: ``||out - ref|| / ||ref||`` against float64, the reference being computed in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, prod, sqrt

import torch

from .workload import Case, Workload

PIECE = 1 << 25
"""Elements of the largest input in one piece: 256 MB as float64."""
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest error by the output's dtype: rounding to bfloat16 alone is 1.7e-3, and a peer may round on the way."""


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


def errors(
    workload: Workload, case: Case, inputs: Sequence[torch.Tensor], results: dict[str, list[torch.Tensor]]
) -> dict[str, list[float]]:
    """For each implementation the error of each output.  A result of another shape has an infinite error."""
    sums = {name: [_Sums() for _ in workload.sums] for name in results}
    totals: list[torch.Tensor | None] = [None for _ in workload.sums]
    start = 0
    for piece in _pieces(workload, inputs):
        refs = _reference(workload, case, piece)
        rows = 0
        for k, (ref, summed) in enumerate(zip(refs, workload.sums, strict=True)):
            if summed:
                totals[k] = ref if totals[k] is None else totals[k] + ref
                continue
            rows = ref.shape[0] if ref.ndim else 0
            for name, outputs in results.items():
                part = outputs[k][start : start + rows] if ref.ndim else outputs[k]
                _add(sums[name][k], part, ref)
        start += rows
    for k, total in enumerate(totals):
        for name, outputs in results.items():
            if total is not None:
                _add(sums[name][k], outputs[k], total)
    return {name: [s.error for s in of] for name, of in sums.items()}


def tolerance(output: torch.Tensor) -> float:
    return TOLERANCE[output.dtype]


def _add(sums: _Sums, out: torch.Tensor, ref: torch.Tensor) -> None:
    if out.shape != ref.shape:
        sums.difference = inf
        return
    sums.add(out, ref)


def _pieces(workload: Workload, inputs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The inputs cut along dim 0 where the workload says so."""
    cut = [t for t, rows in zip(inputs, workload.rows, strict=True) if rows]
    if not cut:
        yield list(inputs)
        return
    rows = cut[0].shape[0]
    step = max(rows * PIECE // max(prod(t.shape) for t in cut), 1)
    for start in range(0, rows, step):
        yield [t[start : start + step] if c else t for t, c in zip(inputs, workload.rows, strict=True)]


def _reference(workload: Workload, case: Case, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """In float64, for this piece."""
    first = inputs[0].shape[0] if workload.rows[0] else case.shape[0]
    piece = replace(case, dtype=torch.float64, shape=(first, *case.shape[1:]))
    return workload.reference(piece, *(t.double() if t.is_floating_point() else t for t in inputs))
