"""Optimiser steps over DTensors: meshes that differ, replicas that count once, one collective a step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import Parameter

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh, optim
from shardfuse.executor import collective_calls
from shardfuse.optim.optim_errors import NonFiniteNormError, OptimizerTensorError

pytestmark = pytest.mark.mpi
SHAPES = [(8, 6), (7, 3), (5,), (1, 4), (16,), (6, 6), (3,)]
STEPS = 2


def meshes(pg) -> dict[str, object]:
    """Collective: all ranks make all of them."""
    n, kind = pg.size, pg.device.type
    made = {"line": DeviceMesh(list(range(n))), "first": DeviceMesh([0]), "last": DeviceMesh([n - 1])}
    if n > 2:
        half = n // 2
        made |= {
            "low": DeviceMesh(list(range(half))),
            "box": DeviceMesh([list(range(half)), list(range(half, n))]),
        }
    return {name: mesh.to_torch(kind) for name, mesh in made.items()}


def line_of(pg) -> object:
    return DeviceMesh(list(range(pg.size))).to_torch(pg.device.type)


def spread(found: dict[str, object]) -> list[tuple[object, list[object]]]:
    """A mesh and placements for each of the shapes."""
    line, first, last = found["line"], found["first"], found["last"]
    box, low = found.get("box"), found.get("low")
    return [
        (line, [Shard(0)]),
        (line, [Shard(0)]) if box is None else (box, [Shard(0), Replicate()]),
        (line, [Replicate()]),
        (line, [Shard(0)]) if box is None else (box, [Replicate(), Shard(1)]),
        (last, [Shard(0)]) if low is None else (low, [Shard(0)]),
        (line, [Shard(1)]) if box is None else (box, [Shard(1), Shard(0)]),
        (first, [Replicate()]) if low is None else (low, [Replicate()]),
    ]


def drawn(seed: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device) for s in SHAPES]


def distributed(tensors: list[torch.Tensor], where: list[tuple[object, list[object]]]) -> list[DTensor]:
    return [distribute_tensor(t, mesh, placements) for t, (mesh, placements) in zip(tensors, where, strict=True)]


def check_same(value: torch.Tensor, pg, name: str = "") -> None:
    """Bitwise, on all ranks.  name: of the value among those of a test."""
    pg.store.set(f"norm/{name}/{pg.rank}", repr(value.item()))
    assert len({pg.store.get(f"norm/{name}/{rank}") for rank in range(pg.size)}) == 1


def check_pieces(found: list[torch.Tensor], full: list[torch.Tensor], where: list[tuple[object, list[object]]]) -> None:
    for k, (p, want, (mesh, placements)) in enumerate(zip(found, full, where, strict=True)):
        local, piece = p.to_local().detach(), distribute_tensor(want.detach(), mesh, placements).to_local()
        assert_near(local, piece, n=4, terms=piece.abs() + 0.1, what=f"tensor {k}")


def give(parameter: Parameter, gradient: DTensor) -> None:
    """On a rank outside of its mesh, torch has a parameter of a GPU on the CPU, and no gradient of it then."""
    if parameter.device == gradient.device:
        parameter.grad = gradient


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all-reduces."""
    sizes: list[int] = []
    real = collective_calls.all_reduce

    def counting(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        sizes.append(x.numel())
        return real(x, *arguments)

    monkeypatch.setattr(collective_calls, "all_reduce", counting)
    return sizes


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_step_of_tensors_on_differing_meshes(norm_type: float, pg, reductions: list[int]) -> None:
    where = spread(meshes(pg))
    full = [Parameter(t.double()) for t in drawn(0, pg.device)]
    own = [Parameter(t) for t in distributed(drawn(0, pg.device), where)]
    optimizer = optim.AdamW(own, lr=1e-2, max_norm=0.5, norm_type=norm_type)
    reference = torch.optim.AdamW(full, lr=1e-2)
    for step in range(STEPS):
        whole = drawn(1 + step, pg.device)
        for p, q, g, d in zip(own, full, whole, distributed(whole, where), strict=True):
            give(p, d)
            q.grad = g.double()
        reductions.clear()
        norm = torch.nn.utils.clip_grad_norm_(full, 0.5, norm_type)
        optimizer.step()
        reference.step()
        assert reductions == [1], "one collective, of one number"
        assert_near(optimizer.grad_norm, norm, n=2)
        check_same(optimizer.grad_norm, pg, str(step))
    check_pieces(own, full, where)
    state = optimizer.state[own[0]]
    assert isinstance(state["exp_avg"], DTensor)
    assert state["exp_avg"].placements == own[0].placements


def test_clipping_and_the_norm_alone(pg, reductions: list[int]) -> None:
    where = spread(meshes(pg))
    full, whole = [Parameter(t.double()) for t in drawn(0, pg.device)], drawn(5, pg.device)
    own = [Parameter(t) for t in distributed(drawn(0, pg.device), where)]
    for p, q, g, d in zip(own, full, whole, distributed(whole, where), strict=True):
        give(p, d)
        q.grad = g.double()
    reductions.clear()
    alone = optim.get_total_norm(distributed(whole, where))
    found = optim.clip_grad_norm_(own, 1.0)
    assert reductions == [1, 1]
    assert_near(found, torch.nn.utils.clip_grad_norm_(full, 1.0), n=2)
    assert torch.equal(alone, found)
    check_same(found, pg)
    pairs = [(p.grad, q.grad, at) for p, q, at in zip(own, full, where, strict=True) if p.grad is not None]
    check_pieces(*map(list, zip(*pairs, strict=True)))


def test_replicas_alone_need_no_collective(pg, reductions: list[int]) -> None:
    line = line_of(pg)
    where = [(line, [Replicate()])] * len(SHAPES)
    whole = drawn(5, pg.device)
    found = optim.get_total_norm(distributed(whole, where))
    plain = optim.get_total_norm(whole)
    assert reductions == []
    assert torch.equal(found, plain)


def test_plain_tensors_beside_dtensors_and_pieces(pg, reductions: list[int]) -> None:
    """Of a plain tensor the caller says what it is a piece of; beside DTensors one is the same on every rank."""
    mesh, line = DeviceMesh(list(range(pg.size))), line_of(pg)
    whole = [t.double() for t in drawn(3, pg.device)]
    want = torch.linalg.vector_norm(torch.cat([t.flatten() for t in whole]))
    pieces = [mesh.shard_tensor(t, 0) for t in whole]
    assert_near(optim.get_total_norm(pieces, mesh=mesh, placements=Shard(0)), want, n=8)
    assert_near(optim.get_total_norm(pieces, mesh=line, placements=[Shard(0)]), want, n=8)
    assert_near(optim.get_total_norm(whole, mesh=mesh, placements=[Replicate()]), want, n=8)
    mixed = [distribute_tensor(t, line, [Shard(0)]) if k % 2 else t for k, t in enumerate(whole)]
    assert_near(optim.get_total_norm(mixed), want, n=8)
    sharded, same = (Parameter(torch.ones(4, 4, device=pg.device)) for _ in range(2))
    sharded.grad, same.grad = torch.ones_like(sharded), torch.ones_like(same)
    groups = [{"params": [sharded], "mesh": mesh, "placements": Shard(0)}, {"params": [same]}]
    optimizer = optim.AdamW(groups, max_norm=1.0)
    reductions.clear()
    optimizer.step()
    assert reductions == [1]
    assert_near(optimizer.grad_norm, torch.tensor(16.0 * (pg.size + 1), device=pg.device).double().sqrt(), n=2)
    assert "mesh" not in optimizer.state_dict()["param_groups"][0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["mesh"] == mesh


def summands(whole: torch.Tensor, mesh: object, placements: list[object]) -> DTensor:
    """``whole`` as partial sums over each mesh dimension that holds replicas, other numbers on every rank."""
    partial = [Partial() if p.is_replicate() else p for p in placements]
    coordinate, index, size = mesh.get_coordinate() or [0] * mesh.ndim, 0, 1
    for dim, p in enumerate(partial):
        if p.is_partial():
            index, size = index * mesh.size(dim) + coordinate[dim], size * mesh.size(dim)
    part = distribute_tensor(whole, mesh, placements).to_local() * (2 * (index + 1) / (size * (size + 1)))
    return DTensor.from_local(part, mesh, partial, run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_partial_gradients_are_added_up(norm_type: float, pg, reductions: list[int]) -> None:
    """As torch has them of the weight of a norm of sharded rows."""
    where = spread(meshes(pg))
    full = [Parameter(t.double()) for t in drawn(0, pg.device)]
    own = [Parameter(t) for t in distributed(drawn(0, pg.device), where)]
    optimizer, reference = (
        optim.AdamW(own, lr=1e-2, max_norm=0.5, norm_type=norm_type),
        torch.optim.AdamW(full, lr=1e-2),
    )
    for step in range(STEPS):
        whole = drawn(1 + step, pg.device)
        for p, q, g, (mesh, placements) in zip(own, full, whole, where, strict=True):
            give(p, summands(g, mesh, placements))
            q.grad = g.double()
        alone = optim.get_total_norm([p.grad for p in own if p.grad is not None], norm_type)
        norm = torch.nn.utils.clip_grad_norm_(full, 0.5, norm_type)
        reductions.clear()
        optimizer.step()
        assert reductions == [1]
        reference.step()
        assert_near(optimizer.grad_norm, norm, n=2)
        assert_near(alone, norm, n=2)
    check_pieces(own, full, where)
    found = optim.clip_grad_norm_(own, 0.25, norm_type)
    for q, g in zip(full, whole, strict=True):
        q.grad = g.double()
    torch.nn.utils.clip_grad_norm_(full, 0.25, norm_type)
    assert_near(found, alone, n=2)
    for p, q, (mesh, placements) in zip(own, full, where, strict=True):
        if p.grad is not None:
            assert [at.is_partial() for at in p.grad.placements] == [at.is_replicate() for at in placements]
            piece = distribute_tensor(q.grad, mesh, placements).to_local()
            assert_near(p.grad.redistribute(placements=placements).to_local(), piece, n=4, what="a clipped gradient")


def test_gradients_on_another_mesh_are_refused(pg) -> None:
    line, first = line_of(pg), DeviceMesh([0]).to_torch(pg.device.type)
    p = Parameter(distribute_tensor(torch.ones(4, device=pg.device), line, [Replicate()]))
    p.grad = DTensor.from_local(torch.ones(4, device=pg.device), first, [Replicate()], run_check=False)
    with pytest.raises(OptimizerTensorError, match=r"gradient of parameter 0.* on .*as the parameter.* on "):
        optim.AdamW([p]).step()
    assert torch.equal(p.to_local(), torch.ones(4, device=pg.device))


def test_a_whole_gradient_of_a_sharded_parameter_is_cut(pg, reductions: list[int]) -> None:
    """As torch has it of a row-parallel embedding's table, of which rows are replicated."""
    where = spread(meshes(pg))
    full = [Parameter(t.double()) for t in drawn(0, pg.device)]
    own = [Parameter(t) for t in distributed(drawn(0, pg.device), where)]
    optimizer, reference = optim.AdamW(own, lr=1e-2, max_norm=0.5), torch.optim.AdamW(full, lr=1e-2)
    for step in range(STEPS):
        whole = drawn(1 + step, pg.device)
        replicated = [(mesh, [Replicate()] * len(placements)) for mesh, placements in where]
        for p, q, g, d in zip(own, full, whole, distributed(whole, replicated), strict=True):
            give(p, d)
            q.grad = g.double()
        reductions.clear()
        torch.nn.utils.clip_grad_norm_(full, 0.5)
        optimizer.step()
        reference.step()
        assert reductions == [1], "what is cut out is not sent"
    check_pieces(own, full, where)


def test_a_row_parallel_embedding_is_stepped(pg) -> None:
    line = line_of(pg)
    torch.manual_seed(0)
    full = torch.nn.Embedding(7, 4, device=pg.device)
    own = torch.nn.Embedding(7, 4, device=pg.device)
    own.load_state_dict(full.state_dict())
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    parallelize_module(own, line, rows)
    indices = torch.tensor([[0, 6, 2, 3], [3, 3, 1, 6]], device=pg.device)
    optimizer, reference = optim.AdamW(own.parameters(), max_norm=0.5), torch.optim.AdamW(full.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        own(indices).square().sum().full_tensor().backward()
        optimizer.step()
        reference.zero_grad()
        full(indices).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(full.parameters(), 0.5)
        reference.step()
    check_pieces(list(own.parameters()), list(full.parameters()), [(line, [Shard(0)])])


def test_a_norm_that_is_not_finite_is_told_on_every_rank(pg) -> None:
    line = line_of(pg)
    whole = torch.ones(2 * pg.size, device=pg.device)
    whole[-1] = math.nan  # on one rank
    p = Parameter(distribute_tensor(torch.ones_like(whole), line, [Shard(0)]))
    p.grad = distribute_tensor(whole, line, [Shard(0)])
    with pytest.raises(NonFiniteNormError):
        optim.AdamW([p], max_norm=1.0, error_if_nonfinite=True).step()
    with pytest.raises(NonFiniteNormError):
        optim.clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    assert torch.equal(p.to_local(), torch.ones(2, device=pg.device))
    dist.barrier()


def test_pieces_that_differ_in_size_count_once(pg) -> None:
    """Of plain tensors: who counts which replica does not go by how much a rank has of the others."""
    mesh = DeviceMesh([[rank, rank + pg.size // 2] for rank in range(pg.size // 2)])
    row, column = mesh.coordinate(pg.rank)
    rows = mesh.shape[0]
    whole = [torch.arange(1.0, 1 + n, dtype=torch.float64, device=pg.device) for n in (2 * rows - 1, 2 * rows, 6)]
    pieces = [whole[0][2 * row : 2 * row + 2], whole[1][2 * row : 2 * row + 2], whole[2][3 * column : 3 * column + 3]]
    placements = [[Shard(0), Replicate()], [Shard(0), Replicate()], [Replicate(), Shard(0)]]
    groups = []
    for piece, at in zip(pieces, placements, strict=True):
        parameter = Parameter(torch.zeros_like(piece))
        parameter.grad = piece.clone()
        groups.append({"params": [parameter], "mesh": mesh, "placements": at})
    optimizer = optim.AdamW(groups, max_norm=1.0)
    optimizer.step()
    assert_near(optimizer.grad_norm, torch.cat(whole).norm(), n=2)


@pytest.mark.parametrize("is_plain", [False, True])
def test_clipping_where_a_rank_lacks_a_gradient(is_plain: bool, pg, reductions: list[int]) -> None:
    """Experts, say, to which a step has given no row: the other ranks have that rank add its zero."""
    line = line_of(pg)
    made = [distribute_tensor(torch.ones(2 * pg.size, 3, device=pg.device), line, [Shard(0)]) for _ in range(2)]
    experts = [Parameter(t.to_local() if is_plain else t) for t in made]
    bias = Parameter(torch.ones(5, device=pg.device))
    if not is_plain:
        bias = Parameter(distribute_tensor(bias.detach(), line, [Replicate()]))
        bias.grad = torch.ones_like(bias)
    experts[0].grad = torch.ones_like(experts[0]) if pg.rank else None
    experts[1].grad = torch.ones_like(experts[1]) if pg.rank else None
    options = {"mesh": line, "placements": Shard(0)} if is_plain else {}
    norm = optim.clip_grad_norm_([*experts, bias], 1.0, **options)
    expected = math.sqrt(2 * 2 * 3 * (pg.size - 1) + (0 if is_plain else 5))
    assert_near(norm, torch.tensor(expected, dtype=torch.float64, device=pg.device), n=2)
    assert reductions == [1]
    if pg.rank:
        scaled = experts[0].grad if is_plain else experts[0].grad.to_local()
        torch.testing.assert_close(scaled, torch.full_like(scaled, 1 / expected), rtol=1e-5, atol=0)
