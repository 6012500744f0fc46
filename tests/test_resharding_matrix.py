"""Every change of sharding on 1-D meshes, a sample of those on 2-D and 3-D ones: values, and how many collectives."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from resharding_cases import CUTS, PARTIAL, WHOLE, Case, Placed, pairs, run, sample

from shardfuse.analysis.communication_table import Communication


def collectives(cases: list[Case], size: int) -> list[tuple[Communication, ...]]:
    torch.manual_seed(0)
    results = run_ranks(size, lambda rank, size: [run(case, rank).collectives for case in cases], timeout=200)
    assert all(found == results[0] for found in results)
    return results[0]


def expected_kind(case: Case) -> str | None:
    """On one mesh dimension."""
    (source,), (target,) = case.source, case.target
    if source == target or source is WHOLE:
        return None
    if source is PARTIAL:
        return "all_reduce" if target is WHOLE else "reduce_scatter"
    return "all_gather" if target is WHOLE else "all_to_all"


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_one_mesh_dimension(size: int) -> None:
    cases = list(pairs((size,), (4 * size, 4 * size, 4 * size)))
    assert len(cases) == 110
    for case, found in zip(cases, collectives(cases, size), strict=True):
        kind = expected_kind(case)
        kinds = [c.kind for c in found]
        assert kinds == ([] if kind is None else [kind]), f"{case}: {kinds}"


@pytest.mark.parametrize("size", [2, 4, 6, 8])
@pytest.mark.parametrize("shape", ["longer", "shorter"])
def test_uneven_and_empty_shards(size: int, shape: str) -> None:
    extents = (size + 1, 2 * size - 1, 3 * size) if shape == "longer" else (max(size - 1, 2), 3, max(size // 2, 2))
    cases = list(pairs((size,), extents))
    assert len(cases) >= 15
    for case, found in zip(cases, collectives(cases, size), strict=True):
        assert len(found) <= 1, f"{case}: {found}"


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_several_mesh_dimensions(mesh: tuple[int, ...]) -> None:
    size = torch.Size(mesh).numel()
    cases = sample(mesh, (2 * size, 4 * size, 2 * size), 160 // size, seed=size)
    cases += sample(mesh, (size + 1, 2 * size - 1, 5), 40 // size, seed=1)
    for case, found in zip(cases, collectives(cases, size), strict=True):
        changed = sum(a != b for a, b in zip(case.source, case.target, strict=True))
        assert len(found) <= max(changed, 1), f"{case}: {found}"


ROWS, COLUMNS = Placed("outer", 0), Placed("outer", 1)
ONE_CALL = {
    "two mesh dimensions change places on one axis": Case((2, 2), (8, 4, 4), (ROWS, ROWS), (ROWS, ROWS), (False, True)),
    "rows and columns change places": Case((2, 2), (8, 8, 4), (ROWS, COLUMNS), (COLUMNS, ROWS)),
    "cyclic to blocked": Case((4,), (8, 8, 4), (Placed("inner", 0),), (ROWS,)),
    "block-cyclic to cyclic": Case((4,), (16, 8, 4), (Placed("blocks", 0),), (Placed("inner", 0),)),
    "blocked to block-cyclic": Case((4,), (16, 8, 4), (ROWS,), (Placed("blocks", 0),)),
    "partial on both": Case((2, 2), (8, 8, 4), (PARTIAL, PARTIAL), (WHOLE, WHOLE)),
}


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call(name: str) -> None:
    case = ONE_CALL[name]
    size = torch.Size(case.mesh).numel()
    (found,) = collectives([case], size)
    assert len(found) == 1, f"{case}: {list(map(str, found))}"


def test_what_is_scattered_is_scattered_first() -> None:
    """Partial sums on both mesh dimensions, shards on one: what crosses the other is the smaller part."""
    for k in (0, 1):
        target = (ROWS, WHOLE) if k == 0 else (WHOLE, ROWS)
        (found,) = collectives([Case((2, 2), (8, 8, 4), (PARTIAL, PARTIAL), target)], 4)
        assert [c.kind for c in found] == ["reduce_scatter", "all_reduce"]


def test_every_kind_is_among_the_pairs() -> None:
    cases = list(pairs((2,), (4, 8, 4)))
    assert {str(placed) for case in cases for placed in (*case.source, *case.target)} == {
        "whole", "partial", *(str(cut) for cut in CUTS),
    }  # fmt: skip
