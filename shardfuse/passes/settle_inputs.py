"""settle_inputs: inputs about which nothing was said get the sharding that the fusion reads them in, sizes still unknown.

before (T0 was cut by ``outer_split(0, 2, uneven=True)`` and put on mesh_x; nothing was said of T1)::

    T2 = add(T0[i0o@mesh_x, i0i, i1], T1[i0, i1])

after::

    T2 = add(T0[i0o@mesh_x, i0i, i1], T1[i0o@mesh_x, i0i, i1])

What a rank hands over for T1 is then its shard, as for T0.  Sizes are needed to follow axes through the ops, so the
fusion is bound to sizes that any cut divides, and what propagation finds for T1 is recorded in T1's own domain.
"""

from __future__ import annotations

from math import prod

from ..errors import ShapeError, ShardingError
from ..ir.digits import cut_out
from ..ir.domain import BoundDomain, Merge
from ..ir.expr import BoundTensor
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from .bind import bind
from .propagate import propagate_shardings


def settle_inputs(fusion: Fusion) -> None:
    """Changes the domains of inputs without a mesh.  A fusion whose shapes need their real sizes is left as it is."""
    inputs = [i.val for i in fusion.inputs if isinstance(i.val, TensorView)]
    meshes = dict.fromkeys(tv.domain.mesh for tv in fusion.tensors() if tv.domain.mesh is not None)
    unsaid = [tv for tv in inputs if tv.domain.mesh is None]
    if not meshes or not unsaid:
        return
    size = 8 * prod(mesh.size for mesh in meshes) ** 2
    try:
        bound = bind(fusion, {tv: [size if n < 0 else n for n in tv.shape] for tv in inputs})
    except (ShapeError, ShardingError):
        return  # told again, with the real sizes, when the fusion is run
    propagate_shardings(bound)
    uneven = _has_uneven(fusion)
    for declared, tensor in zip(fusion.inputs, bound.inputs, strict=True):
        tv = declared.val
        if isinstance(tv, TensorView) and isinstance(tensor, BoundTensor) and tv in unsaid and tensor.domain.mesh:
            _record(tv, tensor.domain, uneven)


def _has_uneven(fusion: Fusion) -> bool:
    return any(not isinstance(t, Merge) and t.uneven for tv in fusion.tensors() for t in tv.domain.transforms)


def _record(tv: TensorView, domain: BoundDomain, uneven: bool) -> None:
    """Write ``domain``'s sharding as splits of ``tv``: outer parts of axes, outermost mesh dimension first, or inner parts."""
    mesh = domain.mesh
    assert mesh is not None, "only a tensor on a mesh is recorded"
    tv.set_device_mesh(mesh)
    left = list(domain.logical)
    for parallel_type, digits in domain.sharding:
        for k, axis in enumerate(domain.logical):
            found = cut_out(left[k], digits[0]) if len(digits) == 1 else None
            if found is None:
                continue
            at = tv.domain.loop.index(next(i for i in reversed(tv.domain.loop) if i.name.startswith(f"i{k}")))
            above, below = found
            if axis == digits:
                tv.axis(at).parallelize(parallel_type)
            elif not above:
                tv.outer_split(at, mesh.extent(parallel_type), uneven=uneven)
                tv.axis(at).parallelize(parallel_type)
            elif not below:
                tv.inner_split(at, mesh.extent(parallel_type))
                tv.axis(at + 1).parallelize(parallel_type)
            left[k] = below or above
