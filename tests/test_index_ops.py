"""Ops that read at other places (indices, scans, windows, products) combined with what they read, on every placement.

A random part of the matrix runs here; ``INDEX_MATRIX=all`` runs every placement of every program, which takes hours.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence

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

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, ShardfuseError, TensorView
from shardfuse.errors import IndexRangeError

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


@pytest.mark.parametrize("op", ["take_along_axis", "add"])
def test_a_broadcast_axis_that_is_cut_unevenly_is_told_by_its_size(op: str) -> None:
    """Only the caller says that it is 1: else an op pairs it with an axis of 7, which is told with the remedy."""
    table, one = torch.arange(35.0).reshape(5, 7), torch.tensor([[3], [0], [4]] if op == "take_along_axis" else [[2]])

    def run(rank: int, world: int) -> None:
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, -1])
            i = fd.define_tensor([-1, -1], dtype=DataType.Int)
            fd.add_output(fd.ops.take_along_axis(t, i, 0) if op == "take_along_axis" else fd.ops.add(t, i))
            t.set_device_mesh(DeviceMesh(range(world)))
            shard(i, world_mesh(world), (X, (1, "outer")))
        local = world_mesh(world).shard_tensor(one, 1)
        with pytest.raises(ShardfuseError, match=r"how long axis 1 is: .*pairs it, but for one"):
            fd.execute([table, local])
        (y,) = fd.execute([table, local], sizes={i: one.shape})
        expected = torch.take_along_dim(table, one, 0) if op == "take_along_axis" else table + one
        assert y is not None
        assert torch.equal(y, expected)

    run_ranks(2, run)


TABLE, ROWS = torch.arange(12.0).reshape(6, 2), torch.ones(3, 2)
READS: dict[str, Callable[[FusionDefinition, TensorView, TensorView, TensorView], TensorView]] = {
    "index_select": lambda fd, x, i, v: fd.ops.index_select(x, i, 0),
    "gather": lambda fd, x, i, v: fd.ops.gather(x, fd.ops.broadcast_in_dim(i, [3, 2], [0]), 0),
    "take_along_axis": lambda fd, x, i, v: fd.ops.take_along_axis(x, fd.ops.broadcast_in_dim(i, [3, 1], [0]), 0),
    "scatter": lambda fd, x, i, v: fd.ops.scatter(x, fd.ops.broadcast_in_dim(i, [3, 2], [0]), v, 0),
    "index_put_accumulate": lambda fd, x, i, v: fd.ops.index_put_accumulate(x, i, v),
    "embedding": lambda fd, x, i, v: fd.ops.embedding(i, x),
}


def _read(op: str, index: Sequence[int], rank: int = 0, ranks: int = 1, *, sharded: str = "") -> list[float]:
    """The op on the table, with ``sharded``, ``x`` or ``i``, cut by rows over the ranks."""
    with FusionDefinition() as fd:
        x, i = fd.define_tensor([6, 2]), fd.define_tensor([3], dtype=DataType.Int)
        v = fd.define_tensor([3, 2])
        fd.add_output(READS[op](fd, x, i, v))
        if ranks > 1:
            for t in (x, i, v):
                t.set_device_mesh(DeviceMesh(range(ranks)))
            cut = x if sharded == "x" else i
            cut.outer_split(0, ranks, uneven=True)
            cut.axis(0).parallelize(ParallelType.mesh_x)
    table, indices = TABLE, torch.tensor(index)
    if ranks > 1:
        mesh = DeviceMesh(range(ranks))
        table = mesh.shard_tensor(table, 0) if sharded == "x" else table
        indices = mesh.shard_tensor(indices, 0) if sharded == "i" else indices
    (y,) = fd.execute([table, indices, ROWS])
    assert y is not None
    return y.flatten().tolist()


@pytest.mark.parametrize("op", READS)
def test_an_index_beyond_its_axis_is_named(op: str) -> None:
    """By the op, the index, the value, what is allowed, and the line; torch's own error names none of them."""
    wraps = op in ("take_along_axis", "index_put_accumulate")
    for bad in (6, 2**40, -7 if wraps else -1):
        with pytest.raises(IndexRangeError) as caught:
            _read(op, [0, bad, 5])
        text = str(caught.value)
        assert re.match(rf"{op} of T\d+: index T\d holds {bad}, expected {-6 if wraps else 0} to 5: axis 0 of T0", text)
        assert "READS[op](fd, x, i, v)" in text or f'"{op}": lambda' in text
        assert not getattr(caught.value, "__notes__", [])
    for fine in (0, 5, -6 if wraps else 3):
        _read(op, [0, fine, 5])


@pytest.mark.parametrize("sharded", ["x", "i"])
@pytest.mark.parametrize("op", READS)
def test_an_index_beyond_its_axis_on_one_rank_of_two(op: str, sharded: str) -> None:
    """An index within the unsharded axis and beyond this rank's rows is fine; one beyond both is named."""

    def run(rank: int, size: int) -> str:
        _read(op, [0, 3, 5], rank, size, sharded=sharded)
        try:
            _read(op, [0, 5, 6], rank, size, sharded=sharded)
        except ShardfuseError as error:
            return str(error)
        return ""

    found = [text for text in _ended(run) if text]
    assert found
    assert all("holds 6, expected" in text or "failed" in text for text in found), found


def _ended(run: Callable[[int, int], str]) -> list[str]:
    """What the ranks found; a rank that another one leaves alone in a collective is interrupted."""
    found: list[str] = []
    try:
        run_ranks(2, lambda rank, size: found.append(run(rank, size)))
    except ShardfuseError as error:
        found.append(str(error))
    return found


def test_a_number_beyond_its_axis_is_named() -> None:
    with FusionDefinition() as fd:
        x, i = fd.define_tensor([6, 2]), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.select(x, i, 0))
    assert fd.execute([TABLE, -6])[0].tolist() == [0.0, 1.0]
    for bad in (6, -7):
        with pytest.raises(
            IndexRangeError, match=rf"select of T1: index S0 holds {bad}, expected -6 to 5: axis 0 of T0"
        ):
            fd.execute([TABLE, bad])


def test_a_constant_beyond_its_axis_holds_nothing() -> None:
    """It was "index 7 holds 7"."""
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.select(fd.define_tensor([-1, 2]), 7, 0))
    with pytest.raises(IndexRangeError, match=r"^select of T1: index 7, expected -6 to 5: axis 0 of T0 has 6 elements"):
        fd.execute([TABLE])
