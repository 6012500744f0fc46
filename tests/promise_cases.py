"""Fusions whose rows are promised the same bits whatever other rows there are, or on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from fusion_check import bound_piece

from benchmarks.promises import CASES, bits, define, inputs, why_rows_differ
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.ir.tensor_view import TensorView
from shardfuse.mesh import current_rank

__all__ = ["CASES", "assert_pieces", "assert_rows_alike", "bits", "define", "inputs", "sharded"]


def assert_rows_alike(fd: FusionDefinition, given: list[torch.Tensor], counts: Sequence[int]) -> None:
    """Runs of some of the rows, from several places, have the bits that all rows together have."""
    found = why_rows_differ(fd, given, counts)
    assert found is None, found


def sharded(name: str, n: int, dtype: DataType, ranks: int, dim: int) -> FusionDefinition:
    """A case that promises the same bits on any number of ranks, its first input sharded along ``dim`` over them."""
    fd = define(name, n, dtype, "ranks")
    x = fd.fusion.inputs[0].val
    assert isinstance(x, TensorView)
    if ranks > 1:
        x.set_device_mesh(DeviceMesh(range(ranks)))
        x.outer_split(dim, ranks)
        x.axis(dim).parallelize(ParallelType.mesh_x)
    fd.fec  # noqa: B018 closes the definition: inputs about which nothing was said get their sharding
    return fd


def assert_pieces(
    fd: FusionDefinition, found: Sequence[torch.Tensor | None], whole: Sequence[torch.Tensor], what: str
) -> None:
    """What a rank has found are the bits that one rank has in its place."""
    plan = fd.fec.last_plan
    assert plan is not None
    for tensor, own, wanted in zip(plan.fusion.outputs, found, whole, strict=True):
        piece = bound_piece(tensor.domain, wanted, current_rank())
        assert own is not None
        assert piece is not None
        differ = int((bits(own) != bits(cast("torch.Tensor", piece))).sum())
        assert differ == 0, f"{what}, {tensor}: {differ} bytes differ"
