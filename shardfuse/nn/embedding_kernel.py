# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false
"""An embedding: rows of a table, cast as they are read, and the gradient of the table.

That is of each row that was looked up the sum of its gradients, in the order of positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS, AT_ONCE = 1024, 8
TILE = 2048
"""Elements that a program casts, by four warps: four loads of 16 bytes and two stores a thread."""


# Checked as torch checks it, which ends in a failed assertion on the GPU as well.
@triton.jit(debug=True)
def cast_rows(indices_ptr, table_ptr, found_ptr, count, width, stride, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program for ROWS places among the indices, and for each block of columns."""
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_place = places < count
    index = tl.load(indices_ptr + places, mask=is_place, other=0).to(tl.int64)
    tl.device_assert((index >= 0) & (index < rows), "embedding: an index is no row of the table")
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = is_place[:, None] & (columns < width)[None, :]
    read = tl.load(table_ptr + index[:, None] * stride + columns[None, :], mask=mask)
    tl.store(
        found_ptr + places.to(tl.int64)[:, None] * width + columns[None, :],
        read.to(found_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def add_up_rows(
    ordered_ptr, positions_ptr, gradient_ptr, made_ptr, count, width, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """A program for each place among the ``ordered`` indices, and for each block of columns.

    The first place of each index adds up, AT_ONCE rows at a time: the order does not depend on the other programs.
    """
    first = tl.program_id(0)
    index = tl.load(ordered_ptr + first)
    before = tl.load(ordered_ptr + first - 1, mask=first > 0, other=-1)
    if index != before:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < width
        total = tl.zeros([COLUMNS], tl.float32)
        place, found = first, AT_ONCE
        while found == AT_ONCE:
            places = place + tl.arange(0, AT_ONCE)
            is_same = tl.load(ordered_ptr + places, mask=places < count, other=-1) == index
            rows = tl.load(positions_ptr + places, mask=is_same, other=0).to(tl.int64)
            offsets = rows[:, None] * width + columns[None, :]
            read = tl.load(gradient_ptr + offsets, mask=is_same[:, None] & is_column[None, :], other=0.0)
            total += tl.sum(read.to(tl.float32), axis=0)
            place += AT_ONCE
            found = tl.sum(is_same.to(tl.int32), axis=0)
        tl.store(made_ptr + index.to(tl.int64) * width + columns, total, mask=is_column)


def rows_of(indices: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """indices: [positions], 1 or more; table: [rows, width], of which each row is contiguous -> [positions, width]."""
    count, (rows, width) = indices.numel(), table.shape
    found = table.new_empty((count, width), dtype=dtype)
    grid, sizes = cast_tiles(count, width)
    with torch.cuda.device(table.device):
        cast_rows[grid](
            indices, table, found, count, width, table.stride(0), rows, **sizes, num_warps=4, sanitize_overflow=False
        )
    return found


def cast_tiles(count: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and sizes of tiles of ``cast_rows``: whole rows where they are short."""
    columns = min(triton.next_power_of_2(width), TILE)
    rows = TILE // columns
    return (triton.cdiv(count, rows), triton.cdiv(width, columns)), {"ROWS": rows, "COLUMNS": columns}


def gradient_of(indices: torch.Tensor, gradient: torch.Tensor, rows: int) -> torch.Tensor:
    """indices: [positions]; gradient: [positions, width], contiguous -> [rows, width] of float32."""
    count, width = gradient.shape
    ordered, positions = torch.sort(indices.to(torch.int32), stable=True)
    made = gradient.new_zeros((rows, width), dtype=torch.float32)
    grid = (count, triton.cdiv(width, COLUMNS))
    with torch.cuda.device(gradient.device):
        add_up_rows[grid](
            ordered, positions, gradient, made, count, width, COLUMNS=COLUMNS, AT_ONCE=AT_ONCE, num_warps=4
        )
    return made
