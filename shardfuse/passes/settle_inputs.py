"""settle_inputs: inputs about which nothing was said get the sharding that the fusion reads them in, sizes unknown.

before (nothing was said of T1)::

    T0.set_device_mesh(DeviceMesh([0, 1]))
    T0.split(0, 2, inner_split=False, uneven=True)
    T0.axis(0).parallelize(ParallelType.mesh_x)

after (T2 is the sum of T0 and T1)::

    T0.set_device_mesh(DeviceMesh([0, 1]))
    T0.split(0, 2, inner_split=False, uneven=True)
    T0.axis(0).parallelize(ParallelType.mesh_x)
    T1.set_device_mesh(DeviceMesh([0, 1]))
    T1.split(0, 2, inner_split=False, uneven=True)
    T1.axis(0).parallelize(ParallelType.mesh_x)

What a rank hands over for T1 is then its shard, as for T0.  Sizes are needed to follow axes through the ops, so the
fusion is bound to sizes that any cut divides, and what propagation finds for T1 is recorded in T1's own domain; for an
input that nothing reads, what it finds for the output that replaces it.  Where that is no split that can be said
without sizes, or the fusion cannot be bound without them, T1 is replicated: of several meshes, on the first of the
largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..analysis.extents import equal_extents
from ..analysis.sharding import is_even
from ..errors import ScheduleError, ShapeError, ShardingError
from ..ir.digits import Axis, Digit, cut_out
from ..ir.domain import BoundDomain, IterDomain, Merge
from ..ir.expr import BoundTensor
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from ..mesh import DeviceMesh, ParallelType
from .bind import bind
from .propagate import propagate_shardings


def settle_inputs(fusion: Fusion) -> None:
    """Changes the domains of inputs without a mesh, where some tensor of the fusion has one."""
    inputs = [i.val for i in fusion.inputs if isinstance(i.val, TensorView)]
    meshes = list(dict.fromkeys(tv.domain.mesh for tv in fusion.tensors() if tv.domain.mesh is not None))
    unsaid = [tv for tv in inputs if tv.domain.mesh is None]
    if not meshes or not unsaid:
        return
    largest = max(meshes, key=lambda mesh: mesh.size)
    try:
        bound = bind(fusion, _stand_ins(fusion, meshes))
    except (ShapeError, ShardingError, ScheduleError):
        for tv in unsaid:
            tv.set_device_mesh(largest)
        return
    propagate_shardings(bound)
    uneven = _has_uneven(fusion)
    written = {target: out for out, target in bound.aliases.items()}
    for declared, tensor in zip(fusion.inputs, bound.inputs, strict=True):
        tv = declared.val
        if isinstance(tv, TensorView) and isinstance(tensor, BoundTensor) and tv in unsaid:
            domain = (tensor if tensor.domain.mesh else written.get(tensor, tensor)).domain
            if domain.mesh is not None:
                _record(tv, domain, domain.mesh, uneven)
            elif tensor in written:  # at other sizes the output may be found sharded: it is as the input is
                tv.set_device_mesh(largest)


def _stand_ins(fusion: Fusion, meshes: list[DeviceMesh]) -> dict[TensorView, list[int]]:
    """For a symbolic size the static one of an axis that it must equal, else one that any cut divides."""
    classes = equal_extents(fusion)
    static = {classes[a]: a.extent for tv in fusion.tensors() for a in tv.domain.logical if a.extent not in (-1, 1)}
    size = 8 * prod(mesh.size for mesh in meshes) ** 2
    inputs = [i.val for i in fusion.inputs if isinstance(i.val, TensorView)]
    return {
        tv: [a.extent if a.extent >= 0 else static.get(classes[a], size) for a in tv.domain.logical] for tv in inputs
    }


def _has_uneven(fusion: Fusion) -> bool:
    return any(not isinstance(t, Merge) and t.uneven for tv in fusion.tensors() for t in tv.domain.transforms)


def _record(tv: TensorView, domain: BoundDomain, mesh: DeviceMesh, uneven: bool) -> None:
    """Write ``domain``'s sharding as splits of ``tv``: outer and inner parts of what is left of an axis."""
    tv.set_device_mesh(mesh)
    axes = tv.domain.replay(dict(zip(tv.domain.logical, domain.logical, strict=True)))
    left = {i: axes[i] for i in tv.domain.loop if i not in tv.domain.parallel}
    todo = [(p, digits[0]) for p, digits in domain.sharding if len(digits) == 1]
    while todo:
        places = [(place, entry) for entry in todo if (place := _place(left, entry[1])) is not None]
        turns = [(turn, entry) for place, entry in places if (turn := _turn(place, *entry, mesh)) is not None]
        if not turns:
            return
        found = min(turns, key=lambda item: item[0])[1]
        todo.remove(found)
        _split(tv, left, *found, mesh.extent(found[0]), uneven)


def _turn(
    place: tuple[IterDomain, Axis, Axis], parallel_type: ParallelType, digit: Digit, mesh: DeviceMesh
) -> int | None:
    """Inner parts that divide the axis first, then outer parts: what these leave may be short, and is not cut again."""
    if not place[1]:
        return 1
    return 0 if is_even((digit,), mesh.extent(parallel_type)) else None


Left = dict[IterDomain, Axis]
"""What each loop axis that is not on the mesh walks."""


def _place(left: Mapping[IterDomain, Axis], digit: Digit) -> tuple[IterDomain, Axis, Axis] | None:
    """The loop axis whose outer or inner part ``digit`` is, and what stands above and below."""
    for axis, walked in left.items():
        found = cut_out(walked, digit)
        if found is not None and not (found[0] and found[1]):
            return axis, *found
    return None


def _split(tv: TensorView, left: Left, parallel_type: ParallelType, digit: Digit, ranks: int, uneven: bool) -> None:
    place = _place(left, digit)
    assert place is not None, f"{digit} is no part of an axis of {tv}"
    axis, above, below = place
    at = tv.domain.loop.index(axis)
    del left[axis]
    if above:
        tv.inner_split(at, ranks)
        left[tv.domain.loop[at]] = above
        at += 1
    elif below or digit.extent != ranks:
        tv.outer_split(at, ranks, uneven=uneven)
        left[tv.domain.loop[at + 1]] = below
    tv.axis(at).parallelize(parallel_type)
