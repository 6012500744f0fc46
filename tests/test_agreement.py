"""Ranks that would run different programs learn it before the first collective, all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from planted_differences import BASE, DIFFERENCES, Variant
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import InputError, PeerLostError, ProgramMismatchError, ShardfuseError
from shardfuse.executor import agreement, comparison, nccl
from shardfuse.executor.binding import Bound
from shardfuse.executor.options import CompileOptions
from shardfuse.frontend import exchanges, executor_cache
from shardfuse.frontend.bound_call import BoundCall
from shardfuse.mesh.groups import default_store
from shardfuse.rank_errors import RanksLateError, WaitingCircleError

WORLD = 3


def caught(run: Callable[[], object]) -> ShardfuseError | None:
    try:
        run()
    except ShardfuseError as error:
        return error
    return None


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collectives that ranks call from now on, by name: both modules that name one of torch.distributed's."""
    found: list[str] = []

    def watch(module: object, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: found.append(name) or original(*a, **k))

    for name in ("all_reduce", "all_to_all_single", "broadcast", "isend", "irecv", "batch_isend_irecv"):
        watch(dist, name)
    for name in ("all_gather_single", "_reduce_scatter_single"):
        watch(nccl, name)  # found once, when it is imported
    return found


def test_what_is_watched_is_what_ranks_call(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = watched(monkeypatch)
    run_ranks(WORLD, lambda rank, size: replace(BASE, axes=(0,)).run(rank))
    assert len(collectives) >= WORLD


def test_enough_differences_are_planted() -> None:
    assert len(DIFFERENCES) >= 60
    texts = [repr(make(BASE).define()) + str(make(BASE)) for make in DIFFERENCES.values()]
    assert len(dict.fromkeys([repr(BASE), *texts])) == len(DIFFERENCES) + 1


@pytest.mark.parametrize("name", DIFFERENCES)
def test_planted_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = list(DIFFERENCES).index(name) % WORLD
    collectives = watched(monkeypatch)

    def run(rank: int, size: int) -> ShardfuseError | None:
        variant = DIFFERENCES[name](BASE) if rank == odd else BASE
        return caught(lambda: variant.run(rank))

    errors = run_ranks(WORLD, run)
    others = tuple(r for r in range(WORLD) if r != odd)
    for error in errors:
        assert isinstance(error, ProgramMismatchError), f"{name}: {error!r}"
        assert sorted(error.ranks) == sorted([(odd,), others])
        assert f"rank {odd} has " in str(error)
    assert len({str(e).partition("\n")[0] for e in errors}) == 1  # below it, each names lines of its own program
    assert collectives == []


def test_the_line_that_differs_is_named() -> None:
    def run(rank: int, size: int) -> str:
        return str(caught(lambda: replace(BASE, first="mul" if rank else "sub").run(rank)))

    first, *rest = run_ranks(WORLD, run)
    assert "rank 0 has `T2 = fd.ops.sub(T0, T1)`; ranks 1, 2 have `T2 = fd.ops.mul(T0, T1)`" in first
    assert rest == [first] * (WORLD - 1)


def test_three_programs_on_three_ranks() -> None:
    error = run_ranks(WORLD, lambda rank, size: caught(lambda: replace(BASE, constant=float(rank)).run(rank)))[1]
    assert isinstance(error, ProgramMismatchError)
    assert error.ranks == ((0,), (1,), (2,))


def test_order_of_programs() -> None:
    def run(rank: int, size: int) -> ShardfuseError | None:
        programs = [BASE, replace(BASE, unary="exp")]
        for program in reversed(programs) if rank == 2 else programs:
            error = caught(lambda program=program: program.run(rank))
            if error is not None:
                return error
        return None

    assert [type(e) for e in run_ranks(WORLD, run)] == [ProgramMismatchError] * WORLD


def test_meshes_of_different_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 wait for each other in different teams; rank 2 waits for rank 0, which will not come."""

    def run(rank: int, size: int) -> ShardfuseError | None:
        return caught(lambda: replace(BASE, mesh=(0, 1) if rank == 0 else (0, 1, 2)).run(rank))

    monkeypatch.setenv("SHARDFUSE_TIMEOUT", "600")  # ranks that waited for it would be found to hang
    errors = run_ranks(WORLD, run)
    assert any(isinstance(error, ProgramMismatchError) for error in errors[:2])
    for error in errors:
        assert isinstance(error, PeerLostError | ProgramMismatchError)
        assert "DeviceMesh([0, 1])" in str(error)
        assert "DeviceMesh([0, 1, 2])" in str(error)


def test_late_rank_is_named_and_does_not_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_TIMEOUT", "0.5")

    def run(rank: int, size: int) -> ShardfuseError | None:
        if rank == 1:
            time.sleep(1.0)
        return caught(lambda: BASE.run(rank))

    zero, one, two = run_ranks(WORLD, run)
    for error in (zero, two):
        assert isinstance(error, RanksLateError)
        assert error.ranks == (1,)
        assert "rank 1 did not come within 0.5 s" in str(error)
    assert isinstance(one, PeerLostError)
    assert "did not come within" in str(one)


def test_failure_of_one_rank_is_told_to_all() -> None:
    def run(rank: int, size: int) -> ShardfuseError | None:
        fd = BASE.define()
        x, w = torch.ones(4, 24), torch.ones(24)
        return caught(lambda: fd.execute([x.double() if rank == 1 else x, w]))

    zero, one, two = run_ranks(WORLD, run)
    assert isinstance(one, InputError)
    for error in (zero, two):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        assert str(one).partition("\n")[0] in str(error)


def test_failure_on_all_ranks_disturbs_no_later_program() -> None:
    def run(rank: int, size: int) -> list[float]:
        fd = BASE.define()
        assert isinstance(caught(lambda: fd.execute([torch.ones(4, 24).double(), torch.ones(24)])), InputError)
        if rank == 1:
            time.sleep(0.5)  # the others look at what ranks have told meanwhile
        return BASE.run(rank)[1].tolist()

    assert run_ranks(WORLD, run) == [[36.0] * 4] * WORLD


@pytest.mark.parametrize("late", range(WORLD))
def test_failure_of_one_rank_disturbs_no_later_program(late: int) -> None:
    """The others, which waited for it, have not compared anything; ``late``: who comes last to the next program."""

    def run(rank: int, size: int) -> list[float]:
        fd = BASE.define()
        x = torch.ones(4, 24, dtype=torch.float64 if rank == 1 else torch.float32)
        failed = caught(lambda: fd.execute([x, torch.ones(24)]))
        assert isinstance(failed, InputError if rank == 1 else PeerLostError)
        if rank == 1:
            time.sleep(1.0)  # until the others have noticed
        time.sleep(0.3 * (rank == late))
        return BASE.run(rank)[1].tolist()

    assert run_ranks(WORLD, run) == [[36.0] * 4] * WORLD


def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By rank: how often it has compared a program, as long as the test runs."""
    counts = [0] * 8
    original = agreement._Side.run

    def run(self, *arguments: object) -> None:
        counts[self.rank] += 1
        original(self, *arguments)

    monkeypatch.setattr(agreement._Side, "run", run)
    return counts


def test_only_agreed_facts_start_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides, and a definition made anew, are a rank's own affair: it compares nothing and waits for nobody."""
    counts = comparisons(monkeypatch)

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))

        def define() -> FusionDefinition:
            with FusionDefinition() as fd:
                x = fd.define_tensor([-1, 8])
                fd.add_output(fd.ops.sum(x, [0]))
                x.set_device_mesh(mesh)
                x.outer_split(0, size)
                x.axis(0).parallelize(ParallelType.mesh_x)
            return fd

        fd = define()
        x = torch.arange(32.0).reshape(4, 8)
        strided = torch.arange(64.0).reshape(4, 16)[:, ::2].contiguous().t().contiguous().t()
        for turn in range(4):
            if rank == turn:
                fd.fec.programs._young.clear()  # an eviction
                fd = define() if rank == 1 else fd
            (out,) = fd.execute([x if rank != turn else strided / 2])
            assert torch.equal(out, x.sum(0) * size)
        x = torch.ones(2, 8)
        fd.execute([x])

    run_ranks(3, run)
    assert counts[:3] == [2, 2, 2]  # one for each unsharded size


def test_a_world_after_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A definition that outlives a world is compared again in the next, though one rank would find its old program."""
    counts = comparisons(monkeypatch)
    fd = BASE.define()
    for _ in range(2):
        run_ranks(WORLD, lambda rank, size: fd.execute([torch.ones(4, 24), torch.ones(24)]))
    assert counts[:WORLD] == [2, 2, 2]


def test_uneven_sizes_are_asked_for_after_the_definition_is_agreed() -> None:
    def run(rank: int, size: int) -> ShardfuseError | None:
        variant = Variant(uneven=True, rows=7, unary="exp" if rank == 1 else "relu", axes=(0,))
        return caught(lambda: variant.run(rank))

    assert [type(e) for e in run_ranks(WORLD, run)] == [ProgramMismatchError] * WORLD


def test_part_of_the_world() -> None:
    """Ranks outside of the mesh take no part; teams that overlap keep their own count."""

    def run(rank: int, size: int) -> list[float]:
        totals: list[float] = []
        for members in ((0, 1), (1, 2), (0, 1, 2), (1, 2), (2, 3)):
            if rank in members:
                constant = 4.0 if members == (1, 2) else 3.0
                variant = Variant(rows=6, mesh=members, constant=constant, unary="neg", axes=(0,))
                totals.append(float(variant.run(rank)[1].sum()))
        return totals

    assert run_ranks(4, run) == [[288.0] * 2, [288.0, 432.0, 288.0, 432.0], [432.0, 288.0, 432.0, 288.0], [288.0]]


def test_nothing_is_compared_by_a_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = comparisons(monkeypatch)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(x, 1.0))
    assert fd.execute([torch.zeros(2)])[0].tolist() == [1.0, 1.0]
    run_ranks(2, lambda rank, size: fd.execute([torch.zeros(2 + rank)]))
    assert counts[:2] == [0, 0]


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    """Each of three ranks waits for the next, in a program of another mesh: none of the three meshes is whole."""

    def run(rank: int, size: int) -> ShardfuseError | None:
        mesh = ((0, 1), (1, 2), (0, 2))[rank]
        return caught(lambda: replace(BASE, mesh=mesh).run(rank))

    began = time.monotonic()
    errors = run_ranks(WORLD, run)
    assert time.monotonic() - began < 30
    circles = [error for error in errors if isinstance(error, WaitingCircleError)]
    assert circles, errors
    for error in errors:
        assert isinstance(error, WaitingCircleError | PeerLostError)
        assert "rank 0 waits for rank 1 in a program of ranks [0, 1]" in str(error)
        assert "rank 1 waits for rank 2 in a program of ranks [1, 2]" in str(error)
        assert "rank 2 waits for rank 0 in a program of ranks [0, 2]" in str(error)


def test_a_rank_that_waits_for_a_late_one_is_in_no_circle() -> None:
    """Ranks 1 and 2 wait for rank 0, which comes late, by way of one another."""

    def run(rank: int, size: int) -> list[float]:
        if rank == 0:
            time.sleep(1.0)
        order = {0: ((0, 1), (0, 2)), 1: ((0, 1), (1, 2)), 2: ((1, 2), (0, 2))}[rank]
        return [float(Variant(rows=6, mesh=mesh, axes=(0,)).run(rank)[1].sum()) for mesh in order]

    run_ranks(WORLD, run)


@pytest.mark.parametrize("fact", ["version", "torch", "plan", "ranks_per_node", "autotune", "exchange", "number"])
def test_what_decides_what_is_sent_is_compared(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that differs in one such fact: none goes on."""
    rank_of = agreement.current_rank
    describe = executor_cache.describe

    def described(script: str, sizes: object, numbers: dict[str, object], options: CompileOptions, device: object):
        if rank_of() == 1:
            match fact:
                case "version" | "torch":
                    name = "VERSION" if fact == "version" else "torch.__version__"
                    with monkeypatch.context() as patch:
                        patch.setattr(f"shardfuse.executor.comparison.{name}", "0.0.9")
                        return describe(script, sizes, numbers, options, device)
                case "ranks_per_node":
                    options = replace(options, ranks_per_node=3)
                case "autotune":
                    options = replace(options, autotune=True)
                case "exchange":
                    options = replace(options, exchange="nccl")
                case "number":
                    numbers = {**numbers, "S1": 3}
        return describe(script, sizes, numbers, options, device)

    sent = exchanges.sent
    lock = threading.Lock()
    monkeypatch.setattr(executor_cache, "describe", lambda *given: _locked(lock, described, given))
    if fact == "plan":
        monkeypatch.setattr(exchanges, "sent", lambda plan: sent(plan)[: -1 if rank_of() == 1 else None])
    errors = run_ranks(WORLD, lambda rank, size: caught(lambda: Variant(axes=(0,)).run(rank)))
    for error in errors:
        assert isinstance(error, ProgramMismatchError), error
        assert error.ranks == ((0, 2), (1,))
    if fact == "plan":
        assert "rank 1 has nothing more" in str(errors[0])


def _locked(lock: threading.Lock, function: Callable[..., object], given: Sequence[object]) -> object:
    with lock:
        return function(*given)


def test_shapes_that_a_scalar_decides_are_compared() -> None:
    def run(rank: int, size: int) -> ShardfuseError | None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([WORLD * 2, 4])
            n = fd.define_scalar(dtype=DataType.Int)
            fd.add_output(fd.ops.sum(fd.ops.pad(x, [0, n]), [0]))
            x.set_device_mesh(DeviceMesh(list(range(size))))
            x.outer_split(0, size)
            x.axis(0).parallelize(ParallelType.mesh_x)
        return caught(lambda: fd.execute([torch.ones(2, 4), 3 if rank == 1 else 2]))

    for error in run_ranks(WORLD, run):
        assert isinstance(error, ProgramMismatchError), error
        assert error.ranks == ((0, 2), (1,))


def test_numbers_that_shapes_are_made_of() -> None:
    """Of a number that only a shape depends on: the ranks would have tensors of different sizes."""

    def run(rank: int, size: int) -> ShardfuseError | None:
        with FusionDefinition() as fd:
            x, n = fd.define_tensor([-1, 8]), fd.define_scalar(dtype=DataType.Int)
            fd.add_output(fd.ops.sum(x, [0]))
            fd.add_output(fd.ops.full([n], 0.5, DataType.Float))
            x.set_device_mesh(DeviceMesh(list(range(size))))
            x.outer_split(0, size)
            x.axis(0).parallelize(ParallelType.mesh_x)
        return caught(lambda: fd.execute([torch.ones(2, 8), 4 if rank == 1 else 3]))

    errors = run_ranks(WORLD, run)
    assert [type(e) for e in errors] == [ProgramMismatchError] * WORLD


def test_what_chooses_a_plan_is_compared() -> None:
    """Ranks that count other neighbours as of their host would choose another chain of collectives."""
    cpu, options = torch.device("cpu"), CompileOptions()
    text = comparison.describe("", {"T0": (2, 3)}, {"S0": 4}, options, cpu)
    for other in (
        comparison.describe("", {"T0": (2, 4)}, {"S0": 4}, options, cpu),
        comparison.describe("", {"T0": (2, 3)}, {"S0": 5}, options, cpu),
        comparison.describe("", {"T0": (2, 3)}, {"S0": 4}, replace(options, ranks_per_node=4), cpu),
        comparison.describe("", {"T0": (2, 3)}, {"S0": 4}, replace(options, backend="torch"), cpu),
        comparison.describe("T1 = fd.ops.neg(T0)", {"T0": (2, 3)}, {"S0": 4}, options, cpu),
    ):
        assert other != text


def test_comparisons_leave_nothing_in_the_store() -> None:
    """What was compared is taken away once all have come to the next comparison, however many there are."""

    def run(rank: int, size: int) -> list[int]:
        store, counts = default_store(), []
        for k in range(9):
            Variant(rows=6 + 3 * k).run(rank)
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
        return counts

    for counts in run_ranks(WORLD, run):
        assert counts[-1] <= counts[1], counts


def test_a_failure_where_nobody_waited_hides_no_later_one() -> None:
    """Rank 0 fails alone where nobody waits; then rank 1 fails before a program that rank 0 and 2 come to."""

    def run(rank: int, size: int) -> ShardfuseError | None:
        if rank == 0:
            fd = BASE.define()
            assert isinstance(caught(lambda: fd.execute([torch.ones(4, 24).double(), torch.ones(24)])), InputError)
        BASE.run(rank)
        if rank == 1:
            fd = replace(BASE, unary="exp").define()
            error = caught(lambda: fd.execute([torch.ones(4, 24).double(), torch.ones(24)]))
            assert isinstance(error, InputError)
            return error
        return caught(lambda: replace(BASE, unary="exp").run(rank))

    zero, one, two = run_ranks(WORLD, run)
    for error in (zero, two):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        assert str(one).partition("\n")[0] in str(error)


def test_ranks_that_fail_alike_as_often_go_on() -> None:
    """Twice in one place; one of them comes late to what follows, and is waited for."""

    def run(rank: int, size: int) -> list[float]:
        fd = BASE.define()
        for _ in range(2):
            assert isinstance(caught(lambda: fd.execute([torch.ones(4, 24).double(), torch.ones(24)])), InputError)
        time.sleep(0.5 * (rank == 1))
        return BASE.run(rank)[1].tolist()

    assert run_ranks(WORLD, run) == [[36.0] * 4] * WORLD


@pytest.mark.parametrize("is_reduced", [True, False])
def test_a_gpu_that_is_not_the_ranks_own_is_compared(is_reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks communicate: all may move to another GPU, none alone.  What sends nothing runs anywhere."""
    monkeypatch.setattr(exchanges, "stages_through_host", lambda group, device: False)

    def texts(rank: int, size: int) -> list[str]:
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 4])
            fd.add_output(fd.ops.sum(x, [0]) if is_reduced else fd.ops.exp(x))
            x.set_device_mesh(DeviceMesh(range(size)))
            x.outer_split(0, size)
            x.axis(0).parallelize(ParallelType.mesh_x)
        plan = fd.fec.plan({x: (4, 4)})
        calls = [
            BoundCall(None, Bound({}, {}, torch.device("cuda", k)), {}, {}, rank, tuple(range(size)), "text")
            for k in (rank, rank, 1 - rank)
        ]
        return [exchanges.told_elsewhere(call, CompileOptions(), lambda: plan).text for call in calls]

    elsewhere = ["text\ntensors are on another GPU than this rank's own"] if is_reduced else ["text"]
    assert run_ranks(2, texts) == [["text", "text", *elsewhere]] * 2
