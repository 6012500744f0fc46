"""Each aten op of the table, against eager torch: in a graph around a reduction, replaced by the pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compile_graphs import check, graph_of, regions_in
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardfuse.compile.aten_table import aten_ops

F = torch.nn.functional
aten = torch.ops.aten
prims = torch.ops.prims
FLOATS = (torch.float32, torch.bfloat16)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).to(dtype)


def integers(*shape: int, low: int = -5, high: int = 6) -> torch.Tensor:
    return torch.randint(low, high, shape)


def around(op: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``op`` with a reduction behind it, so that there is a region; its own result is an output too."""

    def f(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = op(*inputs)
        return y, y.any(-1) if y.dtype == torch.bool else y.amax(-1)

    return f


UNARY = {
    "abs": (), "neg": (), "relu": (), "exp": (), "exp2": (), "expm1": (), "sin": (), "cos": (), "tan": (-1.0, 1.0),
    "sinh": (), "cosh": (), "tanh": (), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "atan": (), "asinh": (),
    "acosh": (1.1, 4.0), "atanh": (-0.9, 0.9), "erf": (), "erfc": (), "erfinv": (-0.9, 0.9), "lgamma": (0.5, 4.0),
    "sigmoid": (), "silu": (), "reciprocal": (0.5, 2.0), "floor": (), "ceil": (), "trunc": (), "round": (), "frac": (),
    "isnan": (), "isinf": (), "isfinite": (), "isposinf": (), "isneginf": (), "square": (), "sign": (),
    "log": (0.1, 4.0), "log2": (0.1, 4.0), "log10": (0.1, 4.0), "log1p": (0.1, 4.0), "sqrt": (0.1, 4.0),
    "rsqrt": (0.1, 4.0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "bfloat16"])
def test_unary(dtype: torch.dtype) -> None:
    for name, bounds in UNARY.items():
        x = numbers(4, 9, dtype=dtype, **dict(zip(("low", "high"), bounds, strict=False)))
        check(around(getattr(aten, name).default), [x], what=name)


def test_special_values_of_unary() -> None:
    x = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3.5, 2.5]])
    for name in ("abs", "neg", "relu", "exp", "sqrt", "sigmoid", "tanh", "erf", "isnan", "isinf", "sign", "round"):
        check(lambda x, name=name: (getattr(aten, name).default(x), x.sum(-1)), [x], what=name)


def test_logical() -> None:
    mask, other = numbers(4, 9) > 0, numbers(4, 9) > 0.5
    check(around(aten.logical_not.default), [mask])
    check(around(aten.bitwise_not.default), [mask])
    check(around(aten.bitwise_not.default), [integers(4, 9)])
    for name in ("logical_and", "logical_or", "logical_xor"):
        check(around(getattr(aten, name).default), [mask, other], what=name)
    for name in ("mul", "add"):
        check(around(getattr(aten, name).Tensor), [mask, other], what=name)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        check(around(getattr(aten, name).Tensor), [integers(4, 9), integers(4, 9)], what=name)
        check(around(lambda x, name=name: getattr(aten, name).Scalar(x, 3)), [integers(4, 9)], what=name)


@pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "bfloat16"])
def test_binary(dtype: torch.dtype) -> None:
    x, y = numbers(4, 9, dtype=dtype), numbers(4, 9, dtype=dtype, low=0.5)
    for name in ("add", "sub", "mul", "div", "fmod", "remainder", "eq", "ne", "lt", "le", "gt", "ge"):
        check(around(getattr(aten, name).Tensor), [x, y], what=name)
        check(around(lambda x, name=name: getattr(aten, name).Scalar(x, 0.75)), [x], what=f"{name} of a number")
    for name in ("maximum", "minimum", "atan2"):
        check(around(getattr(aten, name).default), [x, y], what=name)
    for name in ("hypot", "copysign"):
        overload = getattr(aten, name)
        check(around(getattr(overload, overload.overloads()[0])), [x, y], what=name)


def test_operands_are_promoted_as_torch_does() -> None:
    narrow, wide, whole = numbers(4, 9, dtype=torch.bfloat16), numbers(4, 9), integers(4, 9)
    scalar, mask = numbers(dtype=torch.float64), numbers(4, 9) > 0
    for a in (narrow, wide, whole, mask):
        for b in (narrow, wide, whole, scalar):
            check(around(aten.mul.Tensor), [a, b], what=f"{a.dtype} * {b.dtype} of {b.ndim} dims")
    for a in (narrow, wide, whole):
        check(around(lambda x: x * 3), [a])
        check(around(lambda x: x * 2.5), [a])
        check(around(lambda x: x > 0), [a])
    check(around(aten.div.Tensor), [whole, integers(4, 9, low=1)])
    check(around(lambda x: 1 - x), [narrow])


def test_scaled_sums() -> None:
    x, y = numbers(4, 9), numbers(4, 9)
    check(around(lambda x, y: aten.add.Tensor(x, y, alpha=0.5)), [x, y])
    check(around(lambda x, y: aten.sub.Tensor(x, y, alpha=3)), [x, y])
    check(around(lambda x: aten.rsub.Scalar(x, 2.0)), [x])
    check(around(lambda x, y: aten.rsub.Tensor(x, y)), [x, y])


def test_operands_are_scaled_in_the_promoted_type() -> None:
    small, large = torch.full((4, 9), 100, dtype=torch.int8), integers(4, 9).int()
    half, wide = numbers(4, 9, dtype=torch.float16, low=4e3, high=6e4), numbers(4, 9)
    for a, b in ((large, small), (wide, half), (numbers(4, 9, dtype=torch.float64), large)):
        check(around(lambda a, b: aten.add.Tensor(a, b, alpha=100)), [a, b], what=f"{a.dtype} + 100 {b.dtype}")
        check(around(lambda a, b: aten.sub.Tensor(a, b, alpha=100)), [a, b], what=f"{a.dtype} - 100 {b.dtype}")
    check(around(lambda x, y: aten.add.Tensor(x, y, alpha=0.3)), [half, half], n=1)
    check(around(lambda x, a, b: aten.addcdiv.default(x, a, b, value=3)), [wide.double(), half, half + 1], n=4)
    check(around(lambda x, a, b: aten.addcmul.default(x, a, b, value=3)), [wide, half, half], n=4)


def test_powers() -> None:
    x = numbers(4, 9, low=0.2)
    for exponent in (0.5, 1, 2, 3, 2.5, -1.0, 3.0):
        check(around(lambda x, e=exponent: aten.pow.Tensor_Scalar(x, e)), [x], what=f"power {exponent}")
    check(around(lambda x: aten.pow.Tensor_Scalar(x, 2)), [numbers(4, 9)])
    check(around(aten.pow.Tensor_Tensor), [x, numbers(4, 9)])
    check(around(lambda x: aten.pow.Scalar(2.0, x)), [x])
    special = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), 4.0, -4.0]])
    for exponent in (-0.5, 0.5, -1, 0):
        f = lambda x, e=exponent: (aten.pow.Tensor_Scalar(x, e), x.sum(-1))  # noqa: E731
        check(f, [special], what=f"power {exponent}")


def test_choices_and_bounds() -> None:
    x, y, mask = numbers(4, 9), numbers(4, 9), numbers(4, 9) > 0
    x[0, 0] = y[1, 1] = float("nan")
    check(around(aten.where.self), [mask, x, y])
    check(around(lambda m, x: torch.where(m, x, 0.0)), [mask, x])
    check(around(lambda x, m: aten.masked_fill.Scalar(x, m, -1e9)), [x, mask])
    check(around(lambda x, m: aten.masked_fill.Scalar(x, m, float("-inf"))), [x.bfloat16(), mask])
    check(around(lambda x, m, v: aten.masked_fill.Tensor(x, m, v)), [x, mask, numbers()])
    check(around(lambda x: aten.clamp.default(x, -0.5, 0.5)), [x])
    check(around(lambda x: aten.clamp.default(x, None, 0.5)), [x])
    check(around(lambda x: aten.clamp_min.default(x, 0.25)), [x])
    check(around(lambda x: aten.clamp_max.default(x, 0.25)), [x])
    check(around(lambda x, y: aten.clamp.Tensor(x, y)), [x, y])
    for name in ("maximum", "minimum"):  # NaN of either is the result
        check(around(getattr(aten, name).default), [x, y], what=name)


def test_composed() -> None:
    x, y, z = numbers(4, 9), numbers(4, 9), numbers(4, 9, low=0.5)
    for approximate in ("none", "tanh"):
        check(around(lambda x, a=approximate: aten.gelu.default(x, approximate=a)), [x], what=approximate)
        check(around(lambda x, a=approximate: F.gelu(x, approximate=a)), [x.bfloat16()], what=approximate)
    check(around(lambda x, y: aten.lerp.Scalar(x, y, 0.3)), [x, y])
    check(around(aten.lerp.Tensor), [x, y, numbers(4, 9, low=0, high=1)])
    check(around(lambda x, y, z: aten.addcmul.default(x, y, z, value=0.5)), [x, y, z], rows=None, n=4)
    check(around(lambda x, y, z: aten.addcdiv.default(x, y, z, value=0.5)), [x, y, z], n=4)
    check(around(aten.sigmoid_backward.default), [x, torch.sigmoid(y)], n=4)
    check(around(aten.tanh_backward.default), [x, torch.tanh(y)], n=4)
    check(around(lambda x: aten.threshold.default(x, 0.1, 20.0)), [x])
    check(around(lambda x: F.leaky_relu(x, 0.1)), [x])
    check(around(F.softplus), [x], n=4)


def test_casts_and_copies() -> None:
    x = numbers(4, 9, low=-9.0, high=9.0)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool):
        check(around(lambda x, d=dtype: prims.convert_element_type.default(x, d)), [x], what=str(dtype))
    check(around(lambda x: aten._to_copy.default(x, dtype=torch.bfloat16)), [x])
    check(around(aten.clone.default), [x])


@pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "bfloat16"])
def test_reductions(dtype: torch.dtype) -> None:
    x = numbers(3, 4, 33, dtype=dtype)
    for dims in ([-1], [0], [0, 2], [1], None, []):
        for keepdim in (False, True):
            what = f"over {dims}, kept: {keepdim}"
            check(lambda x, d=dims, k=keepdim: aten.sum.dim_IntList(x, d, k), [x], signed=False, what=f"sum {what}")
            check(lambda x, d=dims, k=keepdim: aten.mean.dim(x, d, k), [x], signed=False, what=f"mean {what}")
            for name in ("amax", "amin"):
                axes = dims or []
                check(
                    lambda x, d=axes, k=keepdim, n=name: getattr(aten, n).default(x, d, k), [x], what=f"{name} {what}"
                )
    check(lambda x: aten.sum.default(x), [x])
    check(lambda x: aten.mean.default(x), [x])
    check(lambda x: aten.sum.dim_IntList(x, [-1], dtype=torch.float64), [x])
    check(lambda x: aten.max.default(x), [x])
    check(lambda x: aten.prod.dim_int(x, 1), [x], n=4)
    check(lambda x: aten.any.dim(x > 1.9, -1), [x])
    check(lambda x: aten.all.dims(x > -1.9, [0, 2]), [x])
    check(lambda x: aten.any.dims(x > 1.9, []), [x])
    check(lambda x: aten.any.default(x > 1.9), [x])


@pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "bfloat16"])
def test_statistics(dtype: torch.dtype) -> None:
    x = numbers(3, 4, 33, dtype=dtype, low=0.5)
    for correction in (0, 1, 2):
        for keepdim in (False, True):
            f = lambda x, c=correction, k=keepdim: aten.var_mean.correction(x, [-1], correction=c, keepdim=k)  # noqa: E731
            check(f, [x], n=3, signed=False, what=f"correction {correction}")
    check(lambda x: aten.var.correction(x, [0, 2], correction=1), [x], n=3)


def test_integers_and_truth_values_are_counted() -> None:
    check(lambda x: aten.sum.dim_IntList(x, [0]), [integers(6, 5)])
    check(lambda x: aten.sum.default(x > 0), [integers(6, 5)])
    check(lambda x: aten.sum.dim_IntList(x > 0, [1], True), [integers(6, 5)])
    check(lambda x: aten.mean.dim(x.float(), [1]), [integers(6, 5)])


@pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "bfloat16"])
def test_softmax_ops(dtype: torch.dtype) -> None:
    x = numbers(5, 33, dtype=dtype, low=-6.0, high=6.0)
    check(lambda x: F.softmax(x, -1), [x], relative=True, n=3)
    check(lambda x: F.log_softmax(x, 0), [x], n=3, rows=0)
    check(lambda x: x.logsumexp(-1), [x], n=3)
    check(lambda x: aten._softmax.default(x, -1, False), [x], relative=True, n=3)
    online = prims.prepare_softmax_online.default

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*online(x, -1), x * 2)

    check(f, [x.float()], n=3)


def test_views_in_and_around_a_region() -> None:
    x = numbers(4, 6, 8)
    check(lambda x: F.softmax(x.view(24, 8), -1).view(4, 6, 8), [x], relative=True, n=3)
    check(lambda x: F.softmax(x.transpose(1, 2), -1), [x], relative=True, n=3)
    check(lambda x: x.permute(2, 0, 1).sum(0), [x], n=3)
    check(lambda x: F.softmax(x[:, 1:5, ::2], 1), [x], relative=True, rows=1, n=3)
    check(lambda x: F.softmax(x.select(1, 2), -1), [x], relative=True, n=3)
    check(lambda x, b: (x + b.unsqueeze(0).unsqueeze(-1)).sum(-1), [x, numbers(6)], n=3)
    check(lambda x: x.sum(-1, keepdim=True).squeeze(-1), [x], n=3)
    check(lambda x: x.mean(-1, keepdim=True).expand(4, 6, 8) * x, [x], n=3)
    check(lambda x: torch.cat([x, x * 2], -1).sum(-1), [x], n=3)
    check(lambda x: F.pad(x, (1, 2), value=0.5).sum(-1), [x], n=3)
    check(lambda x: (x.flip(-1) * x).sum(-1), [x], n=3)


def test_an_offset_counts_from_the_start_of_the_storage() -> None:
    def f(x: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.as_strided(x[2:4], (8,), (1,), offset)
        return y * 2, y.sum(0, keepdim=True)

    x = numbers(8, 4)
    check(lambda x: f(x, 8), [x])
    gm = graph_of(lambda x: f(x, 0), [x])
    regions_in(gm)
    assert all(map(torch.equal, gm(x), f(x, 0)))


def test_axes_of_tensors_without_dims() -> None:
    gm = graph_of(lambda x, y: (x.logsumexp(0), y.squeeze([0]).exp(), (y * 2).sum()), [numbers(), numbers(1)])
    regions_in(gm)
    x, y = numbers(), numbers(1)
    assert all(map(torch.equal, gm(x, y), (x.logsumexp(0), y.squeeze(0).exp(), (y * 2).sum())))


def test_pads_are_filled_as_torch_converts_the_number() -> None:
    for x in (numbers(4, 9) > 0, integers(4, 9), integers(4, 9).short(), numbers(4, 9)):
        for value in (-0.5, 0.5, 1, 0):
            f = around(lambda x, v=value: torch.constant_pad_nd(x * 1, (1, 2), v))
            check(f, [x], what=f"{x.dtype} beside {value}")


def test_what_reads_a_region_through_a_view_is_made_outside() -> None:
    x, w = numbers(4, 6, 8), numbers(8, 8)
    found = check(lambda x, w: F.softmax(x, -1).view(24, 8) @ w, [x, w], n=4)
    assert found[0].outputs == 1
    check(lambda x: (F.softmax(x, -1).transpose(0, 1), F.softmax(x, -1)), [x], relative=True, n=3)


def test_strides_of_results_are_the_graph_s() -> None:
    x = numbers(2, 8, 4, 4).to(memory_format=torch.channels_last)
    check(lambda x: F.softmax(x, 1), [x], relative=True, rows=1, n=3)
    check(lambda x: (x - x.mean((0, 2, 3), keepdim=True)) * 2, [x], n=3)
    check(lambda x: (x - x.mean((0, 2, 3), keepdim=True)).contiguous(), [x], n=3)
    check(lambda x: F.softmax(x, 1).permute(2, 0, 1, 3).contiguous(), [x], relative=True, rows=2, n=3)
    check(lambda x: (x.transpose(0, 1).contiguous(), x.sum(1)), [x], n=3)


def test_the_label_s_element_is_picked() -> None:
    x, labels = numbers(6, 50), torch.randint(0, 50, (6,))
    labels[2] = -100
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "sum", "none"):
            f = lambda x, y, s=smoothing, r=reduction: F.cross_entropy(x, y, label_smoothing=s, reduction=r)  # noqa: E731
            parts = (
                2 if smoothing and reduction != "none" else 1
            )  # this decomposition changes a tensor in place, which ends a region
            check(f, [x, labels], n=4, regions=parts, what=f"{reduction}, smoothed by {smoothing}")


def test_an_op_that_is_not_in_the_table_ends_a_region() -> None:
    x = numbers(4, 33)
    gm = graph_of(lambda x: F.softmax(x, -1).cumsum(-1).sort(-1).values, [x])
    (region,) = regions_in(gm)
    assert region.taken
    assert "cumsum" not in region.program
    assert aten.cumsum.default in [n.target for n in gm.graph.nodes]


def test_ops_alike_but_for_the_numbers_that_they_read_are_each_asked() -> None:
    """What is scattered into zeros is a pad; the same into a tensor ends the region, whichever comes first."""
    x, y = numbers(4, 5), numbers(4, 3, 5)
    for order in (1, -1):

        def f(x: torch.Tensor, y: torch.Tensor, order: int = order) -> tuple[torch.Tensor, ...]:
            bases = (torch.zeros(4, 3, 5), y)[::order]
            return tuple((torch.select_scatter(base, x, 1, 0) * 2).sum(-1) for base in bases)

        found = regions_in(gm := graph_of(f, [x, y]))
        assert all(r.taken for r in found), str(found)
        assert any("select_scatter" in dict(r.ops) for r in found)
        assert all(map(torch.equal, gm(x, y), f(x, y)))


def test_a_region_is_on_one_device() -> None:
    """A number that the CPU computes is read on the GPU; nothing runs, so that no GPU is needed."""

    def f(host: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * host.sum()
        return y, y.sum(-1)

    with FakeTensorMode():
        gm = make_fx(f)(torch.empty(100), torch.empty(8, 64, device="cuda"))
    found = regions_in(gm)
    assert [dict(r.ops) for r in found] == [{"sum": 1}, {"mul": 1, "sum": 1}]
    assert "shape=[100]" not in found[1].program
    assert "shape=[], dtype=DataType.Float, is_cpu=True" in found[1].program


def test_empty_tensors_and_complex_numbers_stay() -> None:
    for x in (torch.randn(0, 4), torch.randn(3, 4, dtype=torch.complex64)):
        assert regions_in(graph_of(lambda x: x.sum(-1), [x])) == []


def test_every_op_of_the_table_has_a_schema() -> None:
    """Names that this torch does not have would be errors where the table is made; overloads are those of the op."""
    assert all(isinstance(op, torch._ops.OpOverload) for op in aten_ops().rules)
    assert aten_ops().reductions <= frozenset(aten_ops().rules)
