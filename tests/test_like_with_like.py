"""That measurements compare like with like: right results, cold caches, compiled peers, the bytes that are said."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._inductor import metrics
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import peers, suite, timing
from benchmarks.accuracy import errors, judge
from benchmarks.reshard import backward_note
from benchmarks.timing import poison
from benchmarks.workload import Case, Draw, Workload
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.norms import RMS_NORM
from shardfuse import simulate
from shardfuse.executor.timing import behind_flush, flush_buffer

CPU = torch.device("cpu")


def drawn(workload: Workload, case: Case, seed: int = 0) -> list[torch.Tensor]:
    return workload.arguments(case, Draw(CPU, seed))


def test_the_reference_in_pieces_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, case = WORKLOADS["layer_norm_backward"], Case.parse("40x16")
    inputs = drawn(workload, case)
    right = workload.fusion(case).execute(inputs)
    results = {"shardfuse": right, "spoilt": [right[0].index_fill(0, torch.tensor(39), 0.0), *right[1:]]}
    whole = errors(workload, case, inputs, results)
    monkeypatch.setattr("benchmarks.accuracy.PIECE", 7 * 16)
    pieces = judge(workload, case, inputs, results)
    for name, found in pieces.items():
        assert [v.error for v in found] == pytest.approx(whole[name], rel=1e-9)
    assert [v.note for v in pieces["shardfuse"]] == ["", "", ""]
    assert [bool(v.wrong) for v in pieces["spoilt"]] == [True, False, False]


@pytest.mark.parametrize(
    ("spoil", "least", "note"),
    [
        (lambda t: t.index_fill(0, torch.tensor(2), math.nan), math.inf, "WRONG: element [2, 0] is nan"),
        (lambda t: t.index_fill(0, torch.tensor(2), math.inf), math.inf, "WRONG: element [2, 0] is inf"),
        (lambda t: t[:-1], math.inf, "WRONG: shapes [[299, 16]], expected [[300, 16]]"),
        (lambda t: t.index_fill(0, torch.tensor(2), 0.0), 0.02, "WRONG: element [2, "),
        (lambda t: t.index_put((torch.tensor(2), torch.tensor(3)), torch.zeros((), dtype=t.dtype)), 0, "WRONG: "),
        (
            lambda t: t.index_copy(0, torch.tensor([7]), t[8:9]),
            0,
            "WRONG: ",
        ),
        (lambda t: t * 0.7, 0.2, "WRONG: element ["),
        (lambda t: t.double(), 0, "OTHER: torch.float64 where "),
        (lambda t: t.t().contiguous().t(), 0, "OTHER: strides [1, 300] of shape [300, 16]"),
    ],
    ids=["nan", "inf", "shape", "row", "element", "another row", "0.7", "dtype", "strides"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_results_do_not_pass(spoil, least: float, note: str, dtype: str) -> None:
    """One wrong row of 300 and one wrong element are seen, in 16 bits too."""
    case = Case.parse(f"300x16:{dtype}")
    inputs = drawn(RMS_NORM, case)
    (right,) = RMS_NORM.eager(case, *inputs)
    found = judge(RMS_NORM, case, inputs, {"right": [right], "spoilt": [spoil(right)]})
    assert found["right"][0].note == ""
    (verdict,) = found["spoilt"]
    assert verdict.error >= least
    assert verdict.note.startswith(note), verdict.note


def test_wrong_and_failed_implementations_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(peer: str, workload: Workload, case: Case, inputs: list[torch.Tensor]) -> peers.Run:
        if peer == "eager":
            return lambda: (torch.zeros(case.shape, dtype=case.dtype),)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(peers, "prepare", wrong)
    case = Case.parse("5x16")
    ((own, copy, failed, eager),) = suite.run_tables([(RMS_NORM, case)], ["copy", "eager", "liger"], 0.01, CPU)
    assert (own.impl, own.note) == ("shardfuse", "")
    assert own.us is not None
    assert eager.note.startswith("WRONG: element [")
    assert (eager.us, eager.low, eager.errors) == (None, None, (1.0,))
    assert (copy.impl, failed.impl) == ("copy", "liger")
    assert copy.note in ("by copy_", "by clone")
    assert failed.us is None
    assert failed.note == "failed: RuntimeError: no such kernel"


def test_what_a_run_leaves_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fresh outputs and of outputs that every run writes: the last run is one into poisoned memory."""
    case = Case.parse("5x16")
    fixed = torch.empty(case.shape, dtype=case.dtype)

    def lazy(peer: str, workload: Workload, case: Case, inputs: list[torch.Tensor]) -> peers.Run:
        right = workload.eager(case, *inputs)[0]
        calls: list[int] = []

        def run() -> tuple[torch.Tensor]:
            rows = slice(0, 4 if calls else 5)
            calls.append(1)
            fixed[rows] = right[rows]
            return (fixed,)

        return run

    monkeypatch.setattr(peers, "prepare", lazy)
    ((_, eager),) = suite.run_tables([(RMS_NORM, case)], ["eager"], 0.01, CPU)
    assert eager.note.startswith("WRONG: element [4, 0] is nan")


def test_outputs_are_poisoned_and_inputs_are_not() -> None:
    x, counts, y = torch.ones(4, 8), torch.ones(3, dtype=torch.int64), torch.ones(5, dtype=torch.bfloat16)
    poison([x[1:].t(), counts, y], [y], CPU)
    assert x[1:].isnan().all()
    assert torch.equal(x[0], torch.ones(8))
    assert torch.equal(counts, torch.full_like(counts, -1))
    assert torch.equal(y, torch.ones_like(y))


def test_a_run_is_timed_behind_its_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer is written over, as often as asked and before the first event, and nothing else is between events."""
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.name = "end" if told else "start"
            told.append(f"make {self.name}")

        def record(self) -> None:
            told.append(self.name)

        def elapsed_time(self, end: Event) -> float:
            assert (self.name, end.name) == ("start", "end")
            return 0.25

    class Buffer:
        def zero_(self) -> None:
            told.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    read = behind_flush(lambda: told.append("run"), Buffer(), 3)  # type: ignore[arg-type]
    assert told == ["make start", "make end", "flush", "flush", "flush", "start", "run", "end"]
    assert read() == 250.0
    assert flush_buffer(torch.device("meta")).nbytes >= 256 << 20


def test_flushes_hide_the_slowest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, after the warm-up: one alone may be quick, and the GPU then waits for the host in most rounds."""
    clock, turns = [0.0], {"even": 0, "slow once": 0}
    monkeypatch.setattr(timing, "perf_counter", lambda: clock[0])

    def run(name: str, seconds: float, at: int) -> None:
        turns[name] += 1
        clock[0] += 1.0 if turns[name] <= timing.WARM_UP else seconds * (5 if turns[name] == at else 1)

    last = timing.WARM_UP + timing.SAMPLES
    runs = {"even": lambda: run("even", 3e-4, 0), "slow once": lambda: run("slow once", 1e-4, last)}
    found = timing.host_seconds(runs, torch.device("cpu"))
    assert found == {"even": pytest.approx(3e-4), "slow once": pytest.approx(5e-4)}
    assert set(turns.values()) == {last}


def test_every_round_on_a_gpu_is_behind_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, int]] = []

    def behind(run, flush: torch.Tensor, times: int):
        assert flush.nbytes == 8
        taken.append((run(), times))
        return lambda: 1.0

    monkeypatch.setattr(timing, "behind_flush", behind)
    monkeypatch.setattr(timing, "flush_buffer", lambda device: torch.empty(8, dtype=torch.int8))
    monkeypatch.setattr(timing, "host_seconds", lambda runs, device: {"a": 0.0, "b": 4.5 * timing.HIDDEN})
    one_round = timing.rounds_on({"a": lambda: "a", "b": lambda: "b"}, torch.device("cuda"))
    assert {name: read() for name, read in one_round().items()} == {"a": 1.0, "b": 1.0}
    assert taken == [("a", 2), ("b", 6)]


@pytest.mark.parametrize("nbytes", [4096, 100_000, 100_002])
def test_copies_move_as_many_bytes_as_they_say(nbytes: int) -> None:
    """Half of them read, half written."""
    for copy in peers.copy.copies(nbytes, CPU):
        assert copy.source.nbytes == copy.target.nbytes
        assert copy.bytes == nbytes
        copy.target.zero_()
        made = copy.run()
        assert isinstance(made, torch.Tensor)
        assert torch.equal(made, copy.source), copy.name
        assert made.data_ptr() != copy.source.data_ptr()


def test_the_roof_is_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"copy_": 3.0, "clone": 2.0}
    asked: list[list[str]] = []

    def measured(runs, seconds: float, device: torch.device) -> dict[str, timing.Timed]:
        asked.append(list(runs))
        return {name: timing.Timed(times.get(name, 1.0), 0, 9, 1) for name in runs}

    monkeypatch.setattr(suite, "measure", measured)
    for name in ("clone", "copy_"):
        ((_, copy),) = suite.run_tables([(RMS_NORM, Case.parse("5x16"))], ["copy"], 0.01, CPU)
        assert copy.note == f"by {name}"
        times["copy_"] = 1.0
    assert asked == [["copy_", "clone"], ["shardfuse", "copy"]] * 2


def test_inductor_compiles_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called inductor is never eager torch: kernels were generated, by the options that the page names."""
    case, given = Case.parse("5x16"), []

    def compiled(function, *, generated: int, **options):
        given.append(options)

        def run(*inputs: torch.Tensor):
            metrics.generated_kernel_count += generated
            return function(*inputs)

        return run

    for generated in (0, 1):
        monkeypatch.setattr(torch, "compile", partial(compiled, generated=generated))
        chosen = ["inductor", "inductor_max_autotune"]
        ((_, default, tuned),) = suite.run_tables([(RMS_NORM, case)], chosen, 0.01, CPU)
        said = "" if generated else "failed: NotCompiledError: Inductor generated no kernel"
        assert default.note[: len(said) or None] == said
        assert tuned.note[: len(said) or None] == said
        assert (default.us is None) == (generated == 0)
    assert all(o["dynamic"] is False and o["fullgraph"] for o in given)
    tuning = {"max_autotune", "coordinate_descent_tuning"}
    assert [tuning & {k for k, v in o["options"].items() if v} for o in given] == [set(), tuning] * 2


def test_torch_is_asked_for_the_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last, a peer gives it back; as torch gives it, it is a row of its own by name."""
    workload, case = WORKLOADS["group_norm_channels_last"], Case.parse("2x8x3x5:float16:channels_last:groups=4")
    plain = functional.group_norm
    monkeypatch.setattr(functional, "group_norm", lambda *given: plain(*given).contiguous())  # as on a GPU
    ((own, eager, returned),) = suite.run_tables([(workload, case)], ["eager"], 0.01, CPU)
    assert [r.impl for r in (own, eager, returned)] == ["shardfuse", "eager", "eager, NCHW out"]
    assert [r.note for r in (own, eager, returned)] == ["", "", ""]
    monkeypatch.undo()
    ((*rows,),) = suite.run_tables([(workload, case)], ["eager"], 0.01, CPU)
    assert [r.impl for r in rows] == ["shardfuse", "eager"]


def test_joining_halves_is_timed() -> None:
    """The fusion joins them, as its peers do; those of ``rope_apart`` leave them apart."""
    case = Case.parse("2x3x2x8")
    for name, widths in (("rope_halves", [8]), ("rope_apart", [4, 4])):
        measured = suite._Measured(WORKLOADS[name], case, ["eager"], CPU)
        assert [[t.shape[-1] for t in run()] for run in measured.runs.values()] == [widths, widths]


SPOILT = {
    "nothing": lambda dx, dw, db: (dx, dw, db),
    "a zeroed row of dx": lambda dx, dw, db: (dx.index_fill(0, torch.tensor(5), 0.0), dw, db),
    "swapped rows of dx": lambda dx, dw, db: (dx[[1, 0, *range(2, dx.shape[0])]], dw, db),
    "one zeroed element of dw": lambda dx, dw, db: (dx, dw.index_fill(0, torch.tensor(7), 0.0), db),
    "db of one rank": lambda dx, dw, db: (dx, dw, db / 2),
    "0.7 dx": lambda dx, dw, db: (0.7 * dx, dw, db),
    "another dtype": lambda dx, dw, db: (dx.double(), dw, db),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_backward_of_sharded_rows_is_judged_by_element(spoilt: str, dtype: torch.dtype) -> None:
    """2048 rows a rank, of which one is wrong: of the whole tensor's norm that is 2 %."""
    workload, case, world = WORKLOADS["layer_norm_backward"], Case((2048, 16), dtype), 2
    weight = Draw(CPU).normal([case.columns], dtype)

    def rank_main(rank: int) -> str:
        inputs = drawn(workload, case, seed=rank)
        inputs[2] = weight
        found = workload.eager(case, *inputs)
        totals = [t.double() for t in workload.reference(case, *(x.double() for x in inputs))[1:]]
        for total in totals:
            dist.all_reduce(total)
        found = (found[0], *(t.to(dtype) for t in totals))
        return backward_note(workload, case, inputs, SPOILT[spoilt](*found) if rank == 1 else found, CPU)

    notes = simulate(lambda: rank_main(dist.get_rank()), world)
    if spoilt == "nothing":
        assert notes == ["", ""]
    else:
        assert notes[0] == "WRONG: on another rank"
        assert notes[1].startswith("WRONG: ")
        assert "on another rank" not in notes[1]
