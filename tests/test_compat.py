"""nvFuser's module: the contracts that programs written for it rely on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch_answers import assert_like

import shardfuse.compat.nvfuser_direct as nvfuser_direct
from shardfuse import simulate
from shardfuse.compat.nvfuser_direct import (
    DataType,
    FusionDefinition,
    LRUCache,
    LruFusionCache,
    ParallelType,
    shard_tensor,
)


@pytest.fixture(autouse=True)
def _module() -> Iterator[None]:
    """Printed definitions import by nvFuser's name."""
    sys.modules["nvfuser_direct"] = nvfuser_direct
    yield
    del sys.modules["nvfuser_direct"]


def printed(fd: FusionDefinition) -> FusionDefinition:
    space: dict[str, object] = {}
    exec("from nvfuser_direct import FusionDefinition, DataType, DeviceMesh, ParallelType\n" + repr(fd), space)
    with FusionDefinition() as again:
        space["nvfuser_fusion"](again)  # type: ignore[operator]
    return again


def norm(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Half)
    w = fd.define_tensor(shape=[-1], contiguity=True, dtype=DataType.Half)
    wide = fd.ops.cast(x, dtype=DataType.Float)
    var, mean = fd.ops.var_mean(wide, dims=[1], correction=0, keepdim=True)
    off = fd.ops.sub(wide, mean)
    scale = fd.ops.rsqrt(fd.ops.add(var, fd.define_scalar(1e-5)))
    gain = fd.ops.broadcast_in_dim(w, shape=fd.ops.shape(x), broadcast_dims=[1])
    fd.add_output(fd.ops.cast(fd.ops.mul(fd.ops.mul(off, scale), gain), dtype=DataType.Half))


def test_the_printed_definition_gives_the_same() -> None:
    with FusionDefinition() as fd:
        norm(fd)
    x, w = torch.randn(6, 32).half(), torch.randn(32).half()
    again = printed(fd)
    assert repr(again) == repr(fd)
    assert fd.fusion == again.fusion
    (found,), (repeated,) = fd.execute([x, w]), again.execute([x, w])
    assert torch.equal(found, repeated)
    assert found.stride() == repeated.stride()
    assert_like(found, lambda x, w: torch.nn.functional.layer_norm(x, (32,), eps=1e-5) * w, x, w)


def test_equal_fusions_share_an_entry() -> None:
    cache = LRUCache(max_fusions=2)
    definitions = []
    for _ in range(2):
        with FusionDefinition() as fd:
            norm(fd)
        definitions.append(fd)
    a, b = definitions
    assert a.fusion == b.fusion
    assert hash(a.fusion) == hash(b.fusion)
    assert cache.cache_compile(a.fusion) is cache.cache_compile(b.fusion)
    assert cache.num_fusions() == 1
    with FusionDefinition() as other:
        t = other.define_tensor(shape=[-1])
        other.add_output(other.ops.neg(t))
    assert other.fusion != a.fusion
    cache.cache_compile(other.fusion)
    with FusionDefinition() as third:
        t = third.define_tensor(shape=[-1])
        third.add_output(third.ops.abs(t))
    cache.cache_compile(third.fusion)
    assert cache.num_fusions() == 2, "the one that was used longest ago goes"
    assert "Total Unique Fusions Compiled: 3" in cache.stats()


def test_the_cache_decorator() -> None:
    @LruFusionCache(max_fusions=4)
    def make(sign: bool) -> FusionDefinition:
        with FusionDefinition() as fd:
            t = fd.define_tensor(shape=[-1])
            fd.add_output(fd.ops.neg(t) if sign else fd.ops.abs(t))
        return fd

    assert make.stats() == "Max Fusions Allowed: 4\nThe fusion cache is empty.\n"
    x = torch.tensor([-1.0, 2.0])
    for _ in range(3):
        assert make(True).execute([x])[0].tolist() == [1, -2]
        assert make(False).execute([x])[0].tolist() == [1, 2]
    assert make.num_fusions() == 2
    assert "Hit Rate: 66.6667%" in make.stats()


def test_random_numbers_are_torchs() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.uniform(0.0, 1.0, shape=[16]))
        fd.add_output(fd.ops.normal(0.0, 1.0, shape=[16]))
    torch.manual_seed(1)
    first = fd.execute([])
    torch.manual_seed(1)
    for a, b in zip(first, printed(fd).execute([]), strict=True):
        assert torch.equal(a, b)


def test_a_reshape_aliases_and_an_alias_is_written_in_place() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        fd.add_output(fd.ops.reshape(t, [3, 2]))
    assert fd.execute([x])[0].data_ptr() == x.data_ptr()
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        fd.add_output(fd.ops.add(t, 1.0), t)
        fd.add_output(fd.ops.mul(t, 2.0))
        fd.add_output(fd.ops.reshape(t, [6]))
    before = x.clone()
    doubled, flat = fd.execute([x])
    assert torch.equal(x, before + 1)
    assert torch.equal(doubled, before * 2)
    assert torch.equal(flat, before.reshape(6)), "an output is a copy where its storage is written to"


def test_strides_follow_the_stride_order() -> None:
    x = torch.randn(2, 3, 4)
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        wide = fd.ops.broadcast(t, is_broadcast_dim=[False, True, False, False])
        fd.add_output(fd.ops.stride_order(wide, stride_order=[0, 1, 2, 3]))
    (found,) = fd.execute([x])
    assert found.stride() == (1, 2, 2, 6)
    assert torch.equal(found, x.unsqueeze(1))


def test_a_definition_is_cheap() -> None:
    """Programs build one in every call: 40 ops in 3 ms, which is some hundred calls of Python for each."""

    def build(ops: int) -> int:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            with FusionDefinition() as fd:
                t = fd.define_tensor(shape=[-1, -1], contiguity=True)
                for _ in range(ops):
                    t = fd.ops.mul(fd.ops.add(t, 1.0), 0.5)
                fd.add_output(t)
        finally:
            sys.setprofile(None)
        return calls

    build(1)
    each = (build(40) - build(20)) / 40
    assert each < 150
    assert (build(80) - build(40)) / 80 < 1.1 * each, "as many for each op, however many there are"


def test_types_are_nvfusers() -> None:
    half, integer = torch.ones(3).half(), torch.tensor([7, -7, 3])
    with FusionDefinition() as fd:
        h, k = fd.from_pytorch(half), fd.from_pytorch(integer)
        for out in (
            fd.ops.add(h, h), fd.ops.relu(h), fd.ops.exp(k), fd.ops.div(k, fd.define_scalar(2)),
            fd.ops.truediv(k, fd.define_scalar(2)), fd.ops.mul(k, fd.define_scalar(0.5)), fd.ops.sum(k, [0]),
        ):  # fmt: skip
            fd.add_output(out)
    found = fd.execute([half, integer])
    wanted = [torch.float32, torch.float16, torch.float32, torch.int64, torch.float32, torch.float64, torch.int64]
    assert [x.dtype for x in found] == wanted
    assert found[3].tolist() == [3, -3, 1], "integers are divided towards 0"
    assert found[5].tolist() == [3.5, -3.5, 1.5]


def test_vectors_are_shapes() -> None:
    x = torch.randn(4, 6)
    with FusionDefinition() as fd:
        t, shape = fd.from_pytorch(x), fd.define_vector(3)
        fd.add_output(fd.ops.reshape(t, shape))
    for sizes in ([2, 2, 6], (4, 3, 2)):
        assert fd.execute([x, sizes])[0].shape == torch.Size(sizes)


def test_a_script_reproduces_a_run() -> None:
    x = torch.ones(2, 3)
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        fd.add_output(fd.ops.sum(t, [1]))
    with pytest.raises(AssertionError, match="was not executed"):
        fd.last_repro_script()
    fd.execute([x], save_repro_inputs=True)
    script = fd.last_repro_script()
    assert script == fd.repro_script_for([x])
    assert "torch.testing.make_tensor((2, 3), dtype=torch.float32, device='cpu')" in script
    space: dict[str, object] = {}
    exec(script, space)
    assert repr(space["fd"]) == repr(fd)


def test_validate() -> None:
    x = torch.randn(4, 8)
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        fd.add_output(fd.ops.sum(fd.ops.exp(t), [1]))
    assert torch.equal(fd.validate([x])[0], fd.execute([x])[0])
    fd.validate([x], [x.exp().sum(1)])
    with pytest.raises(AssertionError, match="output 0, off by"):
        fd.validate([x], [x.exp().sum(1) + 1])


@pytest.mark.parametrize(
    ("sizes", "strides", "contiguity", "order"),
    [
        ((2, 3, 4), (12, 4, 1), [True, True, True], [2, 1, 0]),
        ((2, 3, 4), (1, 8, 2), [True, True, True], [0, 2, 1]),
        ((2, 3, 4), (24, 8, 2), [True, True, False], [2, 1, 0]),
        ((2, 1, 4), (4, 4, 1), [True, None, True], [2, 1, 0]),
        ((2, 3, 4), (4, 0, 1), [True, None, True], [2, 1, 0]),
        ((), (), [], []),
    ],
)
def test_descriptors(
    sizes: tuple[int, ...], strides: tuple[int, ...], contiguity: list[object], order: list[int]
) -> None:
    assert nvfuser_direct.compute_tensor_descriptor(sizes, strides) == (contiguity, order)


def on_ranks(world: int, run: Callable[[nvfuser_direct.DeviceMesh], None]) -> None:
    simulate(lambda: run(nvfuser_direct.DeviceMesh(range(world))), world)


def test_reduction_axes_stand_in_the_loop_domain() -> None:
    """Splits and mesh axes of what a matmul sums over; a part of it as a tensor of its own; the whole printed."""
    a, b = torch.arange(24.0).reshape(4, 6) - 9, torch.arange(48.0).reshape(6, 8) - 20

    def run(mesh: nvfuser_direct.DeviceMesh) -> None:
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([4, 6], contiguity=True), fd.define_tensor([6, 8], contiguity=True)
            product = fd.ops.matmul(x, w)
            total = fd.ops.sum(product, [0])
            fd.add_output(product)
            fd.add_output(total)
            for tv, at in ((x, 1), (w, 0)):
                tv.set_device_mesh(mesh)
                tv.outer_split(at, 2)
                tv.axis(at).parallelize(ParallelType.mesh_x)
            product.set_device_mesh(mesh)
            assert [axis.is_reduction() for axis in product.get_loop_domain()] == [False, False, True]
            product.outer_split(-1, 2)
            local = product.rfactor([-1])
            local.set_device_mesh(mesh)
            local.axis(-2).parallelize(ParallelType.mesh_x)
            product.axis(-1).parallelize(ParallelType.mesh_x)
            product.outer_split(1, 2)
            product.axis(1).parallelize(ParallelType.mesh_x)
            assert [axis.is_reduction() for axis in total.get_loop_domain()] == [True, False]
            with pytest.raises(RuntimeError, match="one of the two is reduced"):
                total.merge(0)
        inputs = [shard_tensor(a, x), shard_tensor(b, w)]
        found = fd.execute(inputs)
        assert_like(found[0], torch.matmul, a, b, place=lambda x: shard_tensor(x, product))
        assert_like(found[1], lambda a, b: (a @ b).sum(0), a, b, place=lambda x: x[found_slice(found[1])])

    def found_slice(piece: torch.Tensor) -> slice:
        rank = nvfuser_direct.Communicator.instance().rank()
        return slice(None) if piece.numel() == 8 else slice(4 * rank, 4 * rank + 4)

    on_ranks(2, run)


def test_a_printed_reduction_has_its_loop_axes() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 8], contiguity=True)
        total = fd.ops.sum(x, [0])
        fd.add_output(total)
        total.outer_split(0, 2)
        total.outer_split(2, 4)
        total.reorder({2: 0})
    again = printed(fd)
    assert again.fusion == fd.fusion
    assert again.fusion.outputs()[0].domain().__str__() == total.domain().__str__()
    assert torch.equal(again.execute([torch.ones(6, 8)])[0], torch.full((8,), 6.0))


def test_a_linear_for_each_rank() -> None:
    """A weight of three dims, its first on the mesh."""
    x, w, bias = torch.randn(2, 3, 5), torch.randn(2, 4, 5), torch.randn(2, 4)

    def heads(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.linear(x, w.reshape(8, 5), bias.reshape(8))
        return rows.reshape(2, 3, 2, 4).permute(2, 0, 1, 3)

    def run(mesh: nvfuser_direct.DeviceMesh) -> None:
        with FusionDefinition() as fd:
            tvs = [fd.define_tensor(list(t.shape)) for t in (x, w, bias)]
            out = fd.ops.linear(*tvs)
            fd.add_output(out)
            for tv in tvs:
                tv.set_device_mesh(mesh)
            for tv in tvs[1:]:
                tv.axis(0).parallelize(ParallelType.mesh_x)
        (found,) = fd.execute([shard_tensor(t, tv) for t, tv in zip((x, w, bias), tvs, strict=True)])
        assert_like(found, heads, x, w, bias, place=lambda x: mesh.shard_tensor(x, 0))

    on_ranks(2, run)


def test_attention_of_one_projection_lies_as_its_query() -> None:
    """Query and key hold one index: of the key it is another one.  Gradients keep the declared order too."""
    x = torch.randn(2, 5, 18, dtype=torch.bfloat16)
    with FusionDefinition() as fd:
        tv = fd.define_tensor([2, 5, 18], dtype=DataType.BFloat16, contiguity=True)
        parts = [fd.ops.reshape(fd.ops.slice(tv, [0, 0, 6 * k], [2, 5, 6 * k + 6]), [2, 5, 3, 2]) for k in range(3)]
        q, k, v = (fd.ops.permute(t, [0, 2, 1, 3]) for t in parts)
        fd.add_output(fd.ops.sdpfa_fwd(q, k, v, dropout_p=0.0, is_causal=True)[0])
    (found,) = fd.execute([x])
    q, k, v = (t.reshape(2, 5, 3, 2).transpose(1, 2) for t in x.split(6, -1))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert_like(found, attention, q, k, v)
    with FusionDefinition() as fd:
        tvs = [fd.define_tensor([2, 3, 5, 2], dtype=DataType.BFloat16, stride_order=[3, 1, 2, 0]) for _ in range(3)]
        fd.add_output(fd.ops.sdpfa_fwd(*tvs, dropout_p=0.0, is_causal=True)[0])
    (found,) = fd.execute([t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)])
    assert_like(found, attention, q, k, v)
    assert found.transpose(1, 2).is_contiguous()


def test_an_expanded_axis_takes_the_extent_that_it_meets() -> None:
    with FusionDefinition() as fd:
        mask, x = fd.define_tensor([-1], dtype=DataType.Bool), fd.define_tensor([-1, 8])
        wide = fd.ops.broadcast_in_dim(mask, shape=[fd.ops.size(mask, 0), 4], broadcast_dims=[0])
        fd.add_output(fd.ops.where(wide, x, 0.0))
    values, keep = torch.randn(3, 8), torch.tensor([True, False, True])
    assert torch.equal(fd.execute([keep, values])[0], torch.where(keep[:, None], values, 0.0))


def test_the_multi_device_executor() -> None:
    """Rows gathered for a product; nvFuser's switches of streams and backends are taken."""
    a, b = torch.randn(2, 3, 4), torch.randn(4, 5)

    def run(mesh: nvfuser_direct.DeviceMesh) -> None:
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([2, 3, 4], contiguity=True), fd.define_tensor([4, 5], contiguity=True)
            out = fd.ops.matmul(x, w)
            out.set_memory_type(nvfuser_direct.MemoryType.symmetric)
            fd.add_output(out)
            for tv in (x, w, out):
                tv.set_device_mesh(mesh)
            x.axis(0).parallelize(ParallelType.mesh_x)
        params = nvfuser_direct.multidevice.MultiDeviceExecutorParams()
        params.backend_type = nvfuser_direct.CommunicatorBackend.cuda
        executor = nvfuser_direct.multidevice.MultiDeviceExecutor(fd.fusion, params)
        (found,) = executor.run([shard_tensor(a, x), b])
        assert_like(found, torch.matmul, a, b)

    on_ranks(2, run)


def test_partial_sums_that_are_read_in_parts_are_scattered() -> None:
    """An output between a row-parallel linear and the residual of a sequence-parallel block."""
    x, w, residual = torch.randn(4, 6), torch.randn(5, 6), torch.randn(4, 5)

    def run(mesh: nvfuser_direct.DeviceMesh) -> None:
        with FusionDefinition() as fd:
            tvs = [fd.define_tensor(list(t.shape), contiguity=True) for t in (x, w, residual)]
            product = fd.ops.linear(tvs[0], tvs[1])
            fd.add_output(product)
            fd.add_output(fd.ops.add(product, tvs[2]))
            for tv, at in zip(tvs, (1, 1, 0), strict=True):
                tv.set_device_mesh(mesh)
                tv.outer_split(at, 2)
                tv.axis(at).parallelize(ParallelType.mesh_x)
        found = fd.execute([shard_tensor(t, tv) for t, tv in zip((x, w, residual), tvs, strict=True)])

        def block(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
            whole = torch.nn.functional.linear(x, w)
            return [whole, whole + residual]

        assert_like(found, block, x, w, residual, place=lambda x: mesh.shard_tensor(x, 0))
        assert "reduce_scatter" in fd.fec.get_most_recent_scheduled_ir()

    on_ranks(2, run)
