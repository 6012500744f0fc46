"""Promises kept by generated kernels: the same bits for a row among any others, and on any number of ranks."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from functional_promises import CALLS, listed, with_gradient
from fusion_check import local_arguments
from promise_cases import CASES, assert_pieces, assert_rows_alike, bits, define, inputs, sharded
from torch.distributed.tensor import Shard

import shardfuse
import shardfuse.compile
from benchmarks.promises import run_promises
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, nn
from shardfuse.errors import PromiseError
from shardfuse.frontend.promise_arguments import Invariant
from shardfuse.ir.tensor_view import TensorView
from shardfuse.mesh import current_rank
from shardfuse.nn import functional
from shardfuse.passes import promise_checks, segments
from shardfuse.segments.space import Space

ROWS = 17
COUNTS = (1, 5)
RANKS = (1, 2, 4)


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_bits_that_they_have_alone(name: str) -> None:
    for n, dtype in ((40, DataType.BFloat16), (777, DataType.Half), (1100, DataType.Float)):
        fd = define(name, n, dtype)
        assert_rows_alike(fd, inputs(fd, ROWS, n), COUNTS)


@pytest.mark.parametrize("rows", [40, 100, 300])
@pytest.mark.parametrize("dtype", [DataType.BFloat16, DataType.Float])
def test_samples_side_by_side_have_the_bits_that_they_have_alone(dtype: DataType, rows: int) -> None:
    """Columns are added up, of which the batch is the last axis: how wide loads are says nothing of the order."""
    with FusionDefinition(invariant="batch") as fd:
        x = fd.define_tensor([rows, -1], contiguity=True, dtype=dtype)
        fd.add_output(fd.ops.sum(fd.ops.cast(x, dtype=DataType.Float), [0]))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(rows, 64, generator=generator) * torch.exp(4 * torch.randn(rows, 64, generator=generator))
    given = drawn.to(dtype.torch)
    (whole,) = fd.execute([given])
    for samples in (1, 2, 3, 4, 62):
        (found,) = fd.execute([given[:, :samples].contiguous()])
        assert torch.equal(found, whole[:samples]), samples


SQUEEZED = {
    "alone": (lambda ops, x: ops.neg(ops.squeeze(x, 1)), lambda x: -x[:, 0]),
    "beside a sum": (lambda ops, x: ops.sub(ops.squeeze(x, 1), ops.sum(x, [0, 1])), lambda x: x[:, 0] - x.sum()),
    "added up": (lambda ops, x: ops.sum(ops.squeeze(x, 1), [0]), lambda x: x.sum()),
    "and not": (lambda ops, x: ops.sub(x, ops.squeeze(x, 1)), lambda x: x - x[:, 0]),
}


@pytest.mark.parametrize("name", SQUEEZED)
@pytest.mark.parametrize("shape", [[3, 1], [3, -1], [-1, -1]], ids=str)
@pytest.mark.parametrize("promise", ["batch", "ranks"])
def test_an_axis_that_is_squeezed_is_no_batch(promise: Invariant, shape: list[int], name: str) -> None:
    """One whose extent is not said may be a batch of one row, which another tensor has too: that is refused."""
    define, by_torch = SQUEEZED[name]
    with FusionDefinition(backend="triton", invariant=promise) as fd:
        x = fd.define_tensor(shape)
        fd.add_output(define(fd.ops, x))
    given = torch.tensor([[1.0], [-2.0], [4.0]])
    if shape[1] == 1:
        (found,) = fd.execute([given])
        assert torch.equal(found, by_torch(given))
        return
    with pytest.raises(PromiseError, match=r"an axis of one element that is squeezed.* declare the axis as 1"):
        fd.execute([given])


@pytest.mark.parametrize("rows", [1, -1])
def test_a_row_beside_one_that_is_squeezed_keeps_its_bits(rows: int) -> None:
    """One row of x meets the one row of w: with -1 for both, no plan of one row is that of several."""
    with FusionDefinition(backend="triton", invariant="batch") as fd:
        x, w = fd.define_tensor([-1, 1024]), fd.define_tensor([rows, 1024])
        fd.add_output(fd.ops.sum(fd.ops.add(x, w), [1]))
        fd.add_output(fd.ops.neg(fd.ops.sum(fd.ops.squeeze(w, [0]), [0])))
    generator = torch.Generator().manual_seed(0)
    many, one = torch.randn(7, 1024, generator=generator), torch.randn(1, 1024, generator=generator)
    if rows < 0:
        for given in (many, many[:1]):
            with pytest.raises(PromiseError, match="squeezed"):
                fd.execute([given, one])
        return
    together = fd.execute([many, one])[0]
    alone = torch.cat([fd.execute([many[k : k + 1], one])[0] for k in range(7)])
    assert torch.equal(together, alone)


def test_a_squeezed_axis_of_one_that_ranks_share() -> None:
    """The first rank has it, the other nothing."""
    given = torch.tensor([[1.0], [-2.0], [4.0]])

    def run(promise: Invariant) -> torch.Tensor:
        rank, mesh = shardfuse.initialize().rank, DeviceMesh(range(2))
        with FusionDefinition(backend="triton", invariant=promise) as fd:
            x = fd.define_tensor([3, 1])
            y = fd.ops.neg(fd.ops.squeeze(x, 1))
            fd.add_output(y)
        x.set_device_mesh(mesh)
        x.outer_split(1, 2, uneven=True)
        x.axis(1).parallelize(ParallelType.mesh_x)
        y.set_device_mesh(mesh)
        return fd.execute([given[:, rank:]])[0]

    for promise in ("batch", "ranks"):
        assert all(torch.equal(found, -given[:, 0]) for found in shardfuse.simulate(run, 2, args=(promise,)))


def test_a_schedule_that_counts_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "is_invariant", False)
    fd = define("layer_norm", 1536, DataType.Float)
    rows = 600  # more than the machine runs at once: their chunks are shorter
    with pytest.raises(AssertionError, match="bytes differ"):
        assert_rows_alike(fd, inputs(fd, rows, 1536), (3,))


def test_what_it_costs_is_measured() -> None:
    found = [r for rows in run_promises(0.01, torch.device("cpu"), ("rms_norm",), (1, 5), (64,)) for r in rows]
    assert [(r.case, r.impl) for r in found] == [
        (f"{n}x64:bfloat16", impl) for n in (1, 5) for impl in ("shardfuse", "promised")
    ]
    assert all(r.us and not r.note.startswith("WRONG") for r in found)


def on_ranks(name: str, n: int, dtype: DataType, dim: int, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The outputs of a rank that has a part of columns or rows."""
    size = shardfuse.initialize().world_size
    fd = sharded(name, n, dtype, size, dim)
    found = fd.execute(local_arguments(fd.fusion, given, current_rank()))
    wanted = WHOLE.get((name, n))
    if wanted is not None:
        assert_pieces(fd, found, wanted, f"{name} of {n} over {size} ranks, axis {dim}")
    return found


WHOLE: dict[tuple[str, int], list[torch.Tensor]] = {}
"""What one rank has made: simulated ranks are threads of this process."""


def compare_ranks(name: str, n: int, dtype: DataType, dim: int, rows: int = 8) -> None:
    given = inputs(define(name, n, dtype, "ranks"), rows, n)
    if name.endswith("norm_backward"):
        given[1][:, 1] = -0.0  # the sign of its sum over one row would show where a kernel begins with a zero
    WHOLE.pop((name, n), None)
    (whole,) = shardfuse.simulate(on_ranks, 1, args=(name, n, dtype, dim, given))
    WHOLE[name, n] = cast("list[torch.Tensor]", whole)
    for size in RANKS[1:]:
        shardfuse.simulate(on_ranks, size, args=(name, n, dtype, dim, given))


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_bits_of_one(name: str, dim: int) -> None:
    for n, dtype in ((96, DataType.BFloat16),) if dim == 0 else ((768, DataType.Float),):
        compare_ranks(name, n, dtype, dim)


@pytest.mark.parametrize("dtype", [DataType.BFloat16, DataType.Float, DataType.Double], ids=lambda t: t.name)
@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_added_up_in_pairs_have_the_bits_of_one_rank(name: str, dtype: DataType) -> None:
    """Of 128 elements a rank of four has less than a warp loads, of 1024 and more all threads some."""
    for n in (128, 1024) if dtype is DataType.BFloat16 else (512, 1000):
        compare_ranks(name, n, dtype, 1)


PARTS = {17: 2, 96: 3, 512: 4, 640: 5, 1376: 11, 1536: 3, 1792: 7, 2048: 4, 2500: 5}
"""By the elements of a run: parts whose elements are added up one after another."""


@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (40, 0), (128, 0), (128, 1), (200, 0)])
@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
def test_gradients_of_a_kernel_that_walks_rows_have_the_bits_of_many_ranks(name: str, rows: int, dim: int) -> None:
    """Ranks that have a part of the columns add them up in a kernel of its own, and those with few rows in another."""
    compare_ranks(name, {40: 1024}.get(rows, 640), DataType.BFloat16, dim, rows)
    fd = define(name, 1024, DataType.BFloat16, "ranks")
    shapes = {t: tuple(rows if n < 0 else n for n in t.shape) for t in fd.fec.tensors()}
    walks = [s.scheduler for s in fd.fec.plan(shapes).segments]
    assert walks == {1: ["mix_order"], 40: ["persistent", "persistent"]}.get(rows, ["mix_order", "persistent"])


def by_pairs(x: torch.Tensor) -> torch.Tensor:
    """In eight runs, of which parts are added up first, each as if all had the same power of two of elements."""
    runs = x.unflatten(-1, (8, -1))
    n = runs.shape[-1]
    parts = PARTS.get(n, 1)
    part = 1 << (-(-n // parts) - 1).bit_length()
    first, *others = torch.nn.functional.pad(runs, (0, parts * part - n)).split(part, -1)
    x = sum(others, first).flatten(-2)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("rows", "n"),
    [
        (1, 128),
        (3, 256),
        (300, 1024),
        (2, 4096),
        (40, 4096),
        (2, 16384),
        (140, 16384),
        (5, 768),
        (2, 5120),
        (3, 11008),
        (2, 14336),
        (2, 20000),
        (600, 64),
        (601, 96),
        (536, 48),
        (540, 768),
    ],
)
def test_neighbours_are_added_first_in_every_form_of_a_kernel(rows: int, n: int, is_turned: bool) -> None:
    """Bit for bit: of a sum alone, of one whose row is read again, and of the two after one another."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(rows, n, generator=generator) * torch.exp(4 * torch.randn(rows, n, generator=generator))
    total = by_pairs(x)
    centred = x - total[:, None]
    for wanted in ([total], [centred], [by_pairs(centred), x * 2.0]):
        with FusionDefinition(backend="triton", invariant="ranks") as fd:
            given = fd.define_tensor([n, -1] if is_turned else [-1, n], contiguity=True)
            t = fd.ops.permute(given, [1, 0]) if is_turned else given
            found = fd.ops.sum(t, [1], keepdim=len(wanted[0].shape) > 1 or len(wanted) > 1)
            if wanted[0] is not total:
                found = fd.ops.sub(t, found)
            if len(wanted) > 1:
                found = fd.ops.sum(found, [1])
                fd.add_output(found)
                found = fd.ops.mul(t, 2.0)
            fd.add_output(found)
        made = fd.execute([x.t().contiguous() if is_turned else x])
        for own, right in zip(made, wanted, strict=True):
            assert torch.equal(own, right), (own, right)


@pytest.mark.parametrize("promise", ["ranks", ("batch", "ranks")], ids=str)
@pytest.mark.parametrize("n", [2570, 5137, 40004])
def test_odd_rows_of_16_bits_have_the_bits_that_they_have_alone(n: int, promise: Invariant) -> None:
    """They are not read in the aligned words that contain them, in which each begins at another place."""

    def log_sum(ops: Any, x: TensorView) -> list[TensorView]:
        wide = ops.cast(x, dtype=DataType.Float)
        top = ops.max(wide, [1], keepdim=True)
        return [ops.add(ops.log(ops.sum(ops.exp(ops.sub(wide, top)), [1], keepdim=True)), top)]

    x = torch.randn(4, n, generator=torch.Generator().manual_seed(0)).half()
    (whole,) = ran(log_sum, x, promise=promise)
    torch.testing.assert_close(whole.double(), x.double().logsumexp(1, keepdim=True), rtol=0, atol=2e-6)
    assert torch.equal(ran(log_sum, x[1:3].contiguous(), promise=promise)[0], whole[1:3])


def on_two_dims(is_crossed: bool, scattered: int, whole: torch.Tensor, x: torch.Tensor) -> None:
    """Columns over both dims of a mesh, the sum's rows over ``scattered`` of them, in the same order or crossed."""
    shardfuse.initialize()
    dims = (ParallelType.mesh_x, ParallelType.mesh_y)
    with FusionDefinition(backend="triton", invariant="ranks") as fd:
        given = fd.define_tensor([*x.shape], contiguity=True)
        total = fd.ops.sum(given, [1])
        fd.add_output(total)
    for t, axis, parts in ((given, 1, dims), (total, 0, dims[:: -1 if is_crossed else 1][:scattered])):
        t.set_device_mesh(DeviceMesh([[0, 1], [2, 3]]))
        for k, dim in enumerate(parts):
            t.outer_split(axis + k, 2)
            t.axis(axis + k).parallelize(dim)
    fd.fec  # noqa: B018 closes the definition
    found = fd.execute(local_arguments(fd.fusion, [x], current_rank()))
    assert_pieces(fd, found, [whole], f"over {scattered} dims")


@pytest.mark.parametrize("is_crossed", [False, True])
@pytest.mark.parametrize("scattered", [0, 1, 2])
def test_ranks_of_two_dims_of_a_mesh_have_the_bits_of_one(scattered: int, is_crossed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 512, generator=generator) * torch.exp(3 * torch.randn(8, 512, generator=generator))
    shardfuse.simulate(on_two_dims, 4, args=(is_crossed, scattered, by_pairs(x), x))


Defined = Callable[..., list[TensorView]]


def ran(define: Defined, *given: torch.Tensor, promise: Invariant = "ranks") -> list[torch.Tensor]:
    with FusionDefinition(backend="triton", invariant=promise) as fd:
        inputs = [fd.define_tensor([*t.shape], contiguity=True, dtype=DataType.from_torch(t.dtype)) for t in given]
        for output in define(fd.ops, *inputs):
            fd.add_output(output)
    return fd.execute([*given])


def around_their_mean(ops: Any, x: TensorView) -> list[TensorView]:
    return [ops.sum(ops.mul(x, ops.mean(x, [1], keepdim=True)), [0, 1])]


SUMS: dict[str, tuple[Defined, Callable[..., list[torch.Tensor]], tuple[tuple[int, ...], ...]]] = {
    "of what a row has once": (
        lambda ops, x, y: [ops.sum(ops.mul(x, y), [0, 1])], lambda x, y: [(x * y).sum()], ((16, 24), (16, 1)),
    ),
    "around the mean of each row": (around_their_mean, lambda x: [(x * x.mean(1, True)).sum()], ((16, 24),)),
    "of rows, and of one element": (
        lambda ops, x, y: [ops.mul(ops.sum(x, [1]), ops.sum(y, [1]))], lambda x, y: [x.sum(1) * y.sum(1)],
        ((8, 64), (8, 1)),
    ),
    "of a mean that keeps its axis": (
        lambda ops, x: [ops.sum(ops.mean(x, [1], keepdim=True), [1])], lambda x: [x.mean(1)], ((8, 64),),
    ),
    "of an axis, and of it and the one before": (
        lambda ops, x: [ops.sum(x, [1]), ops.sum(x, [0, 1])], lambda x: [x.sum(1), x.sum((0, 1))], ((8, 32, 64),),
    ),
    "of rows, and of all of them in one": (
        lambda ops, x: [ops.sum(x, [1]), ops.sum(ops.reshape(x, [32768]), [0])], lambda x: [x.sum(1), x.sum()],
        ((8, 4096),),
    ),
    "of a prime number of rows": (lambda ops, x: [ops.sum(x, [0])], lambda x: [x.sum(0)], ((1031, 64),)),
    "of many more": (lambda ops, x: [ops.sum(x, [0])], lambda x: [x.sum(0)], ((4099, 8),)),
    "of columns that stand as rows": (
        lambda ops, x: [ops.sum(ops.permute(x, [1, 0]), [1])], lambda x: [x.sum(0)], ((16384, 40),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("promise", ["ranks", ("batch", "ranks")], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, promise: Invariant) -> None:
    define, by_torch, shapes = SUMS[name]
    generator = torch.Generator().manual_seed(4)
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    wide = by_torch(*(t.double() for t in given))
    for found, wanted in zip(ran(define, *given, promise=promise), wide, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("n", [24, 32, 5120])
def test_numbers_that_are_drawn_beside_a_sum_are_those_without_a_promise(n: int) -> None:
    def drawn(ops: Any, x: TensorView) -> list[TensorView]:
        u = ops.uniform(0.0, 1.0, [8, n], rng_seed=7, rng_offset=0, dtype=DataType.Float)
        return [u, ops.sum(ops.mul(x, u), [1])]

    x = torch.randn(8, n, generator=torch.Generator().manual_seed(1))
    found, total = ran(drawn, x)
    assert torch.equal(found, ran(drawn, x, promise=None)[0])
    torch.testing.assert_close(total.double(), (x.double() * found.double()).sum(1), rtol=1e-5, atol=1e-4)


def test_eight_ranks_and_rows_that_one_has_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "RANKS", (1, 2, 8))
    for name in ("layer_norm", "softmax"):
        for n in (8192, 5120):
            compare_ranks(name, n, DataType.BFloat16, 1)


def test_sums_that_ranks_cut_as_they_like_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (segments, promise_checks):
        monkeypatch.setattr(module, "has_order", lambda expr: False)
    with pytest.raises(Exception, match="bytes differ"):
        compare_ranks("rms_norm", 768, DataType.Float, 1)


def result_and_gradient(module: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    own = x.clone().requires_grad_()
    y = module(own)
    y.backward(dy)
    assert own.grad is not None
    return y.detach(), own.grad


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.RMSNorm(96), (7, 96)),
        (nn.LayerNorm(50), (5, 3, 50)),
        (nn.Softmax(1), (5, 40, 3)),
        (nn.GroupNorm(4, 16), (4, 16, 5, 5)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, torch.nn.Module) else "",
)
def test_modules_and_their_gradients(module: torch.nn.Module, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    kept = nn.promise(copy.deepcopy(module), invariant="batch")
    whole = result_and_gradient(kept, x, dy)
    for found, wanted in zip(whole, result_and_gradient(module, x, dy), strict=True):
        torch.testing.assert_close(found, wanted)
    again = pickle.loads(pickle.dumps(kept))
    for k in (0, 2, shape[0] - 1):
        for found, wanted in zip(result_and_gradient(again, x[k : k + 1], dy[k : k + 1]), whole, strict=True):
            assert torch.equal(bits(found), bits(wanted[k : k + 1]))


def test_a_compiled_module_is_one_op() -> None:
    """Torch's own ops would promise nothing."""
    module = nn.RMSNorm(96).promise(invariant="batch")
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(3))
    graphs: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(module, backend=seen, fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    assert "shardfuse.rms_norm_v1" in graphs[0]


def layer(x: torch.Tensor, invariant: Invariant = "batch") -> torch.Tensor:
    """Functions that promise, and nothing between them of which Inductor would make C++."""
    weights = functional.softmax(functional.rms_norm(x, (96,), invariant=invariant), scale=0.5, invariant=invariant)
    gated = functional.swiglu(functional.layer_norm(weights, (96,), invariant=invariant), invariant=invariant)
    return functional.log_softmax(gated, invariant=invariant)


@pytest.mark.parametrize("backend", ["inductor", "shardfuse"])
def test_compiled_functions_keep_their_promise(backend: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(6))
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    whole = with_gradient(compiled, x)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 9)):
        for found, wanted in zip(with_gradient(compiled, x[rows].clone()), whole, strict=True):
            assert torch.equal(bits(found), bits(wanted[rows]))
    for found, wanted in zip(whole, with_gradient(layer, x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_masks_of_rows_are_not_taken_for_a_vector() -> None:
    """The mask of a single row is that row's own, or one of all rows: both have the bits of more rows."""
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.randn(3, 1000, generator=generator) * 3, torch.rand(3, 1000, generator=generator) > 0.3
    softmax = nn.Softmax(-1).promise(invariant="batch")
    whole, shared = softmax(x, mask), softmax(x, mask[:1])
    for k in range(3):
        row = slice(k, k + 1)
        assert torch.equal(softmax(x[row], mask[row]), whole[row])
        assert torch.equal(softmax(x[row], mask[:1]), shared[row])


def test_ranks_that_sum_nothing() -> None:
    with shardfuse.FusionDefinition(invariant="ranks") as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(x, [1]))
    (found,) = fd.execute([torch.ones(3, 0)])
    assert torch.equal(found, torch.zeros(3))


def bucketed(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    n, rank = shardfuse.initialize().world_size, current_rank()
    mesh = DeviceMesh(range(n)) if n > 1 else None
    norm = nn.RMSNorm(96, mesh=mesh, input=Shard(0) if mesh else None, parameters="local").promise(invariant="ranks")
    nn.bucket_gradients(norm)
    norm(x.chunk(n)[rank]).backward(dy.chunk(n)[rank])
    return norm.weight.grad


def test_gradients_of_a_bucket_have_the_bits_of_one_rank() -> None:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(16, 96, generator=generator) for _ in range(2))
    (one,) = shardfuse.simulate(bucketed, 1, args=(x, dy))
    assert all(torch.equal(one, found) for found in shardfuse.simulate(bucketed, 4, args=(x, dy)))


@pytest.mark.parametrize("invariant", ["batch", "ranks"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_and_their_gradients(reduction: str, invariant: Invariant) -> None:
    """They count targets that are no class: a sum of all rows, which leaves no row to index."""
    generator = torch.Generator().manual_seed(5)
    classes = 40
    x = torch.randn(6, classes, generator=generator)
    targets = torch.randint(0, classes, (6,), generator=generator)
    exact = x.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, targets, reduction=reduction)
    wanted.sum().backward()
    loss = nn.CrossEntropyLoss(reduction=reduction).promise(invariant=invariant)
    own = x.clone().requires_grad_()
    found = loss(own, targets)
    found.sum().backward()
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), wanted, rtol=8 * eps, atol=8 * eps)
    assert own.grad is not None
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=8 * eps, atol=2 * eps)
    log_prob = nn.LogProb().promise(invariant=invariant)
    torch.testing.assert_close(
        log_prob(x, targets).double(),
        exact.detach().log_softmax(-1)[range(6), targets],
        rtol=8 * eps,
        atol=8 * eps,
    )
    if invariant == "batch":
        assert torch.equal(bits(log_prob(x[2:3], targets[2:3])), bits(log_prob(x, targets)[2:3]))


@pytest.mark.parametrize("n", [8, 96, 777])
def test_a_row_outside_of_any_batch_has_the_same_bits(n: int) -> None:
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(6))
    for module in (nn.Softmax(-1).promise(invariant="batch"), nn.RMSNorm(n).promise(invariant="batch")):
        assert torch.equal(bits(module(x[1])), bits(module(x)[1]))


def test_a_sum_of_everything() -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(7))
    for invariant in ("batch", "ranks"):
        with FusionDefinition(invariant=invariant) as fd:
            t = fd.define_tensor([-1, -1], contiguity=True)
            fd.add_output(fd.ops.sum(t, [0, 1]))
            fd.add_output(fd.ops.max(t, [0, 1]))
        total, largest = fd.execute([x])
        torch.testing.assert_close(total.double(), x.double().sum(), rtol=0, atol=30 * torch.finfo(x.dtype).eps)
        assert torch.equal(largest, x.max())


def test_a_batch_norm_by_kept_statistics() -> None:
    norm = nn.BatchNorm2d(4).promise(invariant="batch").eval()
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(8))
    whole = norm(x)
    torch.testing.assert_close(whole, torch.nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4)))
    assert torch.equal(bits(norm(x[1:2])), bits(whole[1:2]))


@pytest.mark.parametrize("name", CALLS)
def test_rows_of_functions_have_the_bits_that_they_have_alone(name: str) -> None:
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(4))
    whole, plain = listed(CALLS[name](x, invariant="batch")), listed(CALLS[name](x))
    for found, wanted in zip(whole, plain, strict=True):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(listed(CALLS[name](x[:1], invariant="batch")), whole, strict=True):
        assert torch.equal(bits(found), bits(wanted[:1]))


def test_a_function_that_promises_keeps_it_when_compiled() -> None:
    """It is one op of the graph: torch's own kernels would promise nothing."""
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(4))
    for name in ("rms_norm", "softmax"):
        graphs: list[torch.fx.GraphModule] = []

        def seen(graph: torch.fx.GraphModule, _: object, graphs=graphs) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        call = partial(lambda x, name: CALLS[name](x.neg(), invariant="batch"), name=name)
        compiled = torch.compile(call, backend=seen, fullgraph=True)
        assert torch.equal(bits(compiled(x)), bits(CALLS[name](-x, invariant="batch")))
        assert not any("rsqrt" in g.code or "exp" in g.code for g in graphs)
