"""Where the members of a team read and write rows that begin within a word.

The lines that a member's addresses and masks are made of are run by themselves, for every member.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from segments import layout_of, rms_norm

from shardfuse.codegen import generate
from shardfuse.codegen.lagged_rows import MisalignedLaggedRows
from shardfuse.codegen.statements import rendered
from shardfuse.device import H200
from shardfuse.ir.dtype import DataType
from shardfuse.schedulers import persistent
from shardfuse.schedulers.schedule import Access, Group, Lagged, Launch, Registers, Schedule, Tile

ROWS, BLOCK = 9, 256


class Language:
    """What the lines have of Triton."""

    int32 = int64 = None
    minimum, maximum = staticmethod(min), staticmethod(max)


def by_teams(members: int) -> Schedule:
    return Schedule(
        Tile(1, BLOCK),
        group=Group(members, 2 * members, Lagged()),
        access=Access.ALIGN_DOWN,
        launch=Launch(1),
    )


def emitter(columns: int, members: int) -> MisalignedLaggedRows:
    segment = rms_norm(ROWS, columns, DataType.BFloat16)
    schedule = by_teams(members)
    (plan,) = persistent.kernels(segment, schedule, H200)
    layouts = {t: t.domain.layout(0) for t in (*segment.inputs, *segment.outputs)}
    return MisalignedLaggedRows(plan, layouts, {}, interpret=False)


@pytest.mark.parametrize(("columns", "members"), [(5003, 4), (2050, 2), (4099, 8), (1999, 2), (4096 + 8 * 3 + 1, 4)])
def test_each_element_is_read_and_written_once(columns: int, members: int) -> None:
    e = emitter(columns, members)
    x, weight = e.plan.segment.inputs
    (out,) = e.plan.segment.outputs
    e.begin()
    lines = [re.sub(r"\.to\(tl\.\w+\)", "", line).strip() for line in rendered(e.head.statements)]
    chunks = e.tile.chunks()
    written = np.zeros(ROWS * columns, int)
    for row in range(ROWS):
        used = np.zeros(columns, int)
        for member in range(members):
            names = {"tl": Language, "x": row, "first": member * e.tile.share, "c": np.arange(BLOCK)}
            for line in lines:
                exec(line, names)
            for chunk in chunks:
                mask = names[chunk.mask] if chunk.is_masked else np.ones(BLOCK, bool)
                of_row, of_weight, of_out = (
                    eval(e.pointer(t, chunk)[0].split("_ptr + ", 1)[1], names) for t in (x, weight, out)
                )
                assert names["base"] % e.tile.word == 0
                assert np.array_equal(of_row, of_out)
                assert np.array_equal(of_row[mask], row * columns + of_weight[mask])
                np.add.at(used, of_weight[mask], 1)
                np.add.at(written, of_out[mask], 1)
        assert (used == 1).all()
    assert (written == 1).all()


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_begin_at_different_places(packed: bool) -> None:
    """An input with a gap between its rows is read element by element, beside an output without."""
    segment = rms_norm(ROWS, 5003, DataType.BFloat16)
    schedule = by_teams(4)
    if packed:
        schedule = replace(schedule, residency=Registers(packed=True), group=None)
    (plan,) = persistent.kernels(segment, schedule, H200)
    layouts = {t: t.domain.layout(0) for t in (*segment.inputs, *segment.outputs)}
    whole = generate(plan, layouts, 0)
    assert "shift" in whole.text
    assert whole.schedule == plan.schedule
    apart = layout_of(segment.inputs[0], torch.empty(ROWS, 5004, dtype=torch.bfloat16)[:, :-1])
    single = generate(plan, {**layouts, segment.inputs[0]: apart}, 0)
    assert "shift" not in single.text
    assert single.schedule == replace(plan.schedule, access=Access.NATIVE)
