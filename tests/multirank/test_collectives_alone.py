"""shardfuse.collectives: 16-bit sums over ranks, added in float32 and rounded once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfuse import NoGradientsWarning, collectives
from shardfuse.errors import CollectiveArgumentError
from shardfuse.executor import plain_arguments
from shardfuse.mesh.calls import Ledger

pytestmark = pytest.mark.mpi

SHAPES = ((5, 7), (9, 70000))


def given(shape: tuple[int, ...], size: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """What each rank has: 1 and more, or so little that a sum of 16 bits loses each of them.  Exact in float32."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(1, 16, shape, generator=generator) for _ in range(size)]
    step = torch.finfo(dtype).eps / 32
    return [(x * step if rank else 1 + x * step * 32).to(dtype).to(device) for rank, x in enumerate(drawn)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(dtype: torch.dtype, pg) -> None:
    for shape in SHAPES:
        parts = given(shape, pg.size, dtype, pg.device)
        total = torch.stack(parts).double().sum(0).to(dtype)
        assert torch.equal(collectives.all_reduce(parts[pg.rank]), total)
        pieces = [*total.chunk(pg.size, 1), *[total[:, :0]] * pg.size]
        assert torch.equal(collectives.reduce_scatter(parts[pg.rank], 1), pieces[pg.rank])
        if pg.size > 2:  # two numbers are rounded once by whoever adds them
            hops = parts[0]
            for x in parts[1:]:
                hops = hops + x
            assert not torch.equal(hops, total), "rounding at every hop would not be seen"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(4, 6), (4, 12, 3)])
def test_pieces_are_put_in_the_order_of_the_ranks(dtype: torch.dtype, shape: tuple[int, ...], pg) -> None:
    """Of tensors whose elements are not in order, too."""
    shape = tuple(n * pg.size for n in shape)
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randint(2, shape, generator=generator).to(dtype).to(pg.device) for _ in range(pg.size)]
    mine = parts[pg.rank].transpose(0, 1).contiguous().transpose(0, 1)
    for dim in range(len(shape)):
        found = collectives.all_gather(mine, dim)
        assert torch.equal(found, torch.cat(parts, dim))
        assert found.is_contiguous()
        for split in range(len(shape)):
            pieces = [x.chunk(pg.size, split)[pg.rank] for x in parts]
            found = collectives.all_to_all(mine, split, dim)
            assert torch.equal(found, torch.cat(pieces, dim))
            assert found.is_contiguous()


def test_maxima_keep_nan(pg) -> None:
    x = torch.full((3,), float(pg.rank), device=pg.device)
    x[1] = float("nan") if pg.rank == 0 else 0.0
    found = collectives.all_reduce(x, op="max")
    assert found[0] == pg.size - 1
    assert found[1].isnan()


def test_arguments(pg) -> None:
    x = torch.ones(2, 2, device=pg.device)
    mesh = init_device_mesh(pg.device.type, (pg.size,))
    own = dist.new_group([0])
    others = "a group of other ranks" if pg.rank else None
    for call, found in (
        (lambda: collectives.reduce_scatter(x, 2), "dim is 2, expected a dimension of a tensor of 2"),
        (lambda: collectives.reduce_scatter(x, None), "dim is None, expected a dimension of a tensor of 2"),
        (lambda: collectives.reduce_scatter(x, 1.0), "dim is 1.0, expected a dimension of a tensor of 2"),
        (lambda: collectives.all_gather(x, 2), "dim is 2, expected a dimension of a tensor of 2"),
        (lambda: collectives.all_to_all(x, 3, 0), "split_dim is 3, expected a dimension of a tensor of 2"),
        (lambda: collectives.all_to_all(x, 0, None), "concat_dim is None, expected a dimension of a tensor of 2"),
        (lambda: collectives.all_to_all(x.repeat(1, 9)[:, : 1 + pg.size], 1), "split_dim is 1 of a tensor of shape"),
        (lambda: collectives.all_gather(x[0, 0]), "a tensor of 0 dims: it is a single number, pass its unsqueeze"),
        (lambda: collectives.all_gather([1.0]), "x is a list, expected a dense torch.Tensor"),
        (lambda: collectives.all_reduce(x, op="mean"), "op is 'mean', expected sum, prod, max"),
        (lambda: collectives.all_reduce([1.0]), "x is a list, expected a dense torch.Tensor"),
        (lambda: collectives.all_reduce(x.to_sparse()), "x is a tensor of layout torch.sparse_coo, expected a dense"),
        (
            lambda: collectives.all_reduce(torch.nested.nested_tensor([x[0], x[1, :1]])),
            "x is a nested tensor, expected",
        ),
        (lambda: collectives.all_reduce(x.to("meta")), "x is a tensor on device meta, expected a dense"),
        (lambda: collectives.all_reduce(distribute_tensor(x, mesh)), r"x is a DTensor, .* its to_local\(\)$"),
        (lambda: collectives.all_reduce(x, "world"), "group is 'world', a str, expected a group that this rank is in"),
        (
            lambda: collectives.all_reduce(x, own),
            others and f"group is {others}, expected a group that this rank is in",
        ),
    ):
        if found is not None:
            with pytest.raises(CollectiveArgumentError, match=found):
                call()
    assert torch.equal(collectives.all_reduce(x), x * pg.size), "the refused calls have sent nothing"


CALLS = (collectives.all_reduce, collectives.reduce_scatter, collectives.all_gather, collectives.all_to_all)


def test_a_gradient_that_is_lost_is_told_of_once(pg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_arguments, "_warned_of_kinds", set())
    x = torch.ones(pg.size, 2, device=pg.device, requires_grad=True)
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        call = getattr(collectives, kind)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with torch.no_grad():
                call(x)
            call(x.detach())
            assert not told
            assert not any(call(x).requires_grad for _ in range(2))
        (found,) = told
        assert found.category is NoGradientsWarning
        assert found.filename == __file__
        assert str(found.message).startswith(f"{kind}: x requires a gradient")


@pytest.mark.parametrize("call", CALLS)
def test_what_has_no_values_of_this_rank_is_refused(call: Callable[[torch.Tensor], torch.Tensor], pg) -> None:
    """A recorded graph would not wait for what gloo receives, and has no kernel; a gradient would be 0."""
    x = torch.ones(pg.size, 4, device=pg.device)

    def fake(x: torch.Tensor) -> None:
        with FakeTensorMode() as mode:
            call(mode.from_tensor(x))

    class Around(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x) + 1

    for use, found in (
        (torch.func.grad(lambda x: (call(x) * x.sum()).sum()), "inside of torch.func"),
        (torch.vmap(lambda x: call(x)), "inside of torch.func"),
        (make_fx(lambda x: call(x)), "ops are recorded"),
        (make_fx(lambda x: call(x), tracing_mode="fake"), "ops are recorded"),
        (fake, "x is a FakeTensor"),
        (lambda x: torch.export.export(Around(), (x,), strict=False), "ops are recorded|x is a FakeTensor"),
        (lambda x: torch.jit.trace(lambda x: call(x), (x,), check_trace=False), "ops are recorded"),
    ):
        with pytest.raises(CollectiveArgumentError, match=found):
            use(x)
    assert torch.equal(collectives.all_reduce(x), x * pg.size), "the refused calls have sent nothing"


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_that_is_still_filled_is_waited_for(call: Callable[[torch.Tensor], torch.Tensor], pg) -> None:
    x = torch.arange(4.0 * pg.size, device=pg.device).view(pg.size, 4)
    late = functional.all_reduce(x, "sum", dist.group.WORLD)
    assert isinstance(late, functional.AsyncCollectiveTensor)
    found = call(late)
    assert type(found) is torch.Tensor
    assert torch.equal(found, call(x * pg.size))


def test_calls_are_compared_by_all_that_ranks_have_alike(pg, monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers: dict[int, Ledger] = {}
    monkeypatch.setattr(collectives, "ledger_of", lambda _: ledgers[0])

    def noted(call: Callable[[], object]) -> int:
        ledgers[0] = Ledger(range(pg.size))
        call()
        told = ledgers[0].take_in()
        assert told.calls == 1
        return told.chain

    x = torch.ones(4, 4, device=pg.device)
    differing = [
        noted(call)
        for call in (
            lambda: collectives.all_reduce(x),
            lambda: collectives.all_reduce(x.half()),
            lambda: collectives.all_reduce(x.bfloat16()),
            lambda: collectives.all_reduce(x, op="max"),
            lambda: collectives.all_reduce(x.view(2, 8)),
            lambda: collectives.all_reduce(x[:0]),
            lambda: collectives.reduce_scatter(x),
            lambda: collectives.all_gather(x),
            lambda: collectives.all_gather(x, 1),
            lambda: collectives.all_to_all(x),
            lambda: collectives.all_to_all(x, 0, 1),
            lambda: collectives.all_to_all(x, 1, 0),
            lambda: collectives.reduce_scatter(x, 1),
            lambda: collectives.reduce_scatter(x, 1, op="prod"),
        )
    ]
    assert len(set(differing)) == len(differing)
    assert noted(lambda: collectives.reduce_scatter(x, -1)) == differing[-2], "dim -1 is dim 1"
    ledgers[0] = Ledger(range(pg.size))
    with pytest.raises(CollectiveArgumentError):
        collectives.reduce_scatter(x, 2)
    assert ledgers[0].take_in().calls == 0, "nor is a call that was refused"


@pytest.mark.parametrize("call", CALLS)
def test_graphs_of_torch_compile_break_at_them(call: Callable[[torch.Tensor], torch.Tensor], pg) -> None:
    def around(x: torch.Tensor) -> torch.Tensor:
        return call(x + 1) * 2

    compiled = torch.compile(around, backend="eager")
    for k in range(3):
        x = torch.arange(float(4 * pg.size), device=pg.device).view(pg.size, 4) + k
        assert torch.equal(compiled(x), around(x))
