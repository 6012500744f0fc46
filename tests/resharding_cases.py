"""Changes of sharding: a tensor placed in one way goes in, the same tensor placed in another comes out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from fusion_check import local_arguments, local_piece

from shardfuse import DeviceMesh, FusionDefinition, ParallelType
from shardfuse.frontend.explain import Explanation
from shardfuse.ir.domain import IterDomain
from shardfuse.ir.tensor_view import TensorView


@dataclass(frozen=True)
class Placed:
    """What one mesh dimension holds.  ``kind``: whole, partial, outer, inner (cyclic) or blocks (block-cyclic of 2)."""

    kind: str
    axis: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("whole", "partial") else f"{self.kind}{self.axis}"


WHOLE, PARTIAL = Placed("whole"), Placed("partial")
CUTS = tuple(Placed(kind, axis) for kind in ("outer", "inner", "blocks") for axis in range(3))
SOURCES, TARGETS = (WHOLE, PARTIAL, *CUTS), (WHOLE, *CUTS)

Placing = tuple[Placed, ...]


@dataclass(frozen=True)
class Case:
    """``reverse``: the last mesh dimension cuts first."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    source: Placing
    target: Placing
    reverse: tuple[bool, bool] = (False, False)

    def __str__(self) -> str:
        names = [
            ",".join(map(str, p)) + ("'" if r else "")
            for p, r in zip((self.source, self.target), self.reverse, strict=True)
        ]
        return f"{list(self.shape)} on {list(self.mesh)}: {names[0]} -> {names[1]}"

    def is_possible(self) -> bool:
        """Do the extents allow every cut?  Only the first cut of an axis may be uneven, and only an outer one."""
        return all(self._fits(placing, r) for placing, r in zip((self.source, self.target), self.reverse, strict=True))

    def _fits(self, placing: Placing, reverse: bool) -> bool:
        left = list(self.shape)
        cut = [False] * len(left)
        for mesh_dim in order(len(self.mesh), reverse):
            placed, n = placing[mesh_dim], self.mesh[mesh_dim]
            if placed.kind in ("whole", "partial"):
                continue
            k = placed.axis
            unit = 2 * n if placed.kind == "blocks" else n
            if left[k] % unit and (placed.kind != "outer" or cut[k]):
                return False
            if left[k] % unit and any(q.axis == k and q is not placed and q in CUTS for q in placing):
                return False
            cut[k] = True
            left[k] = -(-left[k] // unit)
        return True


def order(ndim: int, reverse: bool) -> Sequence[int]:
    return range(ndim)[::-1] if reverse else range(ndim)


def place(tv: TensorView, mesh: DeviceMesh, placing: Placing, reverse: bool) -> None:
    tv.set_device_mesh(mesh)
    leading = sum(p.kind == "partial" for p in placing)
    rest: list[IterDomain] = list(tv.domain.loop[leading:])
    partial = iter(range(leading))
    for mesh_dim, placed in enumerate(placing):
        if placed.kind == "partial":
            tv.axis(next(partial)).parallelize(mesh.parallel_types[mesh_dim])
    for mesh_dim in order(mesh.ndim, reverse):
        placed, n = placing[mesh_dim], mesh.shape[mesh_dim]
        if placed.kind in ("whole", "partial"):
            continue
        at = tv.domain.loop.index(rest[placed.axis])
        if placed.kind == "outer":
            tv.outer_split(at, n, uneven=tv.axis(at).extent % n != 0)
            mine, left = at, at + 1
        else:
            if placed.kind == "blocks":
                tv.inner_split(at, 2)
            tv.inner_split(at, n)
            mine, left = at + 1, at
        rest[placed.axis] = tv.domain.loop[left]
        tv.axis(mine).parallelize(mesh.parallel_types[mesh_dim])


def run(case: Case, rank: int, device: torch.device | str = "cpu") -> Explanation:
    """Runs a case on one rank, compares its piece with the one cut by hand, and says what it took."""
    mesh = DeviceMesh(torch.arange(torch.Size(case.mesh).numel()).reshape(case.mesh))
    partial = [n for n, placed in zip(case.mesh, case.source, strict=True) if placed.kind == "partial"]
    with FusionDefinition() as fd:
        x = fd.define_tensor([*partial, *case.shape], contiguity=True)
        y = fd.ops.sum(x, list(range(len(partial)))) if partial else fd.ops.set(x)
        fd.add_output(y)
        place(x, mesh, case.source, case.reverse[0])
        place(y, mesh, case.target, case.reverse[1])
    full = torch.arange(float(torch.Size(case.shape).numel())).reshape(case.shape)
    draw = torch.Generator().manual_seed(0)
    summands = (
        [torch.randint(-99, 99, case.shape, generator=draw).float() for _ in range(torch.Size(partial).numel() - 1)]
        if partial
        else []
    )
    value = torch.stack([full - sum(summands), *summands]).reshape(*partial, *case.shape) if partial else full
    arguments = [a.to(device) for a in local_arguments(fd.fusion, [value], rank) if isinstance(a, torch.Tensor)]
    (out,) = fd.execute(arguments)
    expected = local_piece(y, full, rank)
    assert expected is not None
    assert torch.equal(out.cpu(), expected), (
        f"{case}: rank {rank} has {out.flatten()[:8]}, not {expected.flatten()[:8]}"
    )
    plan = fd.fec.last_plan
    assert plan is not None
    if plan.segments[-1].scheduler == "communication":
        assert out.is_contiguous(), f"{case}: kernels read what a collective made as contiguous"
    return fd.explain()


def pairs(mesh: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Case]:
    """Every source with every target, one mesh dimension cutting after the other."""
    sources, targets = (itertools.product(kinds, repeat=len(mesh)) for kinds in (SOURCES, TARGETS))
    for source, target in itertools.product(list(sources), list(targets)):
        case = Case(mesh, shape, source, target)
        if case.is_possible():
            yield case


def sample(mesh: tuple[int, ...], shape: tuple[int, ...], count: int, seed: int) -> list[Case]:
    """Some of the pairs, in either order of cuts."""
    rng = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        source = tuple(rng.choice(SOURCES) for _ in mesh)
        target = tuple(rng.choice(TARGETS) for _ in mesh)
        case = Case(mesh, shape, source, target, (rng.random() < 0.5, rng.random() < 0.5))
        if case.is_possible():
            found.append(case)
    return found


def parallel_types(mesh: tuple[int, ...]) -> tuple[ParallelType, ...]:
    return DeviceMesh(torch.arange(torch.Size(mesh).numel()).reshape(mesh)).parallel_types
