"""Statistics of what no program holds, rows, channels or groups: several programs hold it, or one reads it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_exchange_kernels as kernels
import torch
from exchange_cases import LOSS, Ranks, define, expected, inputs, kernel_of, piece_of_output, plan_of, with_room
from exchange_fusions import LOG_PROB, SOFTMAX_BACKWARD, cut_columns, part_of
from exchange_images import LONG, ImageNorm

from benchmarks.roundings import assert_near
from shardfuse import DataType, FusionDefinition
from shardfuse.codegen.claims import within
from shardfuse.codegen.mesh_exchange import row_reductions
from shardfuse.codegen.source import KernelSource
from shardfuse.compiler import Plan, compile_fusion
from shardfuse.in_kernel import exchanging, with_exchanges
from shardfuse.ir.op import Reduce
from shardfuse.passes.settle_inputs import settle_inputs
from shardfuse.schedulers.exchange_forms import Form, exchanged_form
from shardfuse.schedulers.plan import KernelPlan

N, ODD = 2 * 40000, 3 * 33000 - 1


ROOMS = [(3, 1, Form.LONG), (1, 4, Form.SHARED), (2, 4, Form.SHARED)]
"""Rows, programs for which each has room, and how they then are exchanged."""


@pytest.mark.parametrize(("rows", "members", "form"), ROOMS)
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "softmax", "add_rms_norm"])
def test_rows_that_no_program_holds(kind: str, rows: int, members: int, form: Form, tmp_path: Path) -> None:
    """Of two ranks that have as much, and of three of which one has less."""
    (n, ranks), device = (N, 2) if rows == 1 else (ODD, 3), with_room(rows, members)
    plan = kernel_of(plan_of(define(kind, n, ranks, DataType.BFloat16), rows, device))
    assert (exchanged_form(plan), plan.rank_exchange.members) == (form, members)
    kernels.check_together(kind, rows, n, ranks, tmp_path, device)


@pytest.mark.parametrize(("rows", "members", "form"), ROOMS)
@pytest.mark.parametrize("kind", [LOG_PROB, SOFTMAX_BACKWARD])
def test_programs_of_modules(kind: str, rows: int, members: int, form: Form, tmp_path: Path) -> None:
    n, ranks = (N, 2) if rows == 1 else (ODD, 3)
    form = Form.SHARED_ALIKE if members > 1 and ranks == 3 and kind == LOG_PROB else form
    assert exchanged_form(kernels.check_program(kind, rows, n, ranks, tmp_path, with_room(rows, members))) is form


@pytest.mark.parametrize(("rows", "members", "form"), ROOMS)
@pytest.mark.parametrize("n", [2 * 20000, 2 * 20000 + 1])
def test_targets_among_more_classes_than_registers_hold(
    n: int, rows: int, members: int, form: Form, tmp_path: Path
) -> None:
    """Rows that a program would hold, but not with the places of their elements."""
    form = Form.SHARED_ALIKE if members > 1 and n % 2 else form
    device = with_room(rows, members)
    plan = kernel_of(plan_of(define(LOSS, n, 2, DataType.BFloat16), rows, device))
    assert exchanged_form(plan) is form
    kernels.check_loss(rows, n, 2, tmp_path, device)


@pytest.mark.parametrize(("rows", "n", "ranks"), [(1, N, 2), (2, ODD, 3)])
def test_sums_of_one_rank_alone_go_round_among_its_programs(rows: int, n: int, ranks: int, tmp_path: Path) -> None:
    """Three of them, of other numbers each, behind a sum of all ranks."""
    with FusionDefinition() as fd:
        given = fd.define_tensor([-1, n], contiguity=True, dtype=DataType.BFloat16)
        x = fd.ops.cast(given, DataType.Float)
        y = fd.ops.sub(x, fd.ops.mul(fd.ops.sum(x, [-1], keepdim=True), 0.01))
        for made in (fd.ops.mul(y, y), fd.ops.abs(y), y):
            fd.add_output(fd.ops.sum(made, [-1]))
        fd.add_output(y)
    cut_columns(given, ranks, n)
    settle_inputs(fd.fusion)
    plan = compile_fusion(fd.fusion, {given: (rows, n)}, device=with_room(rows, 4), has_cheap_sums=True)
    plan = kernel_of_first(with_exchanges(plan))
    assert exchanged_form(plan) is Form.SHARED
    assert len(row_reductions(plan)) == 3
    whole = torch.randn(rows, n, generator=torch.Generator().manual_seed(n)).bfloat16()
    world = Ranks(plan, torch.device("cpu"))
    parts = [part_of(whole, ranks, -1, rank).contiguous() for rank in range(ranks)]
    tensors = [{plan.segment.inputs[0]: part} for part in parts]
    for rank, own in enumerate(tensors):
        for t in plan.segment.outputs:
            own[t] = torch.full(t.domain.local_shape(rank), float("nan"), dtype=t.dtype.torch)
    kernels.run(world, tensors, tmp_path)
    total = whole.double().sum(-1, keepdim=True)
    for own, part in zip(tensors, parts, strict=True):
        y = part.double() - total * 0.01
        wanted = {1: y} | dict(zip((2, 3, 4), (y.square(), y.abs(), y), strict=True))
        sums = [t for t in plan.segment.outputs if t.domain.local_shape(0)[-1] in (1, rows) or own[t].numel() == rows]
        found = [own[t].double().flatten() for t in sums]
        for k, values in enumerate(found):
            terms = wanted[2 + k].abs().sum(-1)
            assert ((values - wanted[2 + k].sum(-1)).abs() <= 1e-5 * terms).all(), f"sum {k}"
        (rest,) = (own[t] for t in plan.segment.outputs if t not in sums)
        assert ((rest.double() - y).abs() <= 1e-5 * (part.double().abs() + total.abs())).all()


def kernel_of_first(plan: Plan) -> KernelPlan:
    """The one kernel that exchanges."""
    ((_, kernel),) = exchanging(plan)
    return kernel


def test_groups_loop_over_rows_where_fewer_run_at_once(tmp_path: Path) -> None:
    """On each rank another number of them, of whole groups."""
    rows, room = 3, (12, 5, 3)
    plan = kernel_of(plan_of(define("layer_norm", ODD, 3, DataType.BFloat16), rows, with_room(rows, 4)))
    world, given = Ranks(plan, torch.device("cpu")), inputs("layer_norm", rows, ODD, torch.bfloat16, 3)
    tensors = [world.pieces("layer_norm", rank, given) for rank in range(3)]
    grids: list[int] = []

    def fewer(rank: int, source: KernelSource) -> list[KernelSource]:
        found = within(source, plan.rank_exchange, room[rank])
        grids.extend(part.grid for part in found)
        return found

    kernels.run(world, tensors, tmp_path, fewer)
    assert grids == [12, 4, 4]
    wide, eager = (expected("layer_norm", [v.to(t) for v in given]) for t in (torch.float64, torch.float32))
    (out,) = plan.segment.outputs
    for rank, own in enumerate(tensors):
        parts = [piece_of_output("layer_norm", v[0], 3, rank) for v in (wide, eager)]
        assert_near(own[out], parts[0], parts[1].bfloat16(), n=2, what=f"rank {rank}")
    assert [world.launches_of(rank) for rank in range(3)] == [8.0] * 3


@pytest.mark.parametrize(("n", "ranks"), [(5, 4), (9, 8)])
def test_rows_of_which_some_ranks_have_nothing(n: int, ranks: int, tmp_path: Path) -> None:
    """They tell their peers so, and have what all ranks have."""
    for kind in ("rms_norm", "layer_norm", "softmax", "add_rms_norm"):
        kernels.check_together(kind, 3, n, ranks, tmp_path)
    for kind in (LOG_PROB, SOFTMAX_BACKWARD):
        assert exchanged_form(kernels.check_program(kind, 3, n, ranks, tmp_path)) is Form.NONE_SOMEWHERE
    kernels.check_loss(3, n, ranks, tmp_path)


@pytest.mark.parametrize(("members", "form"), [(1, Form.LONG), (2, Form.SHARED)])
@pytest.mark.parametrize("norm", LONG)
def test_channels_and_groups_of_images(norm: ImageNorm, members: int, form: Form, tmp_path: Path) -> None:
    plan = norm.plan(with_room(norm.rows, members))
    assert exchanged_form(plan) is form
    world, given = Ranks(plan, torch.device("cpu")), norm.inputs()
    tensors = norm.pieces(world, given)
    launches = world.launches(tmp_path, interpret=True)
    reductions = sum(isinstance(e.op, Reduce) for e in plan.segment.exprs)
    for _ in range(1 + reductions * (2 if members > 1 else 1)):
        for rank, launch in enumerate(launches):
            world.set_launches(7, rank)
            launch(None, *tensors[rank])
    norm.check(tensors, given)


def test_where_a_rank_has_nothing_collectives_are_the_default() -> None:
    """Until GPUs have run it; short rows of the same program are exchanged in their kernel, and long ones are not read
    again, as they would spare no collective."""
    lengths, device = (2 * N, 640, 5), with_room(3)
    with FusionDefinition() as fd:
        for n in lengths:
            given = fd.define_tensor([-1, n], contiguity=True, dtype=DataType.BFloat16)
            x = fd.ops.cast(given, DataType.Float)
            rstd = fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True), 1e-5))
            fd.add_output(fd.ops.cast(fd.ops.mul(x, rstd), DataType.BFloat16))
            cut_columns(given, 4, n)
    settle_inputs(fd.fusion)
    sizes = {i.val: (3, n) for i, n in zip(fd.fusion.inputs, lengths, strict=True)}
    plan = compile_fusion(fd.fusion, sizes, device=device, has_cheap_sums=True)
    asked, by_default = with_exchanges(plan), with_exchanges(plan, is_by_default=True)

    forms = [[exchanged_form(k).name for _, k in exchanging(p)] for p in (asked, by_default)]
    assert list(map(sorted, forms)) == [["LONG", "NONE_SOMEWHERE", "STATISTICS"], ["STATISTICS"]]
    assert sum("SHARDFUSE_EXCHANGE=symmetric" in line for line in by_default.in_kernel) == 1
