"""Programs by name whose ranks exchange inside of a kernel: how they are defined, cut over ranks, and checked.

The norm of a sum, of summands of the ranks or of rows that are cut, whose result is cast to float8; and programs of
modules: log-probabilities with the entropy, and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from quantized_check import check as check_quantized
from torch import Tensor
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir import TensorView
from shardfuse.nn.log_prob import LogProbSpec, log_prob_op
from shardfuse.nn.placement import TensorPlacement
from shardfuse.nn.quantized import Quantized
from shardfuse.nn.row_norm_fusions import RowNormSpec, row_norm_op
from shardfuse.nn.softmax import SoftmaxSpec, softmax_op

EPS = 1e-5
LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 128


@dataclass(frozen=True)
class Program:
    """``define``: for rows of so many unsharded elements, over so many ranks.  ``inputs``: unsharded, for so many rows.

    ``check``: raises AssertionError where unsharded results are not what torch makes of the inputs in float64; results
    come in the order of the kernel.  ``cuts``: of each input the dim that is cut over the ranks, None for one that all
    of them have.
    """

    define: Callable[[int, int, DataType], FusionDefinition]
    inputs: Callable[[int, int, torch.dtype, int], list[Tensor]]
    check: Callable[[Sequence[Tensor], Sequence[Tensor]], None]
    cuts: tuple[int | None, ...]

    def piece(self, k: int, whole: Tensor, ranks: int, rank: int) -> Tensor:
        """What a rank has of input ``k``."""
        cut = self.cuts[k]
        return whole if cut is None else part_of(whole, ranks, cut, rank).contiguous()


def part_of(whole: Tensor, ranks: int, dim: int, rank: int) -> Tensor:
    """What a rank has where ``dim`` is cut over so many: the last ones may have less, or nothing."""
    each = -(-whole.shape[dim] // ranks)
    first, last = (min(k * each, whole.shape[dim]) for k in (rank, rank + 1))
    return whole.narrow(dim, first, last - first)


def drawn(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Normal numbers, the same for the same shapes."""
    made = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def cut_columns(tv: TensorView, ranks: int, n: int) -> None:
    """The last of two axes, of ``n`` elements, over the ranks."""
    tv.set_device_mesh(DeviceMesh(range(ranks)))
    tv.outer_split(1, ranks, uneven=n % ranks != 0)
    tv.axis(1).parallelize(ParallelType.mesh_x)


# float8


@dataclass(frozen=True)
class Float8:
    """The RMSNorm of a sum, by a scale that is ``"given"``, or by one for each ``"row"`` or ``"block"``.

    ``is_partial``: of summands that ranks have, else of columns that are cut over them.
    """

    scales: str
    is_partial: bool

    def define(self, n: int, ranks: int, dtype: DataType) -> FusionDefinition:
        """(input, residual, weight[, scale]) -> (sum, values[, scales]); blocks' scales as matmuls read them."""
        with FusionDefinition() as fd:
            o, is_blocks = fd.ops, self.scales == "block"
            shape = [ranks, -1, n] if self.is_partial else [-1, n]
            given = fd.define_tensor(shape, contiguity=True, dtype=dtype)
            residual = fd.define_tensor([-1, n], contiguity=True, dtype=dtype)
            w = fd.define_tensor([n], contiguity=True, dtype=dtype)
            x = o.cast(given, DataType.Float)
            x = o.add(o.sum(x, [0]) if self.is_partial else x, residual)
            fd.add_output(o.cast(x, dtype))
            y = o.mul(o.mul(x, o.rsqrt(o.add(o.mean(o.mul(x, x), [-1], keepdim=True), EPS))), w)
            y = o.reshape(y, [-1, n // BLOCK, BLOCK]) if is_blocks else y
            if self.scales == "given":
                scale = divisor = fd.define_tensor([1], contiguity=[None], dtype=DataType.Float)
            else:
                top = o.max(o.abs(y), [-1], keepdim=not is_blocks)
                scale = divisor = o.div(o.maximum(top, 1e-12), LARGEST)
                divisor = o.broadcast(scale, [False, False, True]) if is_blocks else scale
                fd.add_output(scale, stride_order=[0, 1] if is_blocks else None)
            values = o.cast(o.clamp(o.div(y, divisor), -LARGEST, LARGEST), DataType.Float8_e4m3fn)
            fd.add_output(o.reshape(values, [-1, n]) if is_blocks else values)
        if self.is_partial:
            given.set_device_mesh(DeviceMesh(range(ranks)))
            given.axis(0).parallelize(ParallelType.mesh_x)
        else:
            cut_columns(given, ranks, n)
        return fd

    def inputs(self, rows: int, n: int, dtype: torch.dtype, ranks: int) -> list[Tensor]:
        found = drawn([(ranks, rows, n) if self.is_partial else (rows, n), (rows, n), (n,)], dtype)
        return [*found, *([torch.tensor([0.02])] if self.scales == "given" else [])]

    def check(self, found: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        x, residual, w = (t.double() for t in given[:3])
        x = (x.sum(0) if self.is_partial else x) + residual
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w
        of = {t.dtype: t for t in found}
        assert_near(of[given[0].dtype], x, n=1, rows=None, what="sum")
        asked = given[3] if self.scales == "given" else self.scales
        scales = asked if isinstance(asked, Tensor) else of[torch.float32]
        check_quantized(Quantized(of[torch.float8_e4m3fn], scales), y, torch.float8_e4m3fn, asked)

    @property
    def program(self) -> Program:
        cuts = (0, None, None, None) if self.is_partial else (1, 1, 0, None)
        return Program(self.define, self.inputs, self.check, cuts)


OF_SUMMANDS, OF_COLUMNS = (
    tuple(f"float8 of {kind}, {scales}" for scales in ("given", "row", "block")) for kind in ("summands", "columns")
)

# modules of shardfuse.nn over a sharded last axis


def _placed(ranks: int, n: int) -> dict[str, Any]:
    """Of two dims, the last of ``n`` elements cut over the ranks."""
    mesh, at = DeviceMesh(range(ranks)), TensorPlacement((1,), (False,))
    return {"mesh": mesh, "ndim": 2, "at": at.for_shape(mesh, (1, n))}


def _define_log_prob(n: int, ranks: int, dtype: DataType) -> FusionDefinition:
    """(logits, target) -> (log-probability, entropy, maximum, log of the sum): four statistics, of which one is
    the target's logit, which a rank picks."""
    options = _placed(ranks, n)
    options["placement"] = options.pop("at")
    spec = LogProbSpec(
        classes=n, temperature=1.0, ignore_index=-100, counts_strays=False, entropy=True, dtype=dtype, **options
    )
    return log_prob_op(spec).forward


def _log_prob_inputs(rows: int, n: int, dtype: torch.dtype, ranks: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(n)
    return [drawn([(rows, n)], dtype)[0] * 3, torch.randint(n, (rows, 1), generator=made)]


def _check_log_prob(found: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    of_type = []
    for dtype in (torch.float64, torch.float32):
        x, target = given[0].to(dtype), given[1]
        logs, top = x.log_softmax(-1), x.amax(-1, keepdim=True)
        entropy = -(logs.exp() * logs).sum(-1, keepdim=True)
        of_type.append([(x - top).logsumexp(-1, keepdim=True), logs.gather(1, target), entropy, top])
    (top,) = (t for t in found if t.ndim == 1)  # which is a view where it is returned
    values = [*(t for t in found if t.ndim == 2), top[:, None]]
    names = ("log of sum", "log-probability", "entropy", "top")
    for what, own, wide, eager in zip(names, values, *of_type, strict=True):
        assert_near(own, wide, eager, n=4, what=what)


def _define_softmax_backward(n: int, ranks: int, dtype: DataType) -> FusionDefinition:
    """(gradient, result) -> d input: one statistic."""
    options = _placed(ranks, n)
    options["placement"] = options.pop("at")
    made = softmax_op(
        SoftmaxSpec(dim=1, is_log=False, scale=1.0, mask_dtype=None, mask_shape=(), dtype=dtype, **options)
    )
    assert made.backward is not None
    return made.backward


def _softmax_backward_inputs(rows: int, n: int, dtype: torch.dtype, ranks: int) -> list[Tensor]:
    gradient, x = drawn([(rows, n), (rows, n)], dtype)
    return [gradient, x.double().softmax(-1).to(dtype)]


def _check_softmax_backward(found: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    wide, eager = (
        torch.ops.aten._softmax_backward_data(*(t.to(dtype) for t in given), -1, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert_near(found[0], wide, eager.to(given[0].dtype), n=2, what="d input")


@dataclass(frozen=True)
class NormBackward:
    """Of a LayerNorm where it is ``centered``, with two statistics, else of an RMSNorm; of the sum of its input and a
    residual where it ``has_residual``, whose gradient from beyond the norm is added.

    The gradient of the weight, a sum over rows, is a kernel of its own, which is not run here; of one row it is no sum.
    """

    centered: bool
    has_residual: bool

    def define(self, n: int, ranks: int, dtype: DataType) -> FusionDefinition:
        """(d normed[, d sum], sum, 1 / deviation[, mean], weight) -> (d input, d weight)."""
        options = _placed(ranks, n)
        at = options["at"]
        spec = RowNormSpec(
            hidden_size=n, eps=EPS, centered=self.centered, dropout=None, x=at, output=at, output_grad=at, dtype=dtype,
            weight_dtype=dtype, residual_dtype=dtype if self.has_residual else None, **options,
        )  # fmt: skip
        made = row_norm_op(spec)
        assert made.backward is not None
        return made.backward

    def inputs(self, rows: int, n: int, dtype: torch.dtype, ranks: int) -> list[Tensor]:
        gradient, from_sum, total, weight = drawn([(rows, n), (rows, n), (rows, n), (n,)], dtype)
        wide = total.double()
        mean = wide.mean(-1, keepdim=True)
        away = wide - mean if self.centered else wide
        rstd = (away.square().mean(-1, keepdim=True) + EPS).rsqrt()
        given = [gradient, *([from_sum] if self.has_residual else []), total, rstd.float()]
        return [*given, *([mean.float()] if self.centered else []), weight]

    def check(self, found: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """By autograd of torch's function of the sum."""
        made = list[dict[int, Tensor]]()
        for dtype in (torch.float64, torch.float32):
            gradient, *rest, weight = (t.to(dtype) for t in given)
            total, weight = rest[self.has_residual].requires_grad_(), weight.requires_grad_()
            function: Any = functional.layer_norm if self.centered else functional.rms_norm
            normed = function(total, weight.shape, weight, eps=EPS)
            d_total, d_weight = torch.autograd.grad(normed, (total, weight), gradient)
            made.append({2: d_total + rest[0] if self.has_residual else d_total, 1: d_weight})
        assert any(t.ndim == 2 for t in found)
        for t in found:  # of one row, the weight's gradient too
            assert_near(t, made[0][t.ndim], made[1][t.ndim].to(t.dtype), n=2, what="a gradient")

    @property
    def program(self) -> Program:
        cuts = (1, *[1] * self.has_residual, 1, None, *[None] * self.centered, 0)
        return Program(self.define, self.inputs, self.check, cuts)


LOG_PROB, SOFTMAX_BACKWARD = "log-probability and entropy", "softmax backward"
BACKWARD = {
    "LayerNorm backward": NormBackward(centered=True, has_residual=False),
    "RMSNorm backward": NormBackward(centered=False, has_residual=False),
    "LayerNorm of a sum backward": NormBackward(centered=True, has_residual=True),
    "RMSNorm of a sum backward": NormBackward(centered=False, has_residual=True),
}
"""With the gradient of a weight, which is a kernel of its own."""
PROGRAMS: Mapping[str, Program] = {
    name: Float8(name.split(", ")[1], name in OF_SUMMANDS).program for name in (*OF_SUMMANDS, *OF_COLUMNS)
} | {
    LOG_PROB: Program(_define_log_prob, _log_prob_inputs, _check_log_prob, (1, None)),
    SOFTMAX_BACKWARD: Program(_define_softmax_backward, _softmax_backward_inputs, _check_softmax_backward, (1, 1)),
    **{name: of.program for name, of in BACKWARD.items()},
}
