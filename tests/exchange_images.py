"""Norms of images that are sharded over ranks, with statistics over more than a program holds, and what torch makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from exchange_cases import EPS, Ranks, kernel_of
from exchange_fusions import part_of
from torch.nn.functional import batch_norm, group_norm

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.compiler import compile_fusion
from shardfuse.device import H200, Device
from shardfuse.in_kernel import with_exchanges
from shardfuse.passes.settle_inputs import settle_inputs
from shardfuse.schedulers.plan import KernelPlan


@dataclass(frozen=True)
class ImageNorm:
    """Of [batch, channels, height, width] in bfloat16, which ``dim`` shards; groups: 0 for a batch norm."""

    shape: tuple[int, int, int, int]
    dim: int
    groups: int
    ranks: int

    def plan(self, device: Device = H200) -> KernelPlan:
        n, c, h, w = self.shape
        with FusionDefinition() as fd:
            o = fd.ops
            given = fd.define_tensor(list(self.shape), contiguity=True, dtype=DataType.BFloat16)
            weight, bias = (fd.define_tensor([c], contiguity=True, dtype=DataType.Float) for _ in range(2))
            x, axes = o.cast(given, DataType.Float), [0, 2, 3]
            if self.groups:
                x, axes = o.reshape(x, [n, self.groups, c // self.groups, h, w]), [2, 3, 4]
            var, mean = o.var_mean(x, axes, 0, True)
            y = o.reshape(o.mul(o.sub(x, mean), o.rsqrt(o.add(var, EPS))), list(self.shape))
            weight, bias = (o.broadcast(t, [True, False, True, True]) for t in (weight, bias))
            fd.add_output(o.cast(o.add(o.mul(y, weight), bias), DataType.BFloat16))
        size = self.shape[self.dim]
        given.set_device_mesh(DeviceMesh(range(self.ranks)))
        given.outer_split(self.dim, self.ranks, uneven=size % self.ranks != 0)
        given.axis(self.dim).parallelize(ParallelType.mesh_x)
        settle_inputs(fd.fusion)
        sizes = {i.val: tuple(i.val.shape) for i in fd.fusion.inputs}
        return kernel_of(with_exchanges(compile_fusion(fd.fusion, sizes, device=device, has_cheap_sums=True)))

    @property
    def rows(self) -> int:
        """Channels, or groups of all images."""
        return self.shape[0] * self.groups or self.shape[1]

    def inputs(self) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(sum(self.shape))
        x = torch.randn(self.shape, generator=made, dtype=torch.float64)
        x *= torch.linspace(0.5, 2.0, self.shape[1], dtype=torch.float64)[:, None, None]
        vectors = [torch.randn(self.shape[1], generator=made) for _ in range(2)]
        return [x.bfloat16(), *vectors]

    def pieces(self, world: Ranks, given: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Of each rank what its kernel is given: pieces of inputs, and outputs full of NaN."""
        parts = [part_of(given[0], self.ranks, self.dim, rank) for rank in range(self.ranks)]
        found = list[list[torch.Tensor]]()
        for rank in range(self.ranks):
            own = {"x": parts[rank].contiguous(), "weight": given[1], "bias": given[2]}
            tensors = [own[name].to(world.device) for name in ("x", "weight", "bias")]
            by_name = dict(zip(sorted(world.plan.segment.inputs, key=lambda t: int(t.name[1:])), tensors, strict=True))
            (out,) = world.plan.segment.outputs
            made = torch.full(out.domain.local_shape(rank), float("nan"), dtype=torch.bfloat16, device=world.device)
            found.append([*(by_name[t] for t in world.plan.segment.inputs), made])
        return found

    def check(self, tensors: Sequence[Sequence[torch.Tensor]], given: Sequence[torch.Tensor]) -> None:
        found = torch.cat([own[-1].cpu().reshape(self._local(rank)) for rank, own in enumerate(tensors)], self.dim)
        wide, eager = (self._expected([t.to(dtype) for t in given]) for dtype in (torch.float64, torch.float32))
        bias = given[2].double()[:, None, None]
        terms = (wide - bias).abs() + bias.abs()
        assert_near(found, wide, eager.bfloat16(), n=2, rows=None, terms=terms, what=str(self))

    def _local(self, rank: int) -> list[int]:
        part = part_of(torch.empty(self.shape, device="meta"), self.ranks, self.dim, rank)
        return list(part.shape)

    def _expected(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        x, weight, bias = given
        if self.groups:
            return group_norm(x, self.groups, weight, bias, EPS)
        return batch_norm(x, None, None, weight, bias, True, 0.0, EPS)


LONG = (
    ImageNorm((4, 3, 160, 112), 0, 0, 2),
    ImageNorm((5, 2, 160, 112), 0, 0, 2),
    ImageNorm((1, 4, 256, 140), 2, 2, 2),
    ImageNorm((1, 4, 97, 512), 2, 2, 2),
)
"""Channels and groups of more than 64 KB on a rank; the second and the last are cut unevenly."""
