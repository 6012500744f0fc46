"""Programs that wait for each other: lagged, held and looping groups, and reductions finished in the same launch.

The interpreter runs programs one after the other, so that only a GPU shows what a wait is worth.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from torch_answers import Expected, assert_like, compare, evaluate, widened

from benchmarks.accuracy import errors
from benchmarks.workload import Case, Draw
from benchmarks.workloads import WORKLOADS
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


def in_float(x: torch.Tensor) -> torch.Tensor:
    """As the fusions compute: 16-bit tensors in float32; float64, for the reference, stays."""
    return x if x.dtype is torch.float64 else x.float()


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.to(dtype)


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
    (softmax, (901, 128257), torch.bfloat16),
    (softmax, (1100, 50257), torch.float16),
    (rms_norm, (901, 130001), torch.bfloat16),
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
    assert_like(first, lambda x: REFERENCES[build](in_float(x)), here, n=4, relative=build is softmax)
    other = torch.empty(1 << 22, device="cuda")
    for k in range(LAUNCHES):
        (again,) = fd.execute([here])
        if k % 7 == 0:
            other.normal_()
        if k % 20 == 0:
            assert torch.equal(first, again), f"launch {k} of {build.__name__} differs"


BACKWARD = [
    (False, (901, 32768), torch.bfloat16),
    (False, (515, 50000), torch.bfloat16),
    (False, (700, 20480), torch.float32),
    (True, (777, 20480), torch.float16),
    (True, (901, 12288), torch.float16),
    (True, (130, 131072), torch.bfloat16),
    (True, (600, 32772), torch.bfloat16),
]


@pytest.mark.parametrize(("is_layer_norm", "shape", "dtype"), BACKWARD, ids=str)
def test_backward_of_wide_rows(is_layer_norm: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Gradients of what is normed and of the weight, and the bias; the same bits in every launch."""
    kind, numbers = DataType.from_torch(dtype), 2 if is_layer_norm else 1
    with FusionDefinition() as fd:
        x, dy, w = (fd.define_tensor(list(size), contiguity=True, dtype=kind) for size in (shape, shape, shape[1:]))
        own = [fd.define_tensor([shape[0], 1], contiguity=True, dtype=DataType.Float) for _ in range(numbers)]
        for out in gradients(fd.ops, wide(fd, x), wide(fd, dy), wide(fd, w), *own):
            fd.add_output(fd.ops.cast(out, dtype=kind))
    assert [s.scheduler for s in fd.explain().segments] == ["mix_order"]
    generator = torch.Generator("cuda").manual_seed(7)
    wide_rows = [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in (shape, shape, shape[1:])]
    given = [*wide_rows, *(torch.rand(shape[0], 1, generator=generator, device="cuda") for _ in range(numbers))]
    first = fd.execute(given)
    assert_like(first, lambda *t: [rounded(out, dtype) for out in gradients(torch, *map(in_float, t))], *given)
    other = torch.empty(1 << 22, device="cuda")
    for k in range(LAUNCHES):
        again = fd.execute(given)
        if k % 7 == 0:
            other.normal_()
        if k % 20 == 0:
            assert all(map(torch.equal, first, again)), f"launch {k} differs"


def gradients(o, x, dy, w, rstd, *means) -> list:
    """By the calls of ``o``, the ops of a fusion or torch: of RMSNorm; of LayerNorm, of rows with these ``means``."""
    unit = o.mul(o.sub(x, *means) if means else x, rstd)
    scaled = o.mul(dy, w)
    inner = o.sub(scaled, o.mul(unit, o.mean(o.mul(scaled, unit), [1], keepdim=True)))
    if means:
        inner = o.sub(inner, o.mean(scaled, [1], keepdim=True))
    return [o.mul(inner, rstd), *(o.sum(t, [0]) for t in (o.mul(dy, unit), dy)[: 1 + len(means)])]


GROUP_NORMS = [
    ((1, 512, 128, 256), torch.float16, False),
    ((1, 128, 20, 64, 128), torch.bfloat16, False),
    ((1, 96, 9, 256, 192), torch.bfloat16, False),
    ((1, 96, 9, 240, 200), torch.bfloat16, False),
    ((3, 640, 150, 30), torch.float16, False),
    ((2, 320, 100, 60), torch.float16, True),
    ((3, 224, 33, 17), torch.bfloat16, True),
    ((2, 1280, 9, 13), torch.float16, True),
    ((2, 2560, 70, 50), torch.float16, True),
    ((1, 2048, 90, 61), torch.float32, True),
]
"""Those of the last three: few words for each thread; a group for each program, of a whole line and of more."""


@pytest.mark.parametrize(("shape", "dtype", "is_channels_last"), GROUP_NORMS, ids=str)
def test_group_norms(shape: tuple[int, ...], dtype: torch.dtype, is_channels_last: bool) -> None:
    """Weights of a channel, rows so long that all programs share one, columns in pieces of powers of two."""
    n, c, *space = shape
    order = [0, *range(2, len(shape)), 1] if is_channels_last else list(range(len(shape)))
    channels = [1, c, *(1 for _ in space)]
    with FusionDefinition() as fd:
        strides = [len(shape) - 1 - order.index(k) for k in range(len(shape))]
        x = fd.define_tensor(shape=list(shape), contiguity=True, dtype=DataType.from_torch(dtype), stride_order=strides)
        weight, bias = (fd.define_tensor(shape=[c], contiguity=True, dtype=DataType.Float) for _ in range(2))
        rows = fd.ops.reshape(wide(fd, x), [n, 32, c // 32 * math.prod(space)])
        h = fd.ops.reshape(layer_norm(fd, rows), list(shape))
        weight, bias = (fd.ops.broadcast_in_dim(t, shape=channels, broadcast_dims=[1]) for t in (weight, bias))
        out = fd.ops.silu(fd.ops.add(fd.ops.mul(h, weight), bias))
        fd.add_output(fd.ops.cast(out, dtype=DataType.from_torch(dtype)), stride_order=strides)
    generator = torch.Generator("cuda").manual_seed(5)
    stored = torch.randn([shape[k] for k in order], generator=generator, device="cuda").add_(3).to(dtype)
    here = stored.permute([order.index(k) for k in range(len(shape))])
    parts = [torch.randn(c, generator=generator, device="cuda") for _ in range(2)]
    (first,) = fd.execute([here, *parts])

    def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return rounded(functional.silu(functional.group_norm(in_float(x), 32, weight, bias, EPS)), dtype)

    given = [here, *parts]
    # The mean, which is 3, is rounded to float32, as the other intermediate results are: an element, a small difference
    # of terms of several times its size, moves by as much as they do.
    want = Expected(
        normed(*given), normed(*map(widened, given)), lambda: evaluate(fd.fusion, given)[0].moved(), signed=False
    )
    compare("the norm", first, want)
    for k in range(60):
        (again,) = fd.execute([here, *parts])
        if k % 20 == 0:
            assert torch.equal(first, again), f"launch {k} differs"


GRADIENTS = [
    ("group_norm_backward", "2x320x60x44:float16"),
    ("group_norm_backward", "2x640x31x50:float32"),
    ("group_norm_backward", "2x512x40x64:bfloat16"),
    ("group_norm_backward_channels_last", "2x320x60x44:float16:channels_last"),
    ("group_norm_backward_channels_last", "8x320x19x23:bfloat16:channels_last"),
    ("group_norm_backward_channels_last", "2x1280x24x24:float32:channels_last"),
    ("group_norm_backward_channels_last", "2x2560x40x30:float16:channels_last"),
]


@pytest.mark.parametrize(("name", "text"), GRADIENTS)
def test_gradients_of_group_norms(name: str, text: str) -> None:
    workload, case = WORKLOADS[name], Case.parse(text)
    inputs = workload.arguments(case, Draw(torch.device("cuda")))
    fd, bound = workload.fusion(case), workload.bind(inputs)
    first = fd.execute(bound)
    (found,) = errors(workload, case, inputs, {"shardfuse": first}).values()
    for error, output in zip(found, first, strict=True):
        assert error <= max(torch.finfo(output.dtype).eps / 2, 4e-6), found
    for k in range(60):
        again = fd.execute(bound)
        if k % 20 == 0:
            assert all(map(torch.equal, first, again)), f"launch {k} differs"


def normalised(fd: FusionDefinition, x: TensorView, _: TensorView) -> TensorView:
    var, mean = fd.ops.var_mean(x, [0, 2, 3], correction=0, keepdim=True)
    return fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, EPS)))


def without_its_part(fd: FusionDefinition, x: TensorView, dy: TensorView) -> TensorView:
    """The gradient of a batch norm: two sums over two inputs, and both inputs again."""
    along, mean = (fd.ops.mean(t, [0, 2, 3], keepdim=True) for t in (fd.ops.mul(x, dy), dy))
    return fd.ops.sub(fd.ops.sub(dy, mean), fd.ops.mul(x, along))


def channel_means(t: torch.Tensor) -> torch.Tensor:
    return t.mean([0, 2, 3], keepdim=True)


BATCH_NORMS = {
    normalised: lambda x, _: functional.batch_norm(x, None, None, training=True, eps=EPS),
    without_its_part: lambda x, dy: dy - channel_means(dy) - x * channel_means(x * dy),
}
BATCHES = [
    ((8, 64, 96, 256), torch.float16, False),
    ((24, 256, 56, 56), torch.bfloat16, False),
    ((16, 512, 28, 28), torch.float16, False),
    ((48, 2048, 7, 7), torch.float16, False),
    ((6, 32, 300, 220), torch.float32, False),
    ((8, 64, 200, 256), torch.float16, True),
    ((3, 96, 170, 90), torch.bfloat16, True),
]


@pytest.mark.parametrize("build", BATCH_NORMS)
@pytest.mark.parametrize(("shape", "dtype", "is_channels_last"), BATCHES, ids=str)
def test_batch_norms(build, shape: tuple[int, ...], dtype: torch.dtype, is_channels_last: bool) -> None:
    """A channel lies in a piece of every sample, or beside the other channels."""
    order = [0, 2, 3, 1] if is_channels_last else [0, 1, 2, 3]
    strides = [3 - order.index(k) for k in range(4)]
    kind = DataType.from_torch(dtype)
    with FusionDefinition() as fd:
        x, dy = (
            fd.define_tensor(shape=list(shape), contiguity=True, dtype=kind, stride_order=strides) for _ in range(2)
        )
        fd.add_output(fd.ops.cast(build(fd, wide(fd, x), wide(fd, dy)), dtype=kind), stride_order=strides)
    generator = torch.Generator("cuda").manual_seed(7)
    stored = [torch.randn([shape[k] for k in order], generator=generator, device="cuda").to(dtype) for _ in range(2)]
    inputs = [t.permute([order.index(k) for k in range(4)]) for t in stored]
    (first,) = fd.execute(inputs)
    assert_like(first, lambda *t: rounded(BATCH_NORMS[build](*map(in_float, t)), dtype), *inputs)
    for k in range(60):
        (again,) = fd.execute(inputs)
        if k % 20 == 0:
            assert torch.equal(first, again), f"launch {k} differs"
