"""Promises: one text of a kernel for any number of rows, what is refused, and who is told."""

from __future__ import annotations

import pytest
import torch
from promise_cases import CASES, define

from benchmarks.sm90 import sources_of
from shardfuse import DataType, FusionDefinition
from shardfuse.codegen.source import KernelSource

ROWS = (1, 2, 3, 5, 8, 17, 64, 127, 500, 4096, 8192, 20000)
LENGTHS = (96, 777, 1024, 4096, 5139, 16384, 50257, 65536, 131072)


def kernels(fd: FusionDefinition, rows: int, n: int) -> list[KernelSource]:
    """Of the rows; what adds up partial sums over rows is another kernel, or another stage."""
    shapes = {t: (rows, *t.shape[1:]) if t.ndim == 2 else tuple(t.shape) for t in fd.fec.tensors()}
    made = [torch.empty(shape, dtype=t.dtype.torch, device="meta") for t, shape in shapes.items()]
    return list(sources_of(fd.fec.plan(shapes), made))


def told_apart(source: KernelSource) -> tuple[object, ...]:
    return source.text, source.num_warps, source.num_stages, source.max_registers, source.contracts


@pytest.mark.parametrize("name", CASES)
def test_one_text_for_any_number_of_rows(name: str) -> None:
    for n in LENGTHS:
        fd = define(name, n, DataType.BFloat16)
        texts = {rows: [told_apart(k) for k in kernels(fd, rows, n)] for rows in ROWS}
        for rows in ROWS:
            assert texts[rows] == texts[ROWS[0]], f"{name} of {rows} x {n} is another kernel than of {ROWS[0]}"
