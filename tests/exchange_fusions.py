"""Programs by name whose ranks exchange inside of a kernel: how they are defined, cut over ranks, and checked.

The norm of a sum, of summands of the ranks or of rows that are cut, whose result is cast to float8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from quantized_check import check as check_quantized
from torch import Tensor

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir import TensorView
from shardfuse.nn.quantized import Quantized

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
        return whole if cut is None else whole.chunk(ranks, cut)[rank].contiguous()


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
PROGRAMS: Mapping[str, Program] = {
    name: Float8(name.split(", ")[1], name in OF_SUMMANDS).program for name in (*OF_SUMMANDS, *OF_COLUMNS)
}
