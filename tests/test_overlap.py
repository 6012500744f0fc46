"""Collectives that run beside kernels: when they start, and who waits for them."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from fusion_check import check, local_arguments
from random_fusions import random_case
from ranks import run_ranks
from thread_check import X, check_on_threads, shard, world_mesh

from shardfuse import DataType, FusionDefinition, simulate
from shardfuse.device.record import H200
from shardfuse.executor import host_program, streams
from shardfuse.executor.timeline import Span, Timeline
from shardfuse.segments import overlap as rule
from shardfuse.segments.overlap import HIDDEN_US, overlap


@pytest.fixture(autouse=True)
def _hidden_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these tests are too small for a stream of their own."""
    monkeypatch.setattr(rule, "HIDDEN_US", 0.0)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gather_beside_sums(size: int) -> FusionDefinition:
    """``neg`` feeds an all-gather, the sums of ``y`` have nothing to do with it."""
    mesh = world_mesh(size)
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1, 8], contiguity=True), fd.define_tensor([-1, 16], contiguity=True)
        total = fd.ops.sum(fd.ops.exp(y), [1])
        whole = fd.ops.set(fd.ops.neg(x))
        fd.add_output(fd.ops.sum(whole, [1]))
        fd.add_output(total)
    shard(x, mesh, (X, (0, "outer")))
    shard(y, mesh, (X, (0, "outer")))
    whole.set_device_mesh(mesh)
    return fd


BESIDE = """\
def program(T0, T1):
    T4 = torch_0(T0)
    T5, done_1 = start(collective_1, T4)
    T3 = torch_2(T1)
    wait(done_1, T4, T5)
    del T4, done_1
    T6 = torch_3(T5)
    del T5
    return (T6, T3, )
"""


def text_of(fd: FusionDefinition) -> str:
    return fd.last_trace().split("# host program\n")[1]


def test_an_independent_segment_stands_between_start_and_wait() -> None:
    """Though it is defined before what the collective reads."""

    def run(rank: int, size: int) -> str:
        fd = gather_beside_sums(size)
        check(fd, [numbers(8, 8), numbers(8, 16, seed=1)])
        assert "beside kernels" in str(fd.explain())
        return text_of(fd)

    assert run_ranks(2, run) == [BESIDE] * 2


def test_a_stream_of_its_own_has_to_hide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather of [rows, 8] beside the sums of [rows, 16]: both have to take 20 us, by the rates of the GPU."""
    monkeypatch.setattr(rule, "HIDDEN_US", HIDDEN_US)
    fd = gather_beside_sums(2)
    x, y = (i.val for i in fd.fusion.inputs)

    def is_beside(rows: int, others: int) -> bool:
        return "beside kernels" in str(fd.explain(sizes={x: (rows, 8), y: (others, 16)}))

    link, memory = H200.rates.link, H200.rates.memory
    gathered, summed = int(10 * link / 32) // 2 * 2 + 2, 2 * int(20 * memory / 68) + 2  # bytes of a row, of one rank
    assert is_beside(gathered, summed)
    assert not is_beside(gathered - 4, summed), "the gather is too short"
    assert not is_beside(gathered, summed - 4), "the sums are too short"
    assert not is_beside(8, 8)


def test_matmuls_are_counted_by_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather of 8 MB beside a matmul of 2048 x 2048 x n: in memory's time alone it would be too short."""
    monkeypatch.setattr(rule, "HIDDEN_US", HIDDEN_US)
    mesh = world_mesh(2)
    with FusionDefinition() as fd:
        x, a, b = (fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.BFloat16) for _ in range(3))
        whole = fd.ops.set(fd.ops.neg(x))
        fd.add_output(fd.ops.exp(whole))
        fd.add_output(fd.ops.matmul(a, b))
    shard(x, mesh, (X, (0, "outer")))
    for tv in (whole, a, b):
        tv.set_device_mesh(mesh)

    def is_beside(n: int) -> bool:
        return "beside kernels" in str(fd.explain(sizes={x: (2048, 2048), a: (2048, n), b: (n, 2048)}))

    assert is_beside(2048), "29 us of operations, 6 of memory"
    assert not is_beside(512)


def test_a_chain_of_collectives_is_waited_for_once() -> None:
    """A reduce-scatter and the all-gather of its result follow each other on their stream; nothing waits between."""

    def run(rank: int, size: int) -> str:
        mesh = world_mesh(size)
        with FusionDefinition() as fd:
            parts, y = fd.define_tensor([size, 8, 4]), fd.define_tensor([8, 4])
            total = fd.ops.sum(parts, [0])
            whole = fd.ops.set(total)
            fd.add_output(fd.ops.sum(whole, [0]))
            fd.add_output(fd.ops.exp(y))
        parts.set_device_mesh(mesh)
        parts.axis(0).parallelize(X)
        shard(total, mesh, (X, (0, "outer")))
        whole.set_device_mesh(mesh)
        check(fd, [numbers(size, 8, 4), numbers(8, 4, seed=1)])
        return text_of(fd)

    for text in run_ranks(2, run):
        lines = [line.split("(")[0].strip() for line in text.splitlines()[1:]]
        assert [line for line in lines if not line.startswith("del")] == [
            "T2, done_0 = start",
            "T3, done_1 = start",
            "T5 = torch_2",
            "wait",
            "T4 = torch_3",
            "return",
        ]
        assert "wait(done_1, T0, T2, T3)" in text


def test_what_has_nothing_to_run_beside_is_called_where_it_stands() -> None:
    def run(rank: int, size: int) -> str:
        with FusionDefinition() as fd:
            x = fd.define_tensor([8, 4])
            fd.add_output(fd.ops.sub(x, fd.ops.sum(x, [0])))
        shard(x, world_mesh(size), (X, (0, "outer")))
        check(fd, [numbers(8, 4)])
        return text_of(fd)

    for text in run_ranks(2, run):
        assert "collective" in text
        assert "start" not in text
        assert "wait" not in text


def test_simulated() -> None:
    def run() -> str:
        fd = gather_beside_sums(4)
        check(fd, [numbers(8, 8), numbers(8, 16, seed=1)])
        return text_of(fd)

    assert simulate(run, 4) == [BESIDE] * 4


def test_timeline_of_a_run() -> None:
    """In the order of the program, with what each does; nothing on a CPU is at once."""

    def run(rank: int, size: int) -> list[str]:
        fd = gather_beside_sums(size)
        data = [numbers(8, 8), numbers(8, 16, seed=1)]
        check(fd, data)
        found = fd.timeline(local_arguments(fd.fusion, data, rank))
        assert [s.stream for s in found.spans] == ["host"] * 4
        assert all(a.start <= a.end <= b.start for a, b in pairwise(found.spans))
        assert found.overlapped() == 0
        assert found.rank == rank
        return [s.name for s in found.spans]

    assert run_ranks(2, run) == [["neg T4", "all_gather T5", "exp + sum T3", "sum T6"]] * 2


def test_timeline_as_text_and_as_chrome_trace() -> None:
    spans = (Span("a", "kernels", 10, 50), Span("b", "communication", 30, 90), Span("c", "kernels", 60, 74))
    found = Timeline(3, spans)
    assert found.us == 80
    assert found.overlapped() == 20 + 14
    lines = str(found).splitlines()
    assert lines[0] == "rank 3: 80.0 us, 34.0 us of them on both streams"
    assert lines[1] == "kernels       |" + "#" * 32 + "." * 8 + "#" * 11 + "." * 13 + "|"
    assert lines[2] == "communication |" + "." * 16 + "#" * 48 + "|"
    assert [line.split()[-1] for line in lines[4:]] == ["a", "b", "c"]
    event = json.loads(found.chrome_trace())["traceEvents"][1]
    assert event == {"name": "b", "ph": "X", "ts": 30, "dur": 60, "pid": 3, "tid": "communication"}


@dataclass
class SlowCollectives:
    """In place of a stream: what a collective makes is not there before somebody waits for it.

    Until then its memory holds NaN; only a later collective, on the same stream, reads the values.
    """

    queue: list[list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)
    count: int = 0

    def start(self, collective: Callable[..., object], *arguments: object) -> tuple[object, ...]:
        values = {id(hidden): value for made in self.queue for hidden, value in made}
        results = collective(*(values.get(id(a), a) for a in arguments))
        made = [
            (torch.full_like(r, -77 if r.dtype in (torch.int64, torch.int32, torch.bool) else torch.nan), r)
            for r in (results if isinstance(results, tuple) else (results,))
            if isinstance(r, torch.Tensor)
        ]
        self.queue.append(made)
        self.count += 1
        return (*[hidden for hidden, _ in made], *([] if made else [None]), made)

    def wait(self, done: object, *tensors: torch.Tensor | None) -> None:
        while True:
            made = self.queue.pop(0)
            for hidden, value in made:
                hidden.copy_(value)
            if made is done:
                return


def test_random_fusions_wait_before_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With collectives of which nothing is seen before the wait, all values are right, and none is left unwaited."""
    slow: list[SlowCollectives] = []

    def start_and_wait(device: torch.device):
        slow.append(SlowCollectives())
        return slow[-1].start, slow[-1].wait

    monkeypatch.setattr(host_program, "start_and_wait", start_and_wait)
    by_world: dict[int, list] = {}
    for seed in range(150):
        world, case = random_case(seed)
        by_world.setdefault(world, []).append(case)
    for world, cases in by_world.items():
        check_on_threads(world, cases)
    assert sum(s.count for s in slow) > 20
    assert all(not s.queue for s in slow)


def test_the_order_keeps_dependences() -> None:
    """Of random fusions: each segment after those that make what it reads; each of them once."""
    reordered = 0
    for seed in range(150):
        _, case = random_case(seed)
        sizes = {i.val: x.shape for i, x in zip(case.fd.fusion.inputs, case.inputs, strict=True)}
        plan = case.fd.fec.plan(sizes)
        scheduled = [(s.segment, s.scheduler) for s in plan.segments]
        order, beside = overlap(scheduled, H200)
        assert sorted(order) == list(range(len(scheduled)))
        made = {t for s, _ in scheduled for t in s.outputs}
        for at, k in enumerate(order):
            before = {t for j in order[:at] for t in scheduled[j][0].outputs}
            assert made.intersection(scheduled[k][0].inputs) <= before
        assert all(scheduled[k][1] == "communication" for k in beside)
        assert order == list(range(len(order))), "the order of a plan is a fixed point"
        reordered += bool(beside)
    assert reordered > 5


class FakeStream:
    """A stream on which nothing runs."""

    cuda_stream = 0

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> object:
        return object()


def test_what_a_collective_reads_is_kept_until_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails behind its start drops its tensors; the collective still reads them."""

    class Numbers:
        pass

    stream = FakeStream()
    monkeypatch.setattr(streams, "communication_stream", lambda *of: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    start, wait = streams.start_and_wait(torch.device("cuda"))
    kept: list[weakref.ref[Numbers]] = []

    def run(*, fails: bool) -> None:
        dones = list[object]()
        for _ in range(2):
            x = Numbers()
            kept.append(weakref.ref(x))
            dones.append(start(lambda x: None, x)[1])
        if fails:
            raise ValueError("a kernel is refused")
        for done in dones:
            wait(done)

    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            run(fails=True)
    gc.collect()
    assert all(x() is not None for x in kept)
    run(fails=False)
    gc.collect()
    assert all(x() is None for x in kept)
