"""Every collective over 1 to 4 ranks that are threads, and what each refuses."""

from __future__ import annotations

from math import prod

import pytest
import torch
from collective_cases import CHECKS, Check
from ranks import RanksHungError, run_ranks

from shardfuse.errors import CollectiveArgumentError, NotInitializedError, RankNotInMeshError, TeamRanksError
from shardfuse.executor import collective_calls as comm
from shardfuse.executor import nccl, packing
from shardfuse.mesh.groups import Team, process_group

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_over_threads(check: Check, size: int) -> None:
    run_ranks(size, lambda rank, size: check(rank, size, CPU))


def test_one_member_needs_no_process_group() -> None:
    team = Team.of([0])
    x = torch.arange(6.0).reshape(2, 3).t()
    for result in (
        comm.all_reduce(x, "max", team),
        comm.all_gather(x, 1, team),
        comm.reduce_scatter(x, 0, "sum", team),
    ):
        assert torch.equal(result, x)
        assert result.is_contiguous()
    assert torch.equal(comm.all_to_all(x, 0, 1, team), x)
    assert torch.equal(comm.broadcast(x, (3, 2), torch.float32, CPU, 0, [0]), x)
    assert torch.equal(comm.scatter(x, 1, [2], (3, 2), torch.float32, CPU, 0, [0]), x)
    gathered = comm.gather(x, 0, [3], 0, [0])
    assert gathered is not None
    assert torch.equal(gathered, x)


def test_two_members_need_one() -> None:
    with pytest.raises(NotInitializedError, match=r"call shardfuse\.initialize\(\) first"):
        comm.all_reduce(torch.ones(2), "sum", Team.of([0, 1]))


X = torch.ones(4, 3)
REFUSALS = {
    "an op that is none": (lambda team: comm.all_reduce(X, "mean", team), "op is 'mean', expected sum, prod"),
    "any of floats": (lambda team: comm.all_reduce(X, "any", team), "op is 'any' of torch.float32"),
    "max of complex": (lambda team: comm.all_reduce(X.to(torch.complex64), "max", team), "an ordered dtype"),
    "a dim too far": (lambda team: comm.all_gather(X, 2, team), "dim is 2, expected a dimension of a tensor of 2"),
    "too few sizes": (lambda team: comm.all_gather(X, 0, team, [4]), r"sizes is \[4\], expected 2 extents"),
    "another own size": (lambda team: comm.all_gather(X, 0, team, [3, 3]), "this rank's extent 4 in place"),
    "no even split": (lambda team: comm.reduce_scatter(X, 1, "sum", team), "left out for an extent of 3"),
    "another sum": (lambda team: comm.reduce_scatter(X, 1, "sum", team, [1, 1]), "2 extents with a sum of 3"),
    "negative sizes": (lambda team: comm.reduce_scatter(X, 1, "sum", team, [4, -1]), "2 extents of 0 or more"),
    "one dimension": (lambda team: comm.all_to_all(X, 0, -2, team), "concat_dim is 0, as split_dim"),
    "a root outside": (lambda team: comm.gather(X, 0, [4, 4], 2, team.ranks), "root is 2, expected one of the ranks"),
    "itself": (lambda team: comm.send(X, team.rank), "this rank, expected another rank"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(CollectiveArgumentError, match=message):
        run_ranks(2, lambda rank, size: call(Team.of(range(size), rank)))


def test_root_must_have_what_it_told() -> None:
    def root_has_another_shape(rank: int, size: int) -> None:
        comm.broadcast(torch.ones(2) if rank == 0 else None, (3,), torch.float32, CPU, 0, range(size))

    with pytest.raises(CollectiveArgumentError, match=r"x on the root is \(2,\) of torch.float32, expected \(3,\)"):
        run_ranks(2, root_has_another_shape)


def test_teams_are_distinct_ranks_with_this_one() -> None:
    with pytest.raises(TeamRanksError, match=r"\[0, 1, 0\] has a rank more than once"):
        Team.of([0, 1, 0], 0)
    with pytest.raises(RankNotInMeshError, match=r"rank 3 is not in the team \[0, 1\]"):
        Team.of([0, 1], 3)
    assert Team.of([4, 2, 7], 2).group_order == (1, 0, 2)


def test_groups_are_kept_by_members() -> None:
    def groups(rank: int, size: int) -> bool:
        part = (0, 2) if rank % 2 == 0 else (1, 3)
        made = process_group(part)
        return process_group(part[::-1]) is made and process_group(range(size)).size() == size and made.size() == 2

    assert run_ranks(4, groups) == [True] * 4


def test_ranks_make_groups_in_different_numbers() -> None:
    """Rank 1 has made two groups when it meets rank 2, which has made none, for their own."""

    def chain(rank: int, size: int) -> float:
        for pair in ((0, 1), (1, 2), (2, 3), (0, 1, 2)):
            if rank in pair:
                total = comm.all_reduce(torch.tensor(float(rank)), "sum", Team.of(pair, rank))
        return float(total)

    assert run_ranks(4, chain) == [3.0, 3.0, 3.0, 5.0]


def test_harness_names_the_rank_that_raises() -> None:
    def fails(rank: int, size: int) -> torch.Tensor:
        if rank == 2:
            raise ValueError("boom")
        return comm.all_reduce(torch.ones(2), "sum", Team.of(range(size), rank))

    with pytest.raises(ValueError, match="boom") as caught:
        run_ranks(4, fails)
    assert caught.value.__notes__ == ["raised on rank 2 of 4; ranks that raised: [2]"]
    assert run_ranks(2, lambda rank, size: rank) == [0, 1]


def test_harness_names_the_ranks_that_hang() -> None:
    def waits(rank: int, size: int) -> None:
        if rank == 0:
            comm.all_reduce(torch.ones(2), "sum", Team.of(range(size), rank))

    with pytest.raises(RanksHungError, match=r"ranks \[0\] of 2 still run after 0\.5 s") as caught:
        run_ranks(2, waits, timeout=0.5)
    assert "all_reduce" in str(caught.value)
    assert run_ranks(2, lambda rank, size: rank) == [0, 1]


@pytest.mark.parametrize("bytes_at_once", [2**20, 256])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_as_nccl_moves_them(size: int, bytes_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that are made on GPUs, of pieces that are large or small."""
    monkeypatch.setattr(nccl, "takes", lambda x, team, group: True)
    monkeypatch.setattr(nccl, "UNALIGNED_BYTES", bytes_at_once)
    monkeypatch.setattr(comm, "ONE_STEP_BYTES", 0)

    def run(rank: int, n: int) -> None:
        team = Team.of(range(n), rank)
        x = torch.randint(-4, 5, (8 * n, 6 * n), generator=torch.Generator().manual_seed(rank)).bfloat16()
        given = comm.all_gather(x[None], 0, team)
        total = given.float().sum(0).bfloat16()
        assert torch.equal(comm.all_reduce(x, "sum", team), total)
        for dim, other in ((0, 1), (1, 0)):
            assert torch.equal(comm.equal_all_gather(x, dim, team), torch.cat(list(given), dim))
            assert torch.equal(comm.equal_reduce_scatter(x, dim, "sum", team), total.chunk(n, dim)[rank])
            moved = comm.equal_all_to_all(x, dim, other, team)
            assert torch.equal(moved, torch.cat([piece.chunk(n, dim)[rank] for piece in given], other))
            assert moved.is_contiguous()
            own = x.narrow(dim, 0, 5 + rank)
            pieces = [piece.narrow(dim, 0, 5 + r) for r, piece in enumerate(given)]
            assert torch.equal(comm.all_gather(own, dim, team, [5 + r for r in range(n)]), torch.cat(pieces, dim))
            cuts = comm.chunk_sizes(own.shape[other] - 1, n)
            moved = comm.all_to_all(own.narrow(other, 1, sum(cuts)), other, dim, team, cuts, [5 + r for r in range(n)])
            here = [piece.narrow(other, 1 + sum(cuts[:rank]), cuts[rank]) for piece in pieces]
            assert torch.equal(moved, torch.cat(here, dim))

    run_ranks(size, run)


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 8), (5, 2, 16), (1, 6, 3), (0, 4), (2, 4, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_pieces_are_cut_and_joined(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whatever the alignment of what is cut, and whatever width of words it can be copied in."""
    for start in (0, 1):
        flat = torch.arange(start + prod(shape)).to(dtype)[start:]
        x = flat.view(shape)
        for dim in range(len(shape)):
            if shape[dim] == 0 or shape[dim] % 2:
                continue
            rows = packing.cut(x, dim, 2)
            expected = torch.stack([piece.reshape(-1) for piece in x.chunk(2, dim)])
            assert rows.is_contiguous()
            assert torch.equal(rows, expected)
            assert torch.equal(packing.join(rows.view(2, *x.chunk(2, dim)[0].shape), dim), x)
