"""Rows of a window that end within a block: programs at an end have a mask, the others none."""

from __future__ import annotations

import pytest
import torch
from fusion_check import check
from interpreted import values

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.tensor_view import TensorView

ROWS = 6


def padded_gradient(fd: FusionDefinition, columns: int, behind: int) -> tuple[TensorView, TensorView]:
    """Of a cross entropy, in rows that are padded behind their end, and its sums over the rows."""
    x = fd.define_tensor([ROWS, columns], dtype=DataType.BFloat16)
    rows = fd.define_tensor([ROWS, 1], dtype=DataType.Float)
    found = fd.ops.cast(fd.ops.exp(fd.ops.sub(fd.ops.cast(x, DataType.Float), rows)), DataType.BFloat16)
    padded = fd.ops.pad(found, [0, behind], 0.0)
    return padded, fd.ops.sum(padded, [0], dtype=DataType.Float)


def right(x: torch.Tensor, rows: torch.Tensor, columns: int, behind: int) -> torch.Tensor:
    # rounded to bfloat16 in the fusion: the reference in float64 has no such step, which the check allows for
    return torch.nn.functional.pad((x - rows).exp(), (0, behind))


@pytest.mark.parametrize("sums", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("columns", "behind"), [(4099, 5), (4093, 3)])
def test_the_last_block_of_a_row_has_the_mask(columns: int, behind: int, sums: bool) -> None:
    with FusionDefinition(backend="triton") as fd:
        padded, total = padded_gradient(fd, columns, behind)
        fd.add_output(padded)
        if sums:
            fd.add_output(total)
    x, rows = values(ROWS, columns, dtype=DataType.BFloat16), values(ROWS, 1, seed=1)
    x = torch.nn.functional.pad(x, (0, behind))[:, :columns]  # as it is cut off a padded product

    def reference(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        whole = right(x, rows, columns, behind)
        return (whole, whole.to(torch.bfloat16).to(whole.dtype).sum(0)) if sums else whole

    check(fd, [x, rows], reference=reference)
    (source,) = sources(fd, [x, rows])
    assert "    else:" in source
    assert "tl.load(T0_ptr" in source.split("    else:")[0].split("if tl.program_id(0)")[1]
    assert "mask" not in next(line for line in source.split("    else:")[0].splitlines() if "T0_ptr +" in line)


def test_short_rows_and_other_windows_have_masks_alone() -> None:
    for columns, behind, before in ((100, 4, 0), (4099, 5, 3)):
        with FusionDefinition(backend="triton") as fd:
            x = fd.define_tensor([ROWS, columns], dtype=DataType.BFloat16)
            rows = fd.define_tensor([ROWS, 1], dtype=DataType.Float)
            fd.add_output(fd.ops.pad(fd.ops.sub(x, rows), [before, behind], 0.0))
        given = [values(ROWS, columns, dtype=DataType.BFloat16), values(ROWS, 1, seed=1)]
        check(fd, given, reference=lambda x, r, p=(before, behind): torch.nn.functional.pad(x - r, p))
        (source,) = sources(fd, given)
        assert f"tl.program_id(0) % {-(-(columns + behind) // 2048)}" not in source
        assert source.count("in_T0w = ") == source.count("tl.load(T0_ptr"), "each load has the window's mask"


def sources(fd: FusionDefinition, inputs: list[torch.Tensor]) -> list[str]:
    from benchmarks.sm90 import sources_of

    shapes = [tuple(x.shape) for x in inputs]
    plan = fd.fec.plan(dict(zip(fd.fec.tensors(), shapes, strict=True)))
    return [s.text for s in sources_of(plan, inputs)]
