"""Generated kernels run by Triton's interpreter and compared with torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from interpreted import close, run, values
from pointwise_references import REFERENCES
from segments import Builder, evaluate, kernels_of, rms_norm, scheduler_of
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.op import Broadcast
from shardfuse.ir.scalar import Scalar
from shardfuse.ops.table import POINTWISE
from shardfuse.schedulers import looped, persistent, pointwise, reduction
from shardfuse.schedulers.schedule import Launch, Loop, Schedule, Split, Tile
from shardfuse.segments.segment import Segment

# --- norms ---------------------------------------------------------------------------------------------------


def rms_norm_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.double(), w.double()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


@pytest.mark.parametrize("scheduler", [persistent, looped])
@pytest.mark.parametrize("dtype", [DataType.BFloat16, DataType.Half, DataType.Float])
@pytest.mark.parametrize(("rows", "columns"), [(5, 300), (3, 2500), (2, 1), (1, 129), (7, 64)])
def test_rms_norm(tmp_path: Path, scheduler: ModuleType, dtype: DataType, rows: int, columns: int) -> None:
    segment = rms_norm(rows, columns, dtype)
    if columns == 1:
        scheduler = pointwise
    x, w = values(rows, columns, dtype=dtype), values(columns, dtype=dtype, seed=1)
    (out,) = run(segment, dict(zip(segment.inputs, (x, w), strict=True)), tmp_path, scheduler=scheduler)
    close(out, rms_norm_of(x, w))


@pytest.mark.parametrize("scheduler", [persistent, looped])
def test_add_rms_norm_stores_both(tmp_path: Path, scheduler: ModuleType) -> None:
    segment = rms_norm(3, 700, DataType.BFloat16, residual=True)
    x, r = values(3, 700, dtype=DataType.BFloat16), values(3, 700, dtype=DataType.BFloat16, seed=1)
    w = values(700, dtype=DataType.BFloat16, seed=2)
    total, out = run(segment, dict(zip(segment.inputs, (x, r, w), strict=True)), tmp_path, scheduler=scheduler)
    assert torch.equal(total, x + r)
    close(out, rms_norm_of(x + r, w))


def layer_norm(b: Builder, x: BoundTensor, axes: Sequence[int]) -> BoundTensor:
    centred = b.op("sub", x, b.mean(x, axes))
    return b.op("mul", centred, b.op("rsqrt", b.op("add", b.mean(b.op("mul", centred, centred), axes), 1e-5)))


@pytest.mark.parametrize("scheduler", [persistent, looped])
@pytest.mark.parametrize("dtype", [DataType.Float, DataType.Double])
def test_layer_norm_has_three_phases(tmp_path: Path, scheduler: ModuleType, dtype: DataType) -> None:
    b = Builder()
    x = b.input(dtype, b.axis(6), b.axis(1100))
    segment = b.segment(layer_norm(b, x, [1]))
    data = values(6, 1100, dtype=dtype) * 3 + 100
    (out,) = run(segment, {x: data}, tmp_path, scheduler=scheduler)
    close(out, torch.nn.functional.layer_norm(data.double(), [1100]))


def normed_twice(rows: int, columns: int, dtype: DataType) -> Segment:
    """Two layer norms in a row, which share scale and shift."""
    b = Builder()
    i, j = b.axis(rows), b.axis(columns)
    h, scale, shift = (b.cast(b.input(dtype, *axes), DataType.Float) for axes in ((i, j), (j,), (j,)))
    for _ in range(2):
        h = b.op("add", b.op("mul", layer_norm(b, h, [1]), scale), shift)
    return b.segment(b.cast(h, dtype))


@pytest.mark.parametrize(
    ("columns", "rows", "warps"),
    [
        (2048, 4, 2),
        (3072, 4, 4),
        (5120, 4, 4),
        (7168, 2, 4),
        (16384, 2, 8),
        (20480, 1, 16),
        (5000, 2, 4),
        (13000, 2, 8),
    ],
)
def test_rows_of_a_chain_wait_together(columns: int, rows: int, warps: int) -> None:
    """As many as registers hold, which nothing else bounds."""
    schedule = persistent.propose(normed_twice(4096, columns, DataType.BFloat16), H200)
    assert (schedule.kept, schedule.launch.warps, schedule.launch.registers) == (rows, warps, None)


def test_a_chain_of_norms(tmp_path: Path) -> None:
    segment = normed_twice(7, 300, DataType.Float)
    x, scale, shift = values(7, 300), values(300, seed=1), values(300, seed=2)
    wanted = x.double()
    for _ in range(2):
        wanted = functional.layer_norm(wanted, [300], scale.double(), shift.double(), 1e-5)
    schedule = Schedule(Tile(4, 64), launch=Launch(2))
    (found,) = run(
        segment,
        dict(zip(segment.inputs, (x, scale, shift), strict=True)),
        tmp_path,
        scheduler=persistent,
        schedule=schedule,
    )
    close(found, wanted)


def test_softmax_over_a_middle_axis(tmp_path: Path) -> None:
    b = Builder()
    x = b.input(DataType.Float, b.axis(3), b.axis(21), b.axis(40))
    e = b.op("exp", b.op("sub", x, b.reduce("max", x, [1])))
    segment = b.segment(b.op("div", e, b.reduce("sum", e, [1])))
    data = values(3, 21, 40)
    for scheduler in (persistent, looped):
        (out,) = run(segment, {x: data}, tmp_path, scheduler=scheduler)
        close(out, torch.softmax(data.double(), 1))


def test_group_norm_is_one_persistent_kernel(tmp_path: Path) -> None:
    """[N, C, H, W] -> [N, G, C/G, H, W] -> normalised -> [N, C, H, W] * w[C]: the axis c comes back."""
    b = Builder()
    x = b.input(DataType.Float, b.axis(2), b.axis(12), b.axis(8), b.axis(16))
    grouped = b.unflatten(x, 1, 4)
    back = b.flatten(layer_norm(b, grouped, [2, 3, 4]), 1, 2)
    w = b.input(DataType.Float, x.domain.logical[1])
    weight = b.emit(Broadcast((True, False, True, True)), [w], w.dtype, [(), *w.domain.logical, (), ()])
    segment = b.segment(b.op("mul", back, weight))
    assert scheduler_of(segment) is persistent
    data, scale = values(2, 12, 8, 16), values(12, seed=1)
    wanted = torch.nn.functional.group_norm(data.double(), 3, scale.double(), eps=1e-5)
    for scheduler in (persistent, looped):
        (out,) = run(segment, {x: data, w: scale}, tmp_path, scheduler=scheduler)
        close(out, wanted)


# --- reductions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16, DataType.Double, DataType.Int32])
def test_sum_over_any_axes(tmp_path: Path, axes: list[int], dtype: DataType) -> None:
    b = Builder()
    x = b.input(dtype, b.axis(9), b.axis(34), b.axis(50))
    result = DataType.Int if dtype.is_integral else dtype
    segment = b.segment(b.reduce("sum", x, axes, keepdim=False, dtype=result))
    data = values(9, 34, 50, dtype=dtype)
    wanted = data.double().sum(axes)
    for scheduler in (reduction, looped):
        (out,) = run(segment, {x: data}, tmp_path, scheduler=scheduler)
        close(out, wanted)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_max_and_min_keep_nan(tmp_path: Path, op: str, axis: int) -> None:
    b = Builder()
    x = b.input(DataType.Float, b.axis(70), b.axis(90))
    segment = b.segment(b.reduce(op, x, [axis], keepdim=False))
    data = values(70, 90)
    data[3, 5] = float("nan")
    data[9] = float("inf")
    data[:, 11] = float("-inf")
    wanted = data.amax(axis) if op == "max" else data.amin(axis)
    for scheduler in (reduction, looped):
        (out,) = run(segment, {x: data}, tmp_path, scheduler=scheduler)
        assert torch.equal(out.isnan(), wanted.isnan())
        close(out, wanted)


@pytest.mark.parametrize("dtype", [DataType.Int8, DataType.UInt8, DataType.Int, DataType.Half, DataType.Bool])
@pytest.mark.parametrize("op", ["max", "min", "any", "all", "prod"])
def test_reductions_of_every_type(tmp_path: Path, op: str, dtype: DataType) -> None:
    b = Builder()
    x = b.input(dtype, b.axis(13), b.axis(21))
    result = {"any": DataType.Bool, "all": DataType.Bool, "prod": DataType.Int if dtype.is_integral else dtype}
    segment = b.segment(b.reduce(op, x, [1], keepdim=False, dtype=result.get(op, dtype)))
    data = values(13, 21, dtype=dtype)
    data[2] = 0
    (out,) = run(segment, {x: data}, tmp_path)
    (wanted,) = evaluate(segment, {x: data})
    close(out, wanted.wide)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("shape", [(40000,), (3, 40000), (2000, 24), (513, 7, 12)])
def test_split_reduction_with_an_epilogue(tmp_path: Path, shape: tuple[int, ...], once: bool) -> None:
    """Prologue, sum and max of one input, and an epilogue over both: two kernels, or two stages of one."""
    b = Builder()
    x = b.input(DataType.Float, *map(b.axis, shape))
    axes = [1] if shape == (3, 40000) else [0] if len(shape) < 3 else [0, 1]
    square = b.op("mul", x, x)
    total = b.reduce("sum", square, axes, keepdim=False)
    top = b.reduce("max", square, axes, keepdim=False)
    segment = b.segment(b.op("sqrt", b.op("div", total, top)), top)
    schedule = reduction.propose(segment, H200)
    assert schedule.parts > 1
    schedule = schedule.finished_at_once(is_one_launch=once)
    assert len(reduction.kernels(segment, schedule, H200)) == 2 - once
    data = values(*shape)
    largest, ratio = run(segment, {x: data}, tmp_path, schedule=schedule, scheduler=reduction)
    wanted = data.double() ** 2
    close(largest, wanted.amax(axes))
    close(ratio, (wanted.sum(axes) / wanted.amax(axes)).sqrt())


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("shape", [(64, 37), (3, 64, 37), (64, 3, 37)])
def test_rows_of_odd_length_stand_side_by_side(tmp_path: Path, shape: tuple[int, ...], once: bool) -> None:
    """Eight of them begin where the first did: a weight of their columns, what they store, and two sums."""
    b = Builder()
    axes = [b.axis(n) for n in shape]
    x, weight = b.input(DataType.Half, *axes), b.input(DataType.Half, axes[-1])
    product = b.op("mul", b.cast(x, DataType.Float), b.cast(weight, DataType.Float))
    gone = 1 if shape[0] == 3 else 0
    total, top = (b.reduce(op, product, [gone], keepdim=False) for op in ("sum", "max"))
    segment = b.segment(b.cast(product, DataType.Half), b.op("mul", total, 2.0), top)
    schedule = Schedule(Tile(128, 4), Loop(), split=Split(2, once, side_by_side=8))
    data = values(*shape, dtype=DataType.Half), values(37, dtype=DataType.Half)
    largest, stored, doubled = run(
        segment, dict(zip((x, weight), data, strict=True)), tmp_path, schedule=schedule, scheduler=reduction
    )
    wanted = data[0].double() * data[1].double()
    assert torch.equal(stored, wanted.half())
    close(doubled, 2 * wanted.sum(gone))
    close(largest, wanted.amax(gone))


@pytest.mark.parametrize(
    ("shape", "rows"), [((16384, 8191), 8), ((3001, 4099), 1), ((100000, 77), 1), ((512, 4096), 1)]
)
def test_which_rows_stand_side_by_side(shape: tuple[int, int], rows: int) -> None:
    """Of odd length, in eights, and long enough together to be cut into tiles."""
    b = Builder()
    x = b.input(DataType.Half, *map(b.axis, shape))
    segment = b.segment(b.reduce("sum", b.cast(x, DataType.Float), [0], keepdim=False))
    split = reduction.propose(segment, H200).split
    assert (split.side_by_side if split else 1) == rows


@pytest.mark.parametrize(
    ("rows", "columns"), [(8192, 11008), (4096, 3000), (16384, 5140), (32768, 4096), (16384, 8192)]
)
def test_multiprocessors_have_as_many_parts_each(rows: int, columns: int) -> None:
    """Or one more, of which at least half do."""
    b = Builder()
    x = b.input(DataType.BFloat16, b.axis(rows), b.axis(columns))
    segment = b.segment(b.reduce("sum", b.cast(x, DataType.Float), [0], keepdim=False))
    schedule = reduction.propose(segment, H200)
    blocks = -(-columns // schedule.kept)
    programs = schedule.parts * blocks
    over = programs % H200.multiprocessors
    assert programs >= H200.multiprocessors
    assert over < blocks or over >= H200.multiprocessors // 2 - blocks


def test_reduction_stores_its_prologue(tmp_path: Path) -> None:
    b = Builder()
    x = b.input(DataType.Float, b.axis(2), b.axis(30000))
    double = b.op("mul", x, 2.0)
    segment = b.segment(double, b.reduce("sum", double, [1], keepdim=False))
    data = values(2, 30000)
    out, total = run(segment, {x: data}, tmp_path)
    assert torch.equal(out, data * 2)
    close(total, data.double().sum(1) * 2)


def test_sum_of_what_was_expanded(tmp_path: Path) -> None:
    b = Builder()
    i, j = b.axis(6), b.axis(37)
    x = b.input(DataType.Float, i, ())
    segment = b.segment(b.reduce("sum", b.expand(x, [i, j]), [1], keepdim=False))
    data = values(6, 1)
    for scheduler in (reduction, looped):
        (out,) = run(segment, {x: data}, tmp_path, scheduler=scheduler)
        close(out, data.double()[:, 0] * 37)


# --- pointwise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16, DataType.Half, DataType.Double, DataType.Int])
def test_broadcasts_both_ways(tmp_path: Path, dtype: DataType) -> None:
    b = Builder()
    i, j = b.axis(23), b.axis(45)
    x, row, column = b.input(dtype, i, j), b.input(dtype, j), b.input(dtype, i, ())
    number = b.input(dtype)
    segment = b.segment(b.op("add", b.op("mul", b.op("add", x, row), column), number))
    shapes = ((23, 45), (45,), (23, 1), ())
    data = [values(*s, dtype=dtype, seed=k) for k, s in enumerate(shapes)]
    (out,) = run(segment, dict(zip(b.inputs, data, strict=True)), tmp_path)
    (wanted,) = evaluate(segment, dict(zip(b.inputs, data, strict=True)))
    assert torch.equal(out, wanted.eager), "every op rounds as torch's does"


@pytest.mark.parametrize("view", ["rows", "columns", "transposed", "expanded"])
def test_strided_inputs(tmp_path: Path, view: str) -> None:
    b = Builder()
    i, j = b.axis(20), b.axis(33)
    x, y = b.input(DataType.Float, i, j), b.input(DataType.Float, i, j)
    wide = values(40, 66)
    data = {
        "rows": wide[::2, :33],
        "columns": wide[:20, ::2],
        "transposed": values(33, 20).t(),
        "expanded": values(20, 1).expand(20, 33),
    }[view]
    other = values(20, 33, seed=5)
    segment = b.segment(b.op("sub", x, y))
    (out,) = run(segment, {x: data, y: other}, tmp_path)
    assert torch.equal(out, data - other)
    total = b.reduce("sum", segment.outputs[0], [1], keepdim=False)
    (out,) = run(b.segment(total), {x: data, y: other}, tmp_path)
    close(out, (data.double() - other.double()).sum(1))


def test_permute_and_reshape_are_names(tmp_path: Path) -> None:
    b = Builder()
    i, j, k = b.axis(6), b.axis(10), b.axis(4)
    x, y = b.input(DataType.Float, i, j, k), b.input(DataType.Float, k, i, j)
    moved = b.permute(x, [2, 0, 1])
    segment = b.segment(b.unflatten(b.flatten(b.op("add", moved, y), 1, 2), 1, 5))
    a, c = values(6, 10, 4), values(4, 6, 10, seed=1)
    (out,) = run(segment, {x: a, y: c}, tmp_path)
    assert torch.equal(out, (a.permute(2, 0, 1) + c).reshape(4, 12, 5))


@pytest.mark.parametrize("dtype", list(DataType))
def test_casts_from_and_to_every_type(tmp_path: Path, dtype: DataType) -> None:
    if dtype.is_complex or dtype.name.startswith(("Float8", "UInt16", "UInt32", "UInt64")):
        pytest.skip("no Triton type, or none that torch computes with")
    b = Builder()
    x = b.input(dtype, b.axis(50))
    kinds = [
        DataType.Double,
        DataType.Float,
        DataType.Half,
        DataType.BFloat16,
        DataType.Int,
        DataType.Int8,
        DataType.Bool,
    ]
    segment = b.segment(*(b.cast(x, kind) for kind in kinds if kind is not dtype))
    data = values(50, dtype=dtype)
    for found, wanted in zip(run(segment, {x: data}, tmp_path), evaluate(segment, {x: data}), strict=True):
        assert torch.equal(found, wanted.eager)


def test_where_with_numbers_and_iota(tmp_path: Path) -> None:
    """Cross entropy's pick: eq(iota, target), masked logits."""
    b = Builder()
    i, j = b.axis(9), b.axis(130)
    x, target = b.input(DataType.Half, i, j), b.input(DataType.Int, i, ())
    hit = b.op("eq", b.iota(j), target)
    picked = b.reduce("sum", b.op("where", hit, x, 0.0), [1], keepdim=False)
    kept = b.op("where", b.op("ne", target, -1), x, float("-inf"))
    segment = b.segment(picked)
    data, label = values(9, 130, dtype=DataType.Half), torch.arange(9).mul(14)[:, None]
    (out,) = run(segment, {x: data, target: label}, tmp_path)
    assert torch.equal(out, data.gather(1, label)[:, 0])
    (out,) = run(b.segment(kept), {x: data, target: label}, tmp_path)
    assert torch.equal(out, data)


def test_iota_over_a_reshaped_axis_with_step(tmp_path: Path) -> None:
    b = Builder()
    flat = b.iota(b.axis(24), start=5, step=-3)
    x = b.input(DataType.Int, *(flat.domain.logical))
    two = b.unflatten(b.op("add", x, flat), 0, 6)
    (out,) = run(b.segment(two), {x: torch.zeros(24, dtype=torch.int64)}, tmp_path)
    assert torch.equal(out, (5 - 3 * torch.arange(24)).view(4, 6))


def test_scalar_arguments(tmp_path: Path) -> None:
    b = Builder()
    scale, shift = Scalar("S0", DataType.Double), Scalar("S1", DataType.Int)
    x = b.input(DataType.Float, b.axis(77))
    segment = b.segment(b.op("add", b.op("mul", x, scale), shift))
    data = values(77)
    (out,) = run(segment, {x: data}, tmp_path, numbers={scale: 0.75, shift: 3})
    assert torch.equal(out, data * 0.75 + 3)


def torch_takes(name: str, operands: Sequence[torch.Tensor]) -> bool:
    """Some ops have no meaning for some types; torch's refusal says which."""
    try:
        REFERENCES[name].call(*operands)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def in_triton(name: str, dtype: DataType) -> bool:
    """Some ops have no Triton text for some types: they are torch calls there."""
    b = Builder()
    x = b.input(dtype, b.axis(60))
    return pointwise.why_not(b.segment(b.op(name, *[x] * POINTWISE[name].arity)), H200) is None


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16, DataType.Double, DataType.Int32, DataType.Bool])
def test_pointwise_table(tmp_path: Path, dtype: DataType) -> None:
    """Every op of the table in one kernel, against torch's own function."""
    b = Builder()
    x = b.input(dtype, b.axis(60))
    y = b.input(dtype, *x.domain.logical)
    data, other = values(60, dtype=dtype), values(60, dtype=dtype, seed=3)
    names = [name for name, op in POINTWISE.items() if op.triton is not None and name != "where"]
    outputs: list[BoundTensor] = []
    for name in names:
        arity = POINTWISE[name].arity
        if torch_takes(name, [data, other, data, other][:arity]) and in_triton(name, dtype):
            outputs.append(b.op(name, *[x, y, x, y][:arity]))
    assert len(outputs) >= {DataType.Int32: 41, DataType.Bool: 21}.get(dtype, 75), f"of {len(names)} ops"
    segment = b.segment(*outputs)
    if dtype.is_floating:
        other[5] = float("nan")
    run(segment, {x: data, y: other}, tmp_path)  # compares every element with torch's functions


def test_erf_beside_one(tmp_path: Path) -> None:
    """Right to 2e-7, which a sum with 1 keeps; alone right to that of itself."""
    b = Builder()
    x = b.input(DataType.Float, b.axis(4000))
    data = torch.cat([torch.linspace(-6, 6, 3995), torch.tensor([0.0, 1e-3, 1e-20, -float("inf"), float("nan")])])
    segment = b.segment(b.op("add", b.op("erf", x), 1.0), b.op("sub", 1, b.op("erf", x)), b.op("erf", x))
    (source,) = kernels_of(segment)
    statements = [line for line in source.text.splitlines() if line.startswith("    T")]
    assert [sum(f" = {name}(" in line for line in statements) for name in ("erf", "erf_for_one")] == [1, 2]
    more, less, alone = run(segment, {x: data}, tmp_path)
    wanted = torch.erf(data.double())
    # of a sum with 1, 2.5e-7 (4 roundings of the 1): what the shorter polynomial is right to
    assert_near(more, 1 + wanted, n=1, terms=torch.full((4000,), 4.0))
    assert_near(less, 1 - wanted, n=1, terms=torch.full((4000,), 4.0), signed=False)
    assert_near(alone, wanted, n=4)


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.Double, DataType.BFloat16])
def test_squares_and_cubes_are_products(tmp_path: Path, dtype: DataType) -> None:
    b = Builder()
    x = b.input(dtype, b.axis(1000))
    data = torch.cat([torch.linspace(-40, 40, 996), torch.tensor([0.0, -0.0, float("inf"), float("nan")])])
    data = data.to(dtype.torch)
    segment = b.segment(*(b.op("pow", x, n) for n in (2, 2.0, 3.0, 2.5)))
    (source,) = kernels_of(segment)
    assert source.text.count("libdevice.pow(") == 1
    for found, n in zip(run(segment, {x: data}, tmp_path), (2, 2.0, 3.0, 2.5), strict=True):
        wanted = torch.pow(data.to(dtype.compute.torch), n).to(dtype.torch)
        assert_near(found, wanted.double(), n=0 if n == 2 else 2)


# --- refusals ------------------------------------------------------------------------------------------------


def two_reductions() -> Segment:
    b = Builder()
    x = b.input(DataType.Float, b.axis(8), b.axis(8))
    return b.segment(b.reduce("sum", x, [0], keepdim=False), b.reduce("sum", x, [1], keepdim=False))


def lacking() -> Segment:
    b = Builder()
    x, w = b.input(DataType.Float, b.axis(8), b.axis(4)), b.input(DataType.Float)
    w = b.input(DataType.Float, x.domain.logical[1])
    narrow = b.op("mul", w, 2.0)
    return b.segment(b.op("mul", x, narrow), narrow)


@pytest.mark.parametrize(("segment", "said"), [(two_reductions, "T2 reduces i1, others i0"), (lacking, "T3 lacks i0")])
def test_why_not_names_the_reason(segment: Callable[[], Segment], said: str) -> None:
    for scheduler in (persistent, reduction, pointwise, looped):
        reason = scheduler.why_not(segment(), H200)
        assert reason is not None
        assert said in reason
