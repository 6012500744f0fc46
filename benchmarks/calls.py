"""What a call on ranks takes, host and GPU, whichever is slower: norms with an all-reduce, beside what torch takes.

Every rank runs this.  Times are of back-to-back calls, the slowest rank's, medians over the rounds; *in a graph* they
are of replays of a CUDA graph that holds one call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate
from torch.nn import functional

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.nn import AddRMSNorm

from .report import Row
from .reshard import everywhere, per_call
from .workload import Case, Draw

OWN = "shardfuse"
CASES = tuple(f"{rows}x8192" for rows in (1, 8, 64, 128, 512, 2048, 8192))
ROUNDS = 15
EXCHANGE = "SHARDFUSE_EXCHANGE"
LATE = 90_000
"""Cycles of a GPU: about 50 us."""
EPS = 1e-6

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Sharded:
    """Tensors of one case.  x, weight: sharded over the hidden axis; summand: this rank's; the rest are replicated."""

    x: torch.Tensor
    weight: torch.Tensor
    summand: torch.Tensor
    residual: torch.Tensor
    whole_weight: torch.Tensor
    normed: torch.Tensor
    """float64: this rank's part of RMSNorm of the unsharded x."""
    added: torch.Tensor
    """float64: RMSNorm of the residual and all summands."""

    @staticmethod
    def drawn(case: Case, mesh: DeviceMesh, device: torch.device) -> Sharded:
        rank, n = dist.get_rank(), mesh.size
        x, residual = (Draw(device, seed).normal(case.shape, case.dtype) for seed in (1000, 1001))
        weight = Draw(device, 1002).normal([case.columns], case.dtype)
        summands = [Draw(device, seed).normal(case.shape, case.dtype) for seed in range(n)]
        total = residual.double()
        for s in summands:
            total += s.double()
        return Sharded(
            mesh.shard_tensor(x, 1).contiguous(),
            mesh.shard_tensor(weight, 0).contiguous(),
            summands[rank],
            residual,
            weight,
            mesh.shard_tensor(_rms_norm(x.double(), weight.double()), 1),
            _rms_norm(total, weight.double()),
        )


def run_calls(given: Sequence[Case], device: torch.device, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """The same rows on every rank.  ``given``: instead of the grid."""
    mesh = DeviceMesh(range(dist.get_world_size()))
    for case in given or map(Case.parse, CASES):
        tensors = Sharded.drawn(case, mesh, device)
        yield _rows("hidden-sharded RMSNorm", case, _hidden_sharded(case, mesh, tensors), tensors.normed, rounds)
        yield _rows("all-reduce + add + RMSNorm", case, _added(case, mesh, tensors), tensors.added, rounds)


def run_exchange(given: Sequence[Case], device: torch.device, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """The same programs with their exchange inside of a kernel, and by collectives; with odd ranks late, too."""
    mesh = DeviceMesh(range(dist.get_world_size()))
    for case in given or map(Case.parse, CASES):
        t = Sharded.drawn(case, mesh, device)
        norm, added = _both_ways(norm_fusion, case, mesh), _both_ways(add_norm_fusion, case, mesh)
        x, summands = [t.x, t.weight], [t.summand[None], t.residual, t.whole_weight]
        runs = {name: partial(_first, fd, x) for name, fd in norm.items()}
        runs |= _compiled_only(_hidden_sharded(case, mesh, t))
        yield _rows("hidden-sharded RMSNorm", case, runs, t.normed, rounds, is_late=True)
        runs = {name: partial(_first, fd, summands) for name, fd in added.items()}
        runs |= _compiled_only(_added(case, mesh, t))
        yield _rows("all-reduce + add + RMSNorm", case, runs, t.added, rounds, is_late=True)


def _both_ways(
    define: Callable[[Case, DeviceMesh], FusionDefinition], case: Case, mesh: DeviceMesh
) -> dict[str, FusionDefinition]:
    made: dict[str, FusionDefinition] = {}
    asked = os.environ.get(EXCHANGE, "auto")
    for name, how in ((OWN, asked), ("shardfuse, collectives", "nccl")):
        os.environ[EXCHANGE] = how
        made[name] = define(case, mesh)
    os.environ[EXCHANGE] = asked
    return made


def _first(fd: FusionDefinition, inputs: list[torch.Tensor]) -> torch.Tensor:
    return fd.execute(inputs)[0]


def _compiled_only(runs: dict[str, Run]) -> dict[str, Run]:
    return {name: run for name, run in runs.items() if name.startswith("NCCL")}


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps=EPS)


def norm_fusion(case: Case, mesh: DeviceMesh) -> FusionDefinition:
    """RMSNorm over a hidden axis that is sharded: two kernels and an all-reduce of a number a row."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, case.columns], contiguity=True, dtype=DataType.from_torch(case.dtype))
        weight = fd.define_tensor([case.columns], contiguity=True, dtype=DataType.from_torch(case.dtype))
        wide = fd.ops.cast(x, dtype=DataType.Float)
        rstd = fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(wide, wide), [-1], keepdim=True), EPS))
        normed = fd.ops.mul(fd.ops.mul(wide, rstd), fd.ops.cast(weight, dtype=DataType.Float))
        fd.add_output(fd.ops.cast(normed, dtype=DataType.from_torch(case.dtype)))
    x.set_device_mesh(mesh)
    x.outer_split(1, mesh.size)
    x.axis(1).parallelize(ParallelType.mesh_x)
    return fd


def add_norm_fusion(case: Case, mesh: DeviceMesh) -> FusionDefinition:
    """RMSNorm of a residual and partial sums that are cast before they are added."""
    dtype = DataType.from_torch(case.dtype)
    with FusionDefinition() as fd:
        x = fd.define_tensor([mesh.size, -1, case.columns], contiguity=True, dtype=dtype)
        residual = fd.define_tensor([-1, case.columns], contiguity=True, dtype=dtype)
        weight = fd.define_tensor([case.columns], contiguity=True, dtype=dtype)
        total = fd.ops.add(fd.ops.sum(fd.ops.cast(x, dtype=DataType.Float), [0]), fd.ops.cast(residual, DataType.Float))
        rstd = fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(total, total), [-1], keepdim=True), EPS))
        normed = fd.ops.mul(fd.ops.mul(total, rstd), fd.ops.cast(weight, dtype=DataType.Float))
        normed, new_residual = fd.ops.cast(normed, dtype=dtype), fd.ops.cast(total, dtype=dtype)
        fd.add_output(normed)
        fd.add_output(new_residual)
    x.set_device_mesh(mesh)
    x.axis(0).parallelize(ParallelType.mesh_x)
    for tv in (residual, weight, normed, new_residual):
        tv.set_device_mesh(mesh)
    return fd


def _hidden_sharded(case: Case, mesh: DeviceMesh, t: Sharded) -> dict[str, Run]:
    fd = norm_fusion(case, mesh)
    one_a_row = torch.zeros(case.shape[0], device=t.x.device)

    first = torch.compile(lambda x: x.float().square().sum(-1, keepdim=True))
    second = torch.compile(
        lambda x, total, weight: (x.float() * torch.rsqrt(total / case.columns + EPS) * weight.float()).to(x.dtype)
    )

    def compiled() -> torch.Tensor:
        total = first(t.x)
        dist.all_reduce(total)
        return second(t.x, total, t.weight)

    return {
        OWN: lambda: fd.execute([t.x, t.weight])[0],
        "NCCL + Inductor": compiled,
        "dist.all_reduce alone": lambda: dist.all_reduce(one_a_row) or one_a_row,
    }


def _added(case: Case, mesh: DeviceMesh, t: Sharded) -> dict[str, Run]:
    fd = add_norm_fusion(case, mesh)
    module = AddRMSNorm(
        case.columns, EPS, mesh=mesh, input=Partial(), output=Replicate(), parameters="local", dtype=case.dtype
    ).to(t.x.device)
    with torch.no_grad():
        module.weight.copy_(t.whole_weight)
    sent = t.summand.clone()

    @torch.compile
    def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return functional.rms_norm(total, weight.shape, weight, eps=EPS), total

    def compiled() -> torch.Tensor:
        sent.copy_(t.summand)  # it is written over, as what a matmul made may be
        dist.all_reduce(sent)
        return add_norm(sent, t.residual, t.whole_weight)[0]

    def in_place() -> torch.Tensor:
        dist.all_reduce(sent)
        return add_norm(sent, t.residual, t.whole_weight)[0]

    def module_run() -> torch.Tensor:
        with torch.no_grad():
            return module(t.summand, t.residual)[0]

    return {
        OWN: lambda: fd.execute([t.summand[None], t.residual, t.whole_weight])[0],
        "shardfuse.nn.AddRMSNorm": module_run,
        "NCCL + Inductor, with a copy": compiled,
        "NCCL + Inductor, unchecked": in_place,
        "dist.all_reduce alone": lambda: dist.all_reduce(sent) or sent,
    }


def _rows(
    title: str, case: Case, runs: dict[str, Run], expected: torch.Tensor, rounds: int, *, is_late: bool = False
) -> list[Row]:
    """``is_late``: also with every odd rank 50 us late, which its GPU spends waiting."""
    device = expected.device
    notes = dict.fromkeys(runs, "")
    for name, run in runs.items():
        if "alone" in name or "unchecked" in name:
            continue
        found = run().double()
        right = found.shape == expected.shape and bool(((found - expected).abs() <= 0.02 * expected.abs() + 0.02).all())
        notes[name] = "" if everywhere(right, device) else "WRONG"
    eager = per_call(runs, device, rounds)
    rows = [Row(title, str(case), name, 0, *eager[name], note=notes[name]) for name in runs]
    graphs = {name: _captured(run) for name, run in runs.items()} if device.type == "cuda" else {}
    for name, replayed in (per_call(graphs, device, rounds) if graphs else {}).items():
        rows.append(Row(f"{title}, in a graph", str(case), name, 0, *replayed))
    if is_late and graphs:
        late = {name: partial(_late, replay) for name, replay in graphs.items()}
        for name, replayed in per_call(late, device, rounds).items():
            rows.append(Row(f"{title}, in a graph, odd ranks late", str(case), name, 0, *replayed))
    return rows


def _late(replay: Callable[[], object]) -> None:
    """A replay that odd ranks begin later."""
    if dist.get_rank() % 2:
        torch.cuda._sleep(LATE)
    replay()


def _captured(run: Run) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
