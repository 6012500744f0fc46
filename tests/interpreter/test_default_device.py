"""A default device and dtype of the caller's are no business of what runs on the host: tables, seeds, places, meshes.

``meta`` stands for any other device than the CPU: nothing can be read there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.nn import DropoutAddNorm
from shardfuse.optim import AdamW

ELSEWHERE = torch.device("meta")


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 7


@pytest.mark.parametrize("backend", ["torch", None])
def test_a_fusion(backend: str | None) -> None:
    """Host scalars, random numbers, windows, and an input whose elements may meet."""
    x, tangled = numbers(4, 4), torch.zeros(8).float().as_strided((2, 3), (3, 2))
    tangled.copy_(numbers(2, 3))
    with ELSEWHERE:
        with FusionDefinition(backend=backend) as fd:
            o, t, s = fd.ops, fd.define_tensor([4, 4]), fd.define_scalar()
            u = fd.define_tensor([2, 3])
            fd.add_output(o.mul(t, o.add(o.exp(s), 1)))
            fd.add_output(o.pad(o.exp(o.slice(t, [0, 1], [4, 4])), [1, 1]))
            fd.add_output(o.mul(o.uniform(0.0, 1.0, [4, 4], dtype=DataType.Float), 0.0))
            fd.add_output(o.neg(u), u)
        found = fd.execute([x, 0.5, tangled])
    padded = torch.nn.functional.pad(x[:, 1:].exp(), (1, 1))
    for y, expected in zip(found, (x * (torch.tensor(0.5).exp().item() + 1), padded, x * 0), strict=True):
        assert y.device.type == "cpu"
        assert y.dtype == torch.float32
        assert torch.allclose(y, expected.float())
    assert torch.equal(tangled, -numbers(2, 3))


def test_ranks() -> None:
    full = numbers(5, 4)

    def run(rank: int, size: int) -> list[torch.Tensor]:
        with ELSEWHERE:
            mesh = DeviceMesh(range(size))
            with FusionDefinition() as fd:
                x = fd.define_tensor([-1, 4])
                y = fd.ops.set(x)
                for t, dim in ((x, 0), (y, 1)):
                    t.set_device_mesh(mesh)
                    t.outer_split(dim, size, uneven=True)
                    t.axis(dim).parallelize(ParallelType.mesh_x)
                fd.add_output(fd.ops.amax(x, [0]))
                fd.add_output(y)
            return fd.execute([mesh.shard_tensor(full, 0, rank)])

    for rank, (largest, columns) in enumerate(run_ranks(2, run)):
        assert torch.equal(largest, full.amax(0))
        assert torch.equal(columns, full.chunk(2, 1)[rank])


def test_a_step() -> None:
    torch.manual_seed(0)
    found = [torch.nn.Parameter(numbers(3, 5)) for _ in range(2)]
    for p in found:
        p.grad = numbers(3, 5) + 1
    with ELSEWHERE:
        optimiser = AdamW(found[:1], max_norm=1.0)
        optimiser.step()
    AdamW(found[1:], max_norm=1.0).step()
    assert torch.equal(*found)


def test_a_module_is_made_elsewhere() -> None:
    with ELSEWHERE:
        norm = DropoutAddNorm(8)
    assert {p.device for p in norm.parameters()} == {ELSEWHERE}
    norm = norm.to_empty(device="cpu").float().eval()
    torch.nn.init.ones_(norm.weight)
    torch.nn.init.zeros_(norm.bias)
    x = numbers(2, 8)
    with ELSEWHERE:
        normed, _ = norm(x, x)
    assert torch.allclose(normed, torch.nn.functional.layer_norm(2 * x, (8,)), atol=1e-6)
