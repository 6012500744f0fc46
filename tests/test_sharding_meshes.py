"""Meshes of two dimensions and parts of the world, moves between meshes, unknown sizes, shapes, and refusals."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from math import prod

import pytest
import torch
from fusion_check import check, local_arguments
from ranks import run_ranks
from test_sharding import names, placements, values
from thread_check import Case, Placement, X, Y, Z, check_on_threads, shard, world_mesh

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.analysis.communication_table import communication_of
from shardfuse.compiler import compile_fusion
from shardfuse.device import H200
from shardfuse.errors import MeshExceedsWorldError, ScheduleError, ShapeError, ShardfuseError, ShardingError
from shardfuse.ir.tensor_view import TensorView

# --- meshes ------------------------------------------------------------------------------------------------

Two = tuple[tuple[ParallelType, Placement], ...]


def two_dims(*axes: int) -> list[Two]:
    """Outer parts on one mesh dimension, on both, on one axis in both orders, and nothing."""
    first, second = axes
    return [
        (),
        *(((p, (k, "outer")),) for p in (X, Y) for k in axes),
        ((Y, (first, "outer")), (X, (second, "outer"))),
        ((X, (first, "outer")), (Y, (second, "outer"))),
        ((Y, (first, "outer")), (X, (first, "outer"))),
        ((X, (first, "outer")), (Y, (first, "outer"))),
    ]


@pytest.mark.parametrize("shape", [(8, 3, 12), (7, 2, 5)], ids=names)
@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[3, 0], [1, 2]]], ids=["in order", "permuted"])
def test_meshes_of_two_dimensions(ranks: list[list[int]], shape: tuple[int, ...]) -> None:
    cases: list[Case] = []
    for source, target in itertools.product(two_dims(0, 2), repeat=2):
        with FusionDefinition() as fd:
            x = fd.define_tensor(list(shape))
            y = fd.ops.mul(x, 2.0)
            fd.add_output(y)
        shard(x, DeviceMesh(ranks), *source)
        shard(y, DeviceMesh(ranks), *target)
        cases.append(Case(fd, [values(*shape)], reference=lambda x: x * 2, name=f"{source} to {target}"))
    check_on_threads(4, cases)


def test_a_reduction_over_both_mesh_dimensions() -> None:
    for shape in ((8, 6), (7, 5)):
        cases: list[Case] = []
        for source, target in itertools.product(two_dims(0, 1), [(), ((X, (0, "outer")),), ((Y, (0, "outer")),)]):
            with FusionDefinition() as fd:
                x = fd.define_tensor(list(shape))
                y = fd.ops.sum(x, [0])
                fd.add_output(y)
                fd.add_output(fd.ops.sum(x))
            mesh = DeviceMesh([[0, 1], [2, 3]])
            shard(x, mesh, *source)
            shard(y, mesh, *target)
            cases.append(Case(fd, [values(*shape)], reference=lambda x: (x.sum(0), x.sum()), name=f"{source} {target}"))
        check_on_threads(4, cases)


def test_a_mesh_that_is_a_part_of_the_world() -> None:
    """Ranks outside take no part and are given nothing."""

    def run(rank: int, _: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([7, 4])
            y = fd.ops.sum(x, [0])
            fd.add_output(y)
            fd.add_output(fd.ops.exp(x))
        shard(x, DeviceMesh([3, 1]), (X, (0, "outer")))
        found = check(fd, [values(7, 4)], reference=lambda x: (x.sum(0), x.exp()))
        assert [out is None for out in found] == [rank not in (1, 3)] * 2

    run_ranks(4, run)


MOVES: dict[str, tuple[DeviceMesh, Placement, DeviceMesh, Placement, list[str]]] = {
    "send": (DeviceMesh([0]), None, DeviceMesh([2]), None, ["send"]),
    "broadcast": (DeviceMesh([1]), None, DeviceMesh([0, 2, 3]), None, ["broadcast"]),
    "broadcast from a team": (DeviceMesh([0, 1]), None, DeviceMesh([1, 2, 3]), None, ["broadcast"]),
    "scatter": (DeviceMesh([0]), None, DeviceMesh([1, 3, 2]), (0, "outer"), ["scatter"]),
    "scatter over its own rank": (DeviceMesh([0]), None, DeviceMesh([0, 1, 2, 3]), (1, "outer"), ["scatter"]),
    "gather": (DeviceMesh([0, 1, 2]), (0, "outer"), DeviceMesh([3]), None, ["gather"]),
    "gather on one of them": (DeviceMesh([3, 1, 2]), (1, "outer"), DeviceMesh([1]), None, ["gather"]),
    "a pipeline stage": (DeviceMesh([0, 1]), (0, "outer"), DeviceMesh([2, 3]), (0, "outer"), ["send"]),
    "a pipeline stage, crossed": (DeviceMesh([0, 1]), (1, "outer"), DeviceMesh([1, 0]), (1, "outer"), ["send"]),
    "another sharding": (DeviceMesh([0, 1]), (0, "outer"), DeviceMesh([2, 3]), (1, "outer"), ["all_gather", "scatter"]),
}


@pytest.mark.parametrize("shape", [(6, 8), (5, 3)], ids=names)
@pytest.mark.parametrize("case", MOVES)
def test_between_meshes(case: str, shape: tuple[int, ...]) -> None:
    here, source, there, target, kinds = MOVES[case]

    def run(rank: int, _: int) -> list[str]:
        with FusionDefinition() as fd:
            x = fd.define_tensor(list(shape))
            y = fd.ops.set(fd.ops.mul(x, 3.0))
            z = fd.ops.add(y, 1.0)
            fd.add_output(z)
        shard(x, here, (X, source))
        shard(y, there, (X, target))
        (out,) = check(fd, [values(*shape)], reference=lambda x: x * 3 + 1)
        assert (out is None) == (rank not in there.ranks)
        return [c.kind for c in fd.explain().collectives]

    assert run_ranks(4, run) == [kinds] * 4


# --- sizes that are not in the definition ------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("rows", [8, 7, 5, 2])
def test_uneven_shards_of_symbolic_size(rows: int, told: bool) -> None:
    """Nobody says how long the axis is: the ranks add up what they have.  Called twice, with another length between."""

    def run(rank: int, world: int) -> None:
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([-1, 3]), fd.define_tensor([3])
            y = fd.ops.set(fd.ops.mul(x, w))
            fd.add_output(y)
            fd.add_output(fd.ops.mean(x, [0]))
        shard(x, world_mesh(world), (X, (0, "outer")))
        y.set_device_mesh(world_mesh(world))
        for n in (rows, rows + 1, rows):
            data = [values(n, 3), values(3, seed=1)]
            sizes = {x: (n, 3)} if told else None
            check(fd, data, sizes=sizes, reference=lambda x, w: (x * w, x.mean(0)))

    run_ranks(4, run)


def test_what_is_not_said_of_an_input_follows_from_what_reads_it() -> None:
    """Residual and weight are about nothing said: the ranks hand over shards of the one and all of the other."""
    with FusionDefinition() as fd:
        x, r, w = fd.define_tensor([-1, -1, 8]), fd.define_tensor([-1, -1, 8]), fd.define_tensor([8])
        out = fd.ops.mul(fd.ops.add(x, r), w)
        fd.add_output(out)
        fd.add_output(fd.ops.sum(out, [0, 1]))
    shard(x, world_mesh(2), (X, (1, "outer")))
    data = [values(2, 6, 8), values(2, 6, 8, seed=1), values(8, seed=2)]
    check_on_threads(2, [Case(fd, data, reference=lambda x, r, w: ((x + r) * w, ((x + r) * w).sum((0, 1))))])
    shapes = [x.shape for x in local_arguments(fd.fusion, data, 0) if isinstance(x, torch.Tensor)]
    assert shapes == [(2, 3, 8), (2, 3, 8), (8,)]


@pytest.mark.parametrize("read", [False, True])
def test_an_input_that_is_written_is_held_as_the_output_that_replaces_it(read: bool) -> None:
    """Of ``t`` nothing is said.  It is a shard where nothing reads it; where all of it is read, it stays whole.

    A shard of one row, copied over all of ``t``, would be there twice.
    """
    with FusionDefinition() as fd:
        x, t = fd.define_tensor([2]), fd.define_tensor([-1])
        out = fd.ops.div(t, fd.ops.sum(t, [0], keepdim=True)) if read else fd.ops.mul(x, 2.0)
        fd.add_output(out, alias_input=x if read else t)
        fd.add_output(fd.ops.neg(out), alias_input=t if read else None)
    shard(x, world_mesh(2), (X, (0, "outer")))
    whole = values(2, seed=1), values(2, seed=2).abs() + 1
    wanted = whole[1] / whole[1].sum() if read else whole[0] * 2

    def run(rank: int, size: int) -> None:
        fd.fec  # noqa: B018 - says how t is held
        given = [piece.clone() for piece in local_arguments(fd.fusion, whole, rank) if isinstance(piece, torch.Tensor)]
        assert [len(g) for g in given] == ([1, 2] if read else [1, 1])
        left = fd.execute(given)
        assert torch.equal(given[0] if read else given[1], wanted[rank : rank + 1])
        assert torch.equal(given[1] if read else left[0], -wanted if read else -wanted[rank : rank + 1])

    run_ranks(2, run)


# --- shards and shapes -------------------------------------------------------------------------------------


def test_a_flattened_axis_keeps_its_shard() -> None:
    """[b, s, d] sharded on b, as [b * s, d] and back: no collective, also where b is cut unevenly."""
    for b in (4, 3):
        with FusionDefinition() as fd:
            x = fd.define_tensor([b, 5, 6])
            flat = fd.ops.reshape(x, [b * 5, 6])
            fd.add_output(fd.ops.mul(flat, 2.0))
            fd.add_output(fd.ops.reshape(fd.ops.exp(flat), [b, 5, 6]))
        shard(x, world_mesh(2), (X, (0, "outer")))
        check_on_threads(2, [Case(fd, [values(b, 5, 6)], reference=lambda x: (x.reshape(-1, 6) * 2, x.exp()))])
        assert fd.explain().collectives == ()


def test_an_axis_cut_across_its_parts() -> None:
    """[3, 4] as [12] over 2 ranks of 6: no digit of either; over 6 ranks: of two digits."""
    cases: list[Case] = []
    for world, splits in ((2, 2), (3, 3)):
        with FusionDefinition() as fd:
            x = fd.define_tensor([3, 4])
            y = fd.ops.reshape(x, [12])
            fd.add_output(fd.ops.mul(y, 2.0))
            z = fd.ops.set(y)
            fd.add_output(z)
        shard(z, world_mesh(world), (X, (0, "outer")))
        cases.append(Case(fd, [values(3, 4)], reference=lambda x: (x.reshape(12) * 2, x.reshape(12)), name=f"{splits}"))
        check_on_threads(world, cases[-1:])


def test_x_plus_its_transpose() -> None:
    cases: list[Case] = []
    for source, target in itertools.product(placements((6, 6), 2), repeat=2):
        with FusionDefinition() as fd:
            x = fd.define_tensor([6, 6])
            y = fd.ops.add(x, fd.ops.permute(x, [1, 0]))
            fd.add_output(y)
        shard(x, world_mesh(2), (X, source))
        shard(y, world_mesh(2), (X, target))
        cases.append(Case(fd, [values(6, 6)], reference=lambda x: x + x.T, name=f"{source} to {target}"))
    check_on_threads(2, cases)


def test_no_elements() -> None:
    cases: list[Case] = []
    for shape, source in itertools.product(((0, 4), (4, 0)), (None, (0, "outer"), (1, "outer"))):
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1])
            y = fd.ops.set(x)
            for out in (y, fd.ops.sum(x, [0]), fd.ops.mean(x), fd.ops.matmul(x, fd.ops.permute(x, [1, 0]))):
                fd.add_output(out)
        shard(x, world_mesh(2), (X, source))
        y.set_device_mesh(world_mesh(2))
        reference = lambda x: (x, x.sum(0), x.mean(), x @ x.T)  # noqa: E731
        cases.append(Case(fd, [values(*shape)], {x: shape}, reference, f"{source}"))
    check_on_threads(2, cases)


# --- refusals, the same on all ranks -----------------------------------------------------------------------


def same_on_all_ranks(world: int, run: Callable[[], object]) -> str:
    def message(_: int, __: int) -> str:
        with pytest.raises(ShardfuseError) as error:
            run()
        return f"{type(error.value).__name__}: {error.value}"

    messages = run_ranks(world, message)
    assert messages == messages[:1] * world
    return messages[0]


def test_a_mesh_larger_than_the_world() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([4])
            fd.add_output(fd.ops.exp(x))
        shard(x, world_mesh(4), (X, (0, "outer")))
        fd.execute([torch.zeros(1)])

    assert MeshExceedsWorldError.__name__ in same_on_all_ranks(2, run)


def test_an_even_shard_that_is_not() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1])
            y = fd.ops.exp(x)
            fd.add_output(y)
        shard(x, world_mesh(2))
        y.set_device_mesh(world_mesh(2))
        y.outer_split(0, 2)
        y.axis(0).parallelize(X)
        fd.execute([torch.zeros(7)])

    assert "a recorded split does not fit this size; pad the axis, or allow short shards" in same_on_all_ranks(2, run)


def test_a_split_in_more_parts_than_ranks() -> None:
    """Also where the parts that the size is left in would be as many as the ranks."""

    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1])
            fd.add_output(fd.ops.exp(x))
        x.set_device_mesh(world_mesh(2))
        x.outer_split(0, 3)
        x.axis(0).parallelize(X)
        fd.execute([torch.zeros(2)])

    assert "3 does not divide 4" in same_on_all_ranks(2, run)
    with FusionDefinition() as fd:
        x = fd.define_tensor([4])
    x.set_device_mesh(world_mesh(2))
    with pytest.raises(ScheduleError, match=r"3 does not divide 4.*its mesh has 2 ranks on mesh_x"):
        x.outer_split(0, 3)


@pytest.mark.parametrize("mesh", [None, world_mesh(1)], ids=["no mesh", "a mesh of one dimension"])
def test_a_mesh_dimension_that_the_tensor_has_not(mesh: DeviceMesh | None) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4])
        fd.add_output(fd.ops.exp(x))
    if mesh is not None:
        x.set_device_mesh(mesh)
    x.axis(0).parallelize(Y)
    has = "no device mesh" if mesh is None else r"DeviceMesh\(\[0\]\), of mesh_x"
    with pytest.raises(ScheduleError, match=rf"parallelize\(mesh_y\) cannot be done: T0 has {has}; call T0.set_device"):
        fd.execute([torch.zeros(4)])


@pytest.mark.parametrize("other", [None, 0, 1])
@pytest.mark.parametrize("own", [None, 0, 1])
def test_an_output_lives_where_the_input_does_that_it_replaces(own: int | None, other: int | None) -> None:
    a, b = (torch.arange(64.0).reshape(8, 8) % k for k in (5, 7))

    def run(rank: int, world: int) -> None:
        with FusionDefinition() as fd:
            x, y = fd.define_tensor([8, 8]), fd.define_tensor([8, 8])
            fd.add_output(fd.ops.matmul(x, y), alias_input=x)
        for tv, axis in ((x, own), (y, other)):
            shard(tv, world_mesh(2), (X, None if axis is None else (axis, "outer")))
        mine, given = ((t if d is None else t.chunk(2, d)[rank]).clone() for t, d in ((a, own), (b, other)))
        fd.execute([mine, given])
        assert torch.equal(mine, a @ b if own is None else (a @ b).chunk(2, own)[rank])

    run_ranks(2, run)


def test_an_output_that_cannot_replace_its_input() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([8, 8]), fd.define_tensor([8, 6])
        fd.add_output(fd.ops.matmul(x, y), alias_input=x)
    with pytest.raises(ShapeError, match=r"T2 of \[8, 6\] to replace T0 of \[8, 8\]"):
        fd.execute([torch.ones(8, 8), torch.ones(8, 6)])

    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([8, 8])
            y = fd.ops.exp(x)
            fd.add_output(y, alias_input=x)
        shard(x, world_mesh(2), (X, (0, "outer")))
        shard(y, world_mesh(2), (X, (1, "outer")))
        fd.execute([torch.ones(4, 8)])

    assert re.search(r"T1\[.*it replaces T0\[.*, which is sharded otherwise; shard both", same_on_all_ranks(2, run))


def test_an_axis_of_one_element() -> None:
    """The first rank has it: alone, broadcast against other axes, reduced, joined, repeated, read twice."""

    def define(fd: FusionDefinition) -> list[torch.Tensor]:
        x, w = fd.define_tensor([-1, -1]), fd.define_tensor([4, 6])
        y = fd.ops.add(x, fd.ops.exp(x))
        for out in (y, fd.ops.mul(y, w), fd.ops.sum(y, [0]), fd.ops.sum(y, [1]), fd.ops.max(y, [0, 1])):
            fd.add_output(out)
        fd.add_output(fd.ops.reshape(y, [1, 2, 3]))
        fd.add_output(fd.ops.mul(fd.ops.reshape(y, [6]), 2.0))
        fd.add_output(fd.ops.expand(y, [4, 6]))
        fd.add_output(fd.ops.matmul(y, fd.ops.permute(w, [1, 0])))
        fd.add_output(fd.ops.sub(*fd.ops.var_mean(y, [0, 1], correction=0, keepdim=True)))
        return [torch.arange(6.0).reshape(1, 6) / 4, torch.arange(24.0).reshape(4, 6) - 9]

    cases: list[Case] = []
    for ranks, said in (
        (torch.arange(4), [(X, (0, "outer"))]),
        (torch.tensor([[3, 1], [0, 2]]), [(X, (0, "outer")), (Y, (1, "outer"))]),
        (torch.tensor([[3, 1], [0, 2]]), [(Y, (0, "outer")), (X, (1, "inner"))]),
    ):
        fd = FusionDefinition()
        inputs = define(fd)
        x = fd.fusion.tensors()[0]
        shard(x, DeviceMesh(ranks), *said)
        cases.append(Case(fd, inputs, {x: (1, 6)}))
    fd = FusionDefinition()
    x = fd.define_tensor([6])
    y = fd.ops.broadcast(fd.ops.exp(x), [True, False])
    fd.add_output(y)
    shard(y, world_mesh(4), (X, (0, "outer")))
    cases.append(Case(fd, [torch.arange(6.0)], name="an output that only its own words cut"))
    check_on_threads(4, cases)


@pytest.mark.parametrize(
    ("ranks_per_node", "expected"),
    [(8, [("all_to_all", 8)]), (4, [("all_gather", 4), ("slice", 2)]), (1, [("all_to_all", 8)])],
)
def test_a_chain_stays_on_a_host(ranks_per_node: int, expected: list[tuple[str, int]]) -> None:
    """Rows over x to rows over y: by way of the whole tensor where mesh_x is a host and mesh_y is not."""
    mesh = DeviceMesh([[0, 1, 2, 3], [4, 5, 6, 7]])
    fd = FusionDefinition()
    x = fd.define_tensor([32, 32])
    y = fd.ops.set(x)
    fd.add_output(y)
    shard(x, mesh, (X, (0, "outer")))
    shard(y, mesh, (Y, (0, "outer")))
    plan = compile_fusion(fd.fusion, {x: (32, 32)}, ranks_per_node=ranks_per_node, device=H200)
    found = [communication_of(e) for s in plan.segments for e in s.segment.exprs]
    assert [(c.kind, c.team) for c in found if c is not None] == expected


def test_found_by_random_programs() -> None:
    """What once went wrong on a 2 x 2 mesh."""
    mesh = DeviceMesh([[0, 1], [2, 3]])
    cases: list[Case] = []

    fd = FusionDefinition()  # ranks that hold no row take every second column
    x = fd.define_tensor([3, 4])
    y = fd.ops.exp(x)
    fd.add_output(y)
    shard(x, DeviceMesh([[0], [1], [2], [3]]), (Y, (0, "outer")))
    shard(y, DeviceMesh([[0], [1], [2], [3]]), (X, (1, "inner")))
    cases.append(Case(fd, [torch.arange(12.0).reshape(3, 4) / 8], {x: (3, 4)}, name="an empty rank"))

    fd = FusionDefinition()  # 7 rows in blocks of 4, blocks in halves: the halves alone are no sharding
    x, w = fd.define_tensor([7, 2]), fd.define_tensor([2])
    y = fd.ops.where(fd.ops.gt(x, 0), w, 1.0)
    fd.add_output(y)
    shard(x, mesh, (X, (1, "outer")))
    shard(y, mesh, (X, (0, "outer")), (Y, (0, "outer")))
    cases.append(Case(fd, [torch.arange(14.0).reshape(7, 2) - 6, torch.tensor([2.0, 3.0])], {x: (7, 2)}))

    fd = FusionDefinition()  # partial sums of both mesh dimensions, scattered to a block and then to a part of it
    x = fd.define_tensor([6, 6])
    total = fd.ops.sum(x, [0])
    fd.add_output(total)
    shard(x, mesh, (X, (0, "outer")), (Y, (0, "outer")))
    shard(total, mesh, (X, (0, "outer")), (Y, (0, "outer")))
    cases.append(Case(fd, [torch.arange(36.0).reshape(6, 6)], {x: (6, 6)}))

    fd = FusionDefinition()  # one index in two axes of one element
    x = fd.define_tensor([1])
    y = fd.ops.sub(x, fd.ops.reshape(x, [1, 1]))
    fd.add_output(y)
    shard(x, world_mesh(4), (X, (0, "outer")))
    shard(y, world_mesh(4), (X, (1, "outer")))
    cases.append(Case(fd, [torch.ones(1)], {x: (1,)}))

    fd = FusionDefinition()  # a rank that has none of 3 pairs of rows has none of 2 halves of a pair
    x = fd.define_tensor([6, 8])
    y = fd.ops.add(pairs := fd.ops.reshape(x, [3, 2, 8]), 1.0)
    z = fd.ops.mul(pairs, y)
    fd.add_output(z)
    x.set_device_mesh(world_mesh(4))
    shard(y, world_mesh(4), (X, (2, "inner")))
    shard(z, world_mesh(4), (X, (0, "outer")))
    cases.append(Case(fd, [torch.arange(48.0).reshape(6, 8)]))
    check_on_threads(4, cases)


Program = Callable[[FusionDefinition, TensorView], TensorView]
FEW: dict[str, Program] = {
    "alone": lambda fd, x: fd.ops.exp(x),
    "rows reduced": lambda fd, x: fd.ops.sum(x, [0]),
    "columns reduced": lambda fd, x: fd.ops.var(x, [1]),
    "normalised along rows": lambda fd, x: fd.ops.sub(x, fd.ops.mean(x, [0], keepdim=True)),
    "with itself": lambda fd, x: fd.ops.add(x, fd.ops.neg(x)),
    "with a row": lambda fd, x: fd.ops.mul(x, fd.ops.sum(x, [0], keepdim=True)),
    "flattened": lambda fd, x: fd.ops.reshape(x, [-1]),
    "turned": lambda fd, x: fd.ops.permute(x, [1, 0]),
    "multiplied": lambda fd, x: fd.ops.matmul(fd.ops.permute(x, [1, 0]), x),
    "multiplied by a whole one": lambda fd, x: fd.ops.matmul(
        fd.ops.permute(x, [1, 0]), fd.ops.sub(fd.ops.set(x), fd.ops.sum(x, [0], keepdim=True))
    ),
    "copied": lambda fd, x: fd.ops.set(x),
}


@pytest.mark.parametrize(
    ("ranks", "order"),
    [([[0, 1], [2, 3]], [X, Y]), ([[3, 0], [1, 2]], [Y, X]), ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [Y, Z, X])],
    ids=str,
)
def test_fewer_elements_than_ranks_over_several_mesh_dimensions(ranks: list[object], order: list[ParallelType]) -> None:
    """What one mesh dimension leaves no second element of, the first rank of the next one has."""
    cases: list[Case] = []
    mesh = DeviceMesh(ranks)
    over = [(p, (0, "outer")) for p in order]
    for rows, symbolic, (name, program) in itertools.product((1, 2, 3), (False, True), FEW.items()):
        for target in ((), over, [(X, (1, "outer"))]) if name == "copied" else ((),):
            with FusionDefinition() as fd:
                x = fd.define_tensor([-1 if symbolic else rows, 4])
                y = program(fd, x)
                fd.add_output(y)
            shard(x, mesh, *over)
            if name == "copied":
                shard(y, mesh, *target)
            cases.append(Case(fd, [values(rows, 4)], {x: (rows, 4)}, name=f"{name}, {rows} rows, to {target}"))
    check_on_threads(mesh.size, cases)


def test_one_element_that_one_operand_of_a_product_shares_out() -> None:
    """The contracted axis is of one element: of one operand the first rank has it, of the other all have."""
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([3, 1]), fd.define_tensor([1, 5])
        fd.add_output(fd.ops.matmul(x, fd.ops.neg(y)))
    shard(x, world_mesh(2), (X, (1, "outer")))
    y.set_device_mesh(world_mesh(2))
    check_on_threads(2, [Case(fd, [values(3, 1), values(1, 5)])])


def test_one_element_on_a_mesh_dimension_of_one_rank() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([1, 7])
        y = fd.ops.neg(x)
        fd.add_output(fd.ops.sum(y, [0, 1]))
    mesh = DeviceMesh([[0], [1]])
    shard(x, mesh, (Y, (0, "outer")))
    y.set_device_mesh(mesh)
    y.inner_split(0, 1)
    y.axis(1).parallelize(X)
    check_on_threads(2, [Case(fd, [values(1, 7)])])


def test_an_input_that_goes_with_short_shards() -> None:
    """Nothing is said of y: it gets shards like x's, cut twice, of 2 x 4 ranks."""
    cases: list[Case] = []
    for n in (3, 6, 8):
        for first, second in (((Y, 4), (X, 2)), ((X, 2), (Y, 4))):
            with FusionDefinition() as fd:
                x, y = fd.define_tensor([n]), fd.define_tensor([-1])
                fd.add_output(fd.ops.minimum(x, y))
                fd.add_output(fd.ops.neg(y))
            x.set_device_mesh(DeviceMesh([[0, 1], [2, 3], [4, 5], [6, 7]]))
            for at, (p, ranks) in enumerate((first, second)):
                x.outer_split(at, ranks, uneven=True)
                x.axis(at).parallelize(p)
            assert fd.fec.fusion is fd.fusion
            assert y.has_device_mesh()
            cases.append(Case(fd, [values(n), values(n) - 1], {x: (n,), y: (n,)}, name=f"{n} over {first}, {second}"))
    check_on_threads(8, cases)


def test_an_inner_part_that_is_cut_unevenly() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([7])
            fd.add_output(fd.ops.exp(x))
        x.set_device_mesh(world_mesh(2))
        x.split(0, 2, uneven=True)
        x.axis(1).parallelize(X)
        fd.execute([torch.zeros(4)])

    message = same_on_all_ranks(2, run)
    assert ShardingError.__name__ in message
    assert "only the last shards of an axis may be short; pad the axis, or cut its outermost part" in message


def test_a_short_inner_shard_that_a_reshape_merges() -> None:
    """Of 2 x 7 the 7 are shards of 4 and 3 in both rows: as one axis of 14 no digit says so, and it is gathered."""
    cases: list[Case] = []
    for ranks, shape, place in itertools.product(
        ([[0, 1], [2, 3]], [[1, 0], [3, 2]]),
        ((2, 7, 1), (4, 7, 1), (2, 5, 1)),
        ((Y, (1, "outer")), (X, (1, "outer")), ()),
    ):
        mesh, rows = DeviceMesh(ranks), shape[0] * shape[1]
        for sizes in (shape, (-1, -1, -1)):
            with FusionDefinition() as fd:
                x = fd.define_tensor(sizes)
                y = fd.ops.reshape(fd.ops.mul(x, 2.0), [rows, 1])
                fd.add_output(y)
            shard(x, mesh, (Y, (0, "outer")), (X, (1, "outer")))
            shard(y, mesh, *([place] if place else []))
            cases.append(Case(fd, [values(*shape)], {x: shape}, name=f"{shape} on {ranks} to {place}"))
    check_on_threads(4, cases)


def test_a_split_that_gives_too_few_pieces() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([8])
            fd.add_output(fd.ops.exp(x))
        x.set_device_mesh(world_mesh(4))
        x.outer_split(0, 2)
        x.axis(0).parallelize(X)
        fd.execute([torch.zeros(2)])

    assert "it has extent 2, mesh dimension mesh_x has 4 ranks; split the axis with outer_split(axis, 4)" in (
        same_on_all_ranks(4, run)
    )


# --- moves between meshes that change the sharding too -----------------------------------------------------

STAGES = [
    DeviceMesh(ranks)
    for ranks in ([0, 1], [2, 3], [1, 2], [[0, 1], [2, 3]], [3], [3, 1, 0], [[3, 1]], [0, 1, 2, 3])
]  # fmt: skip


def random_move(seed: int) -> Case:
    """A tensor made on one mesh, moved to another under another sharding, and read there."""
    rng = random.Random(seed)

    def any_of(mesh: DeviceMesh, shape: tuple[int, ...]) -> list[tuple[ParallelType, Placement]]:
        free = list(range(len(shape)))
        said: list[tuple[ParallelType, Placement]] = []
        for p in mesh.parallel_types:
            if free and rng.random() < 0.7:
                axis = free.pop(rng.randrange(len(free)))
                inner = shape[axis] % mesh.extent(p) == 0 and rng.random() < 0.3
                said.append((p, (axis, "inner" if inner else "outer")))
        return said

    shape = tuple(rng.choice((1, 2, 3, 4, 6, 7, 8)) for _ in range(rng.choice((1, 2, 2, 3))))
    source, target = rng.sample(STAGES, 2)
    fd = FusionDefinition()
    x = fd.define_tensor([-1] * len(shape))
    z = fd.ops.set(fd.ops.exp(x) if rng.random() < 0.5 else x)
    fd.add_output(fd.ops.mul(z, 2.0) if rng.random() < 0.5 else fd.ops.sum(z, [rng.randrange(len(shape))]))
    shard(x, source, *any_of(source, shape))
    shard(z, target, *any_of(target, shape))
    data = torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 8
    return Case(fd, [data], {x: shape}, name=f"seed {seed}: {source} to {target}")


def test_moves_that_reshard() -> None:
    check_on_threads(4, [random_move(seed) for seed in range(150)])


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        ((2, 2), (Y, X)),
        ((2, 2), (X, Y)),
        ((2, 3), (Y, X)),
        ((3, 2), (X, Y)),
        ((2, 2, 2), (Z, Y, X)),
        ((2, 2, 2), (Y, X, Z)),
    ],
    ids=str,
)
def test_parts_that_are_shared_out_again(ranks: tuple[int, ...], order: tuple[ParallelType, ...]) -> None:
    """Rows in as many parts as there are ranks, and these over several mesh dimensions: as many rows as ranks, more,
    and so few that whole rows of ranks have none.  What is added up, or gathered, goes over all dimensions."""
    size = prod(ranks)

    def run(rank: int, _: int) -> None:
        mesh = DeviceMesh(torch.arange(size).reshape(ranks).tolist())
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 3], dtype=DataType.Double)
            cut, total = fd.ops.mul(x, 2.0), fd.ops.sum(x, [0])
            whole = fd.ops.add(x, total)
            for y in (cut, total, whole):
                fd.add_output(y)
        for t in (x, cut):
            t.set_device_mesh(mesh)
            t.outer_split(0, size, uneven=True)
            for k, p in enumerate(order[:-1]):
                t.outer_split(k, mesh.extent(p))
            for k, p in enumerate(order):
                t.axis(k).parallelize(p)
        for t in (total, whole):
            t.set_device_mesh(mesh)
        at, index = mesh.coordinate(rank), 0
        for p in order:
            index = index * mesh.extent(p) + at[p.mesh_dim(len(ranks))]
        for rows in range(size + 3):
            full = torch.arange(3.0 * rows, dtype=torch.float64).view(rows, 3) + 1
            each = -(-rows // size)
            own = full[index * each : (index + 1) * each]
            found = fd.execute([own], sizes={x: (rows, 3)})
            for got, right in zip(found, (2 * own, full.sum(0), full + full.sum(0)), strict=True):
                assert torch.equal(got, right), (rows, got, right)

    run_ranks(size, run)
