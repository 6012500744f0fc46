"""Collectives between ranks by shardfuse's kernels, beside NCCL's by torch.distributed: in calls, and in a CUDA graph.

Every rank runs this.  A case is the unsharded tensor: what is gathered, what is scattered, or what all ranks have a
summand of.  Times are of back-to-back calls, the slowest rank's, medians over the rounds; *in a graph* they are of one
of ``EACH`` calls in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse.codegen.collective_kernels import Kind
from shardfuse.codegen.collective_moves import all_reduced, exchanged, gathered, scattered
from shardfuse.executor.launch import queue_on
from shardfuse.executor.nccl_channels import BackendChannel
from shardfuse.executor.symmetric_collectives import symmetric_channel
from shardfuse.mesh import Team

from .graphs import per_captured_call
from .report import Row
from .reshard import everywhere, per_call
from .workload import Case, Draw

OWN, NCCL = "shardfuse", "NCCL"
KINDS: tuple[Kind, ...] = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
CASES = tuple(f"{rows}x8192" for rows in (2, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384))
ROUNDS = 11

Run = Callable[[], Tensor]


def run_collectives(given: Sequence[Case], device: torch.device, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """The same rows on every rank.  ``given``: instead of the grid."""
    for case in given or map(Case.parse, CASES):
        if case.shape[0] % dist.get_world_size():
            continue  # not in equal pieces
        for kind in KINDS:
            yield _rows(kind, case, device, rounds)


def _rows(kind: Kind, case: Case, device: torch.device, rounds: int) -> list[Row]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = [Draw(device, seed).normal(case.shape, case.dtype) for seed in range(ranks)]
    mine = whole[rank] if kind != "all_gather" else whole[0].chunk(ranks)[rank].contiguous()
    total = sum((t.double() for t in whole[1:]), whole[0].double())
    wanted = {
        "all_gather": lambda: whole[0].double(),
        "all_to_all": lambda: torch.cat([t.chunk(ranks)[rank] for t in whole]).double(),
        "reduce_scatter": lambda: total.chunk(ranks)[rank],
        "all_reduce": lambda: total,
    }[kind]()
    runs = _runs(kind, mine, torch.empty(wanted.shape, dtype=case.dtype, device=device))
    notes = dict.fromkeys(runs, "")
    for name, run in runs.items():
        right = bool(((run().double() - wanted).abs() <= 2**-7 * (wanted.abs() + 1)).all())
        notes[name] = "" if everywhere(right, device) else "WRONG"
    with torch.no_grad():
        timed, graphs = per_call(runs, device, rounds), per_captured_call(runs, device, rounds)
    rows = [Row(kind, str(case), name, 0, *us, note=notes[name]) for name, us in timed.items()]
    return rows + [Row(f"{kind}, in a graph", str(case), name, 0, *us) for name, us in graphs.items()]


def _runs(kind: Kind, mine: Tensor, taken: Tensor) -> dict[str, Run]:
    """Of this rank's tensor and the memory of the result."""
    team, device = Team.of(range(dist.get_world_size())), mine.device
    moves = {
        "all_gather": gathered(1, mine.numel(), team.size),
        "all_to_all": exchanged((1, mine.numel() // team.size), 0, 1, team.size),
        "reduce_scatter": scattered(1, taken.numel(), team.size),
        "all_reduce": all_reduced(mine.numel()),
    }[kind]
    otherwise = BackendChannel(dist.group.WORLD._get_backend(device))
    issue = symmetric_channel(team, device, mine.dtype, otherwise).by_kernel(kind, moves)
    queue = queue_on(device)

    def own() -> Tensor:
        assert issue is not None
        issue(queue(), mine, taken)
        return taken

    def nccl() -> Tensor:
        match kind:
            case "all_gather":
                dist.all_gather_into_tensor(taken, mine)
            case "all_to_all":
                dist.all_to_all_single(taken, mine)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(taken, mine)
            case "all_reduce":
                taken.copy_(mine)
                dist.all_reduce(taken)
        return taken

    return ({} if issue is None else {OWN: own}) | {NCCL: nccl}
