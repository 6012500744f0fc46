"""Partial sums of which each rank adds up some rows and passes them on, however few there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.device import H200, here
from shardfuse.in_kernel import exchanging
from shardfuse.ir.tensor_view import TensorView
from shardfuse.mesh.process import ProcessContext
from shardfuse.schedulers import sent_words
from shardfuse.schedulers.exchange_forms import Form, exchanged_form

EPS = 1e-5
Define = Callable[[FusionDefinition, TensorView, TensorView, TensorView], list[TensorView]]


@dataclass(frozen=True)
class Program:
    """Of (summands of all ranks, residual, weight).  define: the results, of these; eager: the same in torch.

    overwrites: is the first result the residual's storage?  form: of its kernel, of rows for each rank.
    """

    define: Define
    eager: Callable[[Tensor, Tensor, Tensor], list[Tensor]]
    overwrites: bool = False
    form: Form = Form.PASSED

    def fusion(self, ranks: int, n: int, dtype: DataType) -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([ranks, -1, -1, n], contiguity=True, dtype=dtype)
            residual = fd.define_tensor([-1, -1, n], dtype=dtype)
            w = fd.define_tensor([n], contiguity=True, dtype=dtype)
            for k, out in enumerate(self.define(fd, x, residual, w)):
                fd.add_output(fd.ops.cast(out, dtype), *([residual] if self.overwrites and not k else []))
            x.set_device_mesh(DeviceMesh(range(ranks)))
            x.axis(0).parallelize(ParallelType.mesh_x)
        return fd

    def expected(self, given: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Of sums that are rounded to the type of what is given, where the program says so."""
        x, residual, w = (t.to(dtype) for t in given)
        total = x.sum(0)
        return self.eager(total.to(given[0].dtype).to(dtype) if self.form is Form.PASSED else total, residual, w)


def _normed(fd: FusionDefinition, total: TensorView, w: TensorView) -> TensorView:
    o = fd.ops
    return o.mul(o.mul(total, o.rsqrt(o.add(o.mean(o.mul(total, total), [-1], keepdim=True), EPS))), w)


def _norm_of_16_bits(fd: FusionDefinition, x: TensorView, residual: TensorView, w: TensorView) -> list[TensorView]:
    total = fd.ops.add(fd.ops.sum(x, [0]), residual)
    return [total, _normed(fd, fd.ops.cast(total, DataType.Float), w)]


def _norm_of_scaled(fd: FusionDefinition, x: TensorView, residual: TensorView, w: TensorView) -> list[TensorView]:
    """Of summands that are scaled before, whose float32 sum is rounded at once."""
    o = fd.ops
    summed = o.cast(o.sum(o.mul(o.cast(x, DataType.Float), 0.5), [0]), x.dtype)
    total = o.add(o.cast(summed, DataType.Float), residual)
    return [_normed(fd, total, w), total]


def _layer_norm(fd: FusionDefinition, x: TensorView, residual: TensorView, w: TensorView) -> list[TensorView]:
    o = fd.ops
    total = o.cast(o.sum(x, [0]), DataType.Float)
    var, mean = o.var_mean(total, [-1], correction=0, keepdim=True)
    return [o.add(o.mul(o.mul(o.sub(total, mean), o.rsqrt(o.add(var, EPS))), w), residual)]


def _centred_of_32_bits(fd: FusionDefinition, x: TensorView, residual: TensorView, w: TensorView) -> list[TensorView]:
    """Of a float32 sum with an offset, of which 16 bits would leave little."""
    o = fd.ops
    total = o.add(o.sum(o.cast(x, DataType.Float), [0]), o.mul(o.add(residual, 20.0), 0.0))
    var, mean = o.var_mean(total, [-1], correction=0, keepdim=True)
    return [o.mul(o.mul(o.sub(total, mean), o.rsqrt(o.add(var, EPS))), w)]


def _largest_of_32_bits(fd: FusionDefinition, x: TensorView, residual: TensorView, w: TensorView) -> list[TensorView]:
    o = fd.ops
    total = o.sum(o.cast(x, DataType.Float), [0])
    largest = o.ge(total, o.max(total, [-1], keepdim=True))
    return [o.add(o.cast(largest, DataType.Float), o.mul(o.add(residual, w), 0.0))]


def _rms(total: Tensor, w: Tensor) -> Tensor:
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * w


PROGRAMS = {
    "16 bits": Program(_norm_of_16_bits, lambda x, r, w: [x + r, _rms(x + r, w)], overwrites=True),
    "scaled": Program(_norm_of_scaled, lambda x, r, w: [_rms(x / 2 + r, w), x / 2 + r]),
    "layer norm": Program(_layer_norm, lambda x, r, w: [functional.layer_norm(x, x.shape[-1:], w, None, EPS) + r]),
    "centred": Program(
        _centred_of_32_bits, lambda x, r, w: [functional.layer_norm(x, x.shape[-1:], w, None, EPS)], form=Form.ROWS
    ),
    "largest": Program(
        _largest_of_32_bits, lambda x, r, w: [(x >= x.amax(-1, keepdim=True)).to(x.dtype)], form=Form.ROWS
    ),
}  # fmt: skip
SHAPES = ((2, 3, 96), (1, 4, 640), (5, 1, 40), (2, 8, 96))
"""[batch, sequence, hidden]: rows that ranks share evenly or not, rows of several blocks, and one that fills none."""


class Trial:
    """One of ``PROGRAMS`` on this rank."""

    def __init__(self, name: str, rank: int, n: int, dtype: DataType, device: torch.device) -> None:
        self.program, self.name, self.rank, self.device = PROGRAMS[name], name, rank, device
        self.ranks, self.n, self.dtype = dist.get_world_size(), n, dtype.torch
        self.fd = self.program.fusion(self.ranks, n, dtype)

    def given(self, batch: int, sequence: int, seed: int) -> list[Tensor]:
        """Whole; the rows of the residual do not lie one behind the other."""
        made = torch.Generator().manual_seed(seed)
        shapes = [(self.ranks, batch, sequence, self.n), (sequence, batch, self.n), (self.n,)]
        x, residual, w = (torch.randn(s, generator=made, dtype=torch.float64).to(self.dtype) for s in shapes)
        return [x + 8.0 if self.name == "centred" else x, residual.transpose(0, 1), w]

    def here(self, given: Sequence[Tensor]) -> list[Tensor]:
        """This rank's, of its own memory."""
        x, residual, w = given
        own = [x[self.rank : self.rank + 1], residual.transpose(0, 1).clone().transpose(0, 1), w]
        return [t.to(self.device) for t in own]

    def run(self, here: Sequence[Tensor]) -> list[Tensor]:
        found = self.fd.execute(list(here))
        return [*([here[1]] if self.program.overwrites else []), *found]

    def check(self, batch: int, sequence: int, seed: int) -> None:
        given = self.given(batch, sequence, seed)
        found = self.run(self.here(given))
        wide, eager = (self.program.expected(given, dtype) for dtype in (torch.float64, torch.float32))
        for k, (x, y, z) in enumerate(zip(found, wide, eager, strict=True)):
            what = f"{self.name}, output {k} of {batch} x {sequence} x {self.n} on rank {self.rank}"
            assert_near(x.cpu(), y, z.to(self.dtype), n=3, what=what)

    def form(self) -> Form:
        """Of the one kernel that the last sizes have."""
        plan = self.fd.fec.last_plan
        assert [s.scheduler for s in plan.segments] == ["exchange"], plan.in_kernel
        ((_, kernel),) = exchanging(plan)
        return exchanged_form(kernel)


def _own_summand_twice(fd: FusionDefinition, x: TensorView, given: Sequence[TensorView]) -> TensorView:
    """What is added up of all ranks' summands is not the same on all."""
    total = fd.ops.add(fd.ops.cast(x, DataType.Float), fd.ops.broadcast(given[0], [True, False, False]))
    for piece in given[1:]:
        total = fd.ops.add(total, fd.ops.broadcast(piece, [True, False, False]))
    return total


def _normed_summand(fd: FusionDefinition, x: TensorView, given: Sequence[TensorView]) -> TensorView:
    """A row of one rank is reduced before it is added."""
    total = fd.ops.mul(given[0], fd.ops.rsqrt(fd.ops.mean(fd.ops.mul(given[0], given[0]), [-1], keepdim=True)))
    for piece in given[1:]:
        total = fd.ops.add(total, piece)
    return total


def _check_not_passed(define: Callable[..., TensorView], rank: int, ranks: int, rows: int = 7, n: int = 96) -> None:
    with FusionDefinition() as fd:
        o, mesh = fd.ops, DeviceMesh(range(ranks))
        x = fd.define_tensor([ranks, -1, n], contiguity=True, dtype=DataType.BFloat16)
        whole = o.set(x)
        total = define(fd, x, [o.cast(o.select(whole, k, 0), DataType.Float) for k in range(ranks)])
        total = o.cast(o.cast(total, DataType.BFloat16), DataType.Float)
        fd.add_output(o.cast(o.mul(total, o.rsqrt(o.mean(o.mul(total, total), [-1], keepdim=True))), DataType.BFloat16))
        x.set_device_mesh(mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
        whole.set_device_mesh(mesh)
    given = torch.randint(-3, 4, (ranks, rows, n), generator=torch.Generator().manual_seed(1)).bfloat16()
    (found,) = fd.execute([given[rank : rank + 1]])
    wide, eager = (_of_all(define, given.to(dtype), rank) for dtype in (torch.float64, torch.float32))
    assert_near(
        found, wide.view_as(found), eager.bfloat16().view_as(found), n=3, what=f"{define.__name__} on rank {rank}"
    )


def _of_all(define: Callable[..., TensorView], x: Tensor, rank: int) -> Tensor:
    if define is _own_summand_twice:
        total = x.sum(0) + x[rank]
    else:
        total = x[0] * torch.rsqrt(x[0].square().mean(-1, keepdim=True)) + x[1:].sum(0)
    total = total.bfloat16().to(x.dtype)
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True))


def run_passed(context: ProcessContext) -> None:
    """Also calls whose sizes change, behind one another: turns go on from each to the next."""
    sent_words.MOST_ELEMENTS = 0
    tuned = replace(H200.measured, collectives=replace(H200.measured.collectives, another_turn=0.0))
    here.H200 = replace(H200, measured=tuned)
    for k, (name, (batch, sequence, n)) in enumerate((p, s) for p in PROGRAMS for s in SHAPES):
        dtype = (DataType.BFloat16, DataType.Half)[k % 2]
        trial = Trial(name, context.rank, n, dtype, context.device)
        for seed, (rows, others) in enumerate(((batch, sequence), (1, 2), (batch, sequence))):
            trial.check(rows, others, seed)
            assert trial.form() is (trial.program.form if rows * others >= trial.ranks else Form.ROWS)
    for define in (_own_summand_twice, _normed_summand):
        _check_not_passed(define, context.rank, context.world_size)
