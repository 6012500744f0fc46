"""Who tunes, who waits, what is said, and what stands on disk: everything about tuning but the kernels themselves."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

from shardfuse import DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import ProgramMismatchError, TuningUnavailableError
from shardfuse.executor.choices import Tuned, read_choice, write_choice
from shardfuse.executor.options import CompileOptions
from shardfuse.executor.program import ProgramBuilder
from shardfuse.executor.tuning import owner_of, same, tune_segments
from shardfuse.rank_errors import RanksLateError
from shardfuse.schedulers.schedule import Launch, Schedule, Tile


def choice(us: float = 9.0) -> Tuned:
    wider = Schedule(Tile(1, 1024), launch=Launch(8, registers=64))
    return Tuned("persistent_T1", Schedule(Tile(1, 512)), wider, 10.0, us, 7)


# on disk


def test_a_choice_by_way_of_text() -> None:
    assert Tuned.from_json(choice().to_json()) == choice()


@pytest.mark.parametrize("text", ["", "null", "[1]", "{}", '{"kernel": 1}', choice().to_json()[:-1], "9" * 5000])
def test_a_text_that_is_none(text: str) -> None:
    assert Tuned.from_json(text) is None


def _write(directory: Path, us: float) -> None:
    for _ in range(50):
        write_choice(directory, "tuned/one.json", choice(us))


def test_many_writers_leave_one_whole_choice(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "one.json"
    writers = [multiprocessing.Process(target=_write, args=(tmp_path, float(k))) for k in range(8)]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.append(read_choice(tmp_path, "tuned/one.json"))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen
    assert all(found is not None and found.us in range(8) for found in seen)
    assert [p.name for p in path.parent.iterdir()] == ["one.json"]


def test_a_directory_that_cannot_be_written_is_gone_without(tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("in the way")
    write_choice(tmp_path, "tuned/one.json", choice())
    assert read_choice(tmp_path, "tuned/one.json") is None


# results that are the same


def test_results_that_count_as_the_same() -> None:
    wanted = torch.randn(64, 64)
    assert same(wanted.clone(), wanted)
    assert same(wanted + 1e-6, wanted)
    assert not same(wanted + 1e-3, wanted)
    one = wanted.clone()
    one[3, 5] += 0.1
    assert not same(one, wanted)
    half = wanted.bfloat16()
    assert same(half * (1 + 2**-8), half)
    assert not same(half * 1.05, half)
    for odd in (float("nan"), float("inf")):
        strange = wanted.clone()
        strange[0, 0] = odd
        assert same(strange, strange.clone())
        assert not same(strange, wanted)
        assert not same(wanted, strange)
    whole = torch.arange(9)
    assert same(whole.clone(), whole)
    assert not same(whole + 1, whole)


# ranks


def sharded(ranks: int, *, uneven: bool = False) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 16], contiguity=True)
        fd.add_output(fd.ops.mul(x, fd.ops.sum(x, [-1], keepdim=True)))
    x.set_device_mesh(DeviceMesh(list(range(ranks))))
    x.outer_split(0, ranks, uneven=uneven)
    x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


class Canned:
    """A tuner that knows what it will choose; ``asked``: by which ranks."""

    def __init__(self, choose: Callable[[], Tuned]) -> None:
        self.choose = choose
        self.asked: list[int] = []

    def tune(self, builder: ProgramBuilder, segment: object, scheduler: str) -> Tuned:
        self.asked.append(builder.rank)
        return self.choose()


def ask(tuner: Canned, ranks: int, question: str = "program", rows: int | None = None) -> list[Tuned | None]:
    """As a rank of the world."""
    fd = sharded(ranks)
    (x,) = fd.fec.tensors()
    plan = fd.fec.plan({x: (rows or 4 * ranks, 16)})
    builder = SimpleNamespace(rank=torch.distributed.get_rank())
    segments = [(s.segment, s.scheduler) for s in plan.segments]
    return tune_segments(builder, segments, range(ranks), question, tuner)


def test_the_first_rank_answers_for_all() -> None:
    tuner = Canned(lambda: time.sleep(0.1) or choice())
    assert run_ranks(3, lambda rank, size: ask(tuner, size)) == [[choice()]] * 3
    assert tuner.asked == [0]


def test_an_answer_stands() -> None:
    """A rank that asks again, for reasons of its own, waits for nobody and gets the same."""
    tuner = Canned(choice)

    def work(rank: int, size: int) -> list[list[Tuned | None]]:
        return [ask(tuner, size) for _ in range(1 + 2 * (rank == 1))] + [ask(tuner, size, "another")]

    found = run_ranks(2, work)
    assert all(answer == [choice()] for answers in found for answer in answers)
    assert tuner.asked == [0, 0]


def test_a_rank_that_holds_nothing_does_not_tune() -> None:
    fd = sharded(4, uneven=True)
    (x,) = fd.fec.tensors()
    segment = fd.fec.plan({x: (5, 16)}).segments[0].segment
    assert owner_of(segment, (0, 1, 2, 3)) == 0
    assert owner_of(segment, (3,)) is None
    assert owner_of(segment, (3, 1)) == 1


def test_a_failure_is_told_to_all() -> None:
    def fail() -> Tuned:
        raise RuntimeError("no memory")

    with pytest.warns(UserWarning, match="tuning segment 0") as warned:
        found = run_ranks(3, lambda rank, size: ask(Canned(fail), size))
    assert found == [[None]] * 3
    assert [str(w.message) for w in warned] == [
        "tuning segment 0 on rank 0: RuntimeError: no memory; it runs as proposed"
    ] * 3


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_TIMEOUT", "0.3")

    def work(rank: int, size: int) -> str:
        tuner = Canned(lambda: time.sleep(1.0) or choice())
        try:
            ask(tuner, size)
        except RanksLateError as error:
            return str(error)
        return "answered"

    assert run_ranks(2, work)[0] == "answered"
    late = run_ranks(2, work)[1]
    assert late.startswith("rank 0 did not come within 0.3 s")


def test_ranks_that_do_not_all_tune_learn_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, size: int) -> bool:
        fd = sharded(size)
        fd._options = CompileOptions(autotune=rank == 1)
        with pytest.raises(ProgramMismatchError, match="autotune=True"):
            fd.execute([torch.ones(2, 16)])
        return True

    assert run_ranks(2, work) == [True, True]


# the door


def test_without_a_gpu() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.add(fd.define_tensor([4]), 1.0))
    with pytest.raises(TuningUnavailableError, match=r"tune\(\) found tensors on cpu, .* move the inputs there"):
        fd.tune([torch.ones(4)])


def test_autotuning_leaves_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_AUTOTUNE", "1")
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.add(fd.define_tensor([4]), 1.0))
    assert fd.execute([torch.ones(4)])[0].tolist() == [2.0] * 4
    options = CompileOptions.from_environment()
    assert options.autotune
    assert options.autotunes(torch.device("cuda"))
    assert not options.autotunes(torch.device("cpu"))
    assert not CompileOptions(backend="torch", autotune=True).autotunes(torch.device("cuda"))
