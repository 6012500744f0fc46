"""Partial sums of which each rank adds up some rows and passes them on, however few there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
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

    is_rounded: is the sum of the ranks asked for in 16 bits?  overwrites: is the first result the residual's storage?
    """

    define: Define
    eager: Callable[[Tensor, Tensor, Tensor], list[Tensor]]
    is_rounded: bool = False
    overwrites: bool = False

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
        x, residual, w = (t.to(dtype) for t in given)
        total = x.sum(0)
        return self.eager(total.to(given[0].dtype).to(dtype) if self.is_rounded else total, residual, w)


def _normed(fd: FusionDefinition, total: TensorView, w: TensorView) -> TensorView:
    o = fd.ops
    return o.mul(o.mul(total, o.rsqrt(o.add(o.mean(o.mul(total, total), [-1], keepdim=True), EPS))), w)


def _norm_of_16_bits(fd: FusionDefinition, x: TensorView, residual: TensorView, w: TensorView) -> list[TensorView]:
    total = fd.ops.add(fd.ops.sum(x, [0]), residual)
    return [total, _normed(fd, fd.ops.cast(total, DataType.Float), w)]


def _norm_of_32_bits(fd: FusionDefinition, x: TensorView, residual: TensorView, w: TensorView) -> list[TensorView]:
    """Of summands that are scaled before."""
    o = fd.ops
    summed = o.sum(o.mul(o.cast(x, DataType.Float), 0.5), [0])
    total = o.add(summed, residual)
    return [_normed(fd, total, w), total]


def _layer_norm(fd: FusionDefinition, x: TensorView, residual: TensorView, w: TensorView) -> list[TensorView]:
    o = fd.ops
    total = o.sum(o.cast(x, DataType.Float), [0])
    var, mean = o.var_mean(total, [-1], correction=0, keepdim=True)
    return [o.add(o.mul(o.mul(o.sub(total, mean), o.rsqrt(o.add(var, EPS))), w), residual)]


def _rms(total: Tensor, w: Tensor) -> Tensor:
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * w


PROGRAMS = {
    "16 bits": Program(
        _norm_of_16_bits, lambda x, r, w: [x + r, _rms(x + r, w)], is_rounded=True, overwrites=True
    ),
    "32 bits": Program(_norm_of_32_bits, lambda x, r, w: [_rms(x / 2 + r, w), x / 2 + r]),
    "layer norm": Program(_layer_norm, lambda x, r, w: [functional.layer_norm(x, x.shape[-1:], w, None, EPS) + r]),
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
        return [x, residual.transpose(0, 1), w]

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


def run_passed(context: ProcessContext) -> None:
    """Also calls whose sizes change, behind one another: turns go on from each to the next."""
    sent_words._ANOTHER_TURN, sent_words.MOST_ELEMENTS = 0.0, 0  # pyright: ignore[reportPrivateUsage]
    for k, (name, (batch, sequence, n)) in enumerate((p, s) for p in PROGRAMS for s in SHAPES):
        dtype = (DataType.BFloat16, DataType.Half)[k % 2]
        trial = Trial(name, context.rank, n, dtype, context.device)
        for seed, (rows, others) in enumerate(((batch, sequence), (1, 2), (batch, sequence))):
            trial.check(rows, others, seed)
            assert trial.form() is (Form.PASSED if rows * others >= trial.ranks else Form.ROWS)
