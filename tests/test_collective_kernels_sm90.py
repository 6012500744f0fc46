"""Collectives that are kernels, compiled for sm_90 without a GPU."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

from shardfuse.codegen import KernelSource
from shardfuse.codegen.collective_kernels import SUMMED, Collective, Kind, collective_source, most_chunk
from shardfuse.codegen.collective_moves import Moves, all_reduced, exchanged, gathered, scattered
from shardfuse.device import H200
from shardfuse.device.record import WARP
from shardfuse.executor.symmetric_collectives import exchange_of
from shardfuse.ir.dtype import DataType

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import compile_all, global_accesses

SPILLED = 136
"""Bytes that a thread stores and loads at the most: addresses, in kernels of 5 ranks.  Those of 2 and 4 have 24."""
KINDS: tuple[Kind, ...] = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


def _moves(kind: Kind, ranks: int, *, is_flat: bool) -> Moves:
    """Of elements."""
    runs = 1 if is_flat else 8
    match kind:
        case "all_gather":
            return gathered(runs, 1 << 20, ranks)
        case "all_to_all":
            return exchanged((runs, 1 << 10, 1 << 10), 0, 1, ranks)
        case "reduce_scatter":
            return scattered(runs, 1 << 20, ranks)
        case "all_reduce":
            return all_reduced(1 << 20)


def _source(
    kind: Kind, dtype: DataType, ranks: int, *, is_flat: bool, is_claimed: bool, is_whole: bool
) -> KernelSource:
    moves = _moves(kind, ranks, is_flat=is_flat).in_units(dtype.itemsize)
    assert moves is not None, "whole units"
    exchange = exchange_of(range(ranks), H200, is_claimed=is_claimed)
    made = Collective(kind, dtype, most_chunk(ranks, H200), H200, exchange, moves.is_flat, is_whole)
    return collective_source(made, moves)


def test_as_many_programs_fit_on_a_multiprocessor_as_share_the_chunks() -> None:
    """With fewer at once the last chunks wait for a second round."""
    sources = [
        _source(kind, dtype, ranks, is_flat=is_flat, is_claimed=is_claimed, is_whole=is_whole)
        for kind, ranks, is_flat, is_claimed, is_whole in product(KINDS, (2, 4, 5, 8), *((True, False),) * 3)
        for dtype in (SUMMED if kind in ("reduce_scatter", "all_reduce") else (DataType.Int16, DataType.Int8))
    ]
    programs = H200.measured.collectives.programs
    for source, found in zip(sources, compile_all(sources), strict=True):
        assert found.spills <= SPILLED, f"{found}\n{source.text}"
        assert found.registers * found.warps * WARP * programs <= H200.registers, f"{found}\n{source.text}"
        assert found.widest_load == 128, f"{found}\n{source.text}"


def test_a_thread_has_all_that_it_sends_in_registers_before_its_first_store() -> None:
    """And as many registers as its share of the multiprocessor: 16 MB between two H200s took 89 us with 40, 60 so."""
    each = H200.measured.collectives.thread_bytes // 16
    kinds: tuple[tuple[Kind, DataType], ...] = (
        ("all_gather", DataType.Int16),
        ("reduce_scatter", DataType.BFloat16),
        ("all_reduce", DataType.BFloat16),
    )
    for (kind, dtype), is_whole in product(kinds, (True, False)):
        source = _source(kind, dtype, 2, is_flat=True, is_claimed=True, is_whole=is_whole)
        assert source.max_registers == H200.bound(H200.measured.collectives.programs * source.num_warps)
        (found,) = compile_all([source])
        wide = [access for access in global_accesses(found.binary) if ".128" in access]
        first = wide.index("STG.E.128")
        assert wide[:first] == ["LDG.E.128"] * each, f"{found}: {wide}"
        assert wide[first : first + each] == ["STG.E.128"] * each, f"{found}: {wide}"
