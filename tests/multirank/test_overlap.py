"""Collectives beside kernels over processes: gloo on the CPU, a communication stream where every rank has a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fusion_check import check, local_arguments
from thread_check import X, shard, world_mesh

from shardfuse import FusionDefinition, ParallelType
from shardfuse.executor import nccl

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _hidden_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these tests are too small for a stream of their own."""
    monkeypatch.setattr("shardfuse.segments.overlap.HIDDEN_US", 0.0)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def two_blocks(size: int, rows: int, columns: int) -> FusionDefinition:
    """A reduce-scatter, a norm and an all-gather of one tensor; sums over ranks of another; kernels of a third."""
    mesh = world_mesh(size)
    with FusionDefinition() as fd:
        parts, x, y = (fd.define_tensor(s) for s in ([size, rows, columns], [rows, columns], [rows, columns]))
        total = fd.ops.sum(parts, [0])
        whole = fd.ops.set(fd.ops.mul(total, 2.0))
        fd.add_output(fd.ops.sum(whole, [1]))
        fd.add_output(fd.ops.sum(x, [0]))
        fd.add_output(fd.ops.sum(fd.ops.mul(y, y), [1]))
        fd.add_output(fd.ops.neg(fd.ops.abs(y)))
    parts.set_device_mesh(mesh)
    parts.axis(0).parallelize(X)
    for tv in (total, x, y):
        shard(tv, mesh, (X, (0, "outer")))
    whole.set_device_mesh(mesh)
    return fd


def counted(name: str, call: Callable[..., object], calls: Counter[str]) -> Callable[..., object]:
    """``call``, each of its calls added to ``calls``."""

    def run(*arguments: object, **named: object) -> object:
        calls[name] += 1
        return call(*arguments, **named)

    return run


@pytest.mark.parametrize("rows", [8, 7])
def test_like_unsharded(rows: int, pg) -> None:
    fd = two_blocks(pg.size, rows, 16)
    for seed in range(3):
        data = [
            values(pg.size, rows, 16, seed=seed),
            values(rows, 16, seed=seed + 10),
            values(rows, 16, seed=seed + 20),
        ]
        check(fd, data, device=pg.device)
    assert ("start(" in fd.last_trace()) == (pg.size > 1)


@pytest.mark.parametrize("said", ["rows", "gathered", "ring"])
def test_linear_in_chunks(said: str, pg, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row-parallel linear in chunks of rows; a column-parallel one that gathers from one rank after the other, or
    from all at once, each from another.
    """
    mesh = world_mesh(pg.size)
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 16], contiguity=True), fd.define_tensor([8, 16], contiguity=True)
        whole = x if said == "rows" else fd.ops.set(x)
        fd.add_output(fd.ops.linear(whole, w))
    if said == "rows":
        x.outer_split(0, 3)
        x.axis(0).parallelize(ParallelType.stream)
        for tv, at in ((x, 2), (w, 1)):
            tv.set_device_mesh(mesh)
            tv.outer_split(at, pg.size)
            tv.axis(at).parallelize(X)
    else:
        for tv in (x, w):
            tv.set_device_mesh(mesh)
            tv.outer_split(0, pg.size)
            tv.axis(0).parallelize(X)
        whole.set_device_mesh(mesh)
        whole.outer_split(0, pg.size)
        if said == "ring":
            whole.swizzle1d(0, X)
        whole.axis(0).parallelize(ParallelType.stream)
    calls = Counter[str]()
    for module, name in (
        (nccl, "all_gather_single"),
        (dist, "all_reduce"),
        (dist, "all_to_all_single"),
        (dist, "broadcast"),
    ):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name), calls))
    for rows in (3 * 4, 3 * 8):
        check(fd, [values(rows, 16), values(8, 16, seed=1)], device=pg.device)
    count = {"rows": 3, "gathered": pg.size, "ring": pg.size - 1}[said] if pg.size > 1 else 0
    kind = {"rows": "all_reduce", "gathered": "broadcast", "ring": "collective_permute"}[said]
    assert [c.kind for c in fd.explain().collectives] == [kind] * count
    if said != "rows":  # gloo's sums are several calls
        assert calls == Counter(
            {{"gathered": "broadcast", "ring": "all_to_all_single"}[said]: 2 * count} if count else {}
        )


@pytest.mark.multi_gpu
def test_memory_is_used_again_only_when_free(pg) -> None:
    """Many calls without a wait in between, outputs let go at once: each reads what it made, not what came after."""
    fd = two_blocks(pg.size, 4 * 256, 2048)
    data = [
        [values(pg.size, 1024, 2048, seed=s), values(1024, 2048, seed=s + 1), values(1024, 2048, seed=s + 2)]
        for s in range(3)
    ]
    fd.fec  # noqa: B018 closes the definition
    local = [[x.to(pg.device) for x in local_arguments(fd.fusion, d, pg.rank)] for d in data]
    expected = [[out.clone() for out in fd.execute(x)] for x in local]
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=pg.device)
    for call in range(60):
        outputs = fd.execute(local[call % 3])
        for out, want in zip(outputs, expected[call % 3], strict=True):
            wrong += (out != want).sum()
        del outputs, out
    assert int(wrong) == 0


@pytest.mark.multi_gpu
def test_captured_into_a_graph(pg) -> None:
    fd = two_blocks(pg.size, 64, 512)
    data = [values(pg.size, 64, 512), values(64, 512, seed=1), values(64, 512, seed=2)]
    check(fd, data, device=pg.device)
    local = [x.to(pg.device) for x in local_arguments(fd.fusion, data, pg.rank)]
    expected = [out.clone() for out in fd.execute(local)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fd.execute(local)
    for _ in range(3):
        for out in outputs:
            out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for out, want in zip(outputs, expected, strict=True):
            assert torch.equal(out, want)


@pytest.mark.multi_gpu
def test_a_timeline_shows_both_streams_at_work(pg) -> None:
    fd = two_blocks(pg.size, 4096, 4096)
    data = [values(pg.size, 4096, 4096), values(4096, 4096, seed=1), values(4096, 4096, seed=2)]
    fd.fec  # noqa: B018 closes the definition
    local = [x.to(pg.device) for x in local_arguments(fd.fusion, data, pg.rank)]
    assert max(fd.timeline(local).overlapped() for _ in range(3)) > 5  # microseconds
