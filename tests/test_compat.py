"""nvFuser's module: the contracts that programs written for it rely on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
import torch

import shardfuse.compat.nvfuser_direct as nvfuser_direct
from shardfuse.compat.nvfuser_direct import DataType, FusionDefinition, LRUCache, LruFusionCache


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
    wanted = torch.nn.functional.layer_norm(x.float(), (32,), eps=1e-5) * w.float()
    torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)


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


def test_errors_name_the_input() -> None:
    with FusionDefinition() as fd:
        t, s = fd.define_tensor(shape=[-1]), fd.define_scalar()
        fd.add_output(fd.ops.mul(t, s))
    with pytest.raises(RuntimeError, match=r"Expected input 0, .*, to be an at::Tensor but got scalar 2"):
        fd.execute([2.0, 2.0])
    with pytest.raises(
        RuntimeError, match=r"Expected input 0, .*, to be of dtype torch.float32 but got dtype torch.float16"
    ):
        fd.execute([torch.ones(3).half(), 2.0])
    with FusionDefinition() as empty:
        pass
    with pytest.raises(NotImplementedError, match="Fusion is empty!"):
        empty.execute([torch.ones(3)])
    with pytest.raises(NotImplementedError, match="Fusion does not exist!"):
        FusionDefinition().execute([])


def test_a_definition_is_cheap() -> None:
    """Programs build one in every call: 20 ops in 3 ms, of which a busy machine may take a few times as long."""
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        with FusionDefinition() as fd:
            t = fd.define_tensor(shape=[-1, -1], contiguity=True)
            for _ in range(20):
                t = fd.ops.mul(fd.ops.add(t, 1.0), 0.5)
            fd.add_output(t)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01


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


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="4-bit floats are not supported"):
        DataType.Float4_e2m1fn  # noqa: B018
    with FusionDefinition() as fd:
        t = fd.define_tensor(shape=[-1, -1])
        with pytest.raises(RuntimeError, match="shardfuse schedules kernels by itself"):
            t.cache_after()
        with pytest.raises(AttributeError, match="did you mean"):
            fd.ops.rsqrtt(t)
