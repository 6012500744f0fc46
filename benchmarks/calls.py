"""What a call on ranks takes, host and GPU, whichever is slower: norms with an all-reduce, beside what torch takes.

Every rank runs this.  Times are of back-to-back calls inside of one ``torch.no_grad()``, as a loop of inference has
them: the slowest rank's, medians over the rounds; *in a graph* they are of one of ``EACH`` calls in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate

from shardfuse import DeviceMesh
from shardfuse.nn import AddRMSNorm

from .exchange import CASES
from .exchange_fusions import EPS
from .exchange_ranks import COLLECTIVES, Ranks
from .exchange_verdicts import Measured, Run, judged
from .exchange_workloads import add_rms_norm, rms_norm, rows_and_vectors
from .graphs import per_captured_call
from .report import Row
from .reshard import per_call
from .workload import Case

ROUNDS = 15
ALONE, MODULE = "dist.all_reduce alone", "shardfuse.nn.AddRMSNorm"


def run_calls(given: Sequence[Case], device: torch.device, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """The same rows on every rank.  ``given``: instead of the grid."""
    ranks = Ranks(DeviceMesh(range(dist.get_world_size())), device)
    for case in given or map(Case.parse, CASES):
        torch._dynamo.reset()  # what is compiled is so for the sizes of a case
        one_a_row = torch.zeros(case.shape[0], device=device)
        yield _rows("hidden-sharded RMSNorm", case, rms_norm(case, ranks), one_a_row, rounds)
        measured = add_rms_norm(case, ranks)
        measured = replace(measured, runs={**measured.runs, MODULE: _module(case, ranks)})
        summand = torch.zeros(case.shape, dtype=case.dtype, device=device)
        yield _rows("all-reduce + add + RMSNorm", case, measured, summand, rounds)


def _module(case: Case, ranks: Ranks) -> Run:
    """Of the tensors that the fusion has, too."""
    module = AddRMSNorm(
        case.columns, EPS, mesh=ranks.mesh, input=Partial(), output=Replicate(), parameters="local", dtype=case.dtype
    ).to(ranks.device)
    residual, weight = rows_and_vectors(case, ranks, 1)
    assert module.weight is not None, "it has one"
    with torch.no_grad():
        module.weight.copy_(weight)
    summand = ranks.drawn(case.shape, case.dtype, dist.get_rank())
    return lambda: module(summand, residual)


def _rows(title: str, case: Case, measured: Measured, sent: torch.Tensor, rounds: int) -> list[Row]:
    """``sent``: what a collective by itself sums up, beside the runs."""
    device = sent.device
    with torch.no_grad():
        notes = {name: judged(measured, name, device).note for name in measured.runs if name != COLLECTIVES}
        runs: dict[str, Callable[[], object]] = {name: measured.runs[name] for name in notes}
        runs[ALONE] = lambda: dist.all_reduce(sent)
        eager, graphs = per_call(runs, device, rounds), per_captured_call(runs, device, rounds)
    rows = [Row(title, str(case), name, 0, *us, note=notes.get(name, "")) for name, us in eager.items()]
    return rows + [Row(f"{title}, in a graph", str(case), name, 0, *us) for name, us in graphs.items()]
