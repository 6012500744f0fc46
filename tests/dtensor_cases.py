"""Fusions over DTensors against torch on the unsharded tensors; DTensor's own code cuts shards and joins them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch_answers import assert_like

from shardfuse import FusionDefinition
from shardfuse.frontend.dtensor import has_dtensor


def numbers(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal, and multiples of 1/1024: sums of a few of them, as partial values are, are exact in float32."""
    x = torch.randn(list(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.mul(1024).round().div(1024).to(dtype)


def make_mesh(shape: Sequence[int], device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, tuple(shape), mesh_dim_names=("dp", "tp", "pp")[: len(shape)])


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """As torch cuts, one mesh dimension after the other; partial values are random summands (factors) of ``full``."""
    local = full
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for mesh_dim, placement in enumerate(placements):
        n, k = mesh.size(mesh_dim), coordinate[mesh_dim]
        if isinstance(placement, Partial):
            local = partial_value(local, placement.reduce_op, n, k, mesh_dim)
        elif not isinstance(placement, Replicate):
            pieces, _ = cast(Any, placement)._split_tensor(local, n, with_padding=False, contiguous=True)
            local = pieces[k]
    return DTensor.from_local(
        local.contiguous().clone().to(mesh.device_type),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def partial_value(full: torch.Tensor, op: str, n: int, k: int, seed: int) -> torch.Tensor:
    noise = numbers((n, *full.shape), 100 + seed, full.dtype)
    match op:
        case "sum":
            return full - noise[1:].sum(0) if k == 0 else noise[k]
        case "avg":
            return n * full - noise[1:].sum(0) if k == 0 else noise[k]
        case "max":
            return full if k == n - 1 else full - noise[k].abs()
        case "min":
            return full if k == n - 1 else full + noise[k].abs()
        case _:
            raise AssertionError(op)


def rms_norm(fd: FusionDefinition, shape: Sequence[int], hidden: int) -> None:
    x, w = fd.define_tensor(list(shape), contiguity=True), fd.define_tensor([hidden], contiguity=True)
    mean = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
    fd.add_output(fd.ops.mul(fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))), w))


def check_norm(
    mesh_shape: Sequence[int], shape: Sequence[int], placements: Sequence[Placement], device: str = "cpu"
) -> DTensor:
    """RMSNorm of a DTensor: the output lives where the input does (where it is partial: replicated)."""
    mesh = make_mesh(mesh_shape, device)
    x, w = numbers(shape), numbers(shape[-1:], 1)
    with FusionDefinition() as fd:
        rms_norm(fd, [-1] * len(shape), shape[-1])
    w_placements = [
        Shard(0) if isinstance(p, Shard | _StridedShard) and p.dim == len(shape) - 1 else Replicate()
        for p in placements
    ]
    w_placements = [
        _StridedShard(0, split_factor=p.split_factor) if isinstance(p, _StridedShard) and p.dim == len(shape) - 1 else q
        for p, q in zip(placements, w_placements, strict=True)
    ]
    for _ in range(2):
        (y,) = fd.execute_with_dtensors([distribute(x, mesh, placements), distribute(w, mesh, w_placements)])
    assert has_dtensor([y])
    out = cast(DTensor, y)
    expected = torch.nn.functional.rms_norm(x, (shape[-1],), w, 1e-6)
    extents = zip(placements, mesh_shape, strict=True)
    wanted = tuple(Replicate() if p.is_partial() or n == 1 else p for p, n in extents)
    assert out.placements == wanted, f"{out.placements}, not {wanted}"
    assert tuple(out.shape) == tuple(shape)
    assert out.stride() == expected.stride()

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (shape[-1],), w, 1e-6)

    assert_like(out.to_local().cpu(), norm, x, w, place=lambda t: distribute(t, mesh, wanted).to_local().cpu())
    assert_like(out.full_tensor().cpu(), norm, x, w)
    return out


def check_sum(
    define: Callable[[FusionDefinition], None],
    inputs: Sequence[tuple[torch.Tensor, Sequence[Placement]]],
    mesh: DeviceMesh,
    expected: Callable[..., Sequence[torch.Tensor]],
) -> list[DTensor]:
    """``expected``: torch's function of the unsharded inputs, whose results the outputs are."""
    with FusionDefinition() as fd:
        define(fd)
    outputs = [cast(DTensor, y) for y in fd.execute([distribute(x, mesh, p) for x, p in inputs])]
    assert_like([y.full_tensor().cpu() for y in outputs], expected, *(x for x, _ in inputs))
    return outputs
