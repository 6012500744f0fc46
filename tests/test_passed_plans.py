"""Plans, and kernels for a GPU, of partial sums of more than two ranks that ranks pass on."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from exchange_cases import PARTIAL, define, kernel_of
from exchange_passed import PROGRAMS

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.codegen import generate
from shardfuse.compiler import Plan, compile_fusion
from shardfuse.device import H200
from shardfuse.executor.options import CompileOptions
from shardfuse.frontend.exchanges import with_exchanges_here
from shardfuse.in_kernel import exchanging, with_exchanges
from shardfuse.ir.tensor_view import TensorView
from shardfuse.passes.settle_inputs import settle_inputs
from shardfuse.schedulers import exchange_forms
from shardfuse.schedulers.exchange_forms import Form, exchanged_form
from shardfuse.schedulers.plan import KernelPlan

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import compile_all

BF16 = DataType.BFloat16
N = 8192


def planned(fd: FusionDefinition, rows: int, *, passes_sums: bool = True) -> Plan:
    settle_inputs(fd.fusion)
    sizes = {i.val: tuple(rows if n < 0 else n for n in i.val.shape) for i in fd.fusion.inputs}
    plan = compile_fusion(fd.fusion, sizes, device=H200, has_cheap_sums=True, passes_sums=passes_sums)
    return with_exchanges(plan)


def kernel(ranks: int, rows: int, n: int = N) -> KernelPlan:
    return kernel_of(planned(define(PARTIAL, n, ranks, BF16), rows))


def normed(fd: FusionDefinition, total: TensorView) -> TensorView:
    o = fd.ops
    return o.mul(total, o.rsqrt(o.mean(o.mul(total, total), [-1], keepdim=True)))


def shard(*tensors: TensorView, ranks: int = 4) -> None:
    """Along their first dim, which has an element for each rank."""
    for x in tensors:
        x.set_device_mesh(DeviceMesh(range(ranks)))
        x.axis(0).parallelize(ParallelType.mesh_x)


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
    return with_exchanges_here(make(), tuple(range(ranks)), options, make)


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
@pytest.mark.parametrize("how", ["symmetric", "auto"])
def test_float32_sums_are_added_up_by_all_as_long_as_two_steps_of_them_send_as_much(how: str) -> None:
    """A sum of twice as many bytes would be gathered in the second step."""
    for rows, forms in ((256, [Form.ROWS]), (512, [Form.ROWS]), (513, [])):
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, -1, N], contiguity=True, dtype=BF16)
            fd.add_output(fd.ops.cast(normed(fd, fd.ops.sum(fd.ops.cast(x, DataType.Float), [0])), BF16))
        shard(x)
        assert [exchanged_form(k) for _, k in exchanging(made_here(fd, rows, 4, how))] == forms


@pytest.mark.usefixtures("_in_reach")
@pytest.mark.parametrize("how", ["symmetric", "auto"])
def test_sums_that_no_kernel_takes_are_no_gather_of_all_summands(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pointwise reader, also beside a larger gather of something else."""
    monkeypatch.setattr("shardfuse.in_kernel.HAVE_RUN", dict.fromkeys(Form, ""))
    for is_beside in (False, True):
        with FusionDefinition() as fd:
            o, mesh = fd.ops, DeviceMesh(range(4))
            x = fd.define_tensor([4, -1, N], contiguity=True, dtype=BF16)
            fd.add_output(o.cast(o.tanh(o.cast(o.sum(x, [0]), DataType.Float)), BF16))
            if is_beside:
                z = fd.define_tensor([-1, 8 * N], contiguity=True, dtype=BF16)
                fd.add_output(whole := o.set(z))
        shard(x)
        if is_beside:
            z.set_device_mesh(mesh)
            z.outer_split(1, 4)
            z.axis(1).parallelize(ParallelType.mesh_x)
            whole.set_device_mesh(mesh)
        found = made_here(fd, 4096, 4, how)
        sent = [s.segment for s in found.segments if s.scheduler == "communication"]
        of_summands = [t for s in sent for t in s.outputs if t.ndim == 3]
        assert sum(t.domain.local_elements for t in of_summands) <= 4096 * N


@pytest.mark.usefixtures("_in_reach")
@pytest.mark.parametrize("how", ["symmetric", "auto"])
def test_what_a_kernel_exchanges_beside_such_a_sum_stays(how: str) -> None:
    """A LayerNorm over a sharded axis, whose variance is two sums there."""
    with FusionDefinition() as fd:
        o = fd.ops
        x = fd.define_tensor([4, -1, N], contiguity=True, dtype=BF16)
        z = fd.define_tensor([-1, 1024], contiguity=True, dtype=BF16)
        fd.add_output(normed(fd, o.sum(o.cast(x, DataType.Float), [0])))
        wide = o.cast(z, DataType.Float)
        var, mean = o.var_mean(wide, [-1], correction=0, keepdim=True)
        fd.add_output(o.cast(o.mul(o.sub(wide, mean), o.rsqrt(o.add(var, 1e-5))), BF16))
    shard(x)
    z.set_device_mesh(DeviceMesh(range(4)))
    z.outer_split(1, 4)
    z.axis(1).parallelize(ParallelType.mesh_x)
    assert [exchanged_form(k) for _, k in exchanging(made_here(fd, 4096, 4, how))] == [Form.STATISTICS]


def test_sums_are_passed_on_that_are_rounded_to_the_type_of_the_summands() -> None:
    """Once: what every rank is given then is what it would have added up."""
    for dtype, rounded, form in (
        (BF16, BF16, Form.PASSED),
        (BF16, None, Form.ROWS),
        (BF16, DataType.Half, Form.ROWS),
        (DataType.Half, None, Form.ROWS),
        (DataType.Half, DataType.Half, Form.PASSED),
    ):
        with FusionDefinition() as fd:
            o = fd.ops
            x = fd.define_tensor([4, -1, N], contiguity=True, dtype=dtype)
            total = o.sum(o.cast(x, DataType.Float), [0])
            total = total if rounded is None else o.cast(o.cast(total, rounded), DataType.Float)
            fd.add_output(o.cast(normed(fd, total), dtype))
        shard(x)
        assert exchanged_form(kernel_of(planned(fd, 128))) is form


def test_sums_that_are_read_before_they_are_rounded_are_not_passed_on() -> None:
    with FusionDefinition() as fd:
        o = fd.ops
        x = fd.define_tensor([4, -1, N], contiguity=True, dtype=BF16)
        total = o.sum(o.cast(x, DataType.Float), [0])
        fd.add_output(o.cast(normed(fd, o.cast(o.cast(total, BF16), DataType.Float)), BF16))
        fd.add_output(total)
    shard(x)
    assert exchanged_form(kernel_of(planned(fd, 128))) is Form.ROWS
    large = planned(fd, 4096)
    assert exchanging(large) == []
    assert "each rank would be given all 4 summands" not in large.in_kernel[0], "two collectives were planned"


def test_many_values_of_a_row_are_in_more_warps() -> None:
    with FusionDefinition() as fd:
        o = fd.ops
        x = fd.define_tensor([8, -1, 64], contiguity=True, dtype=BF16)
        others = [fd.define_tensor([-1, 64], contiguity=True, dtype=BF16) for _ in range(20)]
        total = o.cast(o.sum(x, [0]), DataType.Float)
        added = [o.add(total, other) for other in others]
        scale = o.rsqrt(o.mean(o.mul(total, total), [-1], keepdim=True))
        for v in added:
            scale = o.add(scale, o.mean(v, [-1], keepdim=True))
        for v in added:
            fd.add_output(o.cast(o.mul(v, scale), BF16))
    shard(x, ranks=8)
    assert exchanged_form(kernel_of(planned(fd, 65000))) is Form.PASSED


def test_kernels_compile_with_next_to_nothing_in_local_memory() -> None:
    """But for rows of 16384 of 8 ranks, of which a thread has 32 values and 8 summands of each chunk of them."""
    sizes = [(3, 1024), (3, 8192), (4, 4096), (4, 5120), (4, 8192), (4, 16384), (4, 12344), (8, 4096), (8, 8192)]
    plans = [kernel(ranks, 8192, n) for ranks, n in [*sizes, (8, 16384)]]
    assert {exchanged_form(p) for p in plans} == {Form.PASSED}
    found = compile_all([generate(p, {t: t.domain.layout(0) for t in p.segment.tensors}, 0) for p in plans])
    assert max(made.spills for made in found[:-1]) <= 40
    assert found[-1].spills <= 376


def test_a_loop_over_rows_has_names_of_its_own() -> None:
    """Offsets of a draw by index, and of blocks, are of other types than those of the row in front of the loop."""
    made = []
    for is_drawn in (True, False):
        with FusionDefinition() as fd:
            o = fd.ops
            x = fd.define_tensor([4, -1, 4096], contiguity=True, dtype=BF16)
            total = o.cast(o.sum(x, [0]), DataType.Float)
            if is_drawn:
                fd.add_output(o.cast(normed(fd, o.dropout(total, 0.5, rng_seed=3, rng_offset=4)), BF16))
            else:
                blocks = o.reshape(normed(fd, total), [o.size(total, 0), 32, 128])
                scale = o.div(o.max(o.abs(blocks), [-1], keepdim=True), 448.0)
                fd.add_output(o.cast(o.reshape(o.div(blocks, scale), [o.size(total, 0), 4096]), DataType.Float8_e4m3fn))
                fd.add_output(o.reshape(scale, [o.size(total, 0), 32]))
        shard(x)
        plan = kernel_of(planned(fd, 8192))
        assert exchanged_form(plan) is Form.PASSED
        made.append(generate(plan, {t: t.domain.layout(0) for t in plan.segment.tensors}, 0))
    assert all(resources.spills <= 72 for resources in compile_all(made))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_tests_on_ranks_are_one_kernel(name: str) -> None:
    fd = PROGRAMS[name].fusion(4, 4096, BF16)
    settle_inputs(fd.fusion)
    sizes = {i.val: tuple({-1: 20}.get(n, n) for n in i.val.shape) for i in fd.fusion.inputs}
    plan = with_exchanges(compile_fusion(fd.fusion, sizes, device=H200, has_cheap_sums=True))
    assert exchanged_form(kernel_of(plan)) is PROGRAMS[name].form
