"""Programs that wait for each other: late teams, held and looping teams, and reductions finished in the same launch.

The interpreter runs programs one after the other, so that only a GPU shows what a wait is worth.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.tensor_view import TensorView

pytestmark = pytest.mark.gpu

LAUNCHES = 300
EPS = 1e-5


def wide(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.cast(x, dtype=DataType.Float)


def rms_norm(fd: FusionDefinition, x: TensorView) -> TensorView:
    x = wide(fd, x)
    mean = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
    return fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean, EPS)))


def layer_norm(fd: FusionDefinition, x: TensorView) -> TensorView:
    x = wide(fd, x)
    var, mean = fd.ops.var_mean(x, [-1], correction=0, keepdim=True)
    return fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, EPS)))


def softmax(fd: FusionDefinition, x: TensorView) -> TensorView:
    x = wide(fd, x)
    e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [-1], keepdim=True)))
    return fd.ops.div(e, fd.ops.sum(e, [-1], keepdim=True))


def total(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.sum(wide(fd, x), [0, 1])


def down(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.sum(wide(fd, x), [0])


REFERENCES = {
    rms_norm: lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS),
    layer_norm: lambda x: functional.layer_norm(x, x.shape[-1:], eps=EPS),
    softmax: lambda x: x.softmax(-1),
    total: lambda x: x.sum(),
    down: lambda x: x.sum(0),
}
CASES = [
    (rms_norm, (901, 70000), torch.bfloat16),
    (rms_norm, (517, 33000), torch.float32),
    (rms_norm, (130, 1 << 20), torch.bfloat16),
    (layer_norm, (601, 262144), torch.float16),
    (layer_norm, (777, 65539), torch.bfloat16),
    (layer_norm, (64, 163840), torch.float16),
    (softmax, (1200, 100000), torch.bfloat16),
    (softmax, (33, 150001), torch.float32),
    (total, (1000, 8192), torch.bfloat16),
    (down, (50000, 700), torch.float16),
]


@pytest.mark.parametrize(("build", "shape", "dtype"), CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_waiting_kernels(build, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Right by float64, and the same bits in every one of many launches, a flood of other launches between them."""
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1], contiguity=True, dtype=DataType.from_torch(dtype))
        fd.add_output(build(fd, x))
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(shape, generator=generator) + 2).to(dtype)
    here = values.cuda()
    (first,) = fd.execute([here])
    wanted = REFERENCES[build](here.double())
    assert (first.double() - wanted).norm() <= 2e-6 * wanted.norm()
    other = torch.empty(1 << 22, device="cuda")
    for k in range(LAUNCHES):
        (again,) = fd.execute([here])
        if k % 7 == 0:
            other.normal_()
        if k % 20 == 0:
            assert torch.equal(first, again), f"launch {k} of {build.__name__} differs"
