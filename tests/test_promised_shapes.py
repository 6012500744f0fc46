"""``invariant="batch"`` of batches with several axes, of images in both formats, and of reductions down columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from benchmarks.sm90 import sources_of
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.device import H200
from shardfuse.errors import PromiseError
from shardfuse.frontend.exchanges import collectives
from shardfuse.in_kernel import with_exchanges
from shardfuse.ir.op import Reduce
from shardfuse.ir.tensor_view import TensorView
from shardfuse.schedulers.candidates import candidates
from shardfuse.schedulers.schedule import Order, Schedule
from shardfuse.segments.pair_runs import has_order

BATCHES = ((1,), (2,), (8,), (64,))
CHANNELS_LAST = [3, 0, 2, 1]


def layer_norm(n: int) -> FusionDefinition:
    """Of a residual sum; both axes of the batch may be of one element."""
    with FusionDefinition(invariant="batch") as fd:
        x, y = (fd.define_tensor([-1, -1, n], contiguity=True, dtype=DataType.BFloat16) for _ in range(2))
        total = fd.ops.cast(fd.ops.add(x, y), dtype=DataType.Float)
        fd.add_output(fd.ops.cast(normed(fd, total, [-1]), dtype=DataType.BFloat16))
    return fd


def normed(fd: FusionDefinition, x: TensorView, axes: list[int]) -> TensorView:
    var, mean = fd.ops.var_mean(x, axes, correction=0, keepdim=True)
    return fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5)))


def group_norm(channels: int, groups: int, side: int, order: list[int] | None = None) -> FusionDefinition:
    with FusionDefinition(invariant="batch") as fd:
        shape = [-1, channels, side, side]
        x = fd.define_tensor(shape, contiguity=True, dtype=DataType.Half, stride_order=order)
        weight = fd.define_tensor([channels], contiguity=True, dtype=DataType.Half)
        batch = fd.ops.size(x, 0)
        cut = fd.ops.reshape(fd.ops.cast(x, dtype=DataType.Float), [batch, groups, channels // groups, side, side])
        whole = fd.ops.reshape(normed(fd, cut, [2, 3, 4]), [batch, channels, side, side])
        weighted = fd.ops.mul(whole, fd.ops.broadcast(weight, [True, False, True, True]))
        fd.add_output(fd.ops.cast(weighted, dtype=DataType.Half), stride_order=order)
    return fd


def softmax(rows: int, columns: int) -> FusionDefinition:
    """Down the columns of each matrix."""
    with FusionDefinition(invariant="batch") as fd:
        x = fd.define_tensor([-1, rows, columns], contiguity=True, dtype=DataType.BFloat16)
        wide = fd.ops.cast(x, dtype=DataType.Float)
        e = fd.ops.exp(fd.ops.sub(wide, fd.ops.max(wide, [1], keepdim=True)))
        fd.add_output(fd.ops.cast(fd.ops.div(e, fd.ops.sum(e, [1], keepdim=True)), dtype=DataType.BFloat16))
    return fd


def kernels(fd: FusionDefinition, batch: Sequence[int], *, is_last: bool = False) -> list[tuple[object, ...]]:
    shapes: dict[TensorView, tuple[int, ...]] = {}
    for t in fd.fec.tensors():
        sizes = iter(batch)
        shapes[t] = tuple(next(sizes) if n < 0 else n for n in t.shape)
    made = [torch.empty(shape, dtype=t.dtype.torch, device="meta") for t, shape in shapes.items()]
    if is_last:
        made = [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in made]
    return [(s.text, s.num_warps, s.num_stages, s.max_registers) for s in sources_of(fd.fec.plan(shapes), made)]


@pytest.mark.parametrize("n", [64, 777, 4096, 5139])
def test_axes_of_a_batch(n: int) -> None:
    fd = layer_norm(n)
    found = {batch: kernels(fd, batch) for batch in ((8, 16), (1, 1), (8, 1), (1, 8), (3, 5), (64, 128))}
    assert [batch for batch in found if found[batch] != found[8, 16]] == []


@pytest.mark.parametrize("shape", [(32, 4, 8), (320, 32, 32), (640, 32, 64), (512, 2, 64), (64, 64, 7)])
def test_images(shape: tuple[int, int, int]) -> None:
    for order in (None, CHANNELS_LAST):
        fd = group_norm(*shape, order)
        found = {batch: kernels(fd, batch, is_last=order is not None) for batch in BATCHES}
        assert [batch for batch in found if found[batch] != found[8,]] == []


@pytest.mark.parametrize("shape", [(16, 64), (100, 33), (1000, 64), (5000, 128)])
def test_columns(shape: tuple[int, int]) -> None:
    fd = softmax(*shape)
    found = {batch: kernels(fd, batch) for batch in BATCHES}
    assert [batch for batch in found if found[batch] != found[8,]] == []


def column_sum(rows: int, columns: int, invariant: str | None) -> FusionDefinition:
    """Over the rows of a matrix."""
    with FusionDefinition(invariant=invariant) as fd:
        x = fd.define_tensor([rows, columns], contiguity=True, dtype=DataType.BFloat16)
        fd.add_output(fd.ops.sum(fd.ops.cast(x, dtype=DataType.Float), [0]))
    return fd


def schedules(fd: FusionDefinition, shape: tuple[int, ...]) -> list[Schedule]:
    (x,) = fd.fec.tensors()
    return [k.schedule for s in fd.fec.plan({x: shape}).segments for k in s.kernels]


@pytest.mark.parametrize("rows", [7, 512, 20000])
def test_a_sum_over_the_batch_is_planned_as_without_a_promise(rows: int) -> None:
    """It follows the batch by definition, and columns whose number is said are none."""
    assert schedules(column_sum(-1, 4096, "batch"), (rows, 4096)) == schedules(column_sum(-1, 4096, None), (rows, 4096))
    promised = schedules(column_sum(-1, -1, "batch"), (rows, 4096))
    assert promised != schedules(column_sum(-1, -1, None), (rows, 4096)), "either axis may be the batch"


def test_sizes_that_a_definition_says_are_those_of_a_batch_where_it_says_all() -> None:
    """Other definitions may have more rows of the same length."""
    found: list[tuple[Order, int]] = []
    for rows in (1, 64, 8192):
        with FusionDefinition(invariant="batch") as fd:
            x = fd.define_tensor([rows, 1536], contiguity=True, dtype=DataType.BFloat16)
            wide = fd.ops.cast(x, dtype=DataType.Float)
            fd.add_output(normed(fd, wide, [-1]))
        (schedule,) = schedules(fd, (rows, 1536))
        found += [(schedule.order, schedule.launch.warps)] if rows > 1 else []  # one row is broadcast
    assert found[0] == found[1]


def test_all_loads_come_first_where_rows_are_few() -> None:
    fd = layer_norm(4096)
    made = [
        fd.fec.plan(dict.fromkeys(fd.fec.tensors(), (1, n, 4096))).segments[0].kernels[0].schedule for n in (8, 8192)
    ]
    assert [schedule.is_eager for schedule in made] == [True, False]
    assert made[0].order == made[1].order
    assert made[0].launch == made[1].launch


def orders(fd: FusionDefinition, *shapes: tuple[int, ...]) -> list[tuple[object, ...]]:
    """What says in which order the kernels that add up do so."""
    plan = fd.fec.plan(dict(zip(fd.fec.tensors(), shapes, strict=True)))
    found = [k.schedule for s in plan.segments for k in s.kernels if k.space.r]
    return [(s.order, s.is_packed, s.members, s.parts, s.launch.warps) for s in found]


def of_sums(fd: FusionDefinition, x: TensorView) -> TensorView:
    """Of the last axis."""
    return fd.ops.div(x, fd.ops.sum(x, [x.ndim - 1], keepdim=True))


@pytest.mark.parametrize("n", [4096, 131072])
@pytest.mark.parametrize("whole", [False, True])
def test_a_batch_of_one_row_keeps_its_axis_where_it_is_reshaped(n: int, whole: bool) -> None:
    """Two axes of a batch that become one, or all elements in one axis, and rows again."""
    with FusionDefinition(invariant="batch") as fd:
        x = fd.define_tensor([-1, -1, n], contiguity=True)
        rows = fd.ops.mul(fd.ops.size(x, 0), fd.ops.size(x, 1))
        flat = fd.ops.reshape(x, [-1]) if whole else x
        fd.add_output(of_sums(fd, fd.ops.reshape(flat, [rows, n])))
    found = {batch: orders(fd, (*batch, n)) for batch in ((1, 1), (8, 1), (1, 8), (2, 3))}
    assert [batch for batch in found if found[batch] != found[2, 3]] == []


@pytest.mark.parametrize("n", [64, 4096])
def test_heads_of_a_batch_of_one_row(n: int) -> None:
    with FusionDefinition(invariant="batch") as fd:
        x = fd.define_tensor([-1, 32, n], contiguity=True, dtype=DataType.BFloat16)
        heads = fd.ops.reshape(fd.ops.cast(x, dtype=DataType.Float), [fd.ops.mul(fd.ops.size(x, 0), 32), n])
        fd.add_output(of_sums(fd, heads))
    found = {batch: orders(fd, (batch, 32, n)) for batch in (1, 2, 64)}
    assert len(found[1]) == 1
    assert [batch for batch in found if found[batch] != found[2]] == []


@pytest.mark.parametrize("is_first", [False, True])
def test_a_batch_that_meets_a_size_that_is_said(is_first: bool) -> None:
    """Its single row is repeated, and has the bits that it has among eight."""
    with FusionDefinition(invariant="batch") as fd:
        x, y = fd.define_tensor([-1, 131072], contiguity=True), fd.define_tensor([8], contiguity=True)
        operands = [fd.ops.sum(x, [1]), y]
        fd.add_output(fd.ops.add(*operands[:: -1 if is_first else 1]))
    assert orders(fd, (1, 131072), (8,))[0] == orders(fd, (8, 131072), (8,))[0]


def test_columns_beside_a_batch_that_a_reshape_joins() -> None:
    with FusionDefinition(invariant="batch") as fd:
        x = fd.define_tensor([-1, 4096, 256], contiguity=True)
        turned = fd.ops.permute(x, [1, 0, 2])
        fd.add_output(fd.ops.sum(fd.ops.reshape(turned, [4096, fd.ops.mul(fd.ops.size(x, 0), 256)]), [0]))
    found = {batch: orders(fd, (batch, 4096, 256)) for batch in (1, 2, 64)}
    assert [batch for batch in found if found[batch] != found[2]] == []


def on_ranks(build: Callable[[FusionDefinition, TensorView], None], n: int, ranks: int, axis: int) -> FusionDefinition:
    with FusionDefinition(invariant="ranks") as fd:
        x = fd.define_tensor([-1, n], contiguity=True, dtype=DataType.BFloat16)
        build(fd, fd.ops.cast(x, dtype=DataType.Float))
        if ranks > 1:
            x.set_device_mesh(DeviceMesh(range(ranks)))
            x.outer_split(axis, ranks)
            x.axis(axis).parallelize(ParallelType.mesh_x)
    return fd


def softmax_of_rows(fd: FusionDefinition, x: TensorView) -> None:
    fd.add_output(of_sums(fd, fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True)))))


def rows_and_their_sum(fd: FusionDefinition, x: TensorView) -> None:
    fd.add_output(fd.ops.mul(x, fd.ops.sum(x, [1], keepdim=True)))
    fd.add_output(fd.ops.sum(x, [0]))


def total(fd: FusionDefinition, x: TensorView) -> None:
    fd.add_output(fd.ops.sum(x, [0, 1]))


def largest_and_columns(fd: FusionDefinition, x: TensorView) -> None:
    """Reductions both ways, of which one has an order."""
    fd.add_output(fd.ops.sum(fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))), [0]))


def free_orders(fd: FusionDefinition, shape: tuple[int, ...]) -> list[str]:
    """The sums whose order would follow how a kernel shares out its elements among threads.

    Of a row all but those in pairs do; of columns none whose rows one thread adds up.
    """
    (x,) = fd.fec.tensors()
    plan = fd.fec.plan({x: shape})
    plans = [plan, *([with_exchanges(plan)] if collectives(plan) else [])]
    kernels = [k for p in plans for s in p.segments for k in s.kernels]
    found: list[str] = []
    for k in kernels:
        if k.space.block:
            found += [f"{k.name}: {e.output}" for e in k.segment.exprs if isinstance(e.op, Reduce) and has_order(e)]
        sums = [e for e in k.segment.exprs if isinstance(e.op, Reduce) and has_order(e) and not e.op.in_pairs]
        sums = [e for e in sums if e.tensors[0].domain.local_elements > e.output.domain.local_elements]
        is_by_one = not k.space.is_inner and k.schedule.reduced == k.schedule.parts == 1 and not k.schedule.members
        if k.space.walked and k.schedule.kept == k.schedule.parts == 1 and not k.schedule.members:
            sums = [e for e in sums if not k.space.has_r(e.output)]  # one program adds up a column, row by row
        found += [] if is_by_one else [f"{k.name}: {e.output} = {e.op.name}({e.tensors[0]})" for e in sums]
    assert any(has_order(e) for k in kernels for e in k.segment.exprs)
    return found


@pytest.mark.parametrize("build", [softmax_of_rows, rows_and_their_sum, total, largest_and_columns])
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("n", [128, 768, 4096, 5120, 65536, 128256])
def test_no_sum_has_an_order_that_follows_the_kernel(
    build: Callable[[FusionDefinition, TensorView], None], axis: int, n: int
) -> None:
    """A kernel of one rank reads other tensors, of other types, than those of several: its threads have other parts."""
    for rows in (64, 8192):
        for ranks in (1, 2, 8):
            if build is total and axis == 1 and n < 512 and rows == 64 and ranks > 1:  # one axis, cut inside
                with pytest.raises(PromiseError, match="shard the outermost axis that it reduces"):
                    free_orders(on_ranks(build, n, ranks, axis), (rows, n))
                continue
            assert free_orders(on_ranks(build, n, ranks, axis), (rows, n)) == []


@pytest.mark.parametrize("shape", [(8, 32, 4, 16, 16), (8, 6, 5, 7, 9), (3, 1, 4, 1, 5)])
@pytest.mark.parametrize("axes", [(2, 3, 4), (0, 2, 3, 4), (0, 1), (1, 3), (0, 4), (0, 1, 2, 3, 4)])
def test_sums_over_several_axes_have_an_order_of_their_own(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    with FusionDefinition(invariant="ranks") as fd:
        x = fd.define_tensor([-1] * 5, contiguity=True)
        fd.add_output(fd.ops.sum(x, axes))
    assert free_orders(fd, shape) == []


def rows_and_largest_of_columns(fd: FusionDefinition, x: TensorView) -> None:
    fd.add_output(fd.ops.sum(x, [1]))
    fd.add_output(fd.ops.max(x, [0]))


@pytest.mark.parametrize(
    ("build", "rows"),
    [(rows_and_their_sum, 4099), (rows_and_their_sum, 8 * 1031), (rows_and_largest_of_columns, 131072)],
)
def test_a_few_programs_walk_no_rows(build: Callable[[FusionDefinition, TensorView], None], rows: int) -> None:
    """A prime number of rows, or eight times one, is no partial sums, nor are maxima: columns have a kernel of their
    own."""
    fd = on_ranks(build, 4096, 1, 0)
    assert "mix_order" not in {s.scheduler for s in fd.fec.plan({fd.fec.tensors()[0]: (rows, 4096)}).segments}


def test_partial_sums_do_not_follow_the_batch() -> None:
    with FusionDefinition(invariant=("batch", "ranks")) as fd:
        x = fd.define_tensor([-1, 8192, 512], contiguity=True)
        fd.add_output(fd.ops.sum(x, [1]))
    plans = [fd.fec.plan({x: (batch, 8192, 512)}) for batch in (1, 8, 64)]
    sums = [[e.op.in_pairs for e in p.fusion.exprs if isinstance(e.op, Reduce)] for p in plans]
    assert sums[0] == sums[1] == sums[2]


@pytest.mark.parametrize("columns", [64, 4096])
def test_partial_sums_are_as_many_whether_a_definition_says_the_sizes_or_not(columns: int) -> None:
    found: list[list[int]] = []
    for sizes in ([-1, -1], [-1, columns], [8192, columns]):
        with FusionDefinition(invariant="ranks") as fd:
            x = fd.define_tensor(sizes, contiguity=True)
            fd.add_output(fd.ops.sum(x, [0]))
        exprs = fd.fec.plan({x: (8192, columns)}).fusion.exprs
        found.append([e.op.in_pairs for e in exprs if isinstance(e.op, Reduce)])
    assert found == 3 * [[0, {64: 128, 4096: 32}[columns]]]


def test_a_row_of_millions_is_added_up_in_parts() -> None:
    with FusionDefinition(invariant="ranks") as fd:
        fd.add_output(fd.ops.sum(fd.define_tensor([-1], contiguity=True), [0]))
    for n in (1 << 24, 3 << 22, 10**7):
        assert free_orders(fd, (n,)) == []
    with pytest.raises(PromiseError, match=r"a segment of 1000003 elements .* pad it to a multiple of 512"):
        fd.fec.plan({fd.fec.tensors()[0]: (1_000_003,)})
    fd.fec.plan({fd.fec.tensors()[0]: (-(-1_000_003 // 512) * 512,)})


@pytest.mark.parametrize("rows", [67, 521, 1031, 8 * 1031, 100_003, 1 << 20])
def test_columns_of_any_length_have_an_order_of_their_own(rows: int) -> None:
    with FusionDefinition(invariant="ranks") as fd:
        fd.add_output(fd.ops.sum(fd.define_tensor([-1, 256], contiguity=True), [0]))
    assert free_orders(fd, (rows, 256)) == []


@pytest.mark.parametrize(("n", "least"), [(11008, 128), (1285, 128), (8221, 1024), (4096, 1)])
def test_what_the_tuner_tries_of_a_row_loop_leaves_the_order_as_it_is(n: int, least: int) -> None:
    fd = on_ranks(rows_and_their_sum, n, 1, 0)
    planned = fd.fec.plan({fd.fec.tensors()[0]: (2048, n)}).segments[0]
    assert planned.scheduler == "mix_order"
    for other in candidates(planned.scheduler, planned.segment, planned.kernels[0].schedule, H200):
        assert (other.kept, other.parts, other.is_one_launch, other.members) == (1, 1, False, 0)
        assert least <= other.reduced <= 1024


@pytest.mark.parametrize(("n", "lanes"), [(4096, 1024), (5120, 1024), (11008, 1024), (16384, 4096)])
def test_what_the_tuner_tries_leaves_the_order_as_it_is(n: int, lanes: int) -> None:
    fd = on_ranks(softmax_of_rows, n, 1, 0)
    (x,) = fd.fec.tensors()
    (planned,) = fd.fec.plan({x: (2048, n)}).segments
    (kernel,) = planned.kernels
    others = candidates(planned.scheduler, planned.segment, kernel.schedule, H200)
    assert others
    for other in others:
        assert other.is_held
        assert not other.members
        assert lanes % other.reduced == 0
        assert other.reduced >= 128 or n != 11008, "a part of a run"


def test_products_along_a_row_are_refused() -> None:
    with FusionDefinition(invariant="ranks") as fd:
        fd.add_output(fd.ops.prod(fd.define_tensor([-1, 64], contiguity=True), [1]))
    with pytest.raises(PromiseError, match="order follows the kernel: add up logarithms"):
        fd.fec.plan({fd.fec.tensors()[0]: (8, 64)})


def test_rows_of_any_batch_whose_sums_are_those_of_any_number_of_ranks() -> None:
    """A batch of 2, 4 or 8 has a row in each segment."""
    for rows in (1, 2, 3, 8, 16, 8192):
        with FusionDefinition(invariant=("batch", "ranks")) as fd:
            x = fd.define_tensor([-1, 4096], contiguity=True)
            fd.add_output(fd.ops.mul(x, fd.ops.sum(x, [1], keepdim=True)))
            fd.add_output(fd.ops.sum(x, [0]))
        assert free_orders(fd, (rows, 4096)) == []


def test_sums_over_heads_that_are_joined_to_a_batch_of_any_size() -> None:
    """Three rows of four heads are no eight segments, but four."""
    with FusionDefinition(invariant="ranks") as fd:
        x = fd.define_tensor([-1, 4, 16], contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.reshape(x, [-1, 16]), [0]))
    for rows in (0, 1, 2, 3, 5, 6, 9, 12):
        assert fd.fec.plan({x: (rows, 4, 16)}).segments
