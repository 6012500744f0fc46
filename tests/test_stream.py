"""``ParallelType.stream``: an axis done chunk by chunk, each chunk's collective beside the next chunk's kernels."""

from __future__ import annotations

import random

import pytest
import torch
from fusion_check import check
from random_fusions import random_case
from ranks import run_ranks
from thread_check import Case, X, Y, check_on_threads, shard, world_mesh

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import ScheduleError, ShardingError
from shardfuse.executor.steps import Cut
from shardfuse.frontend.building import builder_of
from shardfuse.ir.tensor_view import TensorView

S = ParallelType.stream


@pytest.fixture(autouse=True)
def _hidden_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these tests are too small for a stream of their own."""
    monkeypatch.setattr("shardfuse.segments.overlap.HIDDEN_US", 0.0)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def stream(tv: TensorView, axis: int, chunks: int) -> None:
    """Cut a loop axis into chunks, the outermost part of it."""
    tv.outer_split(axis, chunks)
    tv.axis(axis).parallelize(S)


def lines_of(fd: FusionDefinition) -> list[str]:
    """What the host program does, line by line, less what it lets go."""
    text = fd.last_trace().split("# host program\n")[1]
    lines = [line.strip() for line in text.splitlines()[1:-1]]
    return [line for line in lines if not line.startswith("del")]


def row_parallel(size: int, chunks: int) -> FusionDefinition:
    mesh = world_mesh(size)
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 16], contiguity=True), fd.define_tensor([6, 16], contiguity=True)
        fd.add_output(fd.ops.linear(x, w))
    stream(x, 0, chunks)
    for tv, at in ((x, 2), (w, 1)):
        tv.set_device_mesh(mesh)
        tv.outer_split(at, size)
        tv.axis(at).parallelize(X)
    return fd


def column_parallel(size: int, *, ring: bool = False, mesh: DeviceMesh | None = None) -> FusionDefinition:
    """Chunks are the ranks' pieces: a broadcast from each rank, or sends in a ring, instead of the all-gather."""
    mesh = mesh or world_mesh(size)
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 6], contiguity=True), fd.define_tensor([16, 6], contiguity=True)
        whole = fd.ops.set(x)
        fd.add_output(fd.ops.linear(whole, w))
    for tv in (x, w):
        shard(tv, mesh, (X, (0, "outer")))
    whole.set_device_mesh(mesh)
    stream(whole, 0, size)
    if ring:
        whole.swizzle1d(0, X)
    return fd


@pytest.mark.parametrize("size", [2, 4])
def test_row_parallel_linear(size: int) -> None:
    def run(rank: int, size: int) -> list[str]:
        fd = row_parallel(size, 3)
        check(fd, [values(6, 16), values(6, 16, seed=1)])
        check(fd, [values(12, 16), values(6, 16, seed=1)])
        assert [c.kind for c in fd.explain().collectives] == ["all_reduce"] * 3
        return lines_of(fd)

    lines = run_ranks(size, run)
    assert lines == lines[:1] * size
    work = [line for line in lines[0] if "torch" in line or "collective" in line]
    kinds = ["product" if "torch" in line else "start" if "start" in line else "call" for line in work]
    assert kinds == ["product", "start"] * 3  # and nothing to put together: each writes to its part of the result
    assert sum("wait" in line for line in lines[0]) == 1
    (views,) = [line for line in lines[0] if "chunks_" in line]
    assert views.startswith("T2c0, T2c1, T2c2, T2pc0, T2pc1, T2pc2 = ")  # and is reduced there


@pytest.mark.parametrize("op", ["matmul", "linear", "three dims", "two mesh dimensions", "read twice"])
def test_products_that_are_reduced_in_place(op: str) -> None:
    def run(rank: int, size: int) -> list[str]:
        mesh = DeviceMesh([[0, 1], [2, 3]]) if op == "two mesh dimensions" else world_mesh(size)
        shape = (4, 3, 8) if op == "three dims" else (4, 8)
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([-1] * len(shape), contiguity=True), fd.define_tensor([8, 6], contiguity=True)
            y = fd.ops.matmul(x, w) if op != "linear" else fd.ops.linear(x, fd.ops.permute(w, [1, 0]))
            fd.add_output(y)
            if op == "read twice":
                fd.add_output(fd.ops.sum(fd.ops.mul(y, y), [1]))
        stream(x, 0, 2)
        for tv, at in ((x, len(shape)), (w, 0)):
            tv.set_device_mesh(mesh)
            for p in mesh.parallel_types:
                tv.outer_split(at, mesh.extent(p))
                tv.axis(at).parallelize(p)
                at += 1
        check(fd, [values(*shape), values(8, 6, seed=1)])
        return lines_of(fd)

    for lines in run_ranks(4, run):
        assert any("chunks_" in line and "pc0" in line for line in lines), lines


@pytest.mark.parametrize("size", [2, 4])
def test_column_parallel_linear(size: int) -> None:
    def run(rank: int, size: int) -> list[str]:
        fd = column_parallel(size)
        check(fd, [values(6 * size, 6), values(16, 6, seed=1)])
        assert [c.kind for c in fd.explain().collectives] == ["broadcast"] * size
        return lines_of(fd)

    for lines in run_ranks(size, run):
        started = [k for k, line in enumerate(lines) if "start" in line]
        waits = [k for k, line in enumerate(lines) if line.startswith("wait")]
        products = [k for k, line in enumerate(lines) if "torch" in line]
        assert len(started) == len(waits) == size - 1  # the first broadcast has nothing to run beside
        assert max(started) < min(products)  # all on their way before the first product


@pytest.mark.parametrize("size", [2, 3, 4])
def test_column_parallel_linear_in_a_ring(size: int) -> None:
    """Each rank begins with its own piece, sends it to one other at each stage, and writes where the piece belongs."""

    def run(rank: int, size: int) -> list[str]:
        fd = column_parallel(size, ring=True, mesh=DeviceMesh([2, 0, 1]) if size == 3 else None)
        check(fd, [values(6 * size, 6), values(16, 6, seed=1)])
        assert "T2.swizzle1d(0, ParallelType.mesh_x)" in repr(fd)
        found = fd.explain().collectives
        assert [str(c) for c in found] == [f"collective_permute over mesh_x of {size} ranks, 144 bytes"] * (size - 1)
        return lines_of(fd)

    for lines in run_ranks(size, run):
        started = [k for k, line in enumerate(lines) if "start" in line]
        waits = [k for k, line in enumerate(lines) if line.startswith("wait")]
        products = [k for k, line in enumerate(lines) if "torch" in line]
        assert len(started) == len(waits) == size - 1
        assert len(products) == size
        assert max(started) < products[0] < min(waits)  # the own piece needs nobody's
        assert not any("stream_cat" in line for line in lines)


def test_a_ring_of_other_things() -> None:
    """A gather alone; what is whole on every rank, read at the rank's own chunk; a sum over the ring, put together."""

    def run(rank: int, size: int) -> list[list[str]]:
        mesh, kinds = world_mesh(size), list[list[str]]()
        for case in ("gather", "add", "sum"):
            with FusionDefinition() as fd:
                x, y = fd.define_tensor([-1, 6], contiguity=True), fd.define_tensor([-1, 6], contiguity=True)
                whole = fd.ops.set(x)
                if case == "gather":
                    fd.add_output(whole)
                elif case == "add":
                    fd.add_output(fd.ops.neg(fd.ops.add(whole, y)))
                else:
                    w = fd.define_tensor([8, 6], contiguity=True)
                    v = fd.define_tensor([5, 8], contiguity=True)
                    fd.add_output(fd.ops.linear(fd.ops.linear(whole, w), v))
                    shard(w, mesh, (X, (0, "outer")))
                    shard(v, mesh, (X, (1, "outer")))
            shard(x, mesh, (X, (0, "outer")))
            for tv in (whole, y):
                tv.set_device_mesh(mesh)
            stream(whole, 0, size)
            whole.swizzle1d(0, X)
            more = [values(8, 6, seed=2), values(5, 8, seed=3)] if case == "sum" else []
            check(fd, [values(2 * size, 6), values(2 * size, 6, seed=1), *more])
            kinds.append([c.kind for c in fd.explain().collectives])
        return kinds

    ring = ["collective_permute"] * 3
    assert run_ranks(4, run) == [[ring, ring, [*ring, "all_reduce"]]] * 4


@pytest.mark.parametrize("swizzled", [X, Y])
def test_a_ring_on_one_of_two_mesh_dimensions(swizzled: ParallelType) -> None:
    """Rows are gathered over ``mesh_x``; swizzled on ``mesh_y``, each team of it has another root at each stage."""

    def run(rank: int, size: int) -> list[str]:
        mesh = DeviceMesh([[0, 1], [2, 3]])
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([8, 6]), fd.define_tensor([4, 6])
            whole = fd.ops.set(x)
            fd.add_output(fd.ops.linear(whole, w))
        shard(x, mesh, (Y, (1, "outer")), (X, (0, "outer")))
        shard(w, mesh, (Y, (1, "outer")), (X, (0, "outer")))
        shard(whole, mesh, (Y, (1, "outer")))
        stream(whole, 0, 2)
        whole.swizzle1d(0, swizzled)
        check(fd, [values(8, 6), values(4, 6, seed=1)])
        return [c.kind for c in fd.explain().collectives]

    found = run_ranks(4, run)
    assert found == found[:1] * 4
    # sums over mesh_y are of one chunk only where its ranks take the chunks in one order
    assert found[0] == {X: ["collective_permute"] + ["all_reduce"] * 2, Y: ["broadcast"] * 2 + ["all_reduce"]}[swizzled]


def test_a_ring_is_of_as_many_ranks_as_chunks() -> None:
    with FusionDefinition() as fd, pytest.raises(ScheduleError, match="parallel_type=stream cannot be done"):
        fd.define_tensor([4]).swizzle1d(0, S)
    for parallel_type, chunks, mesh, match in (
        (X, 3, world_mesh(2), "3 chunks, swizzled on mesh_x, of 2 ranks"),
        (Y, 2, world_mesh(2), "swizzled on mesh_y, not of its mesh"),
        (X, 2, None, "swizzled on mesh_x, not of its mesh"),
        (X, 0, None, "axis i0 is swizzled and not parallel on stream"),
    ):
        with FusionDefinition() as fd:
            x = fd.define_tensor([6, 4])
            fd.add_output(fd.ops.neg(x))
        if mesh is not None:
            x.set_device_mesh(mesh)
        if chunks:
            stream(x, 0, chunks)
        x.swizzle1d(0, parallel_type)
        with pytest.raises(ShardingError, match=match):
            fd.fec.plan({x: (6, 4)})


def test_chunks_within_the_shards() -> None:
    """Rows on the mesh, each rank's rows in chunks: gather, norm, reduce-scatter."""

    def run(rank: int, size: int) -> list[str]:
        mesh = world_mesh(size)
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([-1, 8]), fd.define_tensor([8, 8])
            mean = fd.ops.mean(fd.ops.mul(x, x), [1], keepdim=True)
            normal = fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean, 1e-6)))
            whole = fd.ops.set(normal)
            fd.add_output(fd.ops.matmul(whole, w))
        shard(x, mesh, (X, (0, "outer")))
        x.outer_split(1, 2)
        x.axis(1).parallelize(S)
        shard(w, mesh, (X, (1, "outer")))
        whole.set_device_mesh(mesh)
        check(fd, [values(8 * size, 8), values(8, 8, seed=1)])
        return [c.kind for c in fd.explain().collectives]

    assert run_ranks(4, run) == [["all_gather"] * 2] * 4


def test_reduce_scatter_and_two_meshes() -> None:
    def run(rank: int, size: int) -> list[str]:
        mesh = DeviceMesh([[0, 1], [2, 3]])
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([4, 6, 8]), fd.define_tensor([6, 8])
            out = fd.ops.linear(x, w)
            fd.add_output(fd.ops.neg(out))
        x.axis(0).parallelize(S)
        x.set_device_mesh(mesh)
        x.outer_split(2, 2)
        x.axis(2).parallelize(X)
        w.set_device_mesh(mesh)
        w.outer_split(1, 2)
        w.axis(1).parallelize(X)
        shard(out, mesh, (Y, None), (X, (1, "outer")))
        check(fd, [values(4, 6, 8), values(6, 8, seed=1)])
        return [c.kind for c in fd.explain().collectives]

    assert run_ranks(4, run) == [["reduce_scatter"] * 4] * 4


def test_without_a_mesh() -> None:
    """Columns of a product; rows of two products; loops that cannot be one."""
    a, b, c = values(6, 5), values(5, 6, seed=1), values(6, 4, seed=2)

    def matmuls(fd: FusionDefinition) -> int:
        return str(fd.explain()).count("= matmul(")

    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1, -1], contiguity=True), fd.define_tensor([-1, -1], contiguity=True)
        out = fd.ops.matmul(x, y)
        fd.add_output(out)
        stream(out, 1, 3)
    check(fd, [a, b])
    assert matmuls(fd) == 3
    with FusionDefinition() as fd:
        x, y, z = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(3))
        fd.add_output(fd.ops.matmul(fd.ops.matmul(x, y), z))
        stream(x, 0, 3)
    check(fd, [a, b, c])
    assert matmuls(fd) == 6
    with FusionDefinition() as fd:
        x, y, z = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(3))
        out = fd.ops.matmul(fd.ops.matmul(x, y), z)
        fd.add_output(out)
        y.split(1, 3, inner_split=False)
        y.axis(1).parallelize(S)
        stream(out, 0, 2)
    check(fd, [a, b, c])
    assert matmuls(fd) == 5


def test_what_mixes_chunks_reads_them_put_together() -> None:
    """A softmax along the stream axis, a sum over it, and an inner cut of it."""
    x = values(6, 4)
    with FusionDefinition() as fd:
        t = fd.define_tensor([6, 4])
        e = fd.ops.exp(t)
        fd.add_output(fd.ops.div(e, fd.ops.sum(e, [0], keepdim=True)))
        fd.add_output(fd.ops.cumsum(e, 0))
        fd.add_output(fd.ops.cat([e, t], 0))
        t.inner_split(0, 2)
        t.axis(1).parallelize(S)
    check(fd, [x])
    assert "chunk=1" in fd.last_trace()


def test_no_segment_holds_two_chunks() -> None:
    """Kernels of two chunks read one large tensor; their small all-reduces are not packed."""

    def run(rank: int, size: int) -> list[int]:
        with FusionDefinition() as fd:
            x, y = fd.define_tensor([2, 4, 8]), fd.define_tensor([4, 8])
            fd.add_output(fd.ops.sum(fd.ops.mul(x, y), [2]))
        x.axis(0).parallelize(S)
        for tv, at in ((x, 2), (y, 1)):
            shard(tv, world_mesh(size), (X, (at, "outer")))
        check(fd, [values(2, 4, 8), values(4, 8, seed=1)])
        explained = fd.explain()
        return [explained.kernels, len(explained.collectives)]

    assert run_ranks(2, run) == [[2, 2]] * 2


def test_chunks_are_of_one_size() -> None:
    with FusionDefinition() as fd, pytest.raises(ScheduleError, match="3 does not divide 7"):
        fd.define_tensor([7, 4]).outer_split(0, 3)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        fd.add_output(fd.ops.neg(x))
        stream(x, 0, 3)
    for rows in (7, 4):  # of 4 rows two chunks of 2 would be left
        with pytest.raises(ShardingError, match="chunks of a stream are of one size; pad the axis"):
            fd.execute([values(rows, 4)])
    with FusionDefinition() as fd:
        x = fd.define_tensor([7, 4])
        fd.add_output(fd.ops.neg(x))
        x.outer_split(0, 3, uneven=True)
        x.axis(0).parallelize(S)
    with pytest.raises(ShardingError, match="3 chunks along i0o, chunks of a stream are of one size"):
        fd.execute([values(7, 4)])
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 4])
        fd.add_output(fd.ops.neg(x))
        x.axis(0).parallelize(S)
        x.axis(1).parallelize(S)
    with pytest.raises(ShardingError, match="a tensor has one stream axis"):
        fd.execute([values(6, 4)])


def test_dtypes_and_orders_of_storage() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6, 2], dtype=DataType.BFloat16, stride_order=[0, 2, 1])
        y = fd.ops.cast(fd.ops.sum(fd.ops.mul(fd.ops.cast(x, DataType.Float), 3.0), [2]), DataType.BFloat16)
        fd.add_output(y, stride_order=[0, 1])
        x.axis(1).parallelize(S)
    (out,) = check(fd, [torch.empty_strided((4, 6, 2), (1, 8, 4)).copy_(values(4, 6, 2)).bfloat16()])
    assert out is not None
    assert out.stride() == (1, 4)


@pytest.mark.parametrize("dtype", [DataType.ComplexFloat, DataType.Float8_e8m0fnu], ids=lambda d: d.name)
def test_a_slice_of_a_chunk_of_what_no_kernel_computes(dtype: DataType) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], contiguity=True, dtype=dtype)
        fd.add_output(fd.ops.select(x, 2, 1))
        fd.add_output(fd.ops.slice(x, [0, 1], [4, 5]))
    stream(x, 0, 2)
    data = torch.arange(24).reshape(4, 6)
    data = data.to(torch.uint8).view(dtype.torch) if dtype.itemsize == 1 else data.to(dtype.torch)
    column, middle = fd.execute([data])
    assert column is not None
    assert middle is not None
    for found, expected in ((column, data[:, 2]), (middle, data[:, 1:5])):
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_random_fusions_in_chunks() -> None:
    """Random fusions with random shardings, some axis of some input or result in chunks."""
    by_world: dict[int, list[Case]] = {}
    cut, refused = 0, list[str]()
    for seed in range(700):
        world, case = random_case(seed)
        rng = random.Random(seed)
        tensors = [tv for tv in case.fd.fusion.tensors() if tv.ndim]
        if not tensors:
            continue
        tv = rng.choice(tensors)
        at, factor = rng.randrange(len(tv.domain.loop)), rng.choice([2, 2, 3])
        if tv.axis(at).parallel_type is not ParallelType.serial:
            continue
        try:
            tv.split(at, factor, inner_split=rng.random() < 0.3)
            tv.axis(at + (rng.random() < 0.2)).parallelize(S)
            given = zip((i.val for i in case.fd.fusion.inputs), case.inputs, strict=True)
            plan = case.fd.fec.plan({k: v.shape for k, v in given if isinstance(v, torch.Tensor)})
        except (ScheduleError, ShardingError) as error:
            refused.append(str(error))
            continue
        if "chunk=1" in dict(plan.trace)["pipeline_streams"]:
            by_world.setdefault(world, []).append(case)
            cut += 1
    said = ("chunks of a stream are of one size", "a recorded split does not fit", "it has extent 1", "does not divide")
    assert [text for text in refused if not any(reason in text for reason in said)] == []
    assert cut > 100
    for world, cases in by_world.items():
        check_on_threads(world, cases)


@pytest.mark.parametrize("world", [1, 2])
def test_chunks_that_read_no_tensor(world: int) -> None:
    """An iota or a fill in chunks, alone and where something reads it."""

    def define(is_counted: bool) -> FusionDefinition:
        with FusionDefinition() as fd:
            o, x = fd.ops, fd.define_tensor([8, 6], contiguity=True)
            made = o.iota(8, 1, 2, DataType.Int) if is_counted else o.full([8, 6], 2.0, DataType.Float)
            for out in (made, o.neg(made), o.add(x, 1.0 if is_counted else made)):
                fd.add_output(out)
        for tv in (x, made):
            tv.set_device_mesh(world_mesh(world))
        stream(made, 0, 2)
        return fd

    check_on_threads(world, [Case(define(is_counted), [values(8, 6)]) for is_counted in (True, False)])


def test_the_addresses_of_chunks_are_those_of_their_views() -> None:
    """Which of the two a program on a GPU takes is decided when its steps are complete."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 16], contiguity=True)
        fd.add_output(fd.ops.relu(x))
    stream(x, 0, 3)
    call = fd.fec._prepare("key", [torch.zeros(12, 16)], {}, None)
    builder = builder_of(fd.fusion, call, fd.fec._plan_of(call), fd.fec.options, {})
    (cut,) = (step for step in builder.steps if isinstance(step, Cut))
    views = cut.cut(torch.zeros(12, 16))
    assert len(views) == len(cut.parts) == 3
    assert cut.offsets == tuple(v.data_ptr() - views[0].data_ptr() for v in views) == (0, 256, 512)
