"""Plans, and kernels for a GPU, of partial sums of more than two ranks that ranks pass on."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from exchange_cases import PARTIAL, define, kernel_of, plan_of
from exchange_passed import PROGRAMS

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.codegen import generate
from shardfuse.compiler import Plan, compile_fusion
from shardfuse.device import H200
from shardfuse.executor.options import CompileOptions
from shardfuse.frontend.exchanges import with_exchanges_here
from shardfuse.in_kernel import exchanging, with_exchanges
from shardfuse.passes.settle_inputs import settle_inputs
from shardfuse.schedulers import exchange_forms
from shardfuse.schedulers.exchange_forms import Form, exchanged_form
from shardfuse.schedulers.plan import KernelPlan

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import compile_all

BF16 = DataType.BFloat16
N = 8192


def kernel(ranks: int, rows: int, n: int = N) -> KernelPlan:
    return kernel_of(plan_of(define(PARTIAL, n, ranks, BF16), rows))


@pytest.mark.parametrize(("ranks", "least"), [(3, 206), (4, 92), (8, 27)])
def test_rows_are_passed_on_once_that_spares_more_than_another_turn_takes(ranks: int, least: int) -> None:
    """(ranks - 1) (ranks - 2) / ranks of what a rank sends, at the rate of a link, against 8 us."""
    assert exchanged_form(kernel(ranks, least - 1)) is Form.ROWS
    assert exchanged_form(kernel(ranks, least)) is Form.PASSED
    spared = least * N * 2 * (ranks - 1) * (ranks - 2) / ranks
    assert spared / H200.rates.link == pytest.approx(8.0, rel=0.04)
    assert exchanged_form(kernel(2, 1 << 14)) is Form.ROWS, "two ranks are sent no more than once all they add up"


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_each_turn_has_a_row_of_each_rank(ranks: int) -> None:
    plan = kernel(ranks, 1000)
    assert plan.turns == -(-1000 // ranks)
    texts = [generate(plan, {t: t.domain.layout(k) for t in plan.segment.tensors}, k) for k in (0, ranks - 1)]
    assert texts[0].text == texts[1].text, "which rank it is comes in its table"
    assert f"tl.cdiv(i0, {ranks})" in texts[0].text
    few = kernel(4, 100)
    source = generate(few, {t: t.domain.layout(0) for t in few.segment.tensors}, 0)
    assert (few.rank_exchange.is_claimed, source.grid) == (False, 25)


def made_here(fd: FusionDefinition, rows: int, ranks: int, how: str) -> Plan:
    """As a call makes it."""
    settle_inputs(fd.fusion)
    sizes = {i.val: tuple(rows if n < 0 else n for n in i.val.shape) for i in fd.fusion.inputs}
    make = partial(compile_fusion, fd.fusion, sizes, device=H200)
    options = CompileOptions(exchange=how)
    return with_exchanges_here(make(), tuple(range(ranks)), options, partial(make, has_cheap_sums=True))


@pytest.fixture
def _in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("why_no_exchange", "why_out_of_reach"):
        monkeypatch.setattr(f"shardfuse.frontend.exchanges.{name}", lambda *of: None)


@pytest.mark.usefixtures("_in_reach")
@pytest.mark.parametrize("rows", [128, 512, 8192])
def test_a_form_that_has_not_run_leaves_what_there_was(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = define(PARTIAL, N, 4, BF16)
    assert [exchanged_form(k) for _, k in exchanging(made_here(fd, rows, 4, "symmetric"))] == [Form.PASSED]
    for names in (True, False):
        forms = {f: "" for f in Form if names or f is not Form.PASSED}
        monkeypatch.setattr("shardfuse.in_kernel.HAVE_RUN", forms)
        monkeypatch.setattr(exchange_forms, "HAVE_RUN", forms)
        found = [exchanged_form(k) for _, k in exchanging(made_here(fd, rows, 4, "auto"))]
        assert found == ([Form.PASSED] if names else [Form.ROWS] if rows == 128 else [])


@pytest.mark.usefixtures("_in_reach")
def test_a_gather_of_all_summands_is_not_taken_for_fewer_collectives() -> None:
    """Of a sum that a kernel adds up in two steps, and of one that is read by no kernel that holds its rows."""
    with FusionDefinition() as fd:
        o, mesh = fd.ops, DeviceMesh(range(4))
        given = [fd.define_tensor([4, -1, N], contiguity=True, dtype=BF16) for _ in range(2)]
        sums = [o.sum(o.cast(x, DataType.Float), [0]) for x in given]
        fd.add_output(o.cast(o.mul(sums[0], o.rsqrt(o.mean(o.mul(sums[0], sums[0]), [-1], keepdim=True))), BF16))
        fd.add_output(o.cast(o.tanh(sums[1]), BF16))
    for x in given:
        x.set_device_mesh(mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
    plan = made_here(fd, 4096, 4, "symmetric")
    largest = max(t.domain.local_elements for s in plan.segments for t in s.segment.outputs)
    assert largest == 4096 * N, [str(s.segment) for s in plan.segments]


def test_a_float32_result_is_of_sums_that_are_not_rounded() -> None:
    """Where the sum itself is in 16 bits, nothing is lost."""
    for is_rounded in (False, True):
        with FusionDefinition() as fd:
            o = fd.ops
            x = fd.define_tensor([4, -1, N], contiguity=True, dtype=BF16)
            total = o.cast(o.sum(x, [0]), DataType.Float) if is_rounded else o.sum(o.cast(x, DataType.Float), [0])
            fd.add_output(o.mul(total, o.rsqrt(o.mean(o.mul(total, total), [-1], keepdim=True))))
        x.set_device_mesh(DeviceMesh(range(4)))
        x.axis(0).parallelize(ParallelType.mesh_x)
        plan = plan_of(fd, 256)
        assert exchanged_form(kernel_of(plan)) is (Form.PASSED if is_rounded else Form.ROWS)


def test_summands_that_are_read_beside_their_sum_are_not_passed_on() -> None:
    with FusionDefinition() as fd:
        o = fd.ops
        x = fd.define_tensor([4, -1, N], contiguity=True, dtype=BF16)
        total = o.sum(o.cast(x, DataType.Float), [0])
        fd.add_output(o.cast(o.mul(total, o.rsqrt(o.mean(o.mul(total, total), [-1], keepdim=True))), BF16))
        fd.add_output(total)
    x.set_device_mesh(DeviceMesh(range(4)))
    x.axis(0).parallelize(ParallelType.mesh_x)
    plan = plan_of(fd, 4096)
    assert exchanging(plan) == []
    assert "each rank would be given all 4 summands, 134217728 bytes more than in two steps" in plan.in_kernel[0]


def test_kernels_compile_with_next_to_nothing_in_local_memory() -> None:
    """But for rows of 16384 of 8 ranks, of which a thread has 32 values and 8 summands of each chunk of them."""
    sizes = [(3, 1024), (3, 8192), (4, 4096), (4, 5120), (4, 8192), (4, 16384), (4, 12344), (8, 4096), (8, 8192)]
    plans = [kernel(ranks, 8192, n) for ranks, n in [*sizes, (8, 16384)]]
    assert {exchanged_form(p) for p in plans} == {Form.PASSED}
    found = compile_all([generate(p, {t: t.domain.layout(0) for t in p.segment.tensors}, 0) for p in plans])
    assert max(made.spills for made in found[:-1]) <= 40
    assert found[-1].spills <= 376


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_tests_on_ranks_are_one_kernel(name: str) -> None:
    fd = PROGRAMS[name].fusion(4, 4096, BF16)
    settle_inputs(fd.fusion)
    sizes = {i.val: tuple({-1: 40}.get(n, n) for n in i.val.shape) for i in fd.fusion.inputs}
    plan = with_exchanges(compile_fusion(fd.fusion, sizes, device=H200, has_cheap_sums=True))
    assert exchanged_form(kernel_of(plan)) is Form.PASSED
