# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportInvalidTypeForm=false, reportCallIssue=false
"""An embedding: rows of a table, cast as they are read, and the gradient of the table.

That is of each row that was looked up the sum of its gradients, in an order that depends on the indices alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import Device, device_here
from .triton_launch import Launches

SUMS = {"COLUMNS": 1024, "AT_ONCE": 4, "LONG": 64, "HELPERS": 16}
"""Of ``add_up_rows``: 32 elements of each thread.  Helpers have 64 columns each, a line of 16-bit gradients.

On an H200 16384 rows of 4096, of 32000 in all, took 128 us so, by 8 at once 146, in blocks of 512 columns 576; with one
index alone 258 us, without helpers 2233; 2048 rows of 1024 took 17 us, by 8 at once 20.
"""
ORDERED = {"ROWS": 32, "AT_ONCE": 128, "CLEARED": 16384}
"""Of ``order_and_clear``: 32 counts of each thread, and 64 KB of zeros a program."""
COMPARED = 3
"""Instructions of a comparison: 2.4 of a thread's loop, and what is around it."""
SORT_KERNELS = 13
"""Kernels that torch's sort takes as long as: of 16384 indices 67 us on an H200."""
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
def order_and_clear(
    indices_ptr, ordered_ptr, positions_ptr, made_ptr, count, rows, size, orderers,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """The first ``orderers`` programs put ROWS indices each where a stable sort would, the others write zeros.

    An index comes behind as many as are smaller, or as large and before it: programs need not know of one another.
    ROWS divides AT_ONCE, so that a program's own indices are in one step: those of earlier steps are before them.
    """
    program = tl.program_id(0)
    if program < orderers:
        own = program * ROWS + tl.arange(0, ROWS)
        is_own = own < count
        index = tl.load(indices_ptr + own, mask=is_own, other=0).to(tl.int32)
        here = program * ROWS // AT_ONCE * AT_ONCE
        others = here + tl.arange(0, AT_ONCE)
        other = tl.load(indices_ptr + others, mask=others < count, other=rows).to(tl.int32)
        is_tie = (other[None, :] == index[:, None]) & (others[None, :] < own[:, None])
        found = is_tie.to(tl.int32)
        start = 0
        others = tl.arange(0, AT_ONCE)
        later = tl.load(indices_ptr + others, mask=others < count, other=rows)
        while start < count:
            other = later.to(tl.int32)
            others += AT_ONCE
            later = tl.load(indices_ptr + others, mask=others < count, other=rows)  # read a step ahead
            bound = index + (start < here).to(tl.int32)
            apart = (other[None, :] - bound[:, None]).to(tl.uint32, bitcast=True)
            found += (apart >> 31).to(tl.int32, bitcast=True)  # the sign: two instructions, a comparison takes four
            start += AT_ONCE
        place = tl.sum(found, axis=1)
        tl.store(ordered_ptr + place, index, mask=is_own)
        tl.store(positions_ptr + place, own, mask=is_own)
    else:
        offsets = (program - orderers).to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
        tl.store(made_ptr + offsets, tl.zeros([CLEARED], tl.float32), mask=offsets < size)


@triton.jit
def added_up(
    ordered_ptr, positions_ptr, gradient_ptr, first, index, count, width, columns, is_column,
    COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The sum of the rows of ``index``, from its ``first`` place on, AT_ONCE at a time.

    Positions are read a step ahead, so that a step waits for memory once.
    """
    total = tl.zeros([COLUMNS], tl.float32)
    places = first + tl.arange(0, AT_ONCE)
    is_same = tl.load(ordered_ptr + places, mask=places < count, other=-1) == index
    rows = tl.load(positions_ptr + places, mask=places < count, other=0).to(tl.int64)
    found = AT_ONCE
    while found == AT_ONCE:
        offsets = rows[:, None] * width + columns[None, :]
        read = tl.load(gradient_ptr + offsets, mask=is_same[:, None] & is_column[None, :], other=0.0)
        found = tl.sum(is_same.to(tl.int32), axis=0)
        places += AT_ONCE
        is_same = tl.load(ordered_ptr + places, mask=places < count, other=-1) == index
        rows = tl.load(positions_ptr + places, mask=places < count, other=0).to(tl.int64)
        total += tl.sum(read.to(tl.float32), axis=0)
    return total


@triton.jit
def add_up_rows(
    ordered_ptr, positions_ptr, gradient_ptr, made_ptr, count, width,
    COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, LONG: tl.constexpr, HELPERS: tl.constexpr,
):  # fmt: skip
    """A program for each place among the ``ordered`` indices, and for each block of columns.

    The first place of each index adds up its rows; of LONG rows and more, the first HELPERS places each do so in a part
    of the columns.  The order depends on neither the other programs nor the device.
    """
    place = tl.program_id(0)
    index = tl.load(ordered_ptr + place)
    near = place - HELPERS + tl.arange(0, HELPERS)
    before = tl.sum((tl.load(ordered_ptr + near, mask=near >= 0, other=-1) == index).to(tl.int32), axis=0)
    if before < HELPERS:
        made = made_ptr + index.to(tl.int64) * width
        end = place - before + LONG - 1
        is_long = tl.load(ordered_ptr + end, mask=end < count, other=-1) == index
        if is_long:
            part = tl.program_id(1) * HELPERS + before
            columns = part * (COLUMNS // HELPERS) + tl.arange(0, COLUMNS // HELPERS)
            total = added_up(
                ordered_ptr, positions_ptr, gradient_ptr, place - before, index, count, width, columns, columns < width,
                COLUMNS // HELPERS, AT_ONCE * HELPERS,
            )  # fmt: skip
            tl.store(made + columns, total, mask=columns < width)
        elif before == 0:
            columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            total = added_up(
                ordered_ptr, positions_ptr, gradient_ptr, place, index, count, width, columns, columns < width,
                COLUMNS, AT_ONCE,
            )  # fmt: skip
            tl.store(made + columns, total, mask=columns < width)


_cast, _order, _add_up = map(Launches, (cast_rows, order_and_clear, add_up_rows))


def rows_of(indices: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """indices: [positions], 1 or more; table: [rows, width], of which each row is contiguous -> [positions, width]."""
    count, (rows, width) = indices.numel(), table.shape
    found = table.new_empty((count, width), dtype=dtype)
    grid, sizes = cast_tiles(count, width)
    constants = {**sizes, "num_warps": 4, "sanitize_overflow": False}
    _cast(grid, (indices, table, found), (count, width, table.stride(0), rows), constants)
    return found


def cast_tiles(count: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and sizes of tiles of ``cast_rows``: whole rows where they are short."""
    columns = min(1 << (width - 1).bit_length(), TILE)
    rows = TILE // columns
    return (-(-count // rows), -(-width // columns)), {"ROWS": rows, "COLUMNS": columns}


def gradient_of(indices: torch.Tensor, gradient: torch.Tensor, rows: int) -> torch.Tensor:
    """indices: [positions], contiguous; gradient: [positions, width], contiguous -> [rows, width] of float32."""
    count, width = gradient.shape
    if is_compared(count, device_here(gradient.device)):
        made = gradient.new_empty((rows, width), dtype=torch.float32)
        ordered, positions = indices.new_empty((2, count), dtype=torch.int32)
        grid, orderers = order_tiles(count, rows, width)
        numbers = count, rows, made.numel(), orderers
        _order((grid,), (indices, ordered, positions, made), numbers, {**ORDERED, "num_warps": 4})
    else:
        ordered, positions = torch.sort(indices.to(torch.int32), stable=True)
        made = gradient.new_zeros((rows, width), dtype=torch.float32)
    tiles = count, triton.cdiv(width, SUMS["COLUMNS"])
    _add_up(tiles, (ordered, positions, gradient, made), (count, width), {**SUMS, "num_warps": 4})
    return made


def is_compared(count: int, device: Device) -> bool:
    """Are indices put in order by comparing each with all, while zeros are written?  Where a sort takes no less."""
    return COMPARED * count * count / device.rates.issued <= SORT_KERNELS * device.rates.launched


def order_tiles(count: int, rows: int, width: int) -> tuple[int, int]:
    """Programs of ``order_and_clear``, and how many of them put indices in order."""
    orderers = -(-count // ORDERED["ROWS"])
    return orderers + -(-rows * width // ORDERED["CLEARED"]), orderers
