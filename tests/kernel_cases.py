"""Fusions whose generated kernels are looked at: their text (golden), and what sm_90 makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from segments import Builder, number, rms_norm
from window_cases import Define, norm, rotate_half, rotate_halves, rotate_pairs, through_a_wide_type

from shardfuse import FusionDefinition
from shardfuse.compiler import compile_fusion
from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.op import Broadcast, Random
from shardfuse.ir.scalar import Scalar
from shardfuse.segments.segment import Segment

BF16, HALF, FLOAT = DataType.BFloat16, DataType.Half, DataType.Float
FLOAT8 = (DataType.Float8_e4m3fn, DataType.Float8_e5m2)


def layer_norm(rows: int, columns: int, dtype: DataType) -> Segment:
    """layer_norm(x + bias + residual_bias) * weight + shift, biases along the row."""
    b = Builder()
    i, j = b.axis(rows), b.axis(columns)
    x = b.input(dtype, i, j)
    bias, more, weight, shift = (b.cast(b.input(dtype, j), FLOAT) for _ in range(4))
    total = b.op("add", b.cast(x, FLOAT), b.op("add", bias, more))
    return b.segment(b.cast(b.op("add", b.op("mul", normalised(b, total, [1]), weight), shift), dtype))


def normalised(b: Builder, x: BoundTensor, axes: list[int]) -> BoundTensor:
    centred = b.op("sub", x, b.mean(x, axes))
    variance = b.mean(b.op("mul", centred, centred), axes)
    return b.op("mul", centred, b.op("rsqrt", b.op("add", variance, 1e-5)))


def standardised(rows: int, columns: int, dtype: DataType) -> Segment:
    """Rows of mean 0 and variance 1."""
    b = Builder()
    x = b.cast(b.input(dtype, b.axis(rows), b.axis(columns)), FLOAT)
    return b.segment(b.cast(normalised(b, x, [1]), dtype))


def scaled(rows: int, columns: int, dtype: DataType) -> Segment:
    """An RMSNorm times a scale, as an 8-bit float."""
    b = Builder()
    x = b.cast(b.input(BF16, b.axis(rows), b.axis(columns)), FLOAT)
    unit = b.op("mul", x, b.op("rsqrt", b.op("add", b.mean(b.op("mul", x, x), [1]), 1e-6)))
    return b.segment(b.cast(b.op("mul", unit, b.aligned(b.input(FLOAT, ()), 2)), dtype))


def rms_norm_dx(rows: int, columns: int, dtype: DataType) -> Segment:
    """The gradient of RMSNorm's input, from x, dy, weight and the saved reciprocal root."""
    b = Builder()
    i, j = b.axis(rows), b.axis(columns)
    x, dy, weight, rstd = b.input(dtype, i, j), b.input(dtype, i, j), b.input(dtype, j), b.input(FLOAT, i, ())
    unit = b.op("mul", b.cast(x, FLOAT), rstd)
    scaled = b.op("mul", b.cast(dy, FLOAT), b.cast(weight, FLOAT))
    mean = b.mean(b.op("mul", scaled, unit), [1])
    return b.segment(b.cast(b.op("mul", b.op("sub", scaled, b.op("mul", unit, mean)), rstd), dtype))


def rms_norm_backward(rows: int, columns: int, dtype: DataType) -> Segment:
    """dx and dw of RMSNorm in one."""
    b = Builder()
    i, j, wide = b.axis(rows), b.axis(columns), dtype.compute
    x, dy, weight, rstd = b.input(dtype, i, j), b.input(dtype, i, j), b.input(dtype, j), b.input(wide, i, ())
    unit, g = b.op("mul", b.cast(x, wide), rstd), b.cast(dy, wide)
    scaled = b.op("mul", g, b.cast(weight, wide))
    mean = b.mean(b.op("mul", scaled, unit), [1])
    dx = b.op("mul", b.op("sub", scaled, b.op("mul", unit, mean)), rstd)
    dw = b.reduce("sum", b.op("mul", g, unit), [0], keepdim=False)
    return b.segment(b.cast(dx, dtype), b.cast(dw, dtype))


def layer_norm_backward(
    shape: Sequence[int], dtype: DataType, *, samples: bool = False, saved: bool = False, residual: bool = False
) -> Segment:
    """dx, dw and db of LayerNorm.

    ``samples``: a weight, and sums, for each of dim 0.  ``saved``: statistics are inputs, else computed again.
    ``residual``: dx is added to a gradient that comes another way, in the wider type, and there is no db.
    """
    b = Builder()
    axes, lead, wide = [b.axis(n) for n in shape], len(shape) - 1, dtype.compute
    x, dy = b.cast(b.input(dtype, *axes), wide), b.cast(b.input(dtype, *axes), wide)
    weight = b.cast(b.input(dtype, *([axes[0], *((),) * (lead - 1)] if samples else []), axes[-1]), wide)
    if saved:
        mean, rstd = (b.input(wide, *axes[:-1], ()) for _ in range(2))
        centred = b.op("sub", x, mean)
    else:
        centred = b.op("sub", x, b.mean(x, [lead]))
        rstd = b.op("rsqrt", b.op("add", b.mean(b.op("mul", centred, centred), [lead]), 1e-5))
    unit, scaled = b.op("mul", centred, rstd), b.op("mul", dy, weight)
    along, mean = b.mean(b.op("mul", scaled, unit), [lead]), b.mean(scaled, [lead])
    dx = b.op("mul", b.op("sub", b.op("sub", scaled, b.op("mul", unit, along)), mean), rstd)
    if residual:
        dx = b.op("add", dx, b.input(wide, *axes))
    rows = list(range(1 if samples else 0, lead))
    summed = [b.reduce("sum", t, rows, keepdim=False) for t in (b.op("mul", dy, unit), dy)[: 1 if residual else 2]]
    return b.segment(b.cast(dx, dtype), *(b.cast(t, dtype) for t in summed))


def rms_norm_dw(rows: int, columns: int, dtype: DataType) -> Segment:
    """The gradient of RMSNorm's weight: sums of columns."""
    b = Builder()
    i, j = b.axis(rows), b.axis(columns)
    x, dy, rstd = b.input(dtype, i, j), b.input(dtype, i, j), b.input(FLOAT, i, ())
    product = b.op("mul", b.cast(dy, FLOAT), b.op("mul", b.cast(x, FLOAT), rstd))
    return b.segment(b.cast(b.reduce("sum", product, [0], keepdim=False), dtype))


def swiglu(rows: int, columns: int, dtype: DataType) -> Segment:
    b = Builder()
    i, j = b.axis(rows), b.axis(columns)
    gate, up = b.input(dtype, i, j), b.input(dtype, i, j)
    return b.segment(b.cast(b.op("mul", b.op("silu", b.cast(gate, FLOAT)), b.cast(up, FLOAT)), dtype))


def cross_entropy(rows: int, classes: int, dtype: DataType) -> Segment:
    """The loss of each row, and its logarithm of the sum of exponentials."""
    b = Builder()
    i, j = b.axis(rows), b.axis(classes)
    x, target = b.cast(b.input(dtype, i, j), FLOAT), b.input(DataType.Int, i, ())
    top = b.reduce("max", x, [1])
    total = b.reduce("sum", b.op("exp", b.op("sub", x, top)), [1])
    spread = b.op("add", b.op("log", total), top)
    picked = b.reduce("sum", b.op("where", b.op("eq", b.iota(j), target), x, 0.0), [1])
    return b.segment(spread, b.op("sub", spread, picked))


def softmax(rows: int, columns: int, dtype: DataType, axis: int = 1) -> Segment:
    b = Builder()
    x = b.cast(b.input(dtype, b.axis(rows), b.axis(columns)), FLOAT)
    e = b.op("exp", b.op("sub", x, b.reduce("max", x, [axis])))
    return b.segment(b.cast(b.op("div", e, b.reduce("sum", e, [axis])), dtype))


def group_norm_silu(
    n: int, c: int, h: int, w: int, groups: int, dtype: DataType, order: tuple[int, ...] = (0, 1, 2, 3)
) -> Segment:
    """NCHW, reshaped to groups and back as people write it.  ``order``: dims as they are stored."""
    b = Builder()
    x = b.input(dtype, b.axis(n), b.axis(c), b.axis(h), b.axis(w))
    channels = x.domain.logical[1]
    grouped = b.unflatten(b.cast(x, FLOAT), 1, c // groups)
    flat = b.flatten(normalised(b, grouped, [2, 3, 4]), 1, 2)
    weight, shift = (
        b.emit(
            Broadcast((True, False, True, True)),
            [b.cast(b.input(dtype, channels), FLOAT)],
            FLOAT,
            [(), channels, (), ()],
        )
        for _ in range(2)
    )
    segment = b.segment(b.cast(b.op("silu", b.op("add", b.op("mul", flat, weight), shift)), dtype))
    for t in (x, *segment.outputs):
        t.domain = replace(t.domain, allocation=tuple(t.domain.logical[d] for d in order))
    return segment


def total(rows: int, columns: int, dtype: DataType) -> Segment:
    """The sum of everything, in float32."""
    b = Builder()
    x = b.input(dtype, b.axis(rows), b.axis(columns))
    return b.segment(b.reduce("sum", b.cast(x, FLOAT), [0, 1], keepdim=False))


def gelu_tanh_backward(rows: int, columns: int, dtype: DataType) -> Segment:
    """dx of GELU by tanh, written with powers, and db of a bias before it."""
    b = Builder()
    i, j, wide = b.axis(rows), b.axis(columns), dtype.compute
    x, dy = (b.cast(b.input(dtype, i, j), wide) for _ in range(2))
    t = b.op("tanh", b.op("mul", b.op("add", x, b.op("mul", b.op("pow", x, 3.0), 0.044715)), 0.7978845608))
    slope = b.op("add", b.op("mul", b.op("pow", x, 2.0), 0.1070322243), 0.7978845608)
    inner = b.op("mul", b.op("mul", b.op("sub", 1.0, b.op("pow", t, 2.0)), slope), b.op("mul", x, 0.5))
    dx = b.op("mul", dy, b.op("add", b.op("mul", b.op("add", t, 1.0), 0.5), inner))
    return b.segment(b.cast(dx, dtype), b.cast(b.reduce("sum", dx, [0], keepdim=False), dtype))


def row_sums(rows: int, columns: int, dtype: DataType) -> Segment:
    b = Builder()
    x = b.input(dtype, b.axis(rows), b.axis(columns))
    return b.segment(b.cast(b.reduce("sum", b.cast(x, FLOAT), [1], keepdim=False), dtype))


def turned(shape: Sequence[int], dims: Sequence[int], dtype: DataType) -> Segment:
    """x, its dims permuted, added to a tensor that lies in memory as the result does."""
    b = Builder()
    y = b.permute(b.input(dtype, *map(b.axis, shape)), dims)
    return b.segment(b.op("add", y, b.input(dtype, *y.domain.logical)))


def permuted(a: int, b_size: int, c: int, dtype: DataType) -> Segment:
    b = Builder()
    x = b.input(dtype, b.axis(a), b.axis(b_size), b.axis(c))
    return b.segment(b.op("mul", b.permute(x, [1, 0, 2]), 2.0))


def dropout_layer_norm(rows: int, columns: int, dtype: DataType) -> Segment:
    """LayerNorm of dropout(x + bias) + residual, which is stored too; seed and offset are those of the call."""
    b = Builder()
    i, j = b.axis(rows), b.axis(columns)
    x, bias, residual = b.input(dtype, i, j), b.input(dtype, j), b.input(dtype, i, j)
    key = [Scalar(name, DataType.Int) for name in ("S0", "S1")]
    drawn = b.emit(Random("uniform", (rows, columns), drawn=False), [number(0.0), number(1.0), *key], FLOAT, [i, j])
    kept = b.op("where", b.op("ge", drawn, 0.1), b.op("mul", b.op("add", x, bias), 1 / 0.9), 0.0)
    total = b.op("add", kept, residual)
    wide = b.cast(total, FLOAT)
    off = b.op("sub", wide, b.mean(wide, [1]))
    out = b.op("mul", off, b.op("rsqrt", b.op("add", b.mean(b.op("square", off), [1]), 1e-5)))
    return b.segment(total, b.cast(b.op("mul", out, b.cast(b.input(dtype, j), FLOAT)), dtype))


def planned(define: Define, shapes: Sequence[Sequence[int]], dtype: DataType) -> Segment:
    """The only segment with a kernel of ``define`` in float32, on inputs of ``dtype``."""
    with FusionDefinition() as fd:
        inputs = [fd.define_tensor(list(shape), dtype=dtype) for shape in shapes]
        fd.add_output(through_a_wide_type(define)(fd.ops, *inputs))
    plan = compile_fusion(fd.fusion, dict(zip(inputs, shapes, strict=True)), device=H200)
    (found,) = [p.segment for p in plan.segments if p.kernels]
    return found


HEADS = (4, 32, 4096, 128)

GOLDEN: dict[str, Segment] = {
    "rms_norm": rms_norm(8192, 4096, BF16),
    "add_rms_norm": rms_norm(8192, 4096, BF16, residual=True),
    "rms_norm_dx": rms_norm_dx(8192, 4096, BF16),
    "rms_norm_dw": rms_norm_dw(8192, 4096, BF16),
    "layer_norm_backward": layer_norm_backward((8192, 4096), BF16),
    "rms_norm_backward_team": rms_norm_backward(8192, 32768, BF16),
    "swiglu": swiglu(8192, 4096, BF16),
    "cross_entropy": cross_entropy(4096, 32000, BF16),
    "total": total(8192, 4096, BF16),
    "group_norm": group_norm_silu(8, 128, 16, 32, 32, HALF),
    "rms_norm_packed": rms_norm(4096, 65536, BF16),
    "rms_norm_team": rms_norm(2048, 131072, BF16),
    "rms_norm_few": rms_norm(64, 4096, BF16),
    "layer_norm_pairs": layer_norm(8192, 2048, HALF),
    "layer_norm_team": layer_norm(8192, 28672, HALF),
    "standardised_team": standardised(4096, 32768, FLOAT),
    "softmax_columns": softmax(4096, 4096, BF16, axis=0),
    "group_norm_channels_last": group_norm_silu(2, 640, 64, 64, 32, HALF, (0, 2, 3, 1)),
    "dropout_layer_norm": dropout_layer_norm(8192, 4096, BF16),
    "rotary": planned(rotate_half, [HEADS, HEADS[2:], HEADS[2:]], BF16),
    "padded_rms_norm": planned(lambda o, x, w: norm(o, o.pad(x, [8, 248]), w), [(8192, 3840), (4096,)], BF16),
}
"""Name -> the fusion whose kernels' text stands in tests/golden/."""

WIDTHS = (64, 384, 768, 1024, 1280, 1600, 2048, 4096, 5140, 8192, 12288, 16384, 20480)

SM90: dict[str, Segment] = {
    **GOLDEN,
    **{f"layer_norm {n}": layer_norm(8192, n, HALF) for n in WIDTHS},
    **{f"rms_norm {n}": rms_norm(8192, n, BF16) for n in (*WIDTHS, 32768, 65536)},
    **{f"rms_norm float {n}": rms_norm(8192, n, FLOAT) for n in (768, 4096, 16384)},
    **{f"add_rms_norm {n}": rms_norm(8192, n, BF16, residual=True) for n in WIDTHS},
    **{f"rms_norm_dx {n}": rms_norm_dx(8192, n, BF16) for n in (384, 1024, 4096, 8192, 16384)},
    **{f"rms_norm_dw {n}": rms_norm_dw(8192, n, BF16) for n in (384, 4096, 5140)},
    **{f"rms_norm_dw double {n}": rms_norm_dw(8192, n, DataType.Double) for n in (1024, 5139)},
    **{f"rms_norm_backward {n}": rms_norm_backward(32768, n, BF16) for n in (384, 5120)},
    **{f"layer_norm_backward {n}": layer_norm_backward((32768, n), BF16) for n in (384, 5140)},
    **{f"rms_norm_backward {n}": rms_norm_backward(2048, n, BF16) for n in (20480, 32772, 50000)},
    "rms_norm_backward float 16384": rms_norm_backward(4096, 16384, FLOAT),
    "layer_norm_backward 16384": layer_norm_backward((2047, 16384), HALF, saved=True),
    "layer_norm_backward 12288": layer_norm_backward((4096, 12288), BF16, saved=True),
    "layer_norm_backward float 12288": layer_norm_backward((4096, 12288), FLOAT, saved=True),
    "layer_norm_backward beside a residual": layer_norm_backward((4096, 12288), BF16, saved=True, residual=True),
    "layer_norm_backward of samples": layer_norm_backward((8, 4096, 3072), BF16, samples=True),
    "gelu_tanh_backward": gelu_tanh_backward(16384, 8192, BF16),
    **{f"cross_entropy {n}": cross_entropy(4096, n, BF16) for n in (8192, 16384, 50257, 128256)},
    **{f"softmax {n}": softmax(8192, n, BF16) for n in (128, 1000, 4096, 32000)},
    **{f"softmax of odd rows {n}": softmax(8192, n, BF16) for n in (5139, 32001, 50257, 128257)},
    "rms_norm of odd rows": rms_norm(8192, 32001, BF16),
    "softmax of very long rows": softmax(16, 8388608, BF16),
    "softmax of few long columns": softmax(131072, 128, BF16, axis=0),
    "softmax of columns": softmax(64, 8192, BF16, axis=0),
    "softmax of long columns": softmax(4096, 4096, BF16, axis=0),
    "group_norm of large groups": group_norm_silu(2, 320, 128, 128, 32, HALF),
    **{f"row_sums {n}": row_sums(8192, n, BF16) for n in (96, 1024, 8192, 65536)},
    **{f"scaled to {dtype.name}": scaled(8192, 4096, dtype) for dtype in FLOAT8},
    "total of few": total(3, 100, FLOAT),
    "swiglu of odd rows": swiglu(8191, 4095, BF16),
    "swiglu float": swiglu(4096, 4096, FLOAT),
    "swiglu past 32 bits": swiglu(70000, 40000, BF16),
    "rms_norm past 32 bits": rms_norm(1 << 20, 4096, BF16),
    "rms_norm_dw past 32 bits": rms_norm_dw(1 << 20, 4096, BF16),
    **{f"rms_norm {n}": rms_norm(1024, n, BF16) for n in (65540, 1048576)},
    **{f"layer_norm {n}": layer_norm(1024, n, HALF) for n in (32768, 49152)},
    "layer_norm of very long rows": layer_norm(64, 1048576, BF16),
    "layer_norm of few rows": layer_norm(333, 777, BF16),
    "layer_norm of wide rows": layer_norm(8192, 7168, BF16),
    "add_rms_norm 65536": rms_norm(1024, 65536, BF16, residual=True),
    "rms_norm float 65536": rms_norm(1024, 65536, FLOAT),
    "rms_norm_dx 65536": rms_norm_dx(1024, 65536, BF16),
    "cross_entropy 262144": cross_entropy(2048, 262144, BF16),
    **{f"dropout_layer_norm {n}": dropout_layer_norm(8192, n, BF16) for n in (768, 1600, 8192, 16384)},
    "dropout_layer_norm past 32 bits": dropout_layer_norm(1 << 20, 4096, BF16),
    "rotary of halves": planned(rotate_halves, [HEADS, (4096, 64), (4096, 64)], BF16),
    "rotary of pairs": planned(rotate_pairs, [HEADS, HEADS[2:], HEADS[2:]], BF16),
    "rms_norm and rotary": planned(
        lambda o, x, w, c, s: rotate_half(o, norm(o, x, w), c, s), [HEADS, (128,), HEADS[2:], HEADS[2:]], BF16
    ),
    "cat and rms_norm": planned(
        lambda o, x, y, w: norm(o, o.cat([o.exp(x), y], 1), w), [(8192, 4096), (8192, 1024), (5120,)], BF16
    ),
    "permuted": permuted(64, 128, 512, BF16),
    "transpose_add": turned((16384, 8192), (1, 0), BF16),
    "transpose_add float": turned((64, 2048, 1024), (0, 2, 1), FLOAT),
    "channels_last": turned((32, 64, 56, 56), (0, 2, 3, 1), HALF),
}
"""Name -> a fusion whose kernels are compiled for sm_90.  The benchmark's cases are too, and have no like here."""
