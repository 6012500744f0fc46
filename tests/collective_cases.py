"""Checks of every collective against torch on the unsharded tensor, run by one rank of a world.

The same checks run over threads (`test_communication_threads.py`) and processes (`multirank/test_communication.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.roundings import assert_near
from shardfuse.executor import collective_calls as comm
from shardfuse.mesh.groups import Team

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
MOVED = (*FLOATS, *EIGHT_BIT_FLOATS, *INTEGERS, torch.bool, torch.complex64)

Check = Callable[[int, int, torch.device], None]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Numbers that depend on the seed alone, over the whole range of small integer dtypes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return (torch.rand(shape, generator=generator) < 0.5).to(device)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype).to(device)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(2**62)), min(info.max, 2**62)
    return torch.randint(low, high, shape, generator=generator).to(dtype).to(device)


def whole_team(rank: int, size: int) -> Team:
    return Team.of(range(size), rank)


def piece(x: Tensor, dim: int, sizes: list[int], place: int) -> Tensor:
    return x.narrow(dim, sum(sizes[:place]), sizes[place])


def same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    flat, other = actual.reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(flat, other), f"{actual} is not {expected}"


def same_on_all(x: Tensor, team: Team) -> None:
    """Every member has the same bits."""
    gathered = comm.all_gather(x.reshape(1, -1), 0, team)
    for row in gathered:
        same_bits(row.contiguous(), x.reshape(-1))


def exact(stacked: Tensor, op: str) -> Tensor:
    """The reduction over the first dimension, in float64 or int64 (which wraps as the dtype does), unrounded."""
    if stacked.dtype == torch.bool:
        return stacked.any(0) if op == "any" else stacked.all(0)
    wide = stacked.double() if stacked.dtype.is_floating_point else stacked.long()
    return {"sum": wide.sum, "prod": wide.prod, "max": wide.amax, "min": wide.amin}[op](0)


def right(actual: Tensor, stacked: Tensor, op: str, cut: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """``actual`` is the reduction of what the ranks have: a sum or a product is rounded once more than float32 needs.

    A sum near 0 may be off by a rounding (of what it is accumulated in) of the magnitude of its terms, a product by one
    for each factor; the largest and the smallest, and integers, are equal.
    """
    wanted = cut(exact(stacked, op))
    if op in ("max", "min") or not actual.is_floating_point():
        assert_near(actual, wanted.to(actual.dtype), n=0)
        return
    terms = cut(stacked.double().abs().sum(0)) if op == "sum" else None
    n = 1 if op == "sum" else len(stacked)
    assert_near(actual, wanted, n=n, terms=terms, signed=False)


def check_all_reduce(rank: int, size: int, device: torch.device) -> None:
    team = whole_team(rank, size)
    for dtype in (*FLOATS, *INTEGERS):
        stacked = torch.stack([values((3, 5), dtype, seed, device) for seed in range(size)])
        for op in ("sum", "prod", "max", "min"):
            actual = comm.all_reduce(stacked[rank], op, team)
            right(actual, stacked, op)
            same_on_all(actual, team)
    flags = torch.stack([values((4, 3), torch.bool, seed, device) for seed in range(size)])
    same_bits(comm.all_reduce(flags[rank], "any", team), flags.any(0))
    same_bits(comm.all_reduce(flags[rank], "all", team), flags.all(0))


def check_all_reduce_rounds_once(rank: int, size: int, device: torch.device) -> None:
    """16-bit sums are the float32 sum, rounded: not a chain of rounded sums."""
    team = whole_team(rank, size)
    for dtype in (torch.float16, torch.bfloat16):
        stacked = torch.stack([values((257,), dtype, seed, device) for seed in range(size)])
        same_bits(comm.all_reduce(stacked[rank], "sum", team), stacked.float().sum(0).to(dtype))


def check_all_reduce_rare_dtypes(rank: int, size: int, device: torch.device) -> None:
    team = whole_team(rank, size)
    for dtype in EIGHT_BIT_FLOATS:
        stacked = torch.stack([values((9,), dtype, seed, device).float() for seed in range(size)])
        same_bits(comm.all_reduce(stacked[rank].to(dtype), "sum", team), stacked.sum(0).to(dtype))
        same_bits(comm.all_reduce(stacked[rank].to(dtype), "max", team), stacked.amax(0).to(dtype))
    for dtype in UNSIGNED:
        # The top bit is set: as signed numbers these would be negative, and the largest the smallest.
        top = 2 ** (8 * dtype.itemsize - 1)
        numbers = [[top + 3 * r + i if (r + i) % 2 else i + r for i in range(4)] for r in range(size)]
        mine = torch.tensor(numbers[rank], dtype=dtype, device=device)
        for op, reduce in (("max", max), ("min", min), ("sum", sum)):
            expected = [reduce(column) % (2 * top) for column in zip(*numbers, strict=True)]
            same_bits(comm.all_reduce(mine, op, team), torch.tensor(expected, dtype=dtype, device=device))
    complex_ = torch.stack([values((6,), torch.complex64, seed, device) for seed in range(size)])
    total = torch.view_as_real(comm.all_reduce(complex_[rank], "sum", team))
    right(total, torch.view_as_real(complex_), "sum")


def check_all_reduce_large(rank: int, size: int, device: torch.device) -> None:
    """Above the size at which it takes two steps; an extent that the ranks do not divide."""
    team = whole_team(rank, size)
    numel = 256 * 1024 // 4 + 1027
    for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "sum"), (torch.float32, "max"), (torch.int32, "sum")):
        stacked = torch.stack([values((numel * 4 // dtype.itemsize,), dtype, seed, device) for seed in range(size)])
        actual = comm.all_reduce(stacked[rank], op, team)
        right(actual, stacked, op)
        same_on_all(actual, team)


def check_nan_and_infinity(rank: int, size: int, device: torch.device) -> None:
    """One rank's NaN is everybody's, wherever it stands; infinities of both signs sum to NaN."""
    team = whole_team(rank, size)
    for dtype in FLOATS:
        stacked = torch.stack([values((size + 2,), dtype, seed, device) for seed in range(size)])
        for r in range(size):
            stacked[r, r] = float("nan")
            stacked[r, size] = float("inf") if r % 2 else -float("inf")
        for op in ("max", "min", "sum"):
            actual = comm.all_reduce(stacked[rank], op, team)
            assert actual[:size].isnan().all()
            right(actual, stacked, op)
            scattered = comm.reduce_scatter(stacked[rank], 0, op, team, comm.chunk_sizes(size + 2, size))
            right(scattered, stacked, op, lambda x: piece(x, 0, comm.chunk_sizes(size + 2, size), rank))


def check_all_gather(rank: int, size: int, device: torch.device) -> None:
    team = whole_team(rank, size)
    for dtype in MOVED:
        whole = values((2 * size, 3), dtype, 1, device)
        same_bits(comm.all_gather(piece(whole, 0, [2] * size, rank), 0, team), whole)
    for extent in (2 * size, 2 * size - 1, size + 1, 1, 0):
        sizes = comm.chunk_sizes(extent, size)
        for dim in (0, 1, -1):
            shape = [2, 3, 4]
            shape[dim] = extent
            whole = values(tuple(shape), torch.float32, extent, device)
            same_bits(comm.all_gather(piece(whole, dim, sizes, rank), dim, team, sizes), whole)


def check_reduce_scatter(rank: int, size: int, device: torch.device) -> None:
    team = whole_team(rank, size)
    for extent in (2 * size, 2 * size - 1, size + 1, 1, 0):
        sizes = comm.chunk_sizes(extent, size)
        for dim in (0, 1, -1):
            shape = [2, 3, 4]
            shape[dim] = extent
            for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "sum"), (torch.int64, "max")):
                stacked = torch.stack([values(tuple(shape), dtype, seed, device) for seed in range(size)])
                given = None if extent == 2 * size else sizes
                actual = comm.reduce_scatter(stacked[rank], dim, op, team, given)
                assert actual.is_contiguous()
                right(actual, stacked, op, lambda x, d=dim, s=sizes: piece(x, d, s, rank))


def check_all_to_all(rank: int, size: int, device: torch.device) -> None:
    team = whole_team(rank, size)
    for rows, columns in ((size, 2 * size), (size + 1, 2 * size - 1), (1, size), (0, size), (size, 0)):
        for split, concat in ((0, 1), (1, 0), (2, 0), (-1, 1)):
            shape = [2, 2, 2]
            shape[split], shape[concat] = rows, columns
            whole = values(tuple(shape), torch.float32, rows, device)
            splits, concats = comm.chunk_sizes(rows, size), comm.chunk_sizes(columns, size)
            even = rows % size == 0 and columns % size == 0
            sizes = (None, None) if even else (splits, concats)
            actual = comm.all_to_all(piece(whole, concat, concats, rank), split, concat, team, *sizes)
            same_bits(actual, piece(whole, split, splits, rank))
    for dtype in MOVED:
        whole = values((size, size), dtype, 2, device)
        same_bits(comm.all_to_all(whole[rank : rank + 1], 1, 0, team), whole[:, rank : rank + 1])


def check_rooted(rank: int, size: int, device: torch.device) -> None:
    """Broadcast, scatter and gather from and to every rank."""
    ranks = tuple(range(size))
    for root in range(size):
        for dtype in MOVED:
            whole = values((2, 3), dtype, root, device)
            given = whole if rank == root else None
            same_bits(comm.broadcast(given, (2, 3), dtype, device, root, ranks), whole)
        scalar = values((), torch.float32, 5, device)
        same_bits(comm.broadcast(scalar if rank == root else None, (), torch.float32, device, root, ranks), scalar)
        for extent in (2 * size, size + 1, 1, 0):
            sizes = comm.chunk_sizes(extent, size)
            for dim in (0, 1):
                shape = (extent, 3) if dim == 0 else (3, extent)
                whole = values(shape, torch.bfloat16, extent, device)
                given = whole if rank == root else None
                own = comm.scatter(given, dim, sizes, shape, torch.bfloat16, device, root, ranks)
                same_bits(own, piece(whole, dim, sizes, rank))
                gathered = comm.gather(own, dim, sizes, root, ranks)
                assert (gathered is not None) == (rank == root)
                if gathered is not None:
                    same_bits(gathered, whole)


def check_send_recv(rank: int, size: int, device: torch.device) -> None:
    """Down a chain and back, strided, then an empty tensor."""
    whole = values((3, 4), torch.float16, 3, device).t()
    if rank > 0:
        same_bits(comm.recv((4, 3), torch.float16, device, rank - 1), whole)
    if rank < size - 1:
        comm.send(whole, rank + 1)
        assert comm.recv((0, 2), torch.int64, device, rank + 1).shape == (0, 2)
    if rank > 0:
        comm.send(torch.empty(0, 2, dtype=torch.int64, device=device), rank - 1)


def check_strided(rank: int, size: int, device: torch.device) -> None:
    """Transposed, stepped, expanded, conjugated: the values count, not the memory."""
    team = whole_team(rank, size)
    views: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x.t(),
        lambda x: x[::2, 1::2],
        lambda x: x[0].expand(3, -1),
        lambda x: x[1:, 1:],
    )
    for view in views:
        locals_ = [view(values((4, 6), torch.float32, seed, device)) for seed in range(size)]
        mine = locals_[rank]
        right(comm.all_reduce(mine, "sum", team), torch.stack(locals_), "sum")
        same_bits(comm.all_gather(mine, 1, team), torch.cat(locals_, 1))
        sizes = comm.chunk_sizes(mine.shape[0], size)
        actual = comm.reduce_scatter(mine, 0, "sum", team, sizes)
        right(actual, torch.stack(locals_), "sum", lambda x, s=sizes: piece(x, 0, s, rank))
        same_bits(
            comm.broadcast(mine if rank == 0 else None, mine.shape, mine.dtype, device, 0, team.ranks), locals_[0]
        )
        splits, concats = comm.chunk_sizes(mine.shape[1], size), [mine.shape[0]] * size
        moved = comm.all_to_all(mine, 1, 0, team, splits, concats)
        same_bits(moved, piece(torch.cat(locals_, 0), 1, splits, rank))
    numbers = [values((4,), torch.complex64, seed, device) for seed in range(size)]
    same_bits(comm.all_gather(numbers[rank].conj(), 0, team), torch.cat([n.conj() for n in numbers]).resolve_conj())


def check_inputs_are_kept(rank: int, size: int, device: torch.device) -> None:
    """No collective writes to what it was given, or hands it back, or keeps its graph."""
    team = whole_team(rank, size)
    x = values((size, size), torch.float32, rank, device).requires_grad_()
    before = x.detach().clone()
    results = [
        comm.all_reduce(x, "sum", team),
        comm.all_gather(x, 0, team),
        comm.reduce_scatter(x, 0, "sum", team),
        comm.all_to_all(x, 0, 1, team),
        comm.broadcast(x if rank == 0 else None, x.shape, x.dtype, device, 0, team.ranks),
    ]
    for result in results:
        assert not result.requires_grad
        assert result.data_ptr() != x.data_ptr()
        result.zero_()
    same_bits(x.detach(), before)


def check_teams(rank: int, size: int, device: torch.device) -> None:
    """Teams that are a part of the world, in an order of their own, and made by different ranks at different times."""
    order = list(reversed(range(size)))
    team = Team.of(order, rank)
    sizes = [r + 1 for r in order]
    rows = {r: values((r + 1, 2), torch.float32, r, device) for r in range(size)}
    whole = torch.cat([rows[r] for r in order])
    same_bits(comm.all_gather(rows[rank], 0, team, sizes), whole)
    summed = comm.reduce_scatter(whole, 0, "sum", team, sizes)
    right(summed, torch.stack([rows[rank]] * size), "sum")
    columns = values((2, sum(sizes)), torch.float32, 9, device)
    moved = comm.all_to_all(columns, 1, 0, team, sizes, [2] * size)
    same_bits(moved, torch.cat([piece(columns, 1, sizes, team.index)] * size))
    scattered = comm.scatter(whole if rank == 0 else None, 0, sizes, whole.shape, whole.dtype, device, 0, order)
    same_bits(scattered, rows[rank])
    gathered = comm.gather(rows[rank], 0, sizes, size - 1, order)
    if gathered is not None:
        same_bits(gathered, whole)
    for members in ((0, size - 1), tuple(range(size - 1)), tuple(range(1, size)), (size - 1, 0)):
        if rank in members and len(members) > 1 and len(set(members)) == len(members):
            part = Team.of(members, rank)
            same_bits(
                comm.all_gather(rows[rank], 0, part, [m + 1 for m in members]), torch.cat([rows[m] for m in members])
            )
            stacked = torch.stack([values((5,), torch.float64, m, device) for m in members])
            right(comm.all_reduce(stacked[part.index], "sum", part), stacked, "sum")


def check_runs_are_equal(rank: int, size: int, device: torch.device) -> None:
    """Twenty runs have the same bits."""
    team = whole_team(rank, size)
    x = values((1001,), torch.float32, rank, device)
    first = comm.all_reduce(x, "sum", team)
    for _ in range(20):
        same_bits(comm.all_reduce(x, "sum", team), first)


CHECKS: tuple[Check, ...] = (
    check_all_reduce,
    check_all_reduce_rounds_once,
    check_all_reduce_rare_dtypes,
    check_all_reduce_large,
    check_nan_and_infinity,
    check_all_gather,
    check_reduce_scatter,
    check_all_to_all,
    check_rooted,
    check_send_recv,
    check_strided,
    check_inputs_are_kept,
    check_teams,
    check_runs_are_equal,
)
