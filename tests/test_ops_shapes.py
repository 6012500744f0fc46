"""Shapes that only a call tells: scalar inputs as sizes, extents of 0, expanded inputs, aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import called, run_case
from torch.nn import functional
from torch_answers import assert_like

from benchmarks.roundings import assert_near
from shardfuse import DataType, FusionDefinition
from shardfuse.errors import DefinitionError, OperandError, ShapeError
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops


def test_scalar_inputs_are_sizes() -> None:
    with FusionDefinition() as fd:
        x, (rows, columns) = fd.define_tensor([-1, -1]), fd.define_vector(2)
        half = fd.ops.floor_div(rows, 2)
        fd.add_output(fd.ops.slice(x, [half, 0], [rows, columns]))
        fd.add_output(fd.ops.full([columns, half], 2.5, DataType.Float))
        fd.add_output(fd.ops.topk(x, columns, 1)[0])
    x = torch.randn(6, 5)
    for rows, columns in ((6, 3), (4, 5), (4, 2)):
        part, filled, top = fd.execute([x, rows, columns])
        assert torch.equal(part, x[rows // 2 : rows, :columns])
        assert torch.equal(filled, torch.full((columns, rows // 2), 2.5))
        assert torch.equal(top, x.topk(columns, 1).values)


def test_arithmetic_on_scalar_inputs() -> None:
    with FusionDefinition() as fd:
        x, a, n = fd.define_tensor([-1]), fd.define_scalar(), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.mul(x, fd.ops.add(fd.ops.exp(a), fd.ops.mul(n, 2))))
    x = torch.ones(3)
    for a, n in ((0.5, 3), (-1.25, 1 << 40)):
        wanted = x * float(torch.tensor(a, dtype=torch.float64).exp() + 2 * n)
        assert_near(fd.execute([x, a, n])[0], wanted.double(), n=1)


def test_triangles_of_flags() -> None:
    x = torch.ones(3, 5, dtype=torch.bool)
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        fd.add_output(fd.ops.triu(t, 1))
        fd.add_output(fd.ops.tril(t))
    for out, expected in zip(fd.execute([x]), (x.triu(1), x.tril()), strict=True):
        assert out.dtype == torch.bool
        assert torch.equal(out, expected)


def test_reductions_over_no_axes() -> None:
    """Each element is reduced alone; torch's own sum and var take an empty list for all axes."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        outputs = [fd.ops.sum(t, []), fd.ops.mean(t, []), fd.ops.amax(t, []), fd.ops.any(t, [])]
        for out in (*outputs, fd.ops.var(t, []), fd.ops.var(t, [], 0), *fd.ops.var_mean(t, [], 0, keepdim=True)):
            fd.add_output(out)
    expected = [x, x, x, x != 0, x * torch.nan, x * 0, x * 0, x]
    for out, value in zip(fd.execute([x]), expected, strict=True):
        torch.testing.assert_close(out, value, rtol=0, atol=0, equal_nan=True)


def test_fills_of_the_type_of_a_tensor() -> None:
    x = torch.zeros(2, 3, dtype=torch.int64)
    with FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        fd.add_output(fd.ops.full_like(t, 7))
        fd.add_output(fd.ops.full_like(t, 1j, DataType.ComplexFloat))
        fd.add_output(fd.ops.full_like(t, fd.define_scalar(dtype=DataType.Int)))
        fd.add_output(fd.ops.add(t, fd.define_scalar(7, DataType.Int8)))
    wanted = [torch.full_like(x, 7), torch.full_like(x, 1j, dtype=torch.complex64), torch.full_like(x, 9), x + 7]
    for out, expected in zip(fd.execute([x, 9]), wanted, strict=True):
        assert out.dtype == expected.dtype
        assert torch.equal(out, expected)


NARROW = (
    DataType.Half,
    DataType.BFloat16,
    DataType.Float8_e4m3fn,
    DataType.Float8_e5m2,
    DataType.Float8_e8m0fnu,
)


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: d.name)
@pytest.mark.parametrize("value", [3, 70_000, -70_000, 2**62, 70_000.0, 1e9])
def test_a_number_beyond_a_narrow_type_is_what_a_cast_makes_of_it(
    value: float, dtype: DataType, backend: str | None
) -> None:
    """Infinite, or the largest number of a type without infinities, whatever the op and whether the call gives it."""
    x, index = torch.ones(3).to(dtype.torch), torch.zeros(1, dtype=torch.int64)
    for is_given in (False, True):
        with FusionDefinition(backend=backend) as fd:
            kind = DataType.Int if isinstance(value, int) else DataType.Double
            number = fd.define_scalar(dtype=kind) if is_given else value
            t, at, o = fd.define_tensor([3], dtype=dtype), fd.define_tensor([1], dtype=DataType.Int), fd.ops
            first, last = o.full_like(t, number), o.full([3], number, dtype)
            for y in (o.pad(t, [3, 0], number), o.scatter(t, at, number, 0), first, last):
                fd.add_output(y)
        found = fd.execute([*([value] if is_given else []), x, index])
        right = torch.tensor(value, dtype=torch.float64).to(dtype.torch).float()
        for y in found:
            torch.testing.assert_close(y[0].float(), right, rtol=0, atol=0, equal_nan=True)


def test_triangles_and_views_of_nothing() -> None:
    for shape in ((0, 5), (4, 0), (0, 0)):
        x = torch.randn(shape)
        with FusionDefinition() as fd:
            t = fd.from_pytorch(x)
            fd.add_output(fd.ops.triu(t))
            fd.add_output(fd.ops.sum(fd.ops.cat([t, t], 1), [0]))
        upper, total = fd.execute([x])
        assert torch.equal(upper, x.triu())
        assert torch.equal(total, torch.cat([x, x], 1).sum(0))


READ_AGAIN: dict[str, tuple[Callable[[Ops, TensorView], TensorView], Callable[[torch.Tensor], torch.Tensor]]] = {
    "slice": (lambda o, x: o.slice(x, [1], [3]), lambda x: x[1:3]),
    "strided": (lambda o, x: o.slice(x, [1], [6], [2]), lambda x: x[1:6:2]),
    "flip": (lambda o, x: o.flip(x, [0]), lambda x: x.flip(0)),
    "select": (lambda o, x: o.select(x, 4, 0), lambda x: x[4]),
    "pad": (lambda o, x: o.pad(x, [1, 2], 3.0), lambda x: functional.pad(x, [1, 2], value=3.0)),
}


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("said", [-1, None], ids=["symbolic", "static"])
@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_part_of_a_sum_over_an_axis_that_may_be_empty(name: str, said: int | None, rows: int) -> None:
    """The sum is of a view, which has no elements where the axis has none."""
    part, expected = READ_AGAIN[name]
    x = torch.arange(rows * 6, dtype=torch.float32).view(rows, 6)
    views: list[tuple[Callable[[Ops, TensorView], TensorView], torch.Tensor]] = [
        (lambda o, t: o.flip(t, [0]), x.flip(0)),
        (lambda o, t: o.slice(t, [0, 0], [rows, 6], [2, 1]), x[::2]),
    ]
    for view, seen in views:
        with FusionDefinition() as fd:
            t = fd.define_tensor([rows if said is None else said, 6])
            fd.add_output(part(fd.ops, fd.ops.sum(view(fd.ops, t), [0])))
        (found,) = fd.execute([x])
        torch.testing.assert_close(found, expected(seen.sum(0)), rtol=0, atol=0)


def test_expanded_and_strided_inputs() -> None:
    base = torch.randn(4, 1, 6)
    for x in (base.expand(4, 3, 6), base.expand(4, 3, 6).permute(2, 0, 1), torch.randn(8, 3, 12)[::2, :, ::2]):
        with FusionDefinition() as fd:
            t = fd.from_pytorch(x)
            fd.add_output(fd.ops.sum(fd.ops.add(t, 1.0), [1]))
        assert_like(fd.execute([x])[0], lambda x: (x + 1).sum(1), x)


def test_swapping_two_inputs_in_place() -> None:
    a, b = torch.randn(4), torch.randn(4)
    with FusionDefinition() as fd:
        s, t = fd.define_tensor([-1]), fd.define_tensor([-1])
        fd.add_output(fd.ops.set(t), s)
        fd.add_output(fd.ops.set(s), t)
    before = a.clone(), b.clone()
    assert fd.execute([a, b]) == []
    assert torch.equal(a, before[1])
    assert torch.equal(b, before[0])


def test_aliases_that_cannot_be() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1]), fd.define_tensor([-1, -1], dtype=DataType.Half)
        fd.add_output(fd.ops.neg(x), x)
        with pytest.raises(DefinitionError, match="an input that no other output is written to"):
            fd.add_output(fd.ops.abs(x), x)
        with pytest.raises(DefinitionError, match="the rank and dtype of the input"):
            fd.add_output(fd.ops.exp(x), y)


def test_what_does_not_fit() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6])
        with pytest.raises(OperandError, match=r"start_indices is .*expected 2 of them"):
            fd.ops.slice(x, [0], [1])
        with pytest.raises(OperandError, match="pad_widths"):
            fd.ops.pad(x, [1])
        with pytest.raises(OperandError, match=r"bitwise_and: operand 0 is .*Float.*, expected an integer or Bool"):
            fd.ops.bitwise_and(x, x)
        with pytest.raises(OperandError, match=r"reshape: new_shape is \[5, 5\], expected 24 elements"):
            fd.ops.reshape(x, [5, 5])
        with pytest.raises(OperandError, match="cat: axis 1 of operand 1"):
            fd.ops.cat([x, fd.define_tensor([2, 5])], 0)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.pad(x, [-4, -4]))
    with pytest.raises(ShapeError, match="an axis of -2"):
        fd.execute([torch.ones(3, 6)])


def test_attention_drops_the_same_weights_backward() -> None:
    """The gradient by differences, with the mask that one seed gives."""
    shapes = ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), (2, 3, 5, 4))
    q, k, v, grad = (
        torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(len(s))) for s in shapes
    )

    with FusionDefinition() as fd:
        tensors = [fd.from_pytorch(x) for x in (q, k, v, grad)]
        out, sums, seed, offset = fd.ops.sdpfa_fwd(*tensors[:3], dropout_p=0.4, is_causal=True)
        found = fd.ops.sdpfa_bwd(tensors[3], *tensors[:3], out, sums, 0.4, True, seed, offset)
        for tv in (out, *found):
            fd.add_output(tv)

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return fd.execute([*given, grad])

    out, *gradients = run(q, k, v)
    kept = out != run(q, k, v)[0]
    assert not kept.any(), "one seed, one mask"
    torch.manual_seed(4)
    assert not torch.equal(out, fd.execute([q, k, v, grad])[0])
    for j, (x, gradient) in enumerate(zip((q, k, v), gradients, strict=True)):
        step = torch.randn(x.shape, dtype=torch.float64) * 1e-6
        ends = [run(*(y + sign * step if y is x else y for y in (q, k, v)))[0] for sign in (1, -1)]
        change = ((ends[0] - ends[1]) * grad).sum() / 2
        # by differences of steps of 1e-6: their square is left out, and 1e-10 of the ends is rounded away
        torch.testing.assert_close(
            (gradient * step).sum(), change, rtol=1e-6, atol=1e-12, msg=lambda m, j=j: f"{j}: {m}"
        )


def test_heads_that_do_not_match() -> None:
    """As many heads of keys as of queries, or one for all of them in the forward pass."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    with FusionDefinition() as fd:
        x, y = fd.from_pytorch(q), fd.from_pytorch(k)
        fd.add_output(fd.ops.sdpfa_fwd(x, y, y)[0])
    with pytest.raises(ShapeError):
        fd.execute([q, k])
    with FusionDefinition() as fd:
        x, y = fd.from_pytorch(q), fd.from_pytorch(k[:, :1])
        fd.add_output(fd.ops.sdpfa_fwd(x, y, y)[0])

    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        one = k.expand(q.shape)
        return torch.nn.functional.scaled_dot_product_attention(q, one, one)

    assert_like(fd.execute([q, k[:, :1].contiguous()])[0], attention, q, k[:, :1].contiguous())


def test_a_rotary_embedding() -> None:
    shapes = ((4, 6, 8), (6, 8), (6, 8))
    values = [
        torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k, s in enumerate(shapes)
    ]

    def build(o: Any, t: list[Any]) -> Any:
        x, cosine, sine = t
        first, second = o.slice(x, [0, 0, 0], [4, 6, 4]), o.slice(x, [0, 0, 4], [4, 6, 8])
        return o.add(o.mul(x, cosine), o.mul(o.cat([o.neg(second), first], 2), sine))

    def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        return x * cosine + torch.cat([-x[..., 4:], x[..., :4]], -1) * sine

    case = called(build, rotated, values)
    for placement in range(7):
        run_case(case, "torch", placement)


MOVES: dict[str, tuple[Callable[[Ops, TensorView], TensorView], Callable[[torch.Tensor], torch.Tensor]]] = {
    "slice": (lambda ops, t: ops.slice(t, [1, 0, 0], [5, 1, 4], [2, 1, 1]), lambda t: t[1:5:2]),
    "flip": (lambda ops, t: ops.flip(t, [0, 1]), lambda t: t.flip(0, 1)),
    "flip of one element": (lambda ops, t: ops.flip(t, [1]), lambda t: t.flip(1)),
    "select": (lambda ops, t: ops.select(t, -2, 0), lambda t: t[-2]),
    "select of one element": (lambda ops, t: ops.select(t, 0, 1), lambda t: t[:, 0]),
    "pad": (
        lambda ops, t: ops.pad(t, [1, 0, 0, 0, 2, -1], 3.0),
        lambda t: functional.pad(t, [1, 0, 0, 0, 2, -1], value=3.0),
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_move_that_is_made_twice_and_read(move: str) -> None:
    """Of an input and of what is computed: both results are returned, and read by what makes a third and a fourth."""
    define, reference = MOVES[move]
    x, w = torch.randn(6, 1, 4), torch.randn(4)
    with FusionDefinition() as fd:
        t, v = fd.define_tensor([6, 1, 4]), fd.define_tensor([4])
        product = fd.ops.mul(fd.ops.exp(t), v)
        moved = [define(fd.ops, product), define(fd.ops, product), define(fd.ops, t), define(fd.ops, t)]
        fd.add_output(fd.ops.sum(fd.ops.mul(moved[0], moved[2]), [-1]))
        for y in moved:
            fd.add_output(y)
        fd.add_output(fd.ops.add(moved[1], moved[3]))

    def torchs(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        p, q = reference(x.exp() * w), reference(x)
        return [(p * q).sum(-1), p, p, q, q, p + q]

    assert_like(fd.execute([x, w]), torchs, x, w)


@pytest.mark.parametrize("op", ["slice", "flip", "pad"])
def test_a_move_that_a_kernel_reads_runs_by_itself_nowhere(op: str) -> None:
    """No launch beside that of the sum that reads it, of an input as of what is computed."""
    define, _ = MOVES[op]
    for computed in (False, True):
        with FusionDefinition(backend="triton") as fd:
            t = fd.define_tensor([6, 1, 4])
            fd.add_output(fd.ops.sum(fd.ops.exp(define(fd.ops, fd.ops.mul(t, 2.0) if computed else t)), [-1]))
        explained = fd.explain()
        assert explained.kernels == 1
        assert [s.scheduler for s in explained.segments if s.scheduler in ("torch_call", "no_op")] == []


def test_a_slices_step_may_be_a_constant_scalar() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        fd.add_output(fd.ops.slice(x, [1], [7], [fd.define_scalar(2)]))
    (found,) = fd.execute([torch.arange(7.0)])
    assert found.tolist() == [1.0, 3.0, 5.0]
