"""``check`` for many fusions at once, on ranks that are threads: a world is made once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from fusion_check import Reference, check
from ranks import run_ranks
from torch_answers import Argument, Expected, evaluate

from shardfuse import DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir.tensor_view import TensorView

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z


@dataclass
class Case:
    """``inputs``: unsharded.  ``sizes``: unsharded shapes, needed where shards are uneven and sizes symbolic."""

    fd: FusionDefinition
    inputs: Sequence[Argument]
    sizes: Mapping[TensorView, Sequence[int]] | None = None
    reference: Reference | None = None
    name: str = ""
    expected: list[Expected] = field(default_factory=list[Expected])

    def __str__(self) -> str:
        shapes = [str(list(x.shape)) if isinstance(x, torch.Tensor) else repr(x) for x in self.inputs]
        return f"{self.name} on inputs {', '.join(shapes)}:\n{self.fd!r}"


def check_on_threads(world: int, cases: Sequence[Case]) -> None:
    """Every case on every rank against torch; one plan for all threads.  What fails is named in a note."""
    for case in cases:
        try:
            case.expected = evaluate(case.fd.fusion, case.inputs)
            unsharded = dict(zip((i.val for i in case.fd.fusion.inputs), case.inputs, strict=True))
            case.fd.fec.plan(
                {
                    tv: x.shape
                    for tv, x in unsharded.items()
                    if isinstance(tv, TensorView) and isinstance(x, torch.Tensor)
                }
            )
        except Exception as error:
            error.add_note(f"planning {case}")
            raise

    def run(rank: int, _: int) -> None:
        for case in cases:
            try:
                check(case.fd, case.inputs, sizes=case.sizes, reference=case.reference, expected=case.expected)
            except Exception as error:
                error.add_note(f"rank {rank} of {world} ranks, {case}")
                raise

    run_ranks(world, run)


Placement = tuple[int, str] | None
"""An axis and ``outer`` or ``inner``; None is replicated."""


def shard(tv: TensorView, mesh: DeviceMesh, *placements: tuple[ParallelType, Placement]) -> TensorView:
    """Put ``tv`` on ``mesh``: each mesh dimension takes the outer (as ``torch.chunk`` cuts) or inner part of an axis.

    Of two on one axis the second cuts what the first leaves to a rank.
    """
    tv.set_device_mesh(mesh)
    left = list(tv.domain.loop)
    for parallel_type, placement in placements:
        if placement is None:
            continue
        axis, part = placement
        at = tv.domain.loop.index(left[axis])
        ranks = mesh.extent(parallel_type)
        if part == "outer":
            tv.outer_split(at, ranks, uneven=True)
            left[axis] = tv.domain.loop[at + 1]
        else:
            tv.inner_split(at, ranks)
            left[axis] = tv.domain.loop[at]
            at += 1
        tv.axis(at).parallelize(parallel_type)
    return tv


def world_mesh(world: int) -> DeviceMesh:
    return DeviceMesh(list(range(world)))
