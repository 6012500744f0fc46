"""Fusions by generated kernels under Triton's interpreter, alone and on ranks that are threads, against torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_check import check
from random_fusions import run_cases
from test_definition import CLASHES
from thread_check import Case, Placement, X, check_on_threads, shard, world_mesh
from torch_answers import assert_like

import shardfuse
from shardfuse import DataType, DeviceMesh, FusionDefinition
from shardfuse.compat import nvfuser_direct
from shardfuse.errors import KernelCompileError

Define = Callable[[FusionDefinition], None]

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of overflows that are meant
]


def triton(define: Define) -> FusionDefinition:
    with FusionDefinition(backend="triton") as fd:
        define(fd)
    return fd


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("op", ["max", "min", "sum", "maximum"])
def test_nan_is_kept(op: str) -> None:
    data = values(5, 33)
    data[2, 7] = float("nan")

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.maximum(x, 0.0) if op == "maximum" else getattr(fd.ops, op)(x, [1]))

    check(triton(define), [data])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.float32])
def test_an_axis_of_one_element_is_reduced_exactly(dtype: torch.dtype) -> None:
    """Also into a wider type, whose numbers float32 has not: 2**24 + 1."""

    def define(fd: FusionDefinition) -> None:
        o, x = fd.ops, fd.define_tensor([-1, 8], contiguity=True, dtype=DataType.from_torch(dtype))
        for total in (o.sum(x, [0]), o.prod(x, [0]), o.max(x, [0]), o.sum(x, [0], dtype=DataType.Double)):
            fd.add_output(o.add(total, 1e-9 if total.dtype is DataType.Double else 1))

    large = 2 ** (24 if dtype in (torch.int32, torch.int64) else 4) + 1
    fd, data = triton(define), (torch.arange(16).reshape(2, 8) % 8 + large).to(dtype)
    for rows in (1, 2):
        check(fd, [data[:rows]])


@pytest.mark.parametrize("op", ["logical_and", "logical_or", "logical_xor"])
def test_truth_of_numbers(op: str) -> None:
    """0.5 and NaN are true, -0.0 is false: of each element, of a maximum, and of a 0-d tensor."""

    def define(fd: FusionDefinition) -> None:
        o = fd.ops
        x, y, n = fd.define_tensor([7, 2]), fd.define_tensor([7, 2], dtype=DataType.Bool), fd.define_tensor([])
        for a in (x, o.max(x, [1], keepdim=True), n):
            for b in (y, o.max(x, [0], keepdim=True), x):
                fd.add_output(getattr(o, op)(a, b))
        fd.add_output(getattr(o, op)(n, 0.5))

    data = torch.tensor([0.0, -0.0, 0.5, 1.0, float("nan"), -2.5, 256.0])[:, None].expand(7, 2).contiguous()
    truth = (torch.arange(14) % 2 == 0).reshape(7, 2)
    for number in (0.0, 0.5, float("nan")):
        check(triton(define), [data, truth, torch.tensor(number)])


def test_a_chain_longer_than_the_stack_of_python() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1])
        for k in range(1100):
            x = fd.ops.neg(x) if k % 2 else fd.ops.add(x, 1.0)
        fd.add_output(x)

    check(triton(define), [values(3)])


# --- definitions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CLASHES)
def test_axes_that_meet(case: str) -> None:
    define, shapes, reference = CLASHES[case]
    check(triton(define), [values(*shape, seed=k) for k, shape in enumerate(shapes)], reference=reference)


def rms_norm(fd: FusionDefinition, shape: list[int], dtype: DataType) -> None:
    x, w = fd.define_tensor(shape, dtype=dtype), fd.define_tensor(shape[-1:], dtype=dtype)
    wide = fd.ops.cast(x, DataType.Float)
    scale = fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(wide, wide), [-1], keepdim=True), 1e-6))
    fd.add_output(fd.ops.cast(fd.ops.mul(fd.ops.mul(wide, scale), w), dtype))


def layer_norm(fd: FusionDefinition, shape: list[int], dtype: DataType) -> None:
    x = fd.define_tensor(shape, dtype=dtype)
    wide = fd.ops.cast(x, DataType.Float)
    var, mean = fd.ops.var_mean(wide, [-1], correction=0, keepdim=True)
    fd.add_output(fd.ops.cast(fd.ops.div(fd.ops.sub(wide, mean), fd.ops.sqrt(fd.ops.add(var, 1e-5))), dtype))


def softmax(fd: FusionDefinition, shape: list[int], dtype: DataType) -> None:
    x = fd.define_tensor(shape, dtype=dtype)
    wide = fd.ops.cast(x, DataType.Float)
    e = fd.ops.exp(fd.ops.sub(wide, fd.ops.max(wide, [-1], keepdim=True)))
    fd.add_output(fd.ops.cast(fd.ops.div(e, fd.ops.sum(e, [-1], keepdim=True)), dtype))


def column_sums(fd: FusionDefinition, shape: list[int], dtype: DataType) -> None:
    x = fd.define_tensor(shape, dtype=dtype)
    fd.add_output(fd.ops.sum(fd.ops.cast(fd.ops.mul(x, 0.5), DataType.Float), list(range(len(shape) - 1))))


NORMS = (rms_norm, layer_norm, softmax, column_sums)


@pytest.mark.parametrize("shape", [(3, 5), (7, 300), (2, 3, 129)], ids=str)
@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16, DataType.Half, DataType.Double])
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm: Callable[..., None], dtype: DataType, shape: tuple[int, ...]) -> None:
    def define(fd: FusionDefinition) -> None:
        norm(fd, [*[-1] * (len(shape) - 1), shape[-1]], dtype)

    data = [values(*shape, dtype=dtype.torch), values(shape[-1], dtype=dtype.torch, seed=1)]
    fd = triton(define)
    check(fd, data[: len(fd.fusion.inputs)])


def test_a_variance_far_from_zero() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1])
        for out in fd.ops.var_mean(x, [1]):
            fd.add_output(out)

    data = values(4, 1000) + 1e4
    fd = triton(define)
    check(fd, [data], reference=lambda x: torch.var_mean(x, 1))


@pytest.mark.parametrize("name", ["permuted", "strided", "expanded", "offset"])
def test_strides(name: str) -> None:
    data = {
        "permuted": values(50, 40).t(),
        "strided": values(80, 100)[::2, ::2],
        "expanded": values(1, 50).expand(40, 50),
        "offset": values(2001)[1:].reshape(40, 50),
    }[name]

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.mul(x, 2.0))
        fd.add_output(fd.ops.sum(x, [0]))
        fd.add_output(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True)))

    check(triton(define), [data], reference=lambda x: (x * 2, x.sum(0), x - x.amax(1, keepdim=True)))


def test_scalars_indices_and_layouts() -> None:
    def define(fd: FusionDefinition) -> None:
        x, s = fd.define_tensor([-1, -1]), fd.define_scalar(dtype=DataType.Double)
        y = fd.ops.mul(fd.ops.add(x, fd.ops.iota(fd.ops.size(x, 1))), s)
        fd.add_output(y, stride_order=[0, 1])
        fd.add_output(fd.ops.where(fd.ops.gt(x, 0), fd.ops.full([1], 7, DataType.Int), -1))

    fd = triton(define)
    for rows, scale in ((5, 2.0), (9, -0.5)):
        found = check(
            fd,
            [values(rows, 33), scale],
            reference=lambda x, s: ((x + torch.arange(33)) * s, torch.where(x > 0, 7, -1)),
        )
        assert found[0] is not None
        assert found[0].stride() == (1, rows)


def test_no_elements() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1])
        for out in (fd.ops.exp(x), fd.ops.sum(x, [0]), fd.ops.mean(x, [1])):
            fd.add_output(out)

    fd = triton(define)
    for shape in ((0, 4), (4, 0), (3, 4)):
        check(fd, [values(*shape)], reference=lambda x: (x.exp(), x.sum(0), x.mean(1)))


# --- what goes wrong inside --------------------------------------------------------------------------------

PLANTED: dict[str, tuple[str, Exception]] = {
    "a pass": ("shardfuse.compiler.verify", AssertionError("a rule is broken")),
    "the segmenter": ("shardfuse.compiler.segment_fusion", KeyError("a rule is broken")),
    "a scheduler": ("shardfuse.compiler.kernels_of", ValueError("a rule is broken")),
    "codegen": ("shardfuse.executor.fitting.generate", AssertionError("a rule is broken")),
    "Triton": ("shardfuse.executor.kernel.Kernel.compile", KernelCompileError("k", "a rule is broken", "")),
    "a launch": ("shardfuse.executor.kernel.Kernel.launcher", RuntimeError("a rule is broken")),
}


@pytest.mark.parametrize("place", PLANTED)
@pytest.mark.parametrize("module", [shardfuse, nvfuser_direct], ids=lambda m: m.__name__)
def test_an_internal_error_ends_with_a_script(module: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes from: the script, run where nothing is planted, does what was asked for."""
    with module.FusionDefinition() as fd:
        x, s = fd.define_tensor([-1, 3], dtype=module.DataType.Half), fd.define_scalar(dtype=module.DataType.Double)
        fd.add_output(fd.ops.mul(fd.ops.neg(x), s))

    def broken(*_: object, **__: object) -> None:
        raise PLANTED[place][1]

    values = [torch.ones(3, 2).half().t(), 2.5]
    with monkeypatch.context() as planted:
        planted.setattr(PLANTED[place][0], broken)
        with pytest.raises(Exception, match="a rule is broken") as caught:
            fd.execute(values)
    script = caught.value.__notes__[-1].split("\n", 1)[1]
    assert "def nvfuser_fusion(fd : FusionDefinition)" in script
    assert "torch.randn(6, dtype=torch.float16, device='cpu').as_strided((2, 3), (1, 2))" in script
    monkeypatch.setitem(sys.modules, "nvfuser_direct", nvfuser_direct)
    space: dict[str, Any] = {}
    exec(script.replace("fd.execute(inputs)", "found = fd.execute(inputs)"), space)
    kind = torch.float32 if module is nvfuser_direct else torch.float16  # whose scalars are wide
    assert_like(
        space["found"], lambda x: (x * -2.5).to(x.dtype if x.dtype is torch.float64 else kind), space["inputs"][0]
    )


# --- on ranks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 6, 64), (5, 3, 31)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_sharded_norms(norm: Callable[..., None], shape: tuple[int, ...]) -> None:
    """Rows, columns, unevenly: each rank's kernels, and the statistics that are exchanged between them."""
    placements: list[Placement] = [(0, "outer"), (1, "outer"), (2, "outer")]
    if shape[2] % 4 == 0:
        placements.append((2, "inner"))
    for world in (2, 4):
        cases: list[Case] = []
        for placement in placements:
            fd = triton(lambda fd: norm(fd, list(shape), DataType.Float))
            shard(fd.fusion.tensors()[0], world_mesh(world), (X, placement))
            data = [values(*shape), values(shape[-1], seed=1)][: len(fd.fusion.inputs)]
            cases.append(Case(fd, data, name=f"{placement}"))
        check_on_threads(world, cases)


@pytest.mark.parametrize(("extent", "placement"), [(12, "outer"), (12, "inner"), (7, "outer"), (5, "outer")])
def test_what_alone_is_sharded_is_made_inside_of_a_kernel(extent: int, placement: str) -> None:
    """An iota, a fill or an expanded number that only a reduction reads: each rank has its own part, or none of it."""

    def define(mesh: DeviceMesh) -> FusionDefinition:
        def body(fd: FusionDefinition) -> None:
            o = fd.ops
            x = fd.define_tensor([2, 1], contiguity=[True, None], dtype=DataType.Double)
            counted = o.add(x, o.iota(extent, 3, 2, DataType.Int))
            filled = o.full([extent], 1.5, DataType.Float)
            made = [o.sum(counted, [1]), o.max(counted, [0, 1]), o.sum(o.mul(x, filled), [0, 1])]
            made += [o.sum(o.slice(counted, [1, 0], [2, extent]), [0, 1]), o.sum(o.expand(x, [2, extent]), [1])]
            for out in made:
                fd.add_output(out)
            x.set_device_mesh(mesh)
            for tv in fd.fusion.tensors():
                if tv.shape[-1:] == (extent,):
                    shard(tv, mesh, (X, (tv.ndim - 1, placement)))

        return triton(body)

    data = torch.tensor([[10.0], [20.0]], dtype=torch.float64)
    for world in (2, 4):
        ranks = list(range(world))
        check_on_threads(world, [Case(define(DeviceMesh(r)), [data], name=str(r)) for r in (ranks, ranks[::-1])])


def test_tensor_parallel_block() -> None:
    """Partial sums to a sequence shard, residual, norm, gather; 7 rows over 3 ranks."""

    def define(fd: FusionDefinition) -> None:
        parts, residual = fd.define_tensor([3, 2, 7, 16]), fd.define_tensor([2, 7, 16])
        total = fd.ops.sum(parts, [0])
        h = fd.ops.add(total, residual)
        out = fd.ops.set(fd.ops.mul(h, fd.ops.rsqrt(fd.ops.mean(fd.ops.mul(h, h), [-1], keepdim=True))))
        fd.add_output(h)
        fd.add_output(out)
        parts.set_device_mesh(world_mesh(3))
        parts.axis(0).parallelize(X)
        for tv in (total, residual):
            shard(tv, world_mesh(3), (X, (1, "outer")))
        out.set_device_mesh(world_mesh(3))

    check_on_threads(3, [Case(triton(define), [values(3, 2, 7, 16), values(2, 7, 16, seed=1)])])


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_random_fusions(first: int) -> None:
    run_cases(range(600_000 + first, 600_100 + first), backend="triton")


def test_random_fusions_on_one_rank() -> None:
    run_cases(range(700_000, 700_120), worlds=(1,), backend="triton")
