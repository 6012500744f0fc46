"""Fusions whose ranks exchange statistics of rows, or partial sums: what ``exchange`` and ``calls`` measure."""

from __future__ import annotations

import torch

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir.tensor_view import TensorView

from .workload import Case, define

EPS = 1e-6
FLOAT8 = torch.float8_e4m3fn
"""What values are quantised to, with one static scale."""


def rms_norm_fusion(case: Case, mesh: DeviceMesh) -> FusionDefinition:
    """(x, weight) -> RMSNorm over a hidden axis that is sharded: one number of each row is summed over the ranks."""
    with FusionDefinition() as fd:
        x, weight = define(fd, [-1, case.columns], case.dtype), define(fd, [case.columns], case.dtype)
        fd.add_output(fd.ops.cast(_rms_norm(fd, fd.ops.cast(x, DataType.Float), weight), case.data_type))
    _shard_columns(x, mesh)
    return fd


def layer_norm_fusion(case: Case, mesh: DeviceMesh) -> FusionDefinition:
    """(x, weight, bias) -> LayerNorm over a hidden axis that is sharded."""
    with FusionDefinition() as fd:
        x = define(fd, [-1, case.columns], case.dtype)
        weight, bias = (define(fd, [case.columns], case.dtype) for _ in range(2))
        wide = fd.ops.cast(x, DataType.Float)
        var, mean = fd.ops.var_mean(wide, [-1], correction=0, keepdim=True)
        normed = fd.ops.mul(fd.ops.sub(wide, mean), fd.ops.rsqrt(fd.ops.add(var, EPS)))
        normed = fd.ops.mul(normed, fd.ops.cast(weight, DataType.Float))
        fd.add_output(fd.ops.cast(fd.ops.add(normed, fd.ops.cast(bias, DataType.Float)), case.data_type))
    _shard_columns(x, mesh)
    return fd


def softmax_fusion(case: Case, mesh: DeviceMesh) -> FusionDefinition:
    """(x) -> softmax over a last axis that is sharded."""
    with FusionDefinition() as fd:
        x = define(fd, [-1, case.columns], case.dtype)
        wide = fd.ops.cast(x, DataType.Float)
        raised = fd.ops.exp(fd.ops.sub(wide, fd.ops.max(wide, [-1], keepdim=True)))
        fd.add_output(fd.ops.cast(fd.ops.div(raised, fd.ops.sum(raised, [-1], keepdim=True)), case.data_type))
    _shard_columns(x, mesh)
    return fd


def add_rms_norm_fusion(case: Case, mesh: DeviceMesh, *, quantizes: bool = False) -> FusionDefinition:
    """(partial sums, residual, weight[, scale]) -> (RMSNorm of the residual and all summands, their sum).

    quantizes: the norm is divided by the scale, one float32 for all, cut off at the largest float8 and cast to it.
    """
    with FusionDefinition() as fd:
        x = define(fd, [mesh.size, -1, case.columns], case.dtype)
        residual, weight = define(fd, [-1, case.columns], case.dtype), define(fd, [case.columns], case.dtype)
        whole = [residual, weight]
        total = fd.ops.add(fd.ops.sum(fd.ops.cast(x, DataType.Float), [0]), fd.ops.cast(residual, DataType.Float))
        normed, target = _rms_norm(fd, total, weight), case.data_type
        if quantizes:
            whole.append(scale := fd.define_tensor([1], contiguity=[None], dtype=DataType.Float))
            largest, target = torch.finfo(FLOAT8).max, DataType.from_torch(FLOAT8)
            normed = fd.ops.clamp(fd.ops.div(normed, scale), -largest, largest)
        outputs = [fd.ops.cast(normed, target), fd.ops.cast(total, case.data_type)]
        for tv in outputs:
            fd.add_output(tv)
    x.set_device_mesh(mesh)
    x.axis(0).parallelize(ParallelType.mesh_x)
    for tv in (*whole, *outputs):
        tv.set_device_mesh(mesh)
    return fd


def sequence_fusion(case: Case, mesh: DeviceMesh) -> FusionDefinition:
    """(partial sums, residual, weight) -> (RMSNorm of their sum, on all ranks; this rank's rows of the sum).

    The rows of the residual are sharded, as sequence parallelism has them.
    """
    with FusionDefinition() as fd:
        x = define(fd, [mesh.size, -1, case.columns], case.dtype)
        residual, weight = define(fd, [-1, case.columns], case.dtype), define(fd, [case.columns], case.dtype)
        own = fd.ops.sum(x, [0])
        total = fd.ops.add(fd.ops.cast(own, DataType.Float), fd.ops.cast(residual, DataType.Float))
        part = fd.ops.cast(_rms_norm(fd, total, weight), case.data_type)
        normed, rows = fd.ops.set(part), fd.ops.cast(total, case.data_type)
        fd.add_output(normed)
        fd.add_output(rows)
    x.set_device_mesh(mesh)
    x.axis(0).parallelize(ParallelType.mesh_x)
    for tv in (residual, own, part, rows):
        tv.set_device_mesh(mesh)
        tv.outer_split(0, mesh.size)
        tv.axis(0).parallelize(ParallelType.mesh_x)
    for tv in (weight, normed):
        tv.set_device_mesh(mesh)
    return fd


def _rms_norm(fd: FusionDefinition, x: TensorView, weight: TensorView) -> TensorView:
    rstd = fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True), EPS))
    return fd.ops.mul(fd.ops.mul(x, rstd), fd.ops.cast(weight, DataType.Float))


def _shard_columns(x: TensorView, mesh: DeviceMesh) -> None:
    x.set_device_mesh(mesh)
    x.outer_split(1, mesh.size)
    x.axis(1).parallelize(ParallelType.mesh_x)
