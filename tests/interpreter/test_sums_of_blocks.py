"""Sums over other axes than those of rows that a kernel holds, made of its blocks, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from block_cases import RandomRows, decomposed_gradients, drawn, group_norm_gradients, with_moments
from fusion_check import check

import shardfuse
from shardfuse import DataType, FusionDefinition
from shardfuse.codegen import generate
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.op import Reduce
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops
from shardfuse.schedulers.plan import KernelPlan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about lanes that are masked


def kernels(fd: FusionDefinition) -> list[KernelPlan]:
    plan = fd.fec.last_plan
    assert plan is not None
    return [kernel for segment in plan.segments for kernel in segment.kernels]


def wide(kernel: KernelPlan) -> list[BoundTensor]:
    """The 16-bit inputs and float32 ones that are as large as an image."""
    return [t for t in kernel.segment.inputs if sum(map(bool, t.domain.logical)) > 2]


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "block"),
    [
        ((2, 8, 8, 8), 2, DataType.BFloat16, 64),  # several rows for each program
        ((3, 6, 4, 24), 3, DataType.Half, 8),  # of a width that no longer block divides
        ((2, 4, 32, 32), 2, DataType.Float, 128),  # one program for each row, a weight for each chunk
        ((1, 64, 48, 48), 1, DataType.Half, 16),  # a group for each row, whose last member has fewer blocks
        ((2, 48, 40, 40), 1, DataType.BFloat16, 8),
        ((2, 24, 64, 64), 1, DataType.Float, 128),
    ],
)
def test_gradients_read_their_inputs_once(shape: Sequence[int], groups: int, dtype: DataType, block: int) -> None:
    fd = group_norm_gradients(shape, groups, dtype)
    check(fd, drawn(shape, dtype))
    rows, sums = kernels(fd)
    assert rows.space.block_size == block
    assert len(wide(rows)) == 2
    n, c, h, w = shape
    assert [t.domain.local_shape(0) for t in sums.segment.inputs] == [(n, c, h * w // block)] * 2


def test_sums_of_rows_are_made_of_those_of_blocks() -> None:
    """No reduction takes all elements of a row."""
    fd = group_norm_gradients((2, 8, 8, 8), 2, DataType.Float)
    check(fd, drawn((2, 8, 8, 8), DataType.Float))
    rows, _ = kernels(fd)
    reduced = [e for e in rows.segment.exprs if isinstance(e.op, Reduce)]
    assert len(reduced) == 4
    atoms, r = rows.space.atoms, set(rows.space.r)
    assert not any(r <= atoms[e.tensors[0]] - atoms[e.output] for e in reduced)


@pytest.mark.parametrize(
    ("shape", "groups", "dtype"),
    [
        ((2, 8, 8, 8), 2, DataType.Half),
        ((3, 6, 4, 24), 3, DataType.BFloat16),
        ((2, 16, 32, 32), 2, DataType.Float),
        ((1, 64, 48, 48), 1, DataType.Half),
    ],
)
def test_rows_that_wait_for_sums_of_sums(shape: Sequence[int], groups: int, dtype: DataType) -> None:
    """One kernel reads the images, as another one did for each pixel behind those that added up."""
    fd = decomposed_gradients(shape, groups, dtype)
    check(fd, with_moments(drawn(shape, dtype), groups))
    rows, *others = kernels(fd)
    assert rows.space.block
    assert len(wide(rows)) == 2
    assert not any(t in rows.segment.inputs for kernel in others for t in wide(kernel))
    assert fd.explain().kernels == 1 + len(others)


def test_rows_that_need_a_sum_themselves_wait_for_it() -> None:
    """The sum of a channel is read for each of its pixels."""
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x, weight = fd.define_tensor([2, 64, 512], contiguity=True), fd.define_tensor([1, 64], contiguity=True)
        total = o.sum(x, [2])
        scale = o.sum(o.mul(total, weight), [1])
        y = o.mul(x, o.broadcast(scale, [False, True, True]))
        fd.add_output(o.add(y, o.broadcast(total, [False, False, True])))
    generator = torch.Generator().manual_seed(0)
    check(fd, [torch.randn(shape, generator=generator) for shape in ((2, 64, 512), (1, 64))])
    assert not any(kernel.space.block for kernel in kernels(fd))


def test_groups_that_read_ahead_hand_sums_on() -> None:
    """Without a function that is slow to evaluate again."""
    shape = (160, 8, 64, 64)
    fd = group_norm_gradients(shape, 1, DataType.Half, is_active=False)
    check(fd, drawn(shape, DataType.Half))
    rows, _ = kernels(fd)
    assert rows.schedule.lag == 1
    active = group_norm_gradients(shape, 1, DataType.Half)
    plan = active.fec.plan_for(None, None)
    assert plan.segments[0].kernels[0].schedule.lag == 0


@pytest.mark.parametrize(
    ("dtype", "wide", "most"), [(DataType.Half, DataType.Float, 500), (DataType.Int32, DataType.Int, 200000)]
)
def test_a_product_that_is_narrower_is_no_factor(dtype: DataType, wide: DataType, most: int) -> None:
    """The sum of a row has factors of the wide type; what is summed over samples overflows, or wraps around."""
    shape = (2, 4, 8, 8)
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        a, b = (fd.define_tensor(list(shape), contiguity=True, dtype=dtype) for _ in range(2))
        weight = o.broadcast(fd.define_tensor([4], contiguity=True, dtype=wide), [True, False, True, True])
        product = o.mul(a, o.mul(b, weight))
        fd.add_output(o.add(product, o.sum(product, [1, 2, 3], keepdim=True)))
        fd.add_output(o.sum(o.mul(a, b), [0, 2, 3]))
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(1, most, shape, generator=generator).to(dtype.torch) for _ in range(2))
    weight = torch.randint(1, 5, (4,), generator=generator).to(wide.torch)
    (rows, _) = fd.execute([a, b, weight])
    assert rows is not None
    exact = a.double() * b.double() * weight.double().view(4, 1, 1)
    exact += exact.sum([1, 2, 3], keepdim=True)
    assert ((rows.double() - exact).abs() <= 3e-7 * exact.abs()).all()


def plan_of(fd: FusionDefinition) -> list[KernelPlan]:
    return [kernel for segment in fd.fec.plan_for(None, None).segments for kernel in segment.kernels]


def softmax(o: Ops, x: TensorView) -> TensorView:
    """Along the second of two axes."""
    e = o.exp(o.sub(x, o.max(x, [1], keepdim=True)))
    return o.div(e, o.sum(e, [1], keepdim=True))


def softmax_and_maxima(rows: int, columns: int) -> FusionDefinition:
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x = o.cast(fd.define_tensor([rows, columns], contiguity=True, dtype=DataType.BFloat16), DataType.Float)
        fd.add_output(o.cast(softmax(o, x), DataType.BFloat16))
        fd.add_output(o.max(o.abs(o.reshape(x, [rows, columns // 128, 128])), [2]))
    return fd


@pytest.mark.parametrize(("rows", "columns"), [(8192, 131072), (4096, 98304), (4096, 65664), (1024, 524288)])
def test_groups_that_would_read_two_rows_ahead(rows: int, columns: int) -> None:
    """A softmax without blocks does."""
    (kernel,) = plan_of(softmax_and_maxima(rows, columns))
    assert (kernel.space.block_size, kernel.schedule.lag) == (128, 0)


def test_misaligned_rows_with_blocks_are_read_as_they_are() -> None:
    """Words that contain a row begin before it, and so would its blocks."""
    rows, columns = 160, 65538
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x = o.cast(fd.define_tensor([rows, columns], contiguity=True, dtype=DataType.BFloat16), DataType.Float)
        fd.add_output(o.mul(x, o.rsqrt(o.mean(o.mul(x, x), [1], keepdim=True))))
        fd.add_output(o.max(o.reshape(x, [rows, columns // 2, 2]), [2]))
    (kernel,) = plan_of(fd)
    assert kernel.space.block_size == 2
    assert not kernel.schedule.is_aligned_down


def test_what_is_pooled_before_it_is_normed_is_not_held() -> None:
    """No pixel is needed again once its channel has been added up."""
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x = o.cast(fd.define_tensor([256, 2048, 8, 8], contiguity=True, dtype=DataType.Half), DataType.Float)
        fd.add_output(softmax(o, o.mean(x, [2, 3])))
    first, *_ = segments_of(fd)
    assert first == "reduction"


def segments_of(fd: FusionDefinition) -> list[str]:
    return [s.scheduler for s in fd.fec.plan_for(None, None).segments]


def test_sums_of_other_tensors_are_made_of_the_same_rows() -> None:
    """Both are added up beside the rows, though they are two segments without."""
    shape = (32, 128, 80, 80)
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        inputs = (fd.define_tensor(list(shape), contiguity=True, dtype=DataType.Half) for _ in range(3))
        x, dy, z = (o.cast(t, DataType.Float) for t in inputs)
        t = o.mul(dy, x)
        fd.add_output(o.add(o.mul(o.sub(x, dy), z), o.sum(t, [1, 2, 3], keepdim=True)))
        for summed in (t, z):
            fd.add_output(o.sum(summed, [0, 2, 3]))
    rows, *sums = plan_of(fd)
    assert len(wide(rows)) == 3
    assert [len(t.domain.logical) for kernel in sums for t in kernel.segment.inputs] == [3, 3]
    assert not any(t in rows.segment.inputs for kernel in sums for t in kernel.segment.inputs)


def on_ranks(shape: Sequence[int], groups: int, dtype: DataType, cut: int) -> list[int]:
    ranks = shardfuse.initialize().world_size
    fd = group_norm_gradients(shape, groups, dtype, cut=cut, ranks=ranks)
    check(fd, drawn(shape, dtype))
    return [kernel.space.block_size for kernel in kernels(fd)]


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "cut", "ranks", "block"),
    [
        ((4, 8, 8, 8), 2, DataType.Float, 0, 2, 64),
        ((5, 8, 8, 8), 2, DataType.Half, 0, 2, 64),  # a sample more on one rank
        ((4, 64, 48, 48), 1, DataType.Half, 0, 2, 16),
        ((2, 8, 8, 8), 4, DataType.Float, 1, 2, 64),
        ((2, 8, 7, 8), 2, DataType.Half, 2, 3, 1),  # ranks have parts of what would be in blocks
        ((2, 8, 8, 8), 2, DataType.Float, 3, 2, 1),
    ],
)
def test_images_that_ranks_share(
    shape: Sequence[int], groups: int, dtype: DataType, cut: int, ranks: int, block: int
) -> None:
    for found in shardfuse.simulate(on_ranks, ranks, args=(shape, groups, dtype, cut)):
        assert max(found) == block


@pytest.mark.parametrize(("shape", "groups"), [((2, 8, 3, 5), 4), ((2, 6, 17, 17), 3)])
def test_images_of_odd_widths_have_no_blocks(shape: Sequence[int], groups: int) -> None:
    fd = group_norm_gradients(shape, groups, DataType.Float)
    check(fd, drawn(shape, DataType.Float))
    assert not any(kernel.space.block for kernel in kernels(fd))


def test_what_promises_its_bits_adds_up_as_it_says() -> None:
    fd = group_norm_gradients((2, 8, 8, 8), 2, DataType.Float, invariant="ranks")
    check(fd, drawn((2, 8, 8, 8), DataType.Float))
    assert not any(kernel.space.block for kernel in kernels(fd))


def test_what_no_block_is_reduced_to_is_reduced_by_itself() -> None:
    """A vector of one number for each channel, whose sum over channels is no sum over pixels."""
    with FusionDefinition(backend="triton") as fd:
        o = fd.ops
        x, weight = fd.define_tensor([3, 4, 64], contiguity=True), fd.define_tensor([3, 4], contiguity=True)
        fd.add_output(o.sum(x, [2]))
        scaled = o.mul(x, o.broadcast(weight, [False, False, True]))
        fd.add_output(o.mul(scaled, o.broadcast(o.sum(weight, [1]), [False, True, True])))
    generator = torch.Generator().manual_seed(0)
    check(fd, [torch.randn(shape, generator=generator) for shape in ((3, 4, 64), (3, 4))])
    (cut,) = fd.explain().cuts
    assert cut.reason.endswith("is made of no blocks")


def test_the_last_member_of_a_group_stores_fewer_sums() -> None:
    """Under the interpreter a group has one member, so that this looks at the text for a GPU."""
    fd = group_norm_gradients((32, 50, 40, 40), 1, DataType.Half)
    rows = fd.fec.plan_for(None, None).segments[0].kernels[0]
    tensors = (*rows.segment.inputs, *rows.segment.outputs)
    text = generate(rows, {t: t.domain.layout(0) for t in tensors}, 0).text
    assert rows.schedule.members == 16
    (store,) = {line.split(", ")[-1] for line in text.splitlines() if "store_by_all(" in line and "4096 + " in line}
    mask = store.removesuffix(".to(tl.int32))")
    assert text.split(f"    {mask} = ")[1].split("\n")[0].endswith(" + 4096 < valid")


def test_not_a_number_stays_in_its_channel() -> None:
    shape = (2, 8, 8, 8)
    fd = group_norm_gradients(shape, 2, DataType.Float)
    x, dy, weight = drawn(shape, DataType.Float)
    dy[1, 3, 2, 2] = float("nan")
    _, d_weight, d_bias = check(fd, [x, dy, weight])
    for found in (d_weight, d_bias):
        assert found is not None
        assert found.isnan().nonzero().flatten().tolist() == [3]


def test_random_rows_with_blocks() -> None:
    with_blocks = 0
    for seed in range(60):
        case = RandomRows(seed)
        fd = case.fusion()
        check(fd, case.arguments())
        with_blocks += any(kernel.space.block for kernel in kernels(fd))
    assert with_blocks >= 15
