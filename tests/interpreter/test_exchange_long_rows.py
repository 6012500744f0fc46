"""Statistics of what no program holds, rows, channels or groups: several programs hold it, or one reads it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_exchange_kernels as kernels
import torch
from exchange_cases import LOSS, Ranks, define, kernel_of, plan_of, with_room
from exchange_fusions import LOG_PROB, SOFTMAX_BACKWARD, cut_columns
from exchange_images import LONG, ImageNorm

from shardfuse import DataType, FusionDefinition
from shardfuse.compiler import compile_fusion
from shardfuse.in_kernel import exchanging, with_exchanges
from shardfuse.ir.op import Reduce
from shardfuse.passes.settle_inputs import settle_inputs
from shardfuse.schedulers.exchange_forms import Form, exchanged_form

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
    """Reductions of one rank alone, which its programs give each other, are among them."""
    n, ranks = (N, 2) if rows == 1 else (ODD, 3)
    assert exchanged_form(kernels.check_program(kind, rows, n, ranks, tmp_path, with_room(rows, members))) is form


@pytest.mark.parametrize(("rows", "members", "form"), ROOMS)
@pytest.mark.parametrize("n", [2 * 20000, 2 * 20000 + 1])
def test_targets_among_more_classes_than_registers_hold(
    n: int, rows: int, members: int, form: Form, tmp_path: Path
) -> None:
    """Rows that a program would hold, but not with the places of their elements."""
    device = with_room(rows, members)
    plan = kernel_of(plan_of(define(LOSS, n, 2, DataType.BFloat16), rows, device))
    assert exchanged_form(plan) is form
    kernels.check_loss(rows, n, 2, tmp_path, device)


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
    """Until GPUs have run it; long rows of the same program, and short ones, are exchanged in their kernels."""
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
    assert list(map(sorted, forms)) == [["LONG", "NONE_SOMEWHERE", "STATISTICS"], ["LONG", "STATISTICS"]]
    assert sum("SHARDFUSE_EXCHANGE=symmetric" in line for line in by_default.in_kernel) == 1
