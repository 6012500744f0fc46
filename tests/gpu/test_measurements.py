"""What benchmarks rest on and only a GPU shows: caches are cold, peers compiled, wrong rows seen, bytes moved."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import peers, suite
from benchmarks.called import BACKWARD
from benchmarks.peers.copy import Copy, copies, narrow
from benchmarks.timing import count_kernels, measure, poison
from benchmarks.workload import Case, Draw, Workload
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.modules import MODULES
from benchmarks.workloads.norms import RMS_NORM
from shardfuse.executor.timing import behind_flush, flush_buffer

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
SLEEP = 1_000_000
"""Cycles of the GPU's clock, half a millisecond, in which the host launches what is measured."""
PEAK = 4.8e12
"""Bytes a second of an H200's memory, by its maker; other GPUs have less."""


def microseconds(run: Callable[[], object], flushes: int, rounds: int = 41) -> float:
    """The median of runs that are timed as benchmarks time them, but for the number of flushes."""
    flush = flush_buffer(GPU)
    for _ in range(3):
        run()
    reads = [behind_flush(run, flush, flushes) for _ in range(rounds)]
    torch.cuda.synchronize()
    return median(read() for read in reads)


@pytest.mark.alone
def test_a_read_behind_the_flush_comes_from_memory() -> None:
    """24 MB stay in an L2 of 50 MB from one read to the next, unless something else is written in between."""
    x = torch.ones(24 << 18, device=GPU)
    small = torch.ones(1 << 20, device=GPU)
    found: list[float] = []
    for _ in range(41):
        x.sum()
        small.add_(1)  # fits in the cache beside x
        torch.cuda._sleep(SLEEP)  # hides the launches, as a flush does
        read = behind_flush(x.sum, small, 0)
        torch.cuda.synchronize()
        found.append(read())
    cached = median(found)
    flushed = measure({"sum": x.sum}, 0.05, GPU)["sum"].us
    print(f"{flushed:.2f} us behind a flush, {cached:.2f} us from the cache")
    # A launch and the end of a reduction take both as long; the cache gives 24 MB in at most half of the memory's time.
    from_memory = x.nbytes / PEAK * 1e6
    assert flushed - cached > 0.2 * from_memory, (flushed, cached)
    assert flushed > from_memory, "faster than the memory: not all of it was flushed"


@pytest.mark.parametrize("peer", ["inductor", "inductor_graphs", "inductor_max_autotune"])
def test_inductor_is_compiled(peer: str) -> None:
    """One kernel of Triton's, by its name in the profile, where eager torch launches several of its own."""
    workload, case = WORKLOADS["add_rms_norm"], Case.parse("64x1024")
    inputs = workload.arguments(case, Draw(GPU))
    run, eager = (peers.prepare(p, workload, case, inputs) for p in (peer, "eager"))
    assert run is not None
    assert eager is not None
    assert all(name.startswith("triton_") for name in kernels(run)), kernels(run)
    assert len(kernels(run)) < len(kernels(eager))
    assert not any(name.startswith("triton_") for name in kernels(eager))


def kernels(run: Callable[[], object]) -> list[str]:
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    return [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("count", [300_000, 1 << 24])
def test_fresh_outputs_are_poisoned(count: int) -> None:
    """What the next run is given is what was poisoned."""
    torch.cuda.empty_cache()  # what other tests gave back
    held = [torch.ones(count, device=GPU), torch.ones(count, dtype=torch.bfloat16, device=GPU)]
    poison(held, [], GPU)
    # Looked at on the host: what a question makes on the GPU would be in memory that was poisoned.
    assert all(t.cpu().isnan().all() for t in held)
    like = [(t.shape, t.dtype) for t in held]
    del held
    for t in [torch.empty(shape, dtype=dtype, device=GPU) for shape, dtype in like]:
        assert t.cpu().isnan().all()


@pytest.mark.parametrize("fault", ["left out", "swapped", "zero"])
def test_a_wrong_row_of_many_is_reported(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 16,384, which a norm over the tensor does not see; its time is in no table."""
    case = Case.parse("16384x1024")

    def spoilt(peer: str, workload: Workload, case: Case, inputs: list[torch.Tensor]) -> peers.Run:
        def run() -> tuple[torch.Tensor, ...]:
            (right,) = workload.eager(case, *inputs)
            found = torch.empty_like(right)
            found[:7777], found[7778:] = right[:7777], right[7778:]
            if fault != "left out":
                found[7777] = right[7776] if fault == "swapped" else 0
            return (found,)

        return run

    monkeypatch.setattr(peers, "prepare", spoilt)
    ((own, _, wrong),) = suite.run_tables([(RMS_NORM, case)], ["copy", "eager"], 0.01, GPU)
    assert (own.impl, own.note) == ("shardfuse", "")
    assert (wrong.impl, wrong.us) == ("eager", None)
    assert wrong.note.startswith("WRONG: element [7777, "), wrong.note


def test_modules_are_measured_beside_their_peers() -> None:
    """Of the suite ``modules``: all that shardfuse runs is right, and so is Inductor with a backward of its own."""
    tiny = [(w, Case.parse(w.tiny[0])) for w in MODULES.values()]
    rows = [row for found in suite.run_tables(tiny, ["copy"], 0.1, GPU) for row in found]
    assert [f"{r.workload}, {r.impl}: {r.note}" for r in rows if r.note and r.impl != "copy"] == []
    chosen = [MODULES[f"{name}{BACKWARD}"] for name in ("GELU", "RMSNorm", "Linear", "BatchNorm2d")]
    work = [(w, Case.parse(w.tiny[0])) for w in chosen]
    found = [row for rows in suite.run_tables(work, ["eager", "inductor"], 0.1, GPU) for row in rows]
    assert {r.impl for r in found if r.us} >= {"shardfuse", "eager", "inductor"}
    assert all(r.counts for r in found), [(r.workload, r.impl, r.note) for r in found if not r.counts]


def every_copy(nbytes: int) -> list[Copy]:
    return [*copies(nbytes, GPU), *(narrow(nbytes, width) for width in (1, 2, 4, 8))]


@pytest.mark.parametrize("nbytes", [64, 4096, 1_000_002, 300 << 20])
def test_copies_move_as_many_bytes_as_they_say(nbytes: int) -> None:
    """All of the source, nothing beside the target; of large ones no faster than memory allows."""
    for copy in every_copy(nbytes):
        word = copy.source.itemsize
        assert nbytes - 2 * word < copy.bytes <= nbytes, copy.name
        copy.target.fill_(0)
        made = copy.run()
        assert torch.equal(made if isinstance(made, torch.Tensor) else copy.target, copy.source), copy.name
        assert count_kernels(copy.run) == 1, copy.name
        if nbytes > 256 << 20:
            seconds = microseconds(copy.run, flushes=2) * 1e-6
            assert seconds > copy.bytes / PEAK, copy.name


@pytest.mark.alone
def test_copies_of_more_take_longer() -> None:
    """The fastest of each: the roof is monotonic, which one copy alone is not."""
    best = [min(microseconds(c.run, flushes=2) for c in copies(mb << 20, GPU)) for mb in (32, 64, 128, 256, 512)]
    assert best == sorted(best), best
