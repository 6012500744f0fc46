"""A program with a handle on every part of it, and the differences that one rank can have from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from fusion_check import local_arguments

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir.tensor_view import TensorView


@dataclass(frozen=True)
class Variant:
    """The program ``reduce(second(first(x, w), constant))`` of x [rows, columns], sharded, and w [columns]."""

    rows: int = 12
    columns: int = 24
    static_rows: bool = False
    first: str = "mul"
    swap_operands: bool = False
    unary: str = "relu"
    second: str = "add"
    constant: float = 0.5
    reduction: str = "sum"
    axes: tuple[int, ...] = (1,)
    keepdim: bool = False
    dtype: DataType = DataType.Float
    weight_dtype: DataType = DataType.Float
    weight_shape: int = 1
    result: DataType | None = None
    shape_op: str = ""
    outputs: tuple[str, ...] = ("y", "s")
    mesh: object = (0, 1, 2)
    names: tuple[str, ...] | None = None
    shard: int = 0
    inner: bool = False
    block: int = 1
    uneven: bool = False
    say_output: str = ""
    merge: bool = False
    stream: bool = False
    contiguity: bool | None = True
    stride_order: tuple[int, ...] | None = None
    output_order: tuple[int, ...] | None = None
    allocation_rank: bool = False
    is_cpu: bool = False
    backend: str | None = None
    scalar: DataType | None = None
    dead: str = ""

    def define(self) -> FusionDefinition:
        mesh = DeviceMesh(list(self.mesh), self.names)  # type: ignore[call-overload]
        with FusionDefinition(backend=self.backend) as fd:  # type: ignore[arg-type]
            rows = self.rows if self.static_rows else -1
            x = fd.define_tensor([rows, self.columns], self.contiguity, self.dtype, self.is_cpu, self.stride_order)
            shape = [self.columns] if self.weight_shape == 1 else [1, self.columns]
            w = fd.define_tensor(shape, contiguity=True, dtype=self.weight_dtype)
            scalar = None if self.scalar is None else fd.define_scalar(dtype=self.scalar)
            if self.dead:
                getattr(fd.ops, self.dead)(x)
            y = getattr(fd.ops, self.first)(*((w, x) if self.swap_operands else (x, w)))
            y = getattr(fd.ops, self.second)(getattr(fd.ops, self.unary)(y), self.constant)
            if scalar is not None:
                y = fd.ops.mul(y, scalar)
            if self.shape_op == "reshape":
                y = fd.ops.reshape(y, [-1, 4, self.columns // 4])
            elif self.shape_op == "permute":
                y = fd.ops.permute(y, [1, 0])
            if self.result is not None:
                y = fd.ops.cast(y, dtype=self.result)
            s = getattr(fd.ops, self.reduction)(y, list(self.axes), keepdim=self.keepdim)
            for name in self.outputs:
                fd.add_output({"y": y, "s": s, "x": x}[name], stride_order=self.output_order if name == "y" else None)
            self.schedule(x, mesh)
            if self.say_output:
                s.set_device_mesh(mesh)
            if self.say_output == "sharded":
                s.outer_split(0, mesh.size)
                s.axis(0).parallelize(ParallelType.mesh_x)
        return fd

    def schedule(self, x: TensorView, mesh: DeviceMesh) -> None:
        if self.merge:
            x.merge(0, 1)
        if self.stream:
            x.split(1, 2)
            x.axis(1).parallelize(ParallelType.stream)
        x.set_device_mesh(mesh)
        for k, parallel_type in enumerate(mesh.parallel_types):
            at = self.shard + k
            extent = mesh.extent(parallel_type)
            if self.block > 1:
                x.inner_split(at, self.block)
            if self.inner:
                x.inner_split(at, extent)
                x.axis(at + 1).parallelize(parallel_type)
            else:
                x.outer_split(at, extent, uneven=self.uneven)
                x.axis(at).parallelize(parallel_type)

    def inputs(self) -> list[object]:
        x = torch.ones(self.rows, self.columns, dtype=self.dtype.torch)
        shape = [self.columns] if self.weight_shape == 1 else [1, self.columns]
        values: list[object] = [x, torch.ones(shape, dtype=self.weight_dtype.torch)]
        if self.scalar is not None:
            values.append(2 if self.scalar is DataType.Int else 2.0)
        return values

    def run(self, rank: int) -> list[torch.Tensor]:
        fd = self.define()
        fd.fec  # noqa: B018 closes the definition
        arguments = local_arguments(fd.fusion, self.inputs(), rank)
        return fd.execute(arguments)


BASE = Variant()

DIFFERENCES: dict[str, Callable[[Variant], Variant]] = {
    **{f"op {op}": lambda v, op=op: replace(v, first=op) for op in ("add", "sub", "div", "maximum", "minimum", "pow")},
    **{
        f"unary {op}": lambda v, op=op: replace(v, unary=op)
        for op in ("neg", "exp", "tanh", "abs", "sigmoid", "gelu", "silu")
    },
    **{f"second {op}": lambda v, op=op: replace(v, second=op) for op in ("mul", "sub", "gt", "le")},
    **{f"reduction {op}": lambda v, op=op: replace(v, reduction=op) for op in ("max", "min", "prod", "mean", "any")},
    **{f"constant {c}": lambda v, c=c: replace(v, constant=c) for c in (0.25, 0.5000001, -0.5, 1, float("inf"))},
    **{
        f"dtype {t.name}": lambda v, t=t: replace(v, dtype=t)
        for t in (DataType.Half, DataType.BFloat16, DataType.Double)
    },
    **{
        f"result {t.name}": lambda v, t=t: replace(v, result=t)
        for t in (DataType.Half, DataType.BFloat16, DataType.Double)
    },
    **{f"rows {n}": lambda v, n=n: replace(v, rows=n) for n in (3, 9, 15, 24)},
    **{f"columns {n}": lambda v, n=n: replace(v, columns=n) for n in (12, 48)},
    **{f"mesh {m}": lambda v, m=m: replace(v, mesh=m) for m in ((1, 0, 2), (2, 1, 0), (0, 2, 1), ((0,), (1,), (2,)))},
    "order of operands": lambda v: replace(v, swap_operands=True),
    "reduced axis": lambda v: replace(v, axes=(0,)),
    "both axes": lambda v: replace(v, axes=(0, 1)),
    "keepdim": lambda v: replace(v, keepdim=True),
    "static rows": lambda v: replace(v, static_rows=True),
    "dtype of the weight": lambda v: replace(v, weight_dtype=DataType.Double),
    "rank of the weight": lambda v: replace(v, weight_shape=2),
    "reshape": lambda v: replace(v, shape_op="reshape"),
    "permute": lambda v: replace(v, shape_op="permute"),
    "order of outputs": lambda v: replace(v, outputs=("s", "y")),
    "one output fewer": lambda v: replace(v, outputs=("y",)),
    "one output more": lambda v: replace(v, outputs=("y", "s", "x")),
    "names of the mesh": lambda v: replace(v, names=("tp",)),
    "sharded axis": lambda v: replace(v, shard=1),
    "cyclic": lambda v: replace(v, inner=True),
    "block-cyclic": lambda v: replace(v, inner=True, block=2),
    "outer of blocks": lambda v: replace(v, block=2),
    "uneven": lambda v: replace(v, uneven=True),
    "output said to be replicated": lambda v: replace(v, say_output="replicated"),
    "output said to be sharded": lambda v: replace(v, say_output="sharded"),
    "an axis on a stream": lambda v: replace(v, stream=True),
    "contiguity": lambda v: replace(v, contiguity=None),
    "stride order of an input": lambda v: replace(v, stride_order=(0, 1), contiguity=None),
    "stride order of an output": lambda v: replace(v, output_order=(0, 1)),
    "an input on the CPU": lambda v: replace(v, is_cpu=True),
    "backend": lambda v: replace(v, backend="torch"),
    "a scalar input": lambda v: replace(v, scalar=DataType.Double),
    "dead code": lambda v: replace(v, dead="neg"),
}
