"""The tuner's whole way, under the interpreter: what it may choose computes the same, and what it chose is run."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

import pytest
import torch
from interpreted import run, values
from kernel_cases import group_norm_silu, layer_norm_backward, row_sums, softmax, swiglu, turned
from ranks import run_ranks
from segments import rms_norm
from torch_answers import assert_like

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.device import H200
from shardfuse.errors import KernelCompileError
from shardfuse.executor import tuning
from shardfuse.executor.choices import Tuned, read_choice
from shardfuse.executor.program import ProgramBuilder
from shardfuse.executor.tuning import Tuner
from shardfuse.schedulers import looped, mix_order, persistent, pointwise, reduction, transpose
from shardfuse.schedulers.candidates import candidates, may_run
from shardfuse.schedulers.schedule import RowLoop, Schedule, Split
from shardfuse.secure_files import write_sealed
from shardfuse.segments.segment import Segment

FLOAT, HALF = DataType.Float, DataType.Half
SEGMENTS = {
    "pointwise": (pointwise, swiglu(3, 200, FLOAT)),
    "transpose": (transpose, turned((40, 72), (1, 0), FLOAT)),
    "persistent": (persistent, rms_norm(6, 1300, FLOAT)),
    "persistent columns": (persistent, softmax(12, 130, FLOAT, axis=0)),
    "persistent team": (persistent, rms_norm(3, 40000, HALF)),
    "looped groups": (looped, group_norm_silu(1, 16, 12, 12, 4, HALF, (0, 2, 3, 1))),
    "reduction": (reduction, row_sums(3, 5000, FLOAT)),
    "reduction split": (reduction, row_sums(1, 70000, FLOAT)),
    "looped": (looped, softmax(2, 600, FLOAT)),
    "mix_order": (mix_order, layer_norm_backward((32, 96), FLOAT)),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_every_candidate_computes_the_same(name: str, tmp_path: Path) -> None:
    scheduler, segment = SEGMENTS[name]
    inputs = {t: values(*t.domain.local_shape(0), dtype=t.dtype, seed=k) for k, t in enumerate(segment.inputs)}
    inputs = {t: x.contiguous() if t.domain.allocation is None else _stored(t, x) for t, x in inputs.items()}
    proposed = scheduler.propose(segment, H200)
    near = candidates(name.split()[0], segment, proposed, H200)
    assert len(near) >= 3
    assert proposed not in near
    for schedule in near:
        run(segment, inputs, tmp_path, scheduler=scheduler, schedule=schedule)  # compares every output with torch's


def _stored(tensor: object, x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def test_limits_hold() -> None:
    """Of a kernel that could be written, what would not stay in registers, and what a multiprocessor does not have."""
    segment = rms_norm(6, 1300, FLOAT)
    proposed = persistent.propose(segment, H200)
    assert may_run("persistent", segment, proposed, H200)
    wide = proposed.sized(kept=64)
    many_chunks, many_registers = proposed.sized(kept=1, reduced=16), proposed.with_warps(32).with_registers(128)
    for wrong in (wide, many_chunks, many_registers, Schedule(RowLoop(2, 256), split=Split(4))):
        assert not may_run("persistent", segment, wrong, H200), wrong


# the whole way


class Clock:
    """The later a run is given, the faster it is; ``gain``: by how much of the first, for each."""

    def __init__(self, gain: float = 0.1) -> None:
        self.gain = gain
        self.asked: list[int] = []

    def __call__(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        self.asked.append(len(runs))
        for each in runs:
            each()
        return [100.0 * (1 - self.gain) ** k for k in range(len(runs))]


def norm(mesh: DeviceMesh | None = None, *, contiguity: bool | list[bool] = True) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 600], contiguity=contiguity)
        mean = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))))
    if mesh is not None:
        x.set_device_mesh(mesh)
        x.outer_split(0, mesh.size)
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDFUSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "tuned"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two candidates a round."""
    monkeypatch.setattr(tuning, "candidates", lambda *arguments: candidates(*arguments)[:2])


def test_what_is_chosen_is_run() -> None:
    fd, x, clock = norm(contiguity=[False, True]), values(4, 600), Clock()
    before = fd.execute([x])
    proposed = fd.fec.last_program
    (tuned,) = fd.tune([x], timer=clock)
    assert tuned.chosen != tuned.proposed
    assert tuned.us < tuned.proposed_us == 100.0
    assert tuned.tried > 3
    assert len(clock.asked) >= 2
    (out,) = fd.execute([x])
    assert_like(out, normed, x)
    assert_like(before, normed, x)
    chosen = fd.fec.last_program
    assert chosen is not proposed
    # other strides of the same sizes are another program of the same plan
    apart = values(4, 1200)[:, :600]
    assert_like(fd.execute([apart]), normed, apart)
    assert fd.fec.last_program is not chosen
    plan = fd.fec.last_plan
    assert [k.schedule for s in plan.segments for k in s.kernels] == [tuned.chosen]
    # another size is another plan, as it was proposed
    fd.execute([values(5, 600)])
    assert fd.fec.last_plan.segments[0].kernels[0].schedule == tuned.proposed


@pytest.mark.usefixtures("few")
def test_a_small_gain_changes_nothing() -> None:
    (tuned,) = norm().tune([values(4, 600)], timer=Clock(gain=0.0005))
    assert tuned.chosen == tuned.proposed


def test_no_time_changes_nothing() -> None:
    clock = Clock()
    (tuned,) = norm().tune([values(4, 600)], timer=clock, seconds=0.0)
    assert (tuned.chosen, tuned.tried, clock.asked) == (tuned.proposed, 0, [1])


@pytest.mark.usefixtures("few")
def test_a_choice_is_kept(directory: Path) -> None:
    first, second = Clock(), Clock()
    (found,) = norm().tune([values(4, 600)], timer=first)
    (kept,) = norm().tune([values(4, 600)], timer=second)
    assert (kept, second.asked) == (replace(found, tried=0), [])
    (file,) = directory.iterdir()
    assert read_choice(directory.parent, f"tuned/{file.name}") == found
    norm().tune([values(5, 600)], timer=second)
    assert second.asked
    assert len(list(directory.iterdir())) == 2


def damaged(text: str) -> list[str]:
    whole = Tuned.from_json(text)
    assert whole is not None
    too_wide = replace(whole, chosen=whole.chosen.sized(kept=1 << 20))
    other = replace(whole, proposed=whole.proposed.with_warps(1))
    fields = [text.replace('"kept"', '"left"'), text.replace('"us": ', '"us": -'), text.replace(": true", ": 1")]
    return ["", "{", "[]", "\x00\xff", text[: len(text) // 2], "{}", *fields, too_wide.to_json(), other.to_json()]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("case", range(11))
def test_a_record_that_does_not_fit_is_ignored_and_rewritten(case: int, directory: Path) -> None:
    (found,) = norm().tune([values(4, 600)], timer=Clock())
    (file,) = directory.iterdir()
    name, whole = f"tuned/{file.name}", file.read_bytes()
    cases = damaged(found.to_json())
    assert len(cases) == 11
    write_sealed(directory.parent, name, cases[case].encode())
    clock = Clock()
    assert norm().tune([values(4, 600)], timer=clock) == [found]
    assert clock.asked
    assert file.read_bytes() == whole


def test_candidates_that_fail_or_differ_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first round one does not compile and one gives other results: neither is ever timed."""
    first = candidates("persistent", _segment(norm()), persistent.propose(_segment(norm()), H200), H200)
    broken, wrong = first[0], first[1]
    compiled = ProgramBuilder.compiled

    def compile_some(self: ProgramBuilder, plan, renamed=None):
        if plan.schedule == broken:
            raise KernelCompileError(plan.name, "planted", "")
        kernel = compiled(self, plan, renamed)
        if plan.schedule == wrong:
            launch = kernel.launcher()
            monkeypatch.setattr(
                kernel, "launcher", lambda: lambda stream, x, out: (launch(stream, x, out), out[0, 0].mul_(1.01))
            )
        return kernel

    monkeypatch.setattr(ProgramBuilder, "compiled", compile_some)
    clock = Clock()
    (tuned,) = norm().tune([values(4, 600)], timer=clock)
    assert clock.asked[0] == 1 + len(first) - 2
    assert tuned.chosen not in (broken, wrong)


def _segment(fd: FusionDefinition) -> Segment:
    return fd.fec.plan({fd.fec.tensors()[0]: (4, 600)}).segments[0].segment


@pytest.mark.usefixtures("few")
def test_one_rank_tunes_for_all() -> None:
    clocks, lock = [Clock(), Clock(), Clock()], Lock()

    def work(rank: int, size: int) -> tuple[Schedule, list[Schedule], torch.Tensor]:
        fd, x = norm(DeviceMesh(list(range(size)))), values(2, 600, seed=rank)
        (tuned,) = fd.tune([x], timer=clocks[rank])
        with lock:  # the interpreter is for one thread at a time
            (out,) = fd.execute([x])
        assert_like(out, normed, x)
        return tuned.chosen, [k.schedule for s in fd.fec.last_plan.segments for k in s.kernels], out

    found = run_ranks(3, work)
    assert clocks[0].asked
    assert clocks[1].asked == clocks[2].asked == []
    chosen = found[0][0]
    assert all(schedule == chosen and run == [chosen] for schedule, run, _ in found)


@pytest.mark.usefixtures("few")
def test_a_failure_of_the_rank_that_tunes_is_told() -> None:
    def fail(runs: Sequence[Callable[[], object]]) -> list[float]:
        raise RuntimeError("the clock stands still")

    def work(rank: int, size: int) -> tuple[int, Schedule]:
        fd, x = norm(DeviceMesh(list(range(size)))), values(2, 600, seed=rank)
        tuned = fd.tune([x], timer=fail)
        return len(tuned), fd.fec.last_plan.segments[0].kernels[0].schedule

    said = "tuning segment 0 on rank 0: RuntimeError: the clock stands still; it runs as proposed"
    with pytest.warns(UserWarning, match=said) as warned:
        (none, schedule), other = run_ranks(2, work)
    assert [str(w.message) for w in warned] == [said] * 2
    assert (none, schedule) == other
    assert none == 0


@pytest.mark.usefixtures("few")
def test_a_bar_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, x = norm(), values(4, 600)
    stream = io.StringIO()
    stream.isatty = lambda: True
    fd.execute([x])
    fd.fec.tune([x], None, None, Tuner(fd._options, Clock(), stream))
    shown = stream.getvalue().split("\r")
    assert "tuning persistent" in shown[1]
    assert "[####################] " in shown[-1]
    assert " us, proposed 100.0 us" in shown[-1]
    assert shown[-1].endswith("\n")
