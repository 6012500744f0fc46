"""Changes of sharding on several ranks, against DTensor's ``redistribute``; and the backward of a norm by rows.

Every rank runs this.  A sample is a batch of calls between two meetings of the ranks, by the host's clock, so that host
time counts where it is the longer; of each the slowest rank's is taken, and the median of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.nn.placement import TensorPlacement, place

from .accuracy import broken
from .report import Row
from .timing import rounds_on, synchronize
from .workload import Case, Draw, Workload
from .workloads.norm_gradients import LAYER_NORM_BACKWARD

OWN, PEER = "shardfuse", "redistribute"
CASES = ("128x4096", "512x4096", "2048x4096", "8192x4096", "32768x4096")
"""1, 4, 16, 64 and 256 MB."""
BACKWARD_CASES = ("32768x4096", "65536x2048")
BLOCKS = 8
"""How often the ranks' blocks of a block-cyclic tensor repeat."""
ROUNDS, SAMPLE = 15, 3e-3
MOST_CALLS = 200
"""Of a sample: after a pause the first calls of a batch take a host some microseconds more."""


@dataclass(frozen=True)
class Change:
    """Placements by letters: S0 and S1 blocks of a dim, C0 block-cyclic rows, R replicated, P partial sums."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    uneven: bool = False

    def __str__(self) -> str:
        text = f"{' '.join(self.source)} to {' '.join(self.target)}"
        return f"{text}, uneven" if self.uneven else text


ON_A_LINE = (
    Change(("S0",), ("S1",)),
    Change(("S0",), ("R",)),
    Change(("S1",), ("R",)),
    Change(("R",), ("S0",)),
    Change(("P",), ("S0",)),
    Change(("P",), ("S1",)),
    Change(("P",), ("R",)),
    Change(("C0",), ("S0",)),
    Change(("S0",), ("S1",), uneven=True),
    Change(("S0",), ("R",), uneven=True),
)
ON_A_GRID = (
    Change(("S0", "S1"), ("S1", "S0")),
    Change(("S0", "R"), ("R", "S0")),
    Change(("S0", "S1"), ("R", "R")),
    Change(("S0", "S0"), ("S1", "S1")),
    Change(("P", "P"), ("R", "S0")),
)


def run_reshard(given: Sequence[Case], device: torch.device, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """Rows change by change, then of the backward by rows; the same on every rank.  ``given``: instead of the grid."""
    n = dist.get_world_size()
    lines = init_device_mesh(device.type, (n,))
    meshes = [(change, lines) for change in ON_A_LINE]
    if n >= 4 and n % 2 == 0:
        grid = init_device_mesh(device.type, (2, n // 2))
        meshes += [(change, grid) for change in ON_A_GRID]
    for change, mesh in meshes:
        fd = _fusion(change, DeviceMesh.from_torch(mesh))
        for case in given or map(Case.parse, CASES):
            yield _change_rows(change, mesh, fd, case, device, rounds)
    for case in given or map(Case.parse, BACKWARD_CASES):
        yield _backward_rows(case, DeviceMesh(range(n)), device, rounds)


# changes


def _placement(letters: str) -> Placement:
    match letters:
        case "R":
            return Replicate()
        case "P":
            return Partial()
        case "C0":
            return _StridedShard(0, split_factor=BLOCKS)
        case _:
            return Shard(int(letters[1]))


def _fusion(change: Change, mesh: DeviceMesh) -> FusionDefinition:
    target = TensorPlacement.of("target", [_placement(t) for t in change.target], mesh)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.BFloat16)
        if "C0" in change.source:  # said here, as DTensors of torch 2.11 cannot say it
            x.set_device_mesh(mesh)
            x.outer_split(0, BLOCKS)
            x.outer_split(1, mesh.size)
            x.axis(1).parallelize(ParallelType.mesh_x)
        y = fd.ops.set(x)
        place(y, mesh, replace(target, uneven=change.uneven))
        fd.add_output(y)
    return fd


def _change_rows(
    change: Change,
    mesh: torch.distributed.device_mesh.DeviceMesh,
    fd: FusionDefinition,
    case: Case,
    device: torch.device,
    rounds: int,
) -> list[Row]:
    if change.uneven:
        case = replace(case, shape=(case.shape[0] + 1, case.shape[1] + 1))
    given, expected = _tensors(change, mesh, case, device)
    target = [_placement(t) for t in change.target]
    runs: dict[str, Callable[[], torch.Tensor]] = {
        OWN: lambda: fd.execute([given])[0],
        PEER: lambda: given.redistribute(mesh, target),
    }
    notes: dict[str, str] = {}
    for name, run in list(runs.items()):
        try:
            found = run()
            local = found.to_local() if isinstance(found, DTensor) else found
            notes[name] = "" if everywhere(torch.equal(local, expected), device) else "WRONG"
        except (AttributeError, RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
            notes[name] = f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:90]}"
            del runs[name]
    with torch.no_grad():
        timed = per_call(runs, device, rounds)
    collectives = len(fd.explain().collectives)
    rows: list[Row] = []
    for name in (OWN, PEER):
        us, low, high = timed.get(name, (None, None, None))
        counted = collectives if name == OWN else None
        rows.append(Row(str(change), str(case), name, 0, us, low, high, kernels=counted, note=notes[name]))
    return rows


def _tensors(
    change: Change, mesh: torch.distributed.device_mesh.DeviceMesh, case: Case, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor to change, and what this rank has of it afterwards; integers, whose sums are exact.

    A DTensor, or this rank's piece where this torch has no DTensor of it.
    """

    def drawn(seed: int) -> torch.Tensor:
        return Draw(device, seed).integers(case.shape, 9).sub_(4).to(torch.bfloat16)

    def home(letters: Sequence[str], whole: torch.Tensor) -> DTensor:
        return distribute_tensor(whole, mesh, [_placement(t) for t in letters], src_data_rank=None)

    source = [_placement(t) for t in change.source]
    if "P" in change.source:
        whole = drawn(0)
        for rank in range(1, mesh.size()):
            whole += drawn(rank)
        return DTensor.from_local(drawn(dist.get_rank()), mesh, source), home(change.target, whole).to_local()
    whole = drawn(0)
    after = home(change.target, whole).to_local()
    if "C0" in change.source:
        local = whole.unflatten(0, (BLOCKS, mesh.size(), -1))[:, dist.get_rank()].flatten(0, 1)
        try:
            given = DTensor.from_local(local, mesh, source, shape=whole.shape, stride=whole.stride())
        except (NotImplementedError, RuntimeError, ValueError):
            return local, after
        return given, after
    return home(change.source, whole), after


def everywhere(fact: bool, device: torch.device) -> bool:
    """Is it so on every rank?"""
    return slowest([0.0 if fact else 1.0], device) == [0.0]


def per_call(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, fewest: int = 2
) -> dict[str, tuple[float, float, float]]:
    """Microseconds of one call: the median over the rounds, and the 20th and 80th of a hundred.

    fewest: calls that follow one another, at the least, behind a wait of the host for the GPU.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    calls: dict[str, int] = {}
    for name, run in runs.items():
        _sample(run, 2, device)
        (seconds,) = slowest([_sample(run, 2, device)], device)
        calls[name] = min(max(int(SAMPLE / seconds), fewest), MOST_CALLS)
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(_sample(run, calls[name], device))
    found: dict[str, tuple[float, float, float]] = {}
    for name, seconds in samples.items():
        us = sorted(s * 1e6 for s in slowest(seconds, device))
        found[name] = median(us), us[len(us) // 5], us[len(us) * 4 // 5]
    return found


def _sample(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of one call, of a batch that all ranks begin together."""
    slowest([0.0], device)
    synchronize(device)
    began = perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return (perf_counter() - began) / calls


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """For each place the longest of all ranks."""
    told = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.tolist()


# the backward by rows


def _backward_rows(case: Case, mesh: DeviceMesh, device: torch.device, rounds: int) -> list[Row]:
    """LayerNorm's dx, dw, db with rows sharded: its kernel against that of the unsharded fusion of the local rows.

    Both are the first of what runs, by themselves and taking turns: after the all-reduce there are casts of dw and db.
    """
    workload, n = LAYER_NORM_BACKWARD, mesh.size
    local = replace(case, shape=(-(-case.shape[0] // n), case.shape[1]))
    given = replace(case, shape=(local.shape[0] * n, case.shape[1]))
    inputs = workload.arguments(local, Draw(device, dist.get_rank()))
    weight = workload.rows.index(False)
    inputs[weight] = Draw(device).normal([case.columns], case.dtype)
    sharded, alone = workload.fusion(given), workload.fusion(local)
    for declared, by_rows in zip(sharded.fusion.inputs, workload.rows, strict=True):
        if by_rows:
            declared.val.set_device_mesh(mesh)
            declared.val.outer_split(0, n)
            declared.val.axis(0).parallelize(ParallelType.mesh_x)
    note = backward_note(workload, local, inputs, sharded.execute(inputs), device)
    alone.execute(inputs)
    kinds = [c.kind for c in sharded.explain().collectives]
    spans: dict[str, list[float]] = {"all_reduce": []}
    for _ in range(rounds):
        both = sharded.timeline(inputs).spans
        spans["all_reduce"].append(sum(s.end - s.start for s in both if s.name.startswith("all_reduce")))
    runs = {"kernels": _first_kernel(sharded, inputs), "unsharded kernels": _first_kernel(alone, inputs)}
    one_round = rounds_on(runs, device)
    taken = [one_round() for _ in range(rounds + 1)][1:]
    synchronize(device)
    spans |= {name: [t[name]() for t in taken] for name in runs}
    title, kernels = f"row_sharded_backward, {' + '.join(kinds)}", "row_sharded_backward, its kernel"
    us, low, high = per_call({OWN: lambda: sharded.execute(inputs)}, device, rounds)[OWN]
    medians = {name: median(slowest(found, device)) for name, found in spans.items()}
    return [
        Row(title, str(given), OWN, 0, us, low, high, note=note),
        Row(title, str(given), "its all_reduce", 0, medians["all_reduce"]),
        Row(kernels, str(given), OWN, 0, medians["kernels"]),
        Row(kernels, str(given), "unsharded, of the local size", 0, medians["unsharded kernels"]),
    ]


def _first_kernel(fd: FusionDefinition, inputs: Sequence[torch.Tensor]) -> Callable[[], object]:
    """The first kernel of a fusion that ran on ``inputs``, on the tensors that it is given in a run."""
    program = fd.fec.program(inputs)
    name = next(iter(program.labels))
    given: list[tuple[object, ...]] = []

    def kept(*arguments: object) -> object:
        given.append(arguments)
        return program.functions[name](*arguments)

    program.bound_to({**program.functions, name: kept})(*inputs)
    return lambda: program.functions[name](*given[0])


def backward_note(
    workload: Workload,
    case: Case,
    inputs: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    device: torch.device,
) -> str:
    """What the rule of ``benchmarks/roundings.py`` says of a backward of rows that are sharded; the same on every rank.

    case, inputs: of this rank's rows. Of dx each rank has its rows; dw and db are sums over all ranks' rows, of which
    eager torch's are those in float32, added up and then rounded.
    """
    reference = list(workload.reference(case, *(t.double() for t in inputs)))
    eager = list(workload.eager(case, *inputs))
    accurate = replace(case, dtype=case.accurate)
    sums = workload.eager(accurate, *(t.to(case.accurate) for t in inputs))
    for k in (k for k, summed in enumerate(workload.sums) if summed):
        dist.all_reduce(reference[k])
        total = sums[k].clone()
        dist.all_reduce(total)
        eager[k] = total.to(case.dtype)
    wrong = [
        f"{x.dtype} where {theirs.dtype} was asked for"
        if x.dtype != theirs.dtype
        else broken(workload, x, want, theirs)
        for x, want, theirs in zip(found, reference, eager, strict=True)
    ]
    said = next((w for w in wrong if w), "")
    return "" if everywhere(not said, device) else f"WRONG: {said or 'on another rank'}"
