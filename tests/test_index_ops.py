"""Ops that read at other places (indices, scans, windows, products) combined with what they read, on every placement.

A random part of the matrix runs here; ``INDEX_MATRIX=all`` runs every placement of every program, which takes hours.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

import pytest
import torch
from fusion_check import check
from index_matrix import (
    Placement,
    Program,
    all_placements,
    index_programs,
    programs,
    run_placements,
    some_placements,
)
from ranks import run_ranks
from thread_check import X, shard, world_mesh

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType

MESHES = {"2": [0, 1], "3": [2, 0, 1], "2 x 2": [[0, 3], [1, 2]]}
SAMPLE = 300
"""Random cases of each mesh."""
BATCH = 500


@pytest.fixture(scope="module")
def matrix() -> list[Program]:
    found = programs()
    assert len(found) == 2726, "each combination of shapes that go together"
    return found


@pytest.mark.parametrize("name", MESHES)
def test_matrix(name: str, matrix: list[Program]) -> None:
    """Every program on random placements of its inputs and output, or on all placements of the inputs."""
    mesh = DeviceMesh(MESHES[name])
    cases: Iterable[Placement] = some_placements(matrix, mesh, SAMPLE, seed=len(name))
    if os.environ.get("INDEX_MATRIX") == "all":
        cases = all_placements(matrix, mesh)
    remaining = iter(cases)
    while batch := list(itertools.islice(remaining, BATCH)):
        run_placements(mesh.size, batch)


def test_axes_of_one_element() -> None:
    """Sharded in one operand, its element is on the first rank; another operand has it on every rank."""
    alone = [p for p in index_programs(2, 1, 2) if p.name.endswith("alone")]
    cases = list(all_placements(alone, DeviceMesh(MESHES["2"])))
    run_placements(2, cases)


def test_rows_at_indices_added_to_their_table() -> None:
    """The table is whole on each rank where it is indexed, and sharded where it is added."""
    x, index = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 0, 3, 2])

    def run(rank: int, world: int) -> list[float]:
        with FusionDefinition(backend="torch") as fd:
            t = fd.define_tensor([4], dtype=DataType.Float)
            i = fd.define_tensor([4], dtype=DataType.Int)
            fd.add_output(fd.ops.add(fd.ops.index_select(t, i, 0), t))
            for tv in (t, i):
                shard(tv, world_mesh(world), (X, (0, "outer")))
        (y,) = fd.execute([x.chunk(world)[rank], index.chunk(world)[rank]])
        assert y is not None
        return y.tolist()

    assert run_ranks(2, run) == [[3.0, 3.0], [7.0, 7.0]]


@pytest.mark.parametrize("op", ["index_select", "take_along_axis"])
def test_in_chunks_of_a_stream(op: str) -> None:
    """The index goes by chunks, its table does not, though their axes are one."""
    x, index = torch.arange(1.0, 9.0), torch.tensor([7, 0, 6, 1, 5, 2, 4, 3])
    with FusionDefinition(backend="torch") as fd:
        t = fd.define_tensor([8], dtype=DataType.Float)
        i = fd.define_tensor([8], dtype=DataType.Int)
        found = getattr(fd.ops, op)(t, i, 0)
        fd.add_output(fd.ops.mul(fd.ops.add(found, t), fd.ops.neg(t)))
        t.outer_split(0, 4)
        t.axis(0).parallelize(ParallelType.stream)
    check(fd, [x, index], reference=lambda x, i: (x[i.long()] + x) * -x)


def test_one_embedding_of_its_own_indices() -> None:
    """One tensor is the table and the index of a call: it is gathered for the one and sharded for the other."""
    index = torch.tensor([3, 2, 1, 0, 5, 4])

    def run(rank: int, world: int) -> None:
        with FusionDefinition(backend="torch") as fd:
            i = fd.define_tensor([6], dtype=DataType.Int)
            fd.add_output(fd.ops.take_along_axis(i, i, 0))
            shard(i, world_mesh(world), (X, (0, "outer")))
        check(fd, [index], reference=lambda i: i.long()[i.long()])
        assert fd.explain().collectives, f"rank {rank} reads what other ranks have"

    run_ranks(3, run)


@pytest.mark.parametrize(("x", "index"), [((-1, -1), (-1, 1)), ((-1, 1), (-1, -1))])
def test_one_column_beside_any_number_is_as_many(x: tuple[int, int], index: tuple[int, int]) -> None:
    """The result's axis is symbolic, whichever of the two is the static 1, and can be sharded."""
    table, places = torch.arange(8.0 if x[1] == -1 else 4.0), torch.arange(3, -1, -1)
    inputs = [table.reshape(4, -1), places.reshape(4, 1).expand(4, 1 if index[1] == 1 else 2).contiguous()]

    def run(rank: int, world: int) -> None:
        with FusionDefinition(backend="torch") as fd:
            t, i = fd.define_tensor(list(x)), fd.define_tensor(list(index), dtype=DataType.Int)
            out = fd.ops.take_along_axis(t, i, 0)
            assert out.shape[1] == -1
            fd.add_output(shard(out, world_mesh(world), (X, (1, "outer"))))
        check(fd, inputs, reference=lambda t, i: torch.take_along_dim(t, i.long(), 0))

    run_ranks(2, run)
