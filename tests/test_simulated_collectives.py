"""Simulated ranks that come to different collectives all get one error, and no wrong sum."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed import multi_threaded_pg

import shardfuse
from shardfuse import DeviceMesh, FusionDefinition, ParallelType, collectives, nn, simulate
from shardfuse.errors import CallLeftOutError, ModuleInputError, PeerLostError, ProgramMismatchError, ShardfuseError
from shardfuse.rank_errors import CollectivesDifferError


def total(mesh: DeviceMesh, factor: float) -> FusionDefinition:
    """The sum of a sharded vector's elements, times ``factor``."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.mul(x, factor), [0]))
        x.set_device_mesh(mesh)
        x.outer_split(0, mesh.size)
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def errors_of(size: int, run: Callable[[int, DeviceMesh], object], found: int | None = None) -> list[ShardfuseError]:
    """What each rank raises in ``run(rank, mesh)``.  found: how many do; left out, all."""

    def caught() -> ShardfuseError | None:
        rank = shardfuse.initialize().rank
        try:
            run(rank, DeviceMesh(list(range(size))))
        except ShardfuseError as error:
            return error
        return None

    errors = [error for error in simulate(caught, size, timeout=60) if error is not None]
    expected = size if found is None else found
    assert len(errors) == expected, f"{len(errors)} ranks have raised"
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_programs_that_ran_before_and_are_called_in_another_order(size: int) -> None:
    def run(rank: int, mesh: DeviceMesh) -> None:
        once, tenfold = total(mesh, 1.0), total(mesh, 10.0)
        ones = mesh.shard_tensor(torch.ones(2 * size), 0)
        assert [fd.execute([ones])[0].item() for fd in (once, tenfold)] == [2 * size, 20 * size]
        if rank == size - 1:
            tenfold.execute([ones])  # on the last rank
        else:
            once.execute([ones])  # on the others
        once.execute([ones])

    for error in errors_of(size, run):
        assert isinstance(error, ProgramMismatchError)
        text = str(error)
        assert f"at call 3 of ranks {list(range(size))}" in text
        assert "`T1 = fd.ops.mul(T0, 1.0)`" in text
        assert "`T1 = fd.ops.mul(T0, 10.0)`" in text
        assert f"test_simulated_collectives.py:{line_of('# on the last rank')}" in text
        assert f"test_simulated_collectives.py:{line_of('# on the others')}" in text
        assert "# rank 0" in text
        assert f"# rank {size - 1}" in text
        assert error.ranks == (tuple(range(size - 1)), (size - 1,))


def test_modules_that_ran_before_and_are_called_in_another_order() -> None:
    """Their calls, which are repeated without being looked up, are noted like any other."""

    def run(rank: int, mesh: DeviceMesh) -> None:
        first, second = (nn.RMSNorm(4, eps, mesh=mesh, input=Shard(-1)) for eps in (1e-5, 1e-6))
        x = torch.ones(2, 2)
        for norm in (first, second) * 3:
            norm(x)
        for norm in (first, second) if rank == 0 else (second, first):
            norm(x)

    for error in errors_of(2, run):
        assert isinstance(error, ProgramMismatchError)
        assert "at call 7 of ranks [0, 1]" in str(error)


def test_a_batch_that_one_rank_alone_refuses_and_leaves_out() -> None:
    """No result mixes its next batch with this one of the others; where all leave it out, nothing differs."""

    def run(rank: int, mesh: DeviceMesh, refusing: tuple[int, ...]) -> None:
        norm = nn.RMSNorm(4, mesh=mesh, input=Shard(-1), elementwise_affine=False)
        for batch in range(4):
            try:
                norm(torch.full((2, 3 if batch == 1 and rank in refusing else 2), 1.0 + batch))
            except ModuleInputError:
                assert (batch, rank in refusing) == (1, True)

    assert errors_of(2, partial(run, refusing=(0, 1)), found=0) == []
    for error in errors_of(2, partial(run, refusing=(1,))):
        assert isinstance(error, CallLeftOutError)
        said = (
            "at call 2 of ranks [0, 1] rank 1 left out a call that was refused: ModuleInputError: RMSNorm: x has shape"
        )
        assert str(error).startswith(said)


def test_a_collective_of_some_ranks_of_a_program() -> None:
    """What tells is the order of the program's calls, which all ranks of its mesh make."""

    def run(rank: int, _: DeviceMesh) -> None:
        mesh = DeviceMesh([[0, 1], [2, 3]])
        norms = [nn.RMSNorm(4, eps, mesh=mesh, input=[Shard(0), Shard(-1)]) for eps in (1e-5, 1e-6)]
        for _ in range(2):
            for norm in norms:
                norm(torch.ones(2, 2))
        for norm in norms if rank % 2 == 0 else norms[::-1]:
            norm(torch.ones(2, 2))

    for error in errors_of(4, run):
        assert isinstance(error, ProgramMismatchError)
        assert "at call 5 of ranks [0, 1, 2, 3]" in str(error)


def line_of(comment: str) -> int:
    with open(__file__) as file:
        return next(k for k, line in enumerate(file, 1) if line.rstrip().endswith(comment))


def test_one_rank_more_often() -> None:
    """The third call of rank 0 meets what rank 1 calls after it."""

    def run(rank: int, mesh: DeviceMesh) -> None:
        fd, ones = total(mesh, 1.0), mesh.shard_tensor(torch.ones(4), 0)
        for _ in range(3 if rank == 0 else 2):
            fd.execute([ones])
        dist.all_reduce(torch.ones(()))

    for error in errors_of(2, run):
        assert isinstance(error, CollectivesDifferError)
        assert "ranks [0, 1] have come to different collectives: rank 0 to " in str(error)
        assert "of the program that ends in `" in str(error)
        assert "rank 1 to all_reduce (sum) of float32[] at " in str(error)
        assert str(error).partition("\n")[0].count("test_simulated_collectives.py:") == 2
        assert error.ranks == ((0,), (1,))


CASES: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "op": (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX),
        r"rank 0 to all_reduce \(sum\) of float32\[2\] at .*; rank 1 to all_reduce \(max\)",
    ),
    "shape": (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(3)),
        r"float32\[2\] at .*float32\[3\]",
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(2).double()),
        "float32.*float64",
    ),
    "kind": (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.broadcast(torch.ones(2), 0),
        "rank 1 to broadcast from rank 0",
    ),
    "root": (
        lambda: dist.broadcast(torch.ones(2), 1),
        lambda: dist.broadcast(torch.ones(2), 0),
        "from rank 1 .*from rank 0",
    ),
    "barrier": (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.barrier(), "rank 1 to barrier"),
    "gathered": (
        lambda: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2)),
        lambda: dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4)),
        r"2 x float32\[2\].*2 x float32\[4\]",
    ),
    "own": (
        lambda: collectives.all_reduce(torch.ones(2)),
        lambda: collectives.all_reduce(torch.ones(2), op="max"),
        "all_reduce.*sum.*all_reduce.*max",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_other_collectives(name: str) -> None:
    first, second, expected = CASES[name]
    for error in errors_of(2, lambda rank, _: second() if rank else first()):
        assert isinstance(error, CollectivesDifferError | ProgramMismatchError)
        error.add_note("seen")
        with pytest.raises(type(error), match=expected):
            raise error


def test_ranks_go_on_after_a_collective_that_failed() -> None:
    def run() -> float:
        rank = shardfuse.initialize().rank
        with pytest.raises(CollectivesDifferError):
            dist.all_reduce(torch.ones(2 + rank))
        sum_of_ranks = torch.tensor(float(rank))
        dist.all_reduce(sum_of_ranks)
        return float(sum_of_ranks)

    assert simulate(run, 3, timeout=60) == [3.0] * 3


WORK = {  # by what torch says of it: what ranks agree on, and torch cannot do
    "not implemented for 'Float'": lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR),
    "must match the size": lambda: dist.all_gather(
        [torch.empty(2) for _ in range(dist.get_world_size())], torch.ones(3)
    ),
}


@pytest.mark.parametrize("message", WORK)
def test_what_torch_cannot_do_is_an_error_on_every_rank(message: str) -> None:
    """The last rank to come has torch do it; those that wait for it would wait for ever."""

    def run() -> float:
        rank = shardfuse.initialize().rank
        with pytest.raises(RuntimeError, match=message) as caught:
            WORK[message]()
        assert "multi_threaded_pg.py" in str(caught.traceback[-1].path), "torch's lines are kept"
        sum_of_ranks = torch.tensor(float(rank))
        dist.all_reduce(sum_of_ranks)
        return float(sum_of_ranks)

    assert simulate(run, 3, timeout=60) == [3.0] * 3
    with pytest.raises(RuntimeError, match=message) as caught:
        simulate(WORK[message], 2, timeout=60)
    assert "ranks that raised: [0, 1]" in caught.value.__notes__[0]


def test_an_error_that_is_not_made_of_its_arguments_is_told_to_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class OddError(ValueError):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail(*_: object) -> None:
        raise OddError(1, 2)

    monkeypatch.setattr(multi_threaded_pg.AllReduce, "work", fail)

    def run() -> None:
        with pytest.raises((OddError, RuntimeError), match="1 and 2"):
            dist.all_reduce(torch.ones(2))

    simulate(run, 2, timeout=60)


def test_teams_that_overlap_are_not_compared_with_one_another() -> None:
    """Ranks of a row of the mesh have called programs of different columns in between."""

    def run() -> list[float]:
        rank = shardfuse.initialize().rank
        everybody = DeviceMesh([0, 1, 2, 3])
        column, row = DeviceMesh([rank % 2, rank % 2 + 2]), DeviceMesh([rank // 2 * 2, rank // 2 * 2 + 1])
        ones = torch.ones(2)
        found: list[float] = []
        for mesh, times in ((everybody, 1), (column, 1 + rank % 2), (row, 1), (everybody, 1)):
            fd = total(mesh, 1.0 + rank % 2 if mesh is column else 1.0)
            found += [fd.execute([ones])[0].item() for _ in range(times)][:1]
        return found

    odd, even = [8.0, 8.0, 4.0, 8.0], [8.0, 4.0, 4.0, 8.0]
    assert simulate(run, 4, timeout=60) == [even, odd, even, odd]


def test_the_caller_gets_the_error_of_the_rank_that_failed() -> None:
    def run() -> None:
        rank = shardfuse.initialize().rank
        mesh = DeviceMesh([0, 1])
        x = mesh.shard_tensor(torch.ones(4), 0)
        total(mesh, 1.0).execute([x.double() if rank else x])

    with pytest.raises(ShardfuseError, match=r"dtype torch\.float64") as caught:
        simulate(run, 2, timeout=60)
    assert not isinstance(caught.value, PeerLostError)
    assert "raised on rank 1 of 2" in caught.value.__notes__[0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rank_that_says_first_that_another_is_lost(wrapped: bool) -> None:
    def run() -> None:
        if shardfuse.initialize().rank == 1:
            time.sleep(0.2)  # the other has raised
            raise ValueError("the reason")
        try:
            raise PeerLostError(1, "failed")
        except PeerLostError as error:
            if wrapped:
                raise RuntimeError("no step") from error
            raise

    with pytest.raises(ValueError, match="the reason") as caught:
        simulate(run, 2, timeout=60)
    first, other = caught.value.__notes__
    assert first == "raised on rank 1 of 2; ranks that raised: [0, 1]"
    assert other.startswith("rank 0 raised RuntimeError: no step" if wrapped else "rank 0 raised PeerLostError: rank 1")
