"""Programs whose ranks exchange statistics inside of a kernel, and ranks that are parts of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from exchange_fusions import EPS, PROGRAMS, part_of

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.allocation.layouts import strides_of
from shardfuse.codegen import generate
from shardfuse.codegen.mesh_exchange import slots_of, table
from shardfuse.codegen.source import KernelSource
from shardfuse.compiler import Plan, compile_fusion
from shardfuse.device import H200, Device
from shardfuse.executor.kernel import Kernel, Launch
from shardfuse.frontend.promise_arguments import Invariant
from shardfuse.in_kernel import exchanging, with_exchanges
from shardfuse.ir.expr import BoundTensor
from shardfuse.passes.settle_inputs import settle_inputs
from shardfuse.schedulers.exchange_room import LEFT_FREE
from shardfuse.schedulers.plan import KernelPlan

PARTIAL = "partial_sums_add_rms_norm"
"""Of a summand of each rank; its results are on all of them."""
LOSS = "cross_entropy"
"""Of rows of logits and a target for each, over a vocabulary that is sharded; its result is on all ranks."""
KINDS = ("rms_norm", "layer_norm", "softmax", "add_rms_norm", PARTIAL)


def define(
    kind: str, n: int, ranks: int, dtype: DataType, *, gives_rms: bool = False, invariant: Invariant = None
) -> FusionDefinition:
    """Of rows of ``n`` unsharded elements, cut over ``ranks``.  gives_rms: is 1 / rms of each row a result as well?"""
    if kind in PROGRAMS:
        return PROGRAMS[kind].define(n, ranks, dtype)
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition(backend="triton" if invariant else None, invariant=invariant) as fd:
        o = fd.ops
        if kind == PARTIAL:
            given = fd.define_tensor([ranks, -1, n], contiguity=True, dtype=dtype)
            residual = fd.define_tensor([-1, n], contiguity=True, dtype=dtype)
            w = fd.define_tensor([n], contiguity=True, dtype=dtype)
            x = o.add(o.cast(o.sum(given, [0]), DataType.Float), residual)
            fd.add_output(o.cast(x, dtype))
            y = o.mul(o.mul(x, o.rsqrt(o.add(o.mean(o.mul(x, x), [-1], keepdim=True), EPS))), w)
            fd.add_output(o.cast(y, dtype))
            given.set_device_mesh(mesh)
            given.axis(0).parallelize(ParallelType.mesh_x)
            return fd
        given = fd.define_tensor([-1, n], contiguity=True, dtype=dtype)
        x = o.cast(given, DataType.Float)
        if kind == LOSS:
            target = fd.define_tensor([-1], contiguity=True, dtype=DataType.Int)
            top = o.max(x, [-1], keepdim=True)
            total = o.sum(o.exp(o.sub(x, top)), [-1], keepdim=True)
            is_it = o.eq(o.broadcast(o.iota(n), [True, False]), o.broadcast(target, [False, True]))
            y = o.sub(o.add(o.log(total), top), o.sum(o.where(is_it, x, 0.0), [-1], keepdim=True))
        elif kind == "layer_norm":
            w = fd.define_tensor([n], contiguity=True, dtype=dtype)
            var, mean = o.var_mean(x, [-1], 0, True)
            y = o.mul(o.mul(o.sub(x, mean), o.rsqrt(o.add(var, EPS))), w)
        elif kind == "softmax":
            e = o.exp(o.sub(x, o.max(x, [-1], keepdim=True)))
            y = o.div(e, o.sum(e, [-1], keepdim=True))
        else:
            if kind == "add_rms_norm":
                x = o.add(x, fd.define_tensor([-1, n], contiguity=True, dtype=dtype))
                fd.add_output(o.cast(x, dtype))
            w = fd.define_tensor([n], contiguity=True, dtype=dtype)
            rstd = o.rsqrt(o.add(o.mean(o.mul(x, x), [-1], keepdim=True), EPS))
            y = o.mul(o.mul(x, rstd), w)
            if gives_rms:
                fd.add_output(rstd)
        fd.add_output(y if kind == LOSS else o.cast(y, dtype))
        if ranks == 1:
            return fd
        given.set_device_mesh(mesh)
        given.outer_split(1, ranks, uneven=n % ranks != 0)
        given.axis(1).parallelize(ParallelType.mesh_x)
    return fd


def define_backward(n: int, ranks: int, dtype: DataType) -> FusionDefinition:
    """dw and dx of an RMSNorm, of x, dy, the rows' 1 / rms and the weight: dw is a sum over rows."""
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        o = fd.ops
        x, dy = (fd.define_tensor([-1, n], contiguity=True, dtype=dtype) for _ in range(2))
        rstd = fd.define_tensor([-1, 1], contiguity=True, dtype=DataType.Float)
        w = fd.define_tensor([n], contiguity=True, dtype=dtype)
        normed, given = o.mul(o.cast(x, DataType.Float), rstd), o.cast(dy, DataType.Float)
        weighted = o.mul(given, w)
        mean = o.mean(o.mul(weighted, normed), [-1], keepdim=True)
        fd.add_output(o.cast(o.sum(o.mul(given, normed), [0]), dtype))
        fd.add_output(o.cast(o.mul(o.sub(weighted, o.mul(normed, mean)), rstd), dtype))
        x.set_device_mesh(mesh)
        x.outer_split(1, ranks)
        x.axis(1).parallelize(ParallelType.mesh_x)
    return fd


def inputs_of_backward(rows: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x, w = inputs("rms_norm", rows, n, dtype)
    dy = inputs("rms_norm", rows, n + 1, dtype)[0][:, :n].contiguous()
    return [x, dy, torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS).float(), w]


def expected_of_backward(given: list[torch.Tensor]) -> list[torch.Tensor]:
    x, dy, rstd, w = given
    normed, weighted = x * rstd, dy * w
    return [(dy * normed).sum(0), (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * rstd]


def inputs(kind: str, rows: int, n: int, dtype: torch.dtype, ranks: int = 2) -> list[torch.Tensor]:
    """Unsharded, seeded."""
    if kind in PROGRAMS:
        return PROGRAMS[kind].inputs(rows, n, dtype, ranks)
    made = torch.Generator().manual_seed(rows * n)
    shapes = {"softmax": [(rows, n)], "add_rms_norm": [(rows, n), (rows, n), (n,)]}
    shapes |= {PARTIAL: [(ranks, rows, n), (rows, n), (n,)]}
    shapes |= {LOSS: [(rows, n)]}
    drawn = shapes.get(kind, [(rows, n), (n,)])
    targets = [torch.randint(n, (rows,), generator=made)] if kind == LOSS else []
    return [*(torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in drawn), *targets]


def expected(kind: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """What torch makes of it, in the type that is given."""
    x, w = given[0], given[-1]
    if kind == LOSS:
        return [torch.nn.functional.cross_entropy(x, w.long(), reduction="none")[:, None]]
    if kind == "layer_norm":
        return [torch.nn.functional.layer_norm(x, x.shape[-1:], w, None, EPS)]
    if kind == "softmax":
        return [x.softmax(-1)]
    x = x.sum(0) if kind == PARTIAL else x
    x = x + given[1] if len(given) == 3 else x
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w
    return [x, y] if len(given) == 3 else [y]


def piece(kind: str, k: int, whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """What a rank has of input ``k``."""
    if kind in PROGRAMS:
        return PROGRAMS[kind].piece(k, whole, ranks, rank)
    if kind == LOSS and k == 1:
        return whole
    if kind != PARTIAL:
        return part_of(whole, ranks, -1, rank).contiguous()
    return whole[rank : rank + 1].contiguous() if k == 0 else whole


def piece_of_output(kind: str, whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    return whole if kind in (PARTIAL, LOSS) else part_of(whole, ranks, -1, rank)


def plan_of(fd: FusionDefinition, rows: int, device: Device = H200, columns: int = 0) -> Plan:
    """columns: of tensors of several dims whose last one the definition leaves open."""
    settle_inputs(fd.fusion)
    sizes = {}
    for i in fd.fusion.inputs:
        *dims, last = i.val.shape or (1,)
        whole = (*(rows if n < 0 else n for n in dims), last if last >= 0 else columns if dims else rows)
        sizes[i.val] = whole[: i.val.ndim]
    return with_exchanges(compile_fusion(fd.fusion, sizes, device=device, has_cheap_sums=True))


def with_room(rows: int, members: int = 1) -> Device:
    """A GPU that has a multiprocessor for so many programs of each row."""
    return replace(H200, multiprocessors=LEFT_FREE + rows * members)


def kernel_of(plan: Plan) -> KernelPlan:
    """The one kernel that is all of ``plan``, but for views of what it makes, and sums over rows."""
    made = [s.scheduler for s in plan.segments if s.scheduler != "no_op"]
    assert made in (["exchange"], ["reduction", "exchange"]), plan.in_kernel
    ((_, kernel),) = exchanging(plan)
    return kernel


def assembled(plan: KernelPlan, tensors: Sequence[dict[BoundTensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The unsharded results of ``plan``, [rows, ...], of what each rank has; where all have one, its bits are equal."""
    found = list[torch.Tensor]()
    for t in plan.segment.outputs:
        pieces = [own[t].cpu() for own in tensors]
        pieces = [p.flatten(1) if p.ndim > 1 else p for p in pieces]  # blocks of a row lie one after the other
        if not t.domain.sharding:
            assert all(torch.equal(_bits(p), _bits(pieces[0])) for p in pieces), f"ranks have other bits of {t}"
        found.append(torch.cat(pieces, -1) if t.domain.sharding else pieces[0])
    return found


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


@dataclass
class Ranks:
    """So many ranks on one device, each with slots and a table, that run the kernel of ``plan``."""

    plan: KernelPlan
    device: torch.device
    seconds: float = 2.0
    slots: list[torch.Tensor] = field(init=False)
    report: torch.Tensor = field(init=False)
    tables: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        exchange = self.plan.exchange
        assert exchange is not None
        ranks = exchange.ranks
        self.slots = [torch.zeros(slots_of(self.plan), dtype=torch.int64, device=self.device) for _ in range(ranks)]
        self.report = torch.zeros(1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.tables = [torch.tensor(self._table(rank), dtype=torch.int64).to(self.device) for rank in range(ranks)]

    def _table(self, rank: int) -> list[int]:
        exchange = self.plan.exchange
        assert exchange is not None
        order = list(range(exchange.ranks))
        if exchange.is_in_rows:
            order = order[rank:] + order[:rank]
        addresses, names = [self.slots[r].data_ptr() for r in order], [r + 1 for r in order]
        seconds = self.seconds if self.device.type == "cuda" else 0  # under the interpreter they run one by one
        return table(exchange, seconds, self.report.data_ptr(), rank, slots_of(self.plan), addresses, names)

    def set_launches(self, number: int, rank: int) -> None:
        """As if there had been so many; of rows, turns of each program."""
        self.tables[rank][4 + 2 * len(self.slots) + 1] = number << 32
        self.tables[rank][4 + 2 * len(self.slots) + 2 :] = number

    def launches_of(self, rank: int) -> float:
        """How many there were; of rows, turns of the first program."""
        counted = self.tables[rank][4 + 2 * len(self.slots) :].tolist()
        return counted[2] if self.plan.exchange.is_in_rows else counted[1] / (1 << 32)

    def tickets_of(self, rank: int) -> int:
        """What stands where programs claim their numbers."""
        return int(self.tables[rank][4 + 2 * len(self.slots)])

    def launches(
        self,
        directory: Path,
        *,
        interpret: bool = False,
        launched_as: Callable[[int, KernelSource], list[KernelSource]] = lambda rank, source: [source],
    ) -> list[Launch]:
        """Of each rank, ``launch(stream, *tensors)``.  launched_as: what is launched, one after the other."""
        made: list[Launch] = []
        for rank, own in enumerate(self.tables):
            tensors = (*self.plan.segment.inputs, *self.plan.segment.outputs)
            layouts = {t: t.domain.layout(rank) for t in tensors}
            kernel = Kernel(generate(self.plan, layouts, rank, interpret=interpret), directory, interpret=interpret)
            kernel.compile(self.device)
            parts = [kernel.launcher_of(part) for part in launched_as(rank, kernel.source)]
            made.append(lambda stream, *rest, parts=parts, own=own: [part(stream, own, *rest) for part in parts])
        return made

    def pieces(self, kind: str, rank: int, given: list[torch.Tensor]) -> dict[BoundTensor, torch.Tensor]:
        """The tensors of the kernel on ``rank``: pieces of what is ``given``, and outputs full of NaN, or of -1."""
        found = {
            t: piece(kind, k, v, len(self.slots), rank).to(self.device)
            for k, (t, v) in enumerate(zip(sorted(self.plan.segment.inputs, key=_number), given, strict=True))
        }
        for t in self.plan.segment.outputs:
            shape = t.domain.local_shape(rank)
            nothing = float("nan") if t.dtype.is_floating else -1
            made = torch.full(shape, nothing, dtype=t.dtype.torch, device=self.device)
            strides = strides_of(t.domain, rank)
            found[t] = made if strides is None else made.as_strided(shape, strides)  # as many elements, in any order
        return found


class NotedKernel:
    """A kernel of rank 0 that notes its launches: grid, integers, and what it was given."""

    driver = None

    def __init__(self, plan: KernelPlan) -> None:
        tensors = (*plan.segment.inputs, *plan.segment.outputs)
        self.source = generate(plan, {t: t.domain.layout(0) for t in tensors}, 0)
        self.launches = list[tuple[int, tuple[int, ...], tuple[object, ...]]]()

    def launcher_of(self, source: KernelSource) -> Launch:
        return lambda *given: self.launches.append((source.grid, source.integers, given))


def _number(tensor: BoundTensor) -> int:
    """Inputs come in the order of their names."""
    return int(tensor.name[1:])
