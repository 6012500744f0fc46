"""Running a segment's kernels under Triton's interpreter, outputs between poisoned margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from segments import evaluate, layout_of, scheduler_of
from torch_answers import ROUNDINGS, Expected

from benchmarks.roundings import assert_near
from shardfuse.codegen import generate
from shardfuse.device import H200
from shardfuse.executor.kernel import Kernel
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.scalar import Scalar
from shardfuse.schedulers.schedule import Schedule
from shardfuse.segments.segment import Segment

MARGIN = 64


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in the middle of a buffer of bytes 0x5A, and the buffer."""
    count = torch.Size(shape).numel()
    buffer = torch.full(((count + 2 * MARGIN) * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype)
    return buffer[MARGIN : MARGIN + count].view(tuple(shape)), buffer


def run(
    segment: Segment,
    inputs: Mapping[BoundTensor, torch.Tensor],
    directory: Path,
    *,
    scheduler: ModuleType | None = None,
    schedule: Schedule | None = None,
    numbers: Mapping[Scalar, float] | None = None,
    rank: int = 0,
    op_by_op: bool = True,
) -> list[torch.Tensor]:
    """The outputs of ``segment``, by the first scheduler that takes it unless one is named; margins are checked.

    op_by_op: compare each with what torch makes of the rank's own inputs; False where it counts along a sharded axis.
    """
    chosen = scheduler or scheduler_of(segment)
    assert chosen.why_not(segment, H200) is None
    env = dict(inputs)
    buffers: list[torch.Tensor] = []
    for plan in chosen.kernels(segment, schedule or chosen.propose(segment, H200), H200):
        for tensor in plan.segment.outputs:
            env[tensor], buffer = poisoned(tensor.domain.local_shape(rank), tensor.dtype.torch)
            buffers.append(buffer)
        tensors = (*plan.segment.inputs, *plan.segment.outputs)
        source = generate(plan, {t: layout_of(t, env[t], rank) for t in tensors}, rank, interpret=True)
        launch = Kernel(source, directory, interpret=True).launcher()
        launch(None, *(env[t] for t in source.tensors), *((numbers or {})[s] for s in source.scalars))
    for buffer in buffers:
        ends = torch.cat([buffer[:MARGIN], buffer[-MARGIN:]]).view(torch.uint8)
        assert (ends == 0x5A).all(), "a store left its tensor"
    outputs = [env[t] for t in segment.outputs]
    return checked(outputs, evaluate(segment, inputs, numbers, rank)) if op_by_op else outputs


def checked(outputs: Sequence[torch.Tensor], expected: Sequence[Expected]) -> list[torch.Tensor]:
    """``outputs``, each compared with what torch makes of the segment op by op, which ``close`` asks for its errors."""
    for k, (found, want) in enumerate(zip(outputs, expected, strict=True)):
        assert_near(found, want.wide, want.eager, n=ROUNDINGS, slack=want.slack, what=f"output {k}, op by op")
        found.expected = want
    return list(outputs)


def close(
    found: torch.Tensor, wanted: torch.Tensor, *, n: float = ROUNDINGS, terms: torch.Tensor | None = None
) -> None:
    """``wanted``: torch's own function in float64.

    An output of a segment may be off as far as eager torch is, op by op in the segment's types (``Expected.slack``);
    a tensor of which no segment is known by n roundings of its own, and of ``terms``, of whose magnitude its terms are.
    """
    expected: Expected | None = getattr(found, "expected", None)
    assert_near(found, wanted, n=n, terms=terms, slack=None if expected is None else expected.slack)


def values(*shape: int, dtype: DataType = DataType.Float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype.torch)
    if dtype is DataType.Bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(1, 5, shape, generator=generator).to(dtype.torch)
