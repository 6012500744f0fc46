"""Partial sums of 16-bit floats: rounded once, added up by the ranks, in one kernel with what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from thread_check import X, shard, world_mesh

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, TensorView, simulate
from shardfuse.passes import partial_sums

ROWS, COLUMNS = 24, 10


def partial_sum(ranks: int, cut: int | None, *, then_scaled: bool = False) -> FusionDefinition:
    """The sum over the ranks of what each has, cut along an axis or whole on all."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([ranks, -1, -1], dtype=DataType.BFloat16)
        total = fd.ops.sum(x, [0])
        out = fd.ops.mul(fd.ops.exp(total), 0.5) if then_scaled else total
        fd.add_output(out)
    mesh: DeviceMesh = world_mesh(ranks)
    shard(x, mesh, (X, (0, "outer")))
    if cut is None:
        out.set_device_mesh(mesh)
    else:
        shard(out, mesh, (X, (cut, "outer")))
    return fd


def drawn(rows: int, ranks: int) -> torch.Tensor:
    return torch.randn(ranks, rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("cut", "rows"), [(None, ROWS), (None, ROWS + 1), (0, ROWS)])
def test_they_are_rounded_once(ranks: int, cut: int | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_sums, "ONE_STEP_BYTES", 0)
    x = drawn(rows, ranks)
    expected = x.float().sum(0).bfloat16()

    def run(rank: int) -> torch.Tensor:
        fd = partial_sum(ranks, cut)
        (found,) = fd.execute([x[rank : rank + 1]])
        kinds = [c.kind for c in fd.explain().collectives]
        if ranks == 2:
            assert kinds == (["all_reduce"] if cut is None else ["reduce_scatter"])
        elif cut == 0:
            assert kinds == ["all_to_all"]
        else:
            assert kinds in (["all_to_all", "all_gather"], ["all_reduce"])
        assert torch.equal(found, expected if cut is None else expected.chunk(ranks)[rank])
        return found

    simulate(lambda: run(torch.distributed.get_rank()), world_size=ranks)


def test_what_follows_is_in_the_kernel_that_adds() -> None:
    x = drawn(ROWS, 4)
    expected = (x.float().sum(0).bfloat16().float().exp().bfloat16().float() * 0.5).bfloat16()

    def run() -> None:
        rank = torch.distributed.get_rank()
        fd = partial_sum(4, 0, then_scaled=True)
        (found,) = fd.execute([x[rank : rank + 1]])
        assert_near(found, expected.double().chunk(4)[rank], n=1)  # the kernel's exponential may round the other way
        plan = fd.explain()
        assert [c.kind for c in plan.collectives] == ["all_to_all"]
        assert plan.kernels == 1

    simulate(run, world_size=4)


def test_small_ones_are_gathered_in_one_call() -> None:
    def run() -> None:
        fd = partial_sum(4, None)
        fd.execute([drawn(ROWS, 4)[:1]])
        assert [c.kind for c in fd.explain().collectives] == ["all_reduce"]

    simulate(run, world_size=4)


def f32(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.cast(x, dtype=DataType.Float)


FORMS: dict[str, tuple[Callable[..., TensorView], Callable[..., torch.Tensor]]] = {
    "cast before": (
        lambda fd, x, b, r: fd.ops.sum(f32(fd, x), [0]),
        lambda x, b, r: x.sum(0),
    ),
    "scaled": (
        lambda fd, x, b, r: fd.ops.sum(fd.ops.mul(f32(fd, x), 0.375), [0]),
        lambda x, b, r: (x * 0.375).sum(0),
    ),
    "bias before": (
        lambda fd, x, b, r: fd.ops.sum(fd.ops.add(f32(fd, x), fd.ops.broadcast(f32(fd, b), [True, True, False])), [0]),
        lambda x, b, r: (x + b).sum(0),
    ),
    "residual before": (
        lambda fd, x, b, r: fd.ops.sum(fd.ops.add(f32(fd, x), fd.ops.broadcast(r, [True, False, False])), [0]),
        lambda x, b, r: (x + r).sum(0),
    ),
    "average": (
        lambda fd, x, b, r: fd.ops.mean(f32(fd, x), [0]),
        lambda x, b, r: x.mean(0),
    ),
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
@pytest.mark.parametrize("cut", [None, 0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("small", [True, False])
def test_what_is_cast_before_it_is_added_travels_in_16_bits(
    form: str, cut: int | None, ranks: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(partial_sums, "ONE_STEP_BYTES", -(2**60))
    rows = 2 * ranks
    generator = torch.Generator().manual_seed(ranks)
    x = torch.randn(ranks, rows, COLUMNS, generator=generator).bfloat16()
    bias = torch.randn(COLUMNS, generator=generator).bfloat16()
    residual = torch.randn(rows, COLUMNS, generator=generator)
    expected = FORMS[form][1](x.double(), bias.double(), residual.double())
    terms = FORMS[form][1](x.double().abs(), bias.double().abs(), residual.double().abs())

    def run() -> None:
        rank, mesh = torch.distributed.get_rank(), world_mesh(ranks)
        with FusionDefinition() as fd:
            given = fd.define_tensor([ranks, -1, COLUMNS], contiguity=True, dtype=DataType.BFloat16)
            b = fd.define_tensor([COLUMNS], contiguity=True, dtype=DataType.BFloat16)
            r = fd.define_tensor([-1, COLUMNS], contiguity=True, dtype=DataType.Float)
            out = FORMS[form][0](fd, given, b, r)
            fd.add_output(out)
        shard(given, mesh, (X, (0, "outer")))
        b.set_device_mesh(mesh)
        r.set_device_mesh(mesh)
        if cut is None:
            out.set_device_mesh(mesh)
        else:
            shard(out, mesh, (X, (cut, "outer")))
        for _ in range(2):
            (found,) = fd.execute([x[rank : rank + 1], bias, residual])
        here = expected if cut is None else expected.chunk(ranks)[rank]
        largest = terms if cut is None else terms.chunk(ranks)[rank]
        # each of the additions, and the operations before them, rounds at most half a unit of the largest partial sum
        assert ((found.double() - here).abs() <= (ranks + 2) * torch.finfo(torch.float32).eps * largest).all()
        plan = fd.explain()
        sent = 2 * rows * COLUMNS  # a rank's summand, of two bytes an element
        kinds = [c.kind for c in plan.collectives]
        if ranks == 9 and form in ("bias before", "residual before"):  # too many to be told apart in a kernel
            assert kinds == ["all_reduce" if cut is None else "reduce_scatter"]
        elif cut == 0:
            assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_to_all", sent)]
        elif small:
            assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", ranks * sent)]
        else:
            assert kinds == ["all_to_all", "all_gather"]
            assert plan.collectives[0].bytes == sent

    simulate(run, world_size=ranks)
