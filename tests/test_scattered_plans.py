"""Which partial sums are added up in parts inside of a kernel, and which stay with collectives, and why.

Numbers: ``tests/exchange_scattered.py``, by processes on a CPU and by GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from exchange_cases import plan_of
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.codegen import generate
from shardfuse.compiler import Plan, compile_fusion
from shardfuse.device import H200
from shardfuse.frontend.explain import explain_plan
from shardfuse.in_kernel import exchanging, with_exchanges
from shardfuse.ir.tensor_view import TensorView
from shardfuse.nn import AddRMSNorm
from shardfuse.passes.settle_inputs import settle_inputs
from shardfuse.schedulers import exchange_forms
from shardfuse.schedulers.exchange_forms import HAVE_RUN, Form, exchanged_form
from shardfuse.schedulers.overwritten_inputs import replaceable
from shardfuse.schedulers.plan import KernelPlan

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import compile_all

BF16 = DataType.BFloat16
ROWS, N = 64, 1024


def define(
    ranks: int = 2, n: int = N, *, dtype: DataType = BF16, made: DataType | None = None, axis: int = 0,
    rows: int = ROWS, uneven: bool = False, gives_sum: bool = False, gives_part: bool = False, kind: str = "sum",
    replaces: bool = False,
) -> FusionDefinition:  # fmt: skip
    """A norm of the sum of all ranks, [rows, 4, n], of which each has a part along ``axis``, and all the result.

    made: the result's type, where that is another.  kind: of reduction.  replaces: is the result written over an input?
    gives_sum, gives_part: are the sum and this rank's part results?
    """
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        o = fd.ops
        given = fd.define_tensor([ranks, rows, 4, n], contiguity=True, dtype=dtype)
        total = getattr(o, kind)(given, [0])
        x = o.cast(total, DataType.Float)
        y = o.mul(x, o.rsqrt(o.add(o.mean(o.mul(x, x), [-1], keepdim=True), 1e-5)))
        part = o.cast(y, made or dtype)
        whole = o.set(part)
        before = fd.define_tensor([rows, 4, n], contiguity=True, dtype=dtype) if replaces else None
        fd.add_output(whole, alias_input=before)
        if before is not None:
            before.set_device_mesh(mesh)
        if gives_sum:
            fd.add_output(total)
        if gives_part:
            fd.add_output(part)
        given.set_device_mesh(mesh)
        given.axis(0).parallelize(ParallelType.mesh_x)
        cut(total, axis, ranks, mesh, uneven=uneven)
        cut(part, axis, ranks, mesh, uneven=uneven)
        whole.set_device_mesh(mesh)
    return fd


def cut(tv: TensorView, axis: int, ranks: int, mesh: DeviceMesh, *, uneven: bool) -> None:
    tv.set_device_mesh(mesh)
    tv.split(axis, ranks, inner_split=False, uneven=uneven)
    tv.axis(axis).parallelize(ParallelType.mesh_x)


def kernel_of(plan: Plan) -> KernelPlan:
    """The one kernel that is all of ``plan``."""
    assert [s.scheduler for s in plan.segments] == ["exchange"], plan.in_kernel
    ((_, kernel),) = exchanging(plan)
    return kernel


@pytest.mark.parametrize("dtype", [BF16, DataType.Half])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_it_is_one_kernel_that_has_room_for_its_rows(ranks: int, dtype: DataType) -> None:
    plan = plan_of(define(ranks, dtype=dtype, rows=ROWS * 3), ROWS)
    kernel = kernel_of(plan)
    assert [said.split(": ")[1] for said in plan.in_kernel] == ["exchanged inside of a kernel"] * 2
    assert kernel.rank_exchange.is_in_rows, "of however few"
    assert kernel.space.kept == ROWS * 3 * 4 // ranks
    form = exchanged_form(kernel)
    assert form is (Form.SCATTERED if ranks == 2 else Form.FURTHER)
    assert plan.apart is not None
    assert bool(exchanging(with_exchanges(plan.apart, is_by_default=True))) == (form in HAVE_RUN)


def test_kernels_compile_without_spills() -> None:
    """But for 48 bytes of a thread where the addresses of the flags and rows of 7 peers take 28 registers."""
    sources, allowed = [], [0, 0, 0, 0, 48]
    for ranks, n in ((2, 1024), (2, 4096), (2, 8192), (4, 4096), (8, 8192)):
        plan = kernel_of(plan_of(define(ranks, n), ROWS))
        tensors = (*plan.segment.inputs, *plan.segment.outputs)
        sources.append(generate(plan, {t: t.domain.layout(0) for t in tensors}, 0))
    assert all(made.spills <= most for made, most in zip(compile_all(sources), allowed, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_have_one_kernel(rank: int) -> None:
    """Which rank it is comes in its table."""
    plan = kernel_of(plan_of(define(), ROWS))
    tensors = (*plan.segment.inputs, *plan.segment.outputs)
    texts = [generate(plan, {t: t.domain.layout(k) for t in tensors}, k).text for k in (0, rank)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fd", "why"),
    [
        (define(rows=63, uneven=True), "not cut into as many rows for each rank"),
        (define(made=DataType.Float), "not of the same type of 16 bits"),
        (define(dtype=DataType.Float), "not of the same type of 16 bits"),
        (define(gives_sum=True), "itself is read"),
        (define(gives_part=True), "itself is read"),
        (define(n=1020), "not cut into whole words"),
        (define(n=65536 * 2), "more than 65536"),
    ],
    ids=["uneven", "another type", "32 bits", "sum", "part", "no whole words", "long"],
)
def test_what_stays_with_collectives_says_why(fd: FusionDefinition, why: str) -> None:
    plan = plan_of(fd, ROWS)
    assert all(kernel.rank_exchange.sent is None for _, kernel in exchanging(plan))
    assert why in plan.in_kernel[0]


@pytest.mark.parametrize("kind", ["max", "min", "prod"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_only_sums_are_added_up(ranks: int, kind: str) -> None:
    plan = plan_of(define(ranks, kind=kind), ROWS)
    assert all(kernel.rank_exchange.sent is None for _, kernel in exchanging(plan))
    assert "communication" in [s.scheduler for s in plan.segments]


def test_a_result_that_replaces_an_input_is_copied_to_it() -> None:
    """The kernel writes rows of the other ranks in it, which it has under another name."""
    plan = plan_of(define(replaces=True), ROWS)
    kernel_of(plan)
    planned = [(s.segment, s.scheduler, s.kernels) for s in plan.segments]
    assert plan.fusion.aliases
    assert replaceable(plan.fusion, planned, list(plan.fusion.inputs)) == {}
    assert explain_plan(plan).copies == 1


def test_other_kernels_exchange_by_default_where_a_gather_of_more_ranks_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm over a sharded axis, and one of sharded rows that all ranks are given."""
    mesh = DeviceMesh(range(4))
    with FusionDefinition() as fd:
        o = fd.ops
        made: list[TensorView] = []
        for _ in range(2):
            given = fd.define_tensor([ROWS, N], contiguity=True, dtype=BF16)
            x = o.cast(given, DataType.Float)
            y = o.mul(x, o.rsqrt(o.add(o.mean(o.mul(x, x), [-1], keepdim=True), 1e-5)))
            made += [given, o.cast(y, BF16)]
        columns, by_columns, rows, by_rows = made
        whole = o.set(by_rows)
        fd.add_output(by_columns)
        fd.add_output(whole)
    cut(columns, 1, 4, mesh, uneven=False)
    for tv in (rows, by_rows):
        cut(tv, 0, 4, mesh, uneven=False)
    whole.set_device_mesh(mesh)
    plan = plan_of(fd, ROWS)
    assert [s.scheduler for s in plan.segments] == ["exchange", "exchange"]
    assert plan.apart is not None
    monkeypatch.setattr(exchange_forms, "HAVE_RUN", {f: n for f, n in HAVE_RUN.items() if f is not Form.FURTHER})
    chosen = with_exchanges(plan.apart, is_by_default=True)
    assert sorted(s.scheduler for s in chosen.segments) == ["communication", "exchange", "persistent"]
    assert "have not run over GPUs yet" in chosen.in_kernel[1]


def test_rows_are_gathered_alone_where_the_sum_itself_is_read() -> None:
    plan = plan_of(define(gives_sum=True), ROWS)
    assert [s.scheduler for s in plan.segments] == ["communication", "exchange"]
    ((_, kernel),) = exchanging(plan)
    assert exchanged_form(kernel) is Form.GATHERED
    assert plan.in_kernel[1] == "T11: exchanged inside of a kernel"


@pytest.mark.parametrize(("axis", "shift"), [(0, ROWS // 2 * 4 * N), (1, 4 // 2 * N)])
def test_rows_may_be_cut_along_any_axis(axis: int, shift: int) -> None:
    kernel = kernel_of(plan_of(define(axis=axis), ROWS))
    assert kernel.rank_exchange.shift == shift
    assert kernel.space.kept == ROWS * 4 // 2


def test_ranks_beside_its_mesh() -> None:
    """Of a program of four ranks, of which two have the mesh."""
    fd = define()
    with fd:
        other = fd.define_tensor([4, N], contiguity=True)
        fd.add_output(fd.ops.add(other, other))
        other.set_device_mesh(DeviceMesh(range(4)))
    plan = plan_of(fd, ROWS)
    assert exchanging(plan) == []
    assert "not on its mesh" in plan.in_kernel[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence", [8, 1024])
def test_a_backward_that_adds_up_columns_keeps_its_collectives(sequence: int, bias: bool) -> None:
    """Of the module that has such a forward: one kernel makes rows and column sums."""
    module = AddRMSNorm(
        N, bias=bias, mesh=DeviceMesh(range(2)), input=Partial(), residual=Shard(0), output=Replicate(),
        output_grad=Partial(), parameters="local", device="meta",
    )  # fmt: skip
    x = torch.empty(sequence, 2, N, dtype=torch.bfloat16, device="meta")
    op = module.op(x, x[: sequence // 2])
    plans: list[Plan] = []
    for fd in op.fusions:
        settle_inputs(fd.fusion)
        tensors = [i.val for i in fd.fusion.inputs]
        sizes = {tv: sized(tv.shape, sequence) for tv in tensors}
        plans.append(with_exchanges(compile_fusion(fd.fusion, sizes, device=H200, has_cheap_sums=True)))
    forward, backward = plans
    assert exchanged_form(kernel_of(forward)) is Form.SCATTERED
    assert "communication" in [s.scheduler for s in backward.segments]
    assert all(said for said in backward.in_kernel)


def sized(shape: Sequence[int], sequence: int) -> tuple[int, ...]:
    """[..., sequence, batch, N], of which the first ones are not known before."""
    known = dict(zip(range(-3, 0), (sequence, 2, N), strict=True))
    return tuple(known[k - len(shape)] if n < 0 else n for k, n in enumerate(shape))
