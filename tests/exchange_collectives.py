"""Collectives by kernels, of every kind, size and form, beside what torch makes of all ranks' tensors in float64."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from math import prod

import pytest
import torch
from torch import Tensor

from benchmarks.roundings import assert_near
from shardfuse.codegen.collective_kernels import Kind
from shardfuse.executor import symmetric_collectives
from shardfuse.executor.launch import queue_on
from shardfuse.executor.nccl_channels import Issue, Pieces
from shardfuse.executor.symmetric_collectives import symmetric_channel
from shardfuse.mesh import symmetric
from shardfuse.mesh.groups import Team
from shardfuse.mesh.process import ProcessContext

ROUNDS = 2
TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOVED = (*TYPES, torch.int64, torch.uint8)
SIZES = ((1, 16), (1, 4096), (1, 20_000), (3, 8_208), (40, 1_040))
"""Strips, and elements of each."""
FEW = ((1, 16), (1, 9_200), (3, 2_064))
"""Under Triton's interpreter, where a turn takes milliseconds: a chunk, five of one strip, two of each of three."""
LARGE = ((1, 1 << 20), (2, 1 << 20), (1, (1 << 23) + 48), (17, 70_000), (1, 1 << 24))
"""The same on GPUs of their own."""


@dataclass(frozen=True)
class _Case:
    """One collective.  strips, count: of what a rank is given of a gather, or has of a sum that is scattered."""

    kind: Kind
    dtype: torch.dtype
    strips: int
    count: int
    ranks: int

    @property
    def pieces(self) -> Pieces:
        whole = self.count * self.ranks
        match self.kind:
            case "all_gather":
                return Pieces(self.count, self.strips, self.count, whole)
            case "reduce_scatter":
                return Pieces(self.count, self.strips, whole, self.count)
            case "all_reduce":
                return Pieces(self.strips * self.count)

    def given(self, rank: int, turn: int, device: torch.device) -> Tensor:
        """What a rank gives in that turn; all ranks can make it."""
        columns = self.count * (self.ranks if self.kind == "reduce_scatter" else 1)
        generator = torch.Generator(device).manual_seed(97 * turn + rank)
        wide = torch.randn((self.strips, columns), generator=generator, device=device)
        return (wide * 50).to(self.dtype) if not self.dtype.is_floating_point else wide.to(self.dtype)

    def wanted(self, rank: int, given: list[Tensor]) -> Tensor:
        if self.kind == "all_gather":
            return torch.cat(given, 1)
        total = torch.stack([t.double() for t in given]).sum(0)
        return total.chunk(self.ranks, 1)[rank] if self.kind == "reduce_scatter" else total

    def check(self, found: Tensor, rank: int, given: list[Tensor]) -> None:
        wide = self.wanted(rank, given)
        if self.kind == "all_gather":
            assert torch.equal(found.view_as(wide), wide), f"{self} on rank {rank}"
            return
        eager = wide.to(self.dtype)
        assert_near(found.view_as(wide).cpu(), wide.cpu(), eager.cpu(), n=0.51 if self.dtype != torch.float32 else 2)


class Refused:
    """In place of NCCL, which none of these asks."""

    def __getattr__(self, name: str) -> object:
        pytest.fail(f"{name} is asked for")


def run_collectives(context: ProcessContext) -> None:
    """All of them, each in several calls with other numbers, by ranks that are late now and then."""
    is_on_gpu = context.device.type == "cuda"
    if not is_on_gpu:  # several turns of a program, and programs that claim their numbers, of little
        symmetric_collectives.shared_programs = lambda multiprocessors: 3
        symmetric_collectives.free_multiprocessors = lambda multiprocessors: 2
    own, team, n = random.Random(context.rank), Team.of(range(context.world_size)), context.world_size
    sums: tuple[Kind, ...] = ("reduce_scatter", "all_reduce")
    sizes = SIZES if is_on_gpu else FEW
    cases = [_Case("all_gather", dtype, *size, n) for dtype in MOVED for size in sizes]
    cases += [_Case(kind, dtype, *size, n) for kind in sums for dtype in TYPES for size in sizes]
    if is_on_gpu:
        cases += [_Case(kind, torch.bfloat16, *size, n) for kind in ("all_gather", *sums) for size in LARGE]
    queue = queue_on(context.device)
    for case in cases:
        issue = issue_of(case, team, context)
        for turn in range(ROUNDS):
            given = [case.given(rank, turn, context.device) for rank in range(n)]
            mine = given[context.rank]
            taken = torch.full(
                (prod(case.wanted(context.rank, given).shape),), 77, dtype=case.dtype, device=context.device
            )
            if own.random() < 0.2:
                time.sleep(own.random() * 0.01)
            in_place = case.kind == "all_reduce" and turn == 1
            kept = mine.clone()
            issue(queue(), kept, kept if in_place else taken)
            case.check(kept if in_place else taken, context.rank, given)
    assert isinstance(symmetric.arena(), symmetric.Arena)


def issue_of(case: _Case, team: Team, context: ProcessContext) -> Issue:
    channel = symmetric_channel(team, context.device, case.dtype, Refused())
    issue = channel.by_kernel(case.kind, case.pieces)
    assert issue is not None, f"{case} has no kernel"
    return issue


def sizes_without_a_kernel(context: ProcessContext) -> None:
    """What is not cut into words of 16 bytes, and what is not added up in float32, is left to NCCL."""
    team = Team.of(range(context.world_size))
    for dtype, count in ((torch.bfloat16, 12), (torch.float32, 5), (torch.uint8, 8)):
        channel = symmetric_channel(team, context.device, dtype, Refused())
        assert channel.by_kernel("all_gather", Pieces(count)) is None
    for dtype in (torch.int64, torch.float64):
        channel = symmetric_channel(team, context.device, dtype, Refused())
        assert channel.by_kernel("reduce_scatter", Pieces(16, 1, 16 * team.size, 16)) is None
