"""The optimiser's kernels compiled for sm_90 without a GPU: no spill, and loads of 128 bits."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import compile_all
from shardfuse.optim.kernel_text import (
    GENERAL_NORM_SHAPE,
    NORM_SHAPE,
    SCALE_SHAPE,
    UPDATE_SHAPE,
    Use,
    kernel_source,
)

F32, BF16, NARROW, F64 = 1, 2, 7, 8
"""Element types, as `Use` has them; the third stands for a mix of three."""


def test_kernels_for_sm_90() -> None:
    masters = Use(order=2, parameters=NARROW, gradients=NARROW, amsgrad=True, master=True, clips=True)
    asked = [
        ("norm_partials", Use(gradients=BF16), NORM_SHAPE, 0),
        ("norm_partials", Use(order=0, gradients=NARROW), NORM_SHAPE, 0),
        ("norm_partials", Use(order=3), GENERAL_NORM_SHAPE, 0),
        ("finish_norm_and_prepare", Use(), UPDATE_SHAPE, 2),
        ("scale_gradients", Use(gradients=F32), SCALE_SHAPE, 0),
        ("adamw", Use(parameters=F32, gradients=F32, clips=True), UPDATE_SHAPE, 0),
        ("adamw", Use(parameters=F64, gradients=F64), UPDATE_SHAPE, 0),
        ("adamw", masters, UPDATE_SHAPE, 0),
    ]
    sources = [kernel_source(name, use, shape, 4, (1,) * counts) for name, use, shape, counts in asked]
    found = compile_all(sources)
    told = "\n".join(map(str, found))
    assert not any(r.spills or r.stack for r in found), told
    is_list = [name != "finish_norm_and_prepare" for name, *_ in asked]
    assert all(r.widest_load == 128 for r, of_list in zip(found, is_list, strict=True) if of_list), told
    assert all(128 in r.stores for r in found if r.kernel in ("adamw", "scale_gradients")), told
