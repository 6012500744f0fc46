"""Which programs exchange statistics inside of a kernel, why the others do not, and which memory a program has.

Numbers: ``tests/interpreter/test_exchange_kernels.py``, and on GPUs ``tests/gpu`` and ``tests/multirank``.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchange_cases import (
    KINDS,
    LOSS,
    PARTIAL,
    NotedKernel,
    Ranks,
    define,
    define_backward,
    kernel_of,
    plan_of,
    with_room,
)
from exchange_fusions import BACKWARD, LOG_PROB, OF_COLUMNS, OF_SUMMANDS, PROGRAMS, SOFTMAX_BACKWARD, cut_columns
from exchange_images import LONG, ImageNorm
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.codegen import KernelSource, generate
from shardfuse.codegen.mesh_exchange import Reported, exchanged_rows, slots_of, table
from shardfuse.compiler import Plan, compile_fusion
from shardfuse.device import H200, Device
from shardfuse.errors import KernelCompileError
from shardfuse.executor import fitting, symmetric_slots
from shardfuse.executor.binding import Bound
from shardfuse.executor.comparison import Made
from shardfuse.executor.kernel import Launch
from shardfuse.executor.options import CompileOptions
from shardfuse.frontend import exchanges, executor_cache
from shardfuse.frontend.bound_call import BoundCall
from shardfuse.frontend.exchanges import plan_on, promises, with_exchanges_here
from shardfuse.in_kernel import exchanging, with_exchanges
from shardfuse.mesh import symmetric
from shardfuse.mesh.symmetric import Arena
from shardfuse.nn import GroupNorm
from shardfuse.passes.settle_inputs import settle_inputs
from shardfuse.rank_errors import ExchangeTimeoutError, ExchangeUnavailableError
from shardfuse.schedulers.exchange_forms import HAVE_RUN, Form, exchanged_form
from shardfuse.schedulers.plan import KernelPlan
from shardfuse.segments import overlap

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import compile_all

BF16 = DataType.BFloat16
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 4096])
def test_a_norm_over_a_sharded_axis_is_one_kernel(kind: str, rows: int) -> None:
    plan = plan_of(define(kind, 8192, 2, BF16), rows)
    kernel = kernel_of(plan)
    assert [said.split(": ")[1] for said in plan.in_kernel] == ["exchanged inside of a kernel"] * len(plan.in_kernel)
    assert len(kernel.exchange.statistics) == {"layer_norm": 2, "softmax": 2, PARTIAL: 0}.get(kind, 1)
    assert (kernel.exchange.sent is None) == (kind != PARTIAL)
    assert kernel.exchange.is_in_rows == (kind == PARTIAL and rows > 8)  # words that are flags are twice as many
    assert plan.apart is not None
    assert any(s.scheduler == "communication" for s in plan.apart.segments)


@pytest.mark.parametrize(
    ("kind", "rows", "warps", "registers"),
    [
        ("rms_norm", 100, 16, 128),  # a row for each multiprocessor
        ("rms_norm", 256, 4, 128),
        ("rms_norm", 512, 2, 128),  # 4 warps would have 64 registers
        ("layer_norm", 800, 2, 128),
        ("softmax", 801, 4, 64),  # not all wait at once
        (PARTIAL, 512, 8, 64),
    ],
)
def test_rows_that_wait_at_once_have_few_warps_rather_than_few_registers(
    kind: str, rows: int, warps: int, registers: int
) -> None:
    launch = kernel_of(plan_of(define(kind, 8192, 2, BF16), rows)).schedule.launch
    assert (launch.warps, launch.registers) == (warps, registers)


@pytest.mark.parametrize("kind", [*OF_SUMMANDS, *OF_COLUMNS])
@pytest.mark.parametrize("rows", [1, 8, 512])
def test_a_norm_that_is_cast_to_float8_is_one_kernel(kind: str, rows: int) -> None:
    """With scales of its rows or blocks; programs that share a row have whole blocks of it."""
    kernel = kernel_of(plan_of(define(kind, 8192, 2, BF16), rows))
    exchange = kernel.exchange
    assert (exchange.sent is not None) == (kind in OF_SUMMANDS)
    assert len(exchange.statistics) == (0 if kind in OF_SUMMANDS else 2 if "row" in kind else 1)
    assert exchange.members == (4 if kind in OF_SUMMANDS and rows <= 8 else 1)
    assert kernel.space.block_size == (128 if "block" in kind else 1)


@pytest.mark.parametrize("kind", [LOG_PROB, SOFTMAX_BACKWARD, *BACKWARD])
def test_a_program_of_a_module_is_one_kernel(kind: str) -> None:
    """But for the sums over rows that a weight's gradient is, and views of statistics that are results."""
    plan = plan_of(define(kind, 8192, 2, BF16), 8, columns=8192)
    views = ["no_op"] * (kind == LOG_PROB)
    assert [s.scheduler for s in plan.segments] == [*["reduction"] * (kind in BACKWARD), "exchange", *views]
    assert all(said.endswith("exchanged inside of a kernel") for said in plan.in_kernel)


@pytest.mark.parametrize("of_columns", [False, True])
def test_a_mean_of_rows_is_added_up_behind_the_kernel_that_exchanges(of_columns: bool) -> None:
    """Of numbers of rows alone: what sums of columns read would be stored for them."""
    with FusionDefinition() as fd:
        o, x = fd.ops, fd.define_tensor([-1, 8192], contiguity=True)
        total = o.sum(x, [1], keepdim=True)
        scaled = o.mul(x, total) if of_columns else o.log(total)
        fd.add_output(scaled)
        fd.add_output(o.mean(scaled, [0]))
        x.set_device_mesh(DeviceMesh(range(2)))
        x.outer_split(1, 2)
        x.axis(1).parallelize(ParallelType.mesh_x)
    if of_columns:
        assert "no kernel exchanges it" in refused(fd, 8)
        return
    plan = plan_of(fd, 8)
    assert [s.scheduler for s in plan.segments] == ["exchange", "reduction"]
    ((_, kernel),) = exchanging(plan)
    assert [t.domain.local_elements for t in plan.segments[1].segment.inputs] == [8]
    assert all(t.domain.local_elements == 8 for t in kernel.segment.outputs)


def test_readers_of_what_ranks_send_are_one_kernel_where_a_row_of_all_summands_is_too_long() -> None:
    """A group of programs holds the ranks' summands of 16384 elements; of a kernel that sends its own one program."""
    plan = plan_of(define("float8 of summands, block", 16384, 2, BF16), 8)
    assert plan.apart is not None
    assert [s.scheduler for s in plan.apart.segments] == ["communication", "persistent", "no_op"]
    assert kernel_of(plan).space.reduced == 16384


def test_blocks_that_ranks_share_are_moved_to_one_of_them() -> None:
    """The norm's statistic is exchanged all the same."""
    plan = plan_of(define("float8 of columns, block", 640, 2, BF16), 8)
    assert [said.split(": ")[1] for said in plan.in_kernel] == [
        "exchanged inside of a kernel",
        "no kernel exchanges it",
    ]
    assert {kernel.space.block_size for _, kernel in exchanging(plan)} == {1}


def test_column_sums_of_a_backward_are_a_kernel_of_their_own() -> None:
    """Where reading the rows twice is cheap; else one kernel reads them once, and a collective stays."""
    plan = plan_of(define_backward(8192, 2, BF16), 64)
    assert [s.scheduler for s in plan.segments] == ["reduction", "exchange"]
    large = plan_of(define_backward(8192, 2, BF16), 4096)
    assert [s.scheduler for s in large.segments] == ["mix_order", "communication", "pointwise"]
    assert "no kernel exchanges it" in large.in_kernel[0]


def test_a_gather_is_kept_where_a_kernel_cannot_do_both_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variance is one gather where collectives do it; where kernels do, it is two sums."""
    fd = define("layer_norm", 8192, 2, BF16)
    plan_of(fd, 8)  # settles what is not said
    sizes = {i.val: tuple(8 if n < 0 else n for n in i.val.shape) for i in fd.fusion.inputs}

    def make(*, has_cheap_sums: bool = False):
        return compile_fusion(fd.fusion, sizes, device=H200, has_cheap_sums=has_cheap_sums)

    options = CompileOptions()
    monkeypatch.setattr("shardfuse.frontend.exchanges.why_no_exchange", lambda ranks, options: None)
    plan = with_exchanges_here(make(), (0, 1), options, make)
    assert [s.scheduler for s in plan.segments] == ["exchange"]
    apart = plan_on(plan, "", torch.device("cpu"), options)
    assert [s.scheduler for s in apart.segments] == ["persistent", "communication", "persistent", "pointwise"]
    assert apart.in_kernel == ("none: tensors are on cpu",)
    monkeypatch.setattr("shardfuse.frontend.exchanges.why_no_exchange", lambda ranks, options: "no reason")
    assert with_exchanges_here(make(), (0, 1), options, make).in_kernel == ("none: no reason",)


def refused(fd: FusionDefinition, rows: int, device: Device = H200) -> str:
    plan = plan_of(fd, rows, device)
    assert plan.apart is None
    assert exchanging(plan) == []
    return plan.in_kernel[0]


def test_what_no_kernel_exchanges_says_why() -> None:
    assert "reduces nothing on this rank" in refused(define("rms_norm", 3, 4, BF16), 8)
    assert "16 ranks are more than 8" in refused(define("rms_norm", 8192, 16, BF16), 8)
    assert "more than 65536" in refused(define("rms_norm", 1024, 2, BF16), 70000)
    assert "67117056 bytes is more than 67108864" in refused(define("rms_norm", 8192, 2, BF16), 8193)
    assert "bytes is more than 67108864" in refused(define(LOSS, 32768, 2, BF16), 4096)
    assert "560000 bytes of a row that one program reads take 14.1 us, two kernels and a collective 13.1" in refused(
        define("rms_norm", 280000, 2, BF16), 8, with_room(8)
    )
    assert "600000 bytes of a row that one program reads take" in refused(
        define("softmax", 200000, 2, BF16), 8, with_room(8)
    )
    assert "101 rows, which no program holds, are more than the 100" in refused(
        define("rms_norm", 131076, 2, BF16), 101
    )
    blocks = define("float8 of columns, block", 128 * 600, 2, BF16)
    assert "bytes of input, more than 65536" in " ".join(plan_of(blocks, 8).in_kernel)
    assert "not cut into whole words" in refused(define(PARTIAL, 8196, 2, BF16), 4)


@pytest.mark.parametrize(("members", "form"), [(1, Form.LONG), (4, Form.SHARED)])
def test_rows_that_no_program_holds_do_not_spill(members: int, form: Form) -> None:
    """A row has all warps of a multiprocessor, or of four; weights of groups are numbers of a turn."""
    largest = [(LOSS, 131072), ("add_rms_norm", 120000), ("softmax", 260000), ("layer_norm", 2 * 129999)]
    defined = largest if members > 1 else [(LOSS, 40000), ("add_rms_norm", 80000), ("softmax", 80000)]
    plans = [kernel_of(plan_of(define(kind, n, 2, BF16), 3, with_room(3, members))) for kind, n in defined]
    plans += [norm.plan(with_room(norm.rows, members)) for norm in LONG]
    assert [exchanged_form(plan) for plan in plans] == [form] * len(plans)
    assert [plan.schedule.launch.warps for plan in plans] == [16] * len(plans)
    assert members > 1 or [plan.schedule.reduced for plan in plans[-2:]] == [512, 512]
    made = compile_all([generate(p, {t: t.domain.layout(0) for t in p.segment.tensors}, 0) for p in plans])
    assert [resources.spills for resources in made] == [0] * len(plans)


def test_several_programs_hold_a_row_where_all_run_at_once() -> None:
    """As many as there are multiprocessors for, each with 8 KB of a row at least and 64 at most."""
    found = [kernel_of(plan_of(define("rms_norm", 131072, 2, BF16), rows)) for rows in (1, 8, 12, 13, 25, 50, 51)]
    assert [plan.rank_exchange.members for plan in found] == [8, 8, 8, 4, 4, 2, 1]
    assert [plan.schedule.members for plan in found] == [8, 8, 8, 4, 4, 2, 0]
    assert [exchanged_form(plan) for plan in found] == [Form.SHARED] * 6 + [Form.LONG]
    sources = [generate(p, {t: t.domain.layout(0) for t in p.segment.tensors}, 0) for p in found]
    assert [source.grid for source in sources] == [8, 64, 96, 52, 100, 100, 51]
    assert not any(source.is_cooperative for source in sources)
    assert [slots_of(plan) for plan in found] == [2 * p.space.kept * 2 * p.rank_exchange.members for p in found]
    of_eight = kernel_of(plan_of(define("rms_norm", 8 * 60000, 8, BF16), 3))
    assert of_eight.rank_exchange.members == 2, "16 programs of all ranks share a row at most"


def test_the_kernel_of_a_rank_that_has_nothing_compiles() -> None:
    """Of five rows of each image the last of four ranks has none: where a weight of its channel is divides by none."""
    for norm in (ImageNorm((2, 8, 5, 256), 2, 2, 4), ImageNorm((5, 6, 56, 56), 0, 0, 4)):
        plan = norm.plan()
        assert exchanged_form(plan) is Form.NONE_SOMEWHERE
        sources = [generate(plan, {t: t.domain.layout(r) for t in plan.segment.tensors}, r) for r in (0, 2, 3)]
        assert [made.spills for made in compile_all(sources)] == [0, 0, 0]


def test_a_rank_that_has_none_of_single_elements_is_not_exchanged_with() -> None:
    """One image for each of three ranks is no axis of a kernel, which would read some on the fourth."""
    with pytest.raises(AssertionError, match="one element along a dim of some ranks, and none of others"):
        ImageNorm((3, 2, 16, 16), 0, 0, 4).plan()


def test_blocks_of_which_a_rank_has_none_keep_their_collective() -> None:
    with FusionDefinition() as fd:
        given = fd.define_tensor([-1, 5, 128], contiguity=True, dtype=BF16)
        x = fd.ops.cast(given, DataType.Float)
        y = fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(x, x), [1, 2], keepdim=True), 1e-5)))
        scale = fd.ops.maximum(fd.ops.max(fd.ops.abs(y), [-1], keepdim=True), 1e-12)
        fd.add_output(scale)
        fd.add_output(fd.ops.cast(fd.ops.div(y, scale), DataType.Float8_e4m3fn))
    given.set_device_mesh(DeviceMesh(range(4)))
    given.outer_split(1, 4, uneven=True)
    given.axis(1).parallelize(ParallelType.mesh_x)
    settle_inputs(fd.fusion)
    sizes = {i.val: (3, 5, 128) for i in fd.fusion.inputs}
    plan = with_exchanges(compile_fusion(fd.fusion, sizes, device=H200, has_cheap_sums=True))
    assert exchanging(plan) == []
    assert "nothing of its rows, which are cut into blocks" in plan.in_kernel[0]


@pytest.mark.parametrize("n", [48000, 65536])
def test_the_longest_rows_that_a_program_holds(n: int) -> None:
    """By 32 warps, which have 64 registers each."""
    plan = kernel_of(plan_of(define("rms_norm", n, 2, BF16), 3))
    assert (plan.schedule.launch.warps, plan.schedule.launch.registers) == (32, 64)
    (made,) = compile_all([generate(plan, {t: t.domain.layout(0) for t in plan.segment.tensors}, 0)])
    assert made.spills == 0


def test_no_row_is_read_again_where_a_collective_stays() -> None:
    """Of a softmax the largest element alone would be exchanged in time, the sum behind it not; of the gradient of a
    group norm that of the weight keeps its collective, which the rest shares."""
    assert "no one kernel has all that is reduced" in refused(define("softmax", 168000, 2, BF16), 60)
    module = GroupNorm(32, 640, mesh=DeviceMesh(range(2)), input=Shard(2), parameters="local")
    image = torch.empty(2, 640, 32, 64, dtype=torch.bfloat16, device="meta")
    backward = module.bind([image, *(p.detach() for p in module.parameters())], None).backward.fusion
    settle_inputs(backward)
    whole = (2, 640, 64, 64)
    sizes = {i.val: tuple(w if n < 0 else n for n, w in zip(i.val.shape, whole, strict=False)) for i in backward.inputs}
    for is_by_default in (True, False):
        plan = compile_fusion(backward, sizes, device=H200, has_cheap_sums=True)
        made = with_exchanges(plan, is_by_default=is_by_default)
        assert [s.scheduler for s in made.segments] == ["reduction", "reduction", "communication", "pointwise"]
        assert "no one kernel has all that is reduced of them" in made.in_kernel[0]


def test_short_rows_of_which_a_rank_has_nothing_are_exchanged_behind_a_collective() -> None:
    """Where kernels are asked for: what is said of long rows is not said of them."""
    with FusionDefinition() as fd:
        given = fd.define_tensor([-1, 10], contiguity=True, dtype=BF16)
        x = fd.ops.cast(given, DataType.Float)
        scaled = fd.ops.div(x, fd.ops.add(fd.ops.max(fd.ops.abs(x), [0, 1], keepdim=True), 1.0))
        fd.add_output(fd.ops.sub(scaled, fd.ops.mean(scaled, [-1], keepdim=True)))
    cut_columns(given, 8, 10)
    plan = plan_of(fd, 13)
    assert [exchanged_form(k) for _, k in exchanging(plan)] == [Form.NONE_SOMEWHERE]


def test_a_product_beside_a_norm() -> None:
    """Of 80 KB a row together.  One kernel would have to read rows again: the norm, of 40 KB, is one that holds them,
    and the product another."""
    with FusionDefinition() as fd:
        given, other = (fd.define_tensor([-1, 40000], contiguity=True, dtype=BF16) for _ in range(2))
        x, y = (fd.ops.cast(t, DataType.Float) for t in (given, other))
        rstd = fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True), 1e-5))
        fd.add_output(fd.ops.cast(fd.ops.mul(x, rstd), BF16))
        fd.add_output(fd.ops.cast(fd.ops.mul(x, y), BF16))
    for tv in (given, other):
        cut_columns(tv, 2, 40000)
    settle_inputs(fd.fusion)
    sizes = {i.val: (100, 40000) for i in fd.fusion.inputs}
    plan = compile_fusion(fd.fusion, sizes, device=H200, has_cheap_sums=True)
    for is_by_default in (True, False):
        made = with_exchanges(plan, is_by_default=is_by_default)
        ((_, kernel),) = exchanging(made)
        kernels = [p for segment in made.segments for p in segment.kernels]
        assert (kernel.schedule.is_held, len(kernels)) == (True, 2)


def test_parts_of_an_all_reduce_are_exchanged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two norms, whose statistics one collective would have; where ranks might have other bits so, it has."""
    with FusionDefinition() as fd:
        for n in (640, 1000):
            given = fd.define_tensor([-1, n], contiguity=True, dtype=BF16)
            x = fd.ops.cast(given, DataType.Float)
            rstd = fd.ops.rsqrt(fd.ops.add(fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True), 1e-5))
            fd.add_output(fd.ops.cast(fd.ops.mul(x, rstd), BF16))
            cut_columns(given, 2, n)
    settle_inputs(fd.fusion)
    sizes = {i.val: (3, i.val.shape[-1]) for i in fd.fusion.inputs}
    plan = compile_fusion(fd.fusion, sizes, device=H200, has_cheap_sums=True)
    assert [s.scheduler for s in with_exchanges(plan).segments] == ["exchange", "exchange"]
    monkeypatch.setattr("shardfuse.in_kernel.why_not_given", lambda segment, exchange: "bits")
    left = with_exchanges(plan)
    assert left.segments == plan.segments
    assert "not made by one kernel" in left.in_kernel[0]


def test_results_that_all_ranks_have_are_made_alike_of_uneven_rows() -> None:
    """The loss of a vocabulary of odd size, or 1 / rms: of numbers of a row, where no kernel contracts anything."""
    for fd, last in ((define(LOSS, 50257, 4, BF16), 3), (define("rms_norm", 8191, 2, BF16, gives_rms=True), 1)):
        plan = kernel_of(plan_of(fd, 8))
        tensors = (*plan.segment.inputs, *plan.segment.outputs)
        sources = [generate(plan, {t: t.domain.layout(rank) for t in tensors}, rank) for rank in (0, last)]
        assert sources[0].text != sources[1].text
        assert [source.contracts for source in sources] == [False, False]
        assert all(made.spills == 0 for made in compile_all(sources))
    even = kernel_of(plan_of(define(LOSS, 50304, 4, BF16), 8))
    assert (even.exchange.is_uneven, even.exchange.is_alike) == (False, False)
    with FusionDefinition() as fd:  # each rank adds up the same 9 numbers, in an order that its kernel has
        x, y = fd.define_tensor([-1, 8191], dtype=BF16), fd.define_tensor([-1, 9])
        total = fd.ops.sum(fd.ops.cast(x, DataType.Float), [1], keepdim=True)
        fd.add_output(fd.ops.mul(total, fd.ops.sum(y, [1], keepdim=True)))
        fd.add_output(fd.ops.mul(fd.ops.cast(x, DataType.Float), total))
        x.set_device_mesh(DeviceMesh(range(2)))
        x.outer_split(1, 2, uneven=True)
        x.axis(1).parallelize(ParallelType.mesh_x)
    plan = plan_of(fd, 8)
    assert not any(p.exchange.is_alike for _, p in exchanging(plan))


def test_by_default_kernels_are_of_forms_that_have_run_on_gpus() -> None:
    """All are there where kernels are asked for."""
    for fd, form in (
        (define("layer_norm", 8191, 2, BF16), Form.UNEVEN),
        (define(LOSS, 50257, 4, BF16), Form.ALIKE),
        (define(LOSS, 50304, 4, BF16), Form.STATISTICS),
        (define(PARTIAL, 8192, 2, BF16), Form.WORDS),
        (define("float8 of summands, given", 8192, 2, BF16), Form.WORDS),
        (define("float8 of columns, row", 8192, 2, BF16), Form.STATISTICS),
        (define("float8 of summands, block", 8192, 2, BF16), Form.BLOCKS),
        (define("float8 of columns, block", 8192, 2, BF16), Form.BLOCKS),
    ):
        plan = plan_of(fd, 8)
        assert exchanged_form(kernel_of(plan)) is form
        assert plan.apart is not None
        chosen = with_exchanges(plan.apart, is_by_default=True)
        assert bool(exchanging(chosen)) == (form in HAVE_RUN)
        told = f"none: {form.value}, have not run over GPUs yet: SHARDFUSE_EXCHANGE=symmetric has them"
        assert form in HAVE_RUN or chosen.in_kernel == (told,)
    assert exchanged_form(kernel_of(plan_of(define(PARTIAL, 8192, 2, BF16), 2048))) is Form.ROWS


def test_what_alone_is_cut_unevenly_may_be_made_inside_of_the_kernel() -> None:
    """An iota of 5 over 4 ranks, of which the last has nothing, while all have every row of what is stored."""
    mesh = DeviceMesh(range(4))
    with FusionDefinition() as fd:
        x, counted = fd.define_tensor([-1, 1]), fd.ops.iota(5)
        y = fd.ops.add(x, counted)
        out = fd.ops.mul(x, fd.ops.rsqrt(fd.ops.mean(fd.ops.mul(y, y), [1], keepdim=True)))
        fd.add_output(out)
    for tv in (x, counted, out):
        tv.set_device_mesh(mesh)
    counted.outer_split(0, 4, uneven=True)
    counted.axis(0).parallelize(ParallelType.mesh_x)
    assert "what is reduced is not innermost" in refused(fd, 8)


@pytest.mark.parametrize(("rows", "is_kept"), [(8, False), (2048, True)])
def test_a_large_sum_that_other_kernels_run_beside_stays_a_collective(
    rows: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes take NVLink's time either way, and a kernel that waits for them is nothing to run beside."""
    monkeypatch.setattr(overlap, "HIDDEN_US", 0.0)  # so that the small sum has something to run beside as well
    fd = define(PARTIAL, 8192, 2, BF16)
    with fd:
        other = fd.define_tensor([-1, 8192], contiguity=True, dtype=BF16)
        fd.add_output(fd.ops.cast(fd.ops.exp(other), BF16))
        other.set_device_mesh(DeviceMesh(range(2)))
    plan = plan_of(fd, rows)
    assert any(s.is_beside for s in (plan.apart or plan).segments)
    assert (plan.apart is None) == is_kept
    assert not is_kept or plan.in_kernel[0].endswith("it runs beside other kernels, as a collective does")


def test_a_sum_that_something_else_reads_first_stays_a_collective() -> None:
    """What a rank has of the sum is an output of its own."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 1024], contiguity=True, dtype=DataType.Double)
        total = fd.ops.sum(x, [1], keepdim=True)
        fd.add_output(fd.ops.div(x, total))
        x.set_device_mesh(mesh)
        x.outer_split(1, 2)
        x.axis(1).parallelize(ParallelType.mesh_x)
    assert "a word holds a float32" in refused(fd, 8)


def test_rows_of_a_sub_mesh_are_not_those_of_all() -> None:
    """On a mesh of two dimensions the words of four lines of ranks are as many as one line has rows."""
    mesh = DeviceMesh([[0, 1], [2, 3]])
    with FusionDefinition() as fd:
        x = fd.define_tensor([64, 8192], contiguity=True, dtype=DataType.Float)
        total = fd.ops.sum(fd.ops.mul(x, x), [1], keepdim=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(total)))
        x.set_device_mesh(mesh)
        x.outer_split(1, 2)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_y)
        x.axis(2).parallelize(ParallelType.mesh_x)
    kernel = kernel_of(plan_of(fd, 64))
    assert (kernel.exchange.ranks, exchanged_rows(kernel)) == (2, 32)


def test_kernels_compile_and_are_resident() -> None:
    """No spill, and no more registers than leave every program of a grid running at once."""
    sources, each = [], []
    for kind, rows, n, ranks in (
        ("rms_norm", 1, 8192, 2),
        ("layer_norm", 4096, 16384, 8),
        ("softmax", 4096, 512, 4),
        (PARTIAL, 8, 8192, 2),
        (PARTIAL, 2048, 8192, 2),
        (PARTIAL, 24, 16384, 4),
        (LOSS, 8, 32768, 2),
        (LOSS, 8, 12288, 2),
        (LOSS, 4096, 1024, 2),
        *((kind, rows, 8192, 2) for kind in PROGRAMS for rows in (8, 512)),
    ):
        plan = kernel_of(plan_of(define(kind, n, ranks, BF16), rows, columns=n))
        tensors = (*plan.segment.inputs, *plan.segment.outputs)
        source = generate(plan, {t: t.domain.layout(ranks - 1) for t in tensors}, ranks - 1)
        first = generate(plan, {t: t.domain.layout(0) for t in tensors}, 0)
        assert source.text == first.text
        assert not source.is_cooperative, "all programs have room, and a cooperative launch takes longer"
        if plan.exchange.is_claimed:  # where as many as are placed on all multiprocessors claim the numbers of all
            assert source.grid % H200.multiprocessors == 0
            assert source.grid <= -(-plan.exchange.programs * H200.multiprocessors // (H200.multiprocessors - 32))
        else:
            assert source.grid <= plan.exchange.programs <= H200.multiprocessors - 32
        sources.append(source)
        each.append(-(-plan.exchange.programs // (H200.multiprocessors - 32)))
    for made, programs in zip(compile_all(sources), each, strict=True):
        assert made.spills == 0
        assert programs * made.warps * 32 * -(-made.registers // 8) * 8 <= H200.registers


def test_ranks_with_more_or_less_of_each_row_have_the_same_slots() -> None:
    plan = kernel_of(plan_of(define("layer_norm", 8191, 2, BF16), 500))
    tensors = (*plan.segment.inputs, *plan.segment.outputs)
    first, last = (generate(plan, {t: t.domain.layout(rank) for t in tensors}, rank) for rank in range(2))
    assert first.text != last.text
    assert first.grid == last.grid
    assert first.mailbox == last.mailbox
    sets = [[line for line in source.text.splitlines() if "set = " in line] for source in (first, last)]
    assert sets[0] == sets[1] != []


# memory


class FakeMesh:
    """An arena of a world of two ranks, without a GPU."""

    def __init__(self, words: int) -> None:
        self.memory = torch.zeros(words, dtype=torch.int64)
        addresses = {0: self.memory.data_ptr(), 1: 1 << 20}
        report = torch.zeros(1, dtype=torch.int64)
        self.arena = Arena(torch.device("cpu"), 0, addresses, words, 5.0, report, {0: "here", 1: "here"})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    made = FakeMesh(1 << 19)
    monkeypatch.setattr(symmetric_slots, "arena", lambda: made.arena)
    yield made
    dist.destroy_process_group()


def promised(plan: Plan, rank: int = 0) -> list[str]:
    """What the ``rank`` of a program of ranks 0 and 1 compares with the other."""
    return promises(plan, BoundCall((), Bound({}, {}, CPU), {}, {}, rank, (0, 1), ""))


def test_kernels_of_the_same_ranks_share_slots(fake: FakeMesh) -> None:
    """A larger one has others made, which smaller ones leave alone."""
    small, other, large = (
        plan_of(define(kind, 8192, 2, BF16), rows) for kind, rows in (("rms_norm", 8), ("softmax", 100), (PARTIAL, 8))
    )
    assert promised(small)[-1] == promised(other)[-1] == "segment 0 exchanges words at 0"
    assert fake.arena.used == 1 << 13
    assert slots_of(kernel_of(large)) > 1 << 16
    assert promised(large)[-1] == f"segment 0 exchanges words at {1 << 13}"
    assert promised(small)[-1] == "segment 0 exchanges words at 0"
    kernel = kernel_of(large)
    region = symmetric_slots.region_of(kernel)
    assert (region.words, region.ranks) == (fake.arena.used - (1 << 13), (0, 1))
    told, at = region.table.tolist(), 8 * region.offset
    assert told[:4] == [5_000_000_000, fake.arena.report.data_ptr(), 0, region.words // 2]
    assert told[4:] == [fake.memory.data_ptr() + at, (1 << 20) + at, 1, 2, 0, 0]


def test_rows_that_change_in_every_call_take_less_memory_than_four_times_the_most(fake: FakeMesh) -> None:
    """Of one kind of program or of several; then all find room for ever."""
    fake.arena.words = 1 << 20
    for kind in ("rms_norm", "layer_norm", "softmax"):
        for rows in (*range(1, 3000, 97), 20000):
            plan = plan_of(define(kind, 512, 2, BF16), rows)
            assert symmetric_slots.room([kernel_of(plan)]) is None
            promised(plan)
    assert fake.arena.used < 2 * 2 * slots_of(kernel_of(plan))


def test_a_wait_of_centuries_is_an_int64_of_nanoseconds() -> None:
    plan = kernel_of(plan_of(define("rms_norm", 8192, 2, BF16), 8))
    assert 0 < torch.tensor(table(plan.rank_exchange, 1e10, 0, 0, 0, [0, 0], [1, 2]))[0] <= 2**62


def test_kernels_that_send_rows_share_slots(fake: FakeMesh) -> None:
    """As many as their programs take, whatever the rows; this rank's own come first in its table."""
    many, more, few = (kernel_of(plan_of(define(PARTIAL, 8192, 2, BF16), rows)) for rows in (2048, 8192, 32))
    assert slots_of(many) == slots_of(more) == 2 * many.exchange.programs * (4 + 8192 // 4)
    fake.arena.words = 2 * slots_of(many)
    assert symmetric_slots.region_of(many) is symmetric_slots.region_of(more)
    assert fake.arena.used == slots_of(many)
    assert symmetric_slots.room([many, more]) is None
    assert symmetric_slots.region_of(few) is not symmetric_slots.region_of(many)
    assert symmetric_slots.region_of(few).table.tolist()[4:8] == [
        fake.memory.data_ptr() + 8 * slots_of(many), (1 << 20) + 8 * slots_of(many), 1, 2
    ]  # fmt: skip


def test_names_of_mesh_dimensions_make_no_slots(fake: FakeMesh) -> None:
    """The same ranks exchange along the same line; another order of them is another line."""
    fake.arena.words = 1 << 15
    kernels = list[KernelPlan]()
    for mesh in (DeviceMesh([0, 1], ("tp",)), DeviceMesh([0, 1], ("other",)), DeviceMesh([0, 1]), DeviceMesh([1, 0])):
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 512], contiguity=True)
            fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(fd.ops.sum(fd.ops.mul(x, x), [1], keepdim=True))))
            x.set_device_mesh(mesh)
            x.outer_split(1, 2)
            x.axis(1).parallelize(ParallelType.mesh_x)
        kernels.append(kernel_of(plan_of(fd, 8)))
    assert [symmetric_slots.region_of(kernel).offset for kernel in kernels] == [0, 0, 0, 1 << 13]


def test_kernels_reach_shared_memory_from_the_gpu_of_the_rank_only(
    fake: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from another GPU of its process; one without a number is the current one."""
    assert symmetric_slots.is_in_reach(torch.device("cpu"))
    assert not symmetric_slots.is_in_reach(torch.device("cuda", 0))
    fake.arena.device = torch.device("cuda", 1)
    assert [symmetric_slots.is_in_reach(torch.device("cuda", k)) for k in range(3)] == [False, True, False]
    for current in range(2):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert symmetric_slots.is_in_reach(torch.device("cuda")) is (current == 1)
    plan = plan_of(define("rms_norm", 8192, 2, BF16), 8)
    elsewhere = plan_on(plan, "", torch.device("cuda", 0), CompileOptions())
    assert elsewhere.in_kernel == ("none: tensors are on cuda:0",)


def test_what_is_not_agreed_on_is_taken_back(fake: FakeMesh) -> None:
    fake.arena.words = 1 << 20
    kernel, other = (kernel_of(plan_of(define("rms_norm", 8192, 2, BF16), rows)) for rows in (8, 8000))
    symmetric_slots.region_of(kernel)
    used, known = fake.arena.used, list(fake.arena.regions)

    def make() -> None:
        with symmetric_slots.taken_back_on_failure():
            symmetric_slots.region_of(other)
            raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        make()
    assert fake.arena.used == used
    assert list(fake.arena.regions) == known


def test_a_program_that_finds_no_room_has_collectives(fake: FakeMesh) -> None:
    plan = plan_of(define("rms_norm", 8192, 2, BF16), 512)
    fake.arena.words = 1000
    told = symmetric_slots.room([kernel_of(plan)])
    left = "of symmetric memory 8000 bytes are left: SHARDFUSE_EXCHANGE_MEMORY gives more"
    assert told == f"it takes 65536 bytes, {left}"
    assert fake.arena.used == 0


class Agreeing:
    """Ranks of which another says ``theirs``; the second time, they have agreed on the text before."""

    def __init__(self, fake: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake, self.theirs, self.texts, self.builds = fake, 0, list[str](), 0
        monkeypatch.setattr(exchanges, "agreed", self._agreed)

    @contextmanager
    def _agreed(self, ranks: Sequence[int], text: str, call: str) -> Iterator[Made]:
        made = Made()
        yield made
        made.most = None if text in self.texts else max(made.number, self.theirs)
        self.texts.append(text)

    def _build(self, plan: Plan) -> None:
        self.builds += 1

    def bind(self, plan: Plan, text: str, where: torch.device = CPU) -> Plan:
        """What the program of ``text`` runs, as a definition of its own would find it."""
        call, options = BoundCall((), Bound({}, {}, where), {}, {}, 0, (0, 1), text), CompileOptions("triton")
        exchanges.agree_on_memory(call, options, lambda: plan, self._build, nullcontext())
        return plan_on(plan, text, where, options)


@pytest.fixture
def agreeing(fake: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> Agreeing:
    return Agreeing(fake, monkeypatch)


def test_ranks_decide_on_room_once(agreeing: Agreeing) -> None:
    """By what the rank has handed out that has handed out most; not again where a rank binds the program anew."""
    plan, arena = plan_of(define("rms_norm", 8192, 2, BF16), 8), agreeing.fake.arena
    arena.words = 2 << 13
    agreeing.theirs = (1 << 13) + 1
    told = "it takes 65536 bytes, of symmetric memory 65528 bytes are left: SHARDFUSE_EXCHANGE_MEMORY gives more"
    refused = (f"none: {told}",)
    assert agreeing.bind(plan, "a").in_kernel == refused
    arena.words += 1
    assert agreeing.bind(plan, "a").in_kernel == refused
    assert arena.regions == {}
    assert agreeing.bind(plan, "b") is plan
    assert arena.used == arena.words
    assert agreeing.bind(plan, "b") is plan  # its slots are there, though no more are left


def test_slots_are_where_ranks_have_agreed_that_they_are(agreeing: Agreeing) -> None:
    """From then on, also where the program is not made: nobody compares what comes next with what it was then."""
    arena = agreeing.fake.arena
    agreeing.theirs = 160
    agreeing.bind(plan_of(define("rms_norm", 8192, 2, BF16), 8), "a")
    assert [(region.offset, region.words) for region in arena.regions.values()] == [(160, 1 << 13)]
    assert arena.used == 160 + (1 << 13)


def test_a_kernel_that_does_not_compile_is_tried_once_for_all_definitions(agreeing: Agreeing) -> None:
    plan = plan_of(define("rms_norm", 8192, 2, BF16), 8)
    agreeing.theirs = exchanges._NEVER
    for _ in range(2):
        assert agreeing.bind(plan, "a").in_kernel == ("none: a kernel does not compile on some rank",)
        assert agreeing.builds == 1
    assert agreeing.fake.arena.regions == {}


class Bind:
    """A norm that was bound where the other rank agrees, or says that a kernel does not compile there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, is_refused: bool) -> None:
        self.generated = list[str]()
        self.is_refused = is_refused
        for module in (exchanges, executor_cache):
            monkeypatch.setattr(module, "agreed", self._agreed)
        monkeypatch.setattr(fitting, "generate", self._generate)
        self.fd = define("rms_norm", 8192, 2, BF16)
        options = CompileOptions("triton", interpret=True, cache_directory=folder)
        self.fec = executor_cache.FusionExecutorCache(self.fd.fusion, options)
        given = [torch.zeros(8, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)]
        self.found = self.fec._bind(self.fec._prepare("key", given, {}, None))

    @contextmanager
    def _agreed(self, ranks: Sequence[int], text: str, call: str | None = None) -> Iterator[Made]:
        yield (told := Made())
        told.most = exchanges._NEVER if self.is_refused else told.number

    def _generate(self, plan: KernelPlan, *of: object, **how: bool) -> KernelSource:
        self.generated.append(plan.name)
        return generate(plan, *of, **how)


@pytest.fixture(params=[False, True], ids=["agreed", "refused"])
def bind(request: pytest.FixtureRequest, fake: FakeMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bind:
    return Bind(monkeypatch, tmp_path, is_refused=request.param)


def test_kernels_are_made_once_where_ranks_agree_that_they_exchange(bind: Bind, fake: FakeMesh) -> None:
    """Whether they compile is told before ranks agree; what was compiled for that is what runs."""
    tried = kernel_of(plan_of(define("rms_norm", 8192, 2, BF16), 8)).name
    run = [kernel.source.name for kernel in bind.found.program.launched.values()]
    assert bind.generated == ([tried, *run] if bind.is_refused else [tried])
    assert len(run) == (2 if bind.is_refused else 0)  # what exchanges is none of those that a later process finds
    assert len(fake.arena.regions) == (not bind.is_refused)


@pytest.mark.parametrize(("rows", "resident", "fits"), [(8, 8, True), (8, 7, False), (300, 1, True)])
def test_a_grid_is_as_ranks_have_it_or_not_at_all(
    rows: int, resident: int, fits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Programs of other ranks wait for all of it; of programs that claim their numbers those that run have them all."""
    plan = kernel_of(plan_of(define("rms_norm", 8192, 2, BF16), rows))
    monkeypatch.setattr(fitting.Kernel, "compile", lambda kernel, device: None)
    monkeypatch.setattr(fitting.Kernel, "resident", lambda kernel: resident)
    layouts = {t: t.domain.layout(0) for t in (*plan.segment.inputs, *plan.segment.outputs)}
    grid = generate(plan, layouts, 0).grid
    assert plan.exchange.is_claimed == (rows == 300)
    with nullcontext() if fits else pytest.raises(KernelCompileError, match="8 programs wait for each other, 7 run at"):
        made = fitting.fitted(plan, layouts, 0, CompileOptions("triton", cache_directory=tmp_path), CPU)
        assert made.source.grid == grid


def test_a_plan_for_unsharded_sizes_is_the_one_that_ranks_have_agreed_on(bind: Bind) -> None:
    """As `explain(sizes=...)` shows it, which knows of no tensors where they are."""
    sizes = {tv: (8, 8192)[-tv.ndim :] for tv in bind.fec.tensors()}
    found = bind.fec.plan_for(None, sizes)
    assert found.in_kernel == bind.found.plan.in_kernel
    assert [s.scheduler for s in found.segments] == [s.scheduler for s in bind.found.plan.segments]


def test_a_rank_without_memory_for_a_table_has_decided_nothing(
    agreeing: Agreeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails while the others wait to know how much it has handed out, so that all fail, and ask again."""
    plan, arena, make = plan_of(define("rms_norm", 8192, 2, BF16), 8), agreeing.fake.arena, symmetric_slots.made_to_last

    def refuse(make: object, device: torch.device) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(symmetric_slots, "made_to_last", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        agreeing.bind(plan, "a")
    assert (agreeing.texts, arena.used, arena.regions, arena.decided) == ([], 0, {}, {})
    monkeypatch.setattr(symmetric_slots, "made_to_last", make)
    agreeing.theirs = 160
    assert agreeing.bind(plan, "a") is plan
    assert [region.offset for region in arena.regions.values()] == [160]
    assert list(arena.decided.values()) == [None]
    monkeypatch.setattr(symmetric_slots, "made_to_last", refuse)  # its slots are there
    assert promised(plan)[-1] == "segment 0 exchanges words at 160"


def test_a_rank_on_none_of_the_meshes_has_no_slots(agreeing: Agreeing) -> None:
    """It calls the program as the others do, and gets nothing of it."""
    plan, arena = plan_of(define("rms_norm", 8192, 2, BF16), 8), agreeing.fake.arena
    call, options = BoundCall((), Bound({}, {}, CPU), {}, {}, 2, (0, 1), "a"), CompileOptions("triton")
    exchanges.agree_on_memory(call, options, lambda: plan, agreeing._build, nullcontext())
    assert promised(plan, rank=2) == []
    assert (agreeing.texts, arena.used, arena.regions) == ([], 0, {})


def test_tensors_of_a_rank_on_another_gpu_have_all_ranks_use_collectives(
    agreeing: Agreeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(define("rms_norm", 8192, 2, BF16), 8)
    monkeypatch.setattr(exchanges, "tables_for", lambda plans: {})
    agreeing.fake.arena.device = own = torch.device("cuda", 0)
    agreeing.theirs = exchanges._NOWHERE
    told = "none: tensors of some rank are on another device than the one that shares memory"
    assert agreeing.bind(plan, "a", own).in_kernel == (told,)
    agreeing.theirs = 0
    assert agreeing.bind(plan, "b", torch.device("cuda", 1)).in_kernel == ("none: tensors are on cuda:1",)
    assert agreeing.bind(plan, "b", own).in_kernel == (told,)
    assert agreeing.fake.arena.regions == {}


def test_programs_of_several_ranks_exchange_in_kernels(fake: FakeMesh) -> None:
    assert symmetric_slots.why_no_exchange((0, 1), CompileOptions()) is None
    assert symmetric_slots.why_no_exchange((0,), CompileOptions()) == ""
    assert symmetric_slots.why_no_exchange((0, 1), CompileOptions(exchange="nccl")) == "SHARDFUSE_EXCHANGE=nccl"
    assert symmetric_slots.why_no_exchange((0, 1), CompileOptions("torch")) == ""


def launcher(plan: KernelPlan, kernel: NotedKernel) -> Launch:
    return symmetric_slots.region_of(plan).launcher(kernel, plan.rank_exchange)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "rows", "left", "grids"),
    [
        ("rms_norm", 300, 100, [(396, (300, 100))]),  # claimed: those of other multiprocessors end at once
        ("rms_norm", 300, 68, [(396, (300, 68))]),
        ("rms_norm", 300, 0, [(396, (300, 1))]),
        ("rms_norm", 90, 132, [(90, (90,))]),
        ("rms_norm", 90, 68, [(68, (90,))]),  # rows in more turns
        (PARTIAL, 8, 30, [(28, (8,))]),  # programs of a row run at once
        (PARTIAL, 8, 1, [(4, (8,))]),
        (PARTIAL, 90, 100, [(90, (90, 0))]),
        (PARTIAL, 90, 36, [(36, (90, 0)), (36, (90, 36)), (18, (90, 72))]),  # slots are programs' own
    ],
)
def test_launches_leave_what_nccl_may_need(
    kind: str, rows: int, left: int, grids: list[object], fake: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The multiprocessors of all process groups, whenever they are made."""
    fake.arena.words = 1 << 23
    plan = kernel_of(plan_of(define(kind, 8192, 2, BF16), rows))
    noted = NotedKernel(plan)
    launch = launcher(plan, noted)
    launch(None)
    monkeypatch.setattr(fake.arena.room, "left", lambda: left)
    with (
        pytest.warns(UserWarning, match="no room for those of shardfuse")
        if left < plan.exchange.members
        else nullcontext()
    ):
        launch(None)
    assert [(grid, integers) for grid, integers, _ in noted.launches[1:]] == grids
    assert noted.launches[0][0] >= noted.launches[1][0]
    noted.launches.clear()
    launch(None)  # says nothing again
    assert [(grid, integers) for grid, integers, _ in noted.launches] == grids


def test_a_warning_that_is_an_error_comes_behind_the_launch(fake: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait for it."""
    plan = kernel_of(plan_of(define("rms_norm", 8192, 2, BF16), 8))
    noted = NotedKernel(plan)
    launch = launcher(plan, noted)
    launch(None)
    monkeypatch.setattr(fake.arena.room, "left", lambda: 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no room for those of shardfuse"):
            launch(None)
    assert len(noted.launches) == 2
    launch(None)  # says nothing again
    assert fake.arena.order.launches() == {(0, 1): 3}


def test_what_follows_a_refused_launch_waits_for_those_before_it(
    fake: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = kernel_of(plan_of(define("rms_norm", 8192, 2, BF16), 8))
    noted = NotedKernel(plan)

    def refused(*given: object) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(noted, "launcher_of", lambda source: refused)
    launch = launcher(plan, noted)
    ended: list[int | None] = []
    monkeypatch.setattr(fake.arena.order, "follow", lambda stream, ranks: True)
    monkeypatch.setattr(fake.arena.order, "ended", ended.append)
    with pytest.raises(RuntimeError, match="refused"):
        launch(7)
    assert ended == [7]


def test_programs_that_would_have_too_few_multiprocessors_have_collectives(
    agreeing: Agreeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks, where that is so on one: process groups differ.  Half of the GPU is enough."""
    small, large = (plan_of(define("rms_norm", 8192, 2, BF16), rows) for rows in (8, 300))
    half = kernel_of(large).device.multiprocessors // 2
    left = [half - 1]
    monkeypatch.setattr(agreeing.fake.arena.room, "left", lambda: left[0])
    assert agreeing.bind(small, "a") is small
    told = "kernels of NCCL may need too many multiprocessors of some rank's GPU, with so many process groups"
    assert agreeing.bind(large, "b").in_kernel == (f"none: {told}",)
    left[0] = half
    assert agreeing.bind(large, "b").in_kernel == (f"none: {told}",)
    assert agreeing.bind(large, "c") is large
    agreeing.theirs = exchanges._CROWDED
    assert agreeing.bind(small, "d").in_kernel == (f"none: {told}",)


def test_launches_of_all_programs_are_in_one_order(fake: FakeMesh) -> None:
    """Two at a time would each hold multiprocessors that the other ranks' launches wait for."""
    plans = [kernel_of(plan_of(define(kind, 8192, 2, BF16), 8)) for kind in ("rms_norm", "layer_norm")]
    for plan in plans:
        launcher(plan, NotedKernel(plan))(None)
    assert fake.arena.order.launches() == {(0, 1): 2}


def test_a_report_names_the_peer_and_ends_all_programs(fake: FakeMesh) -> None:
    kernel = kernel_of(plan_of(define("rms_norm", 8192, 2, BF16), 8))
    noted = NotedKernel(kernel)
    launch = launcher(kernel, noted)
    launch(None, 1, 2)
    (_, _, (stream, table, *rest)) = noted.launches[0]
    assert table is symmetric_slots.region_of(kernel).table
    assert (stream, rest) == (None, [1, 2])
    word = 0xFFFFFFF0 << 32 | 37 << 10 | 2
    fake.arena.report[0] = word - (1 << 64)
    assert Reported.of(word) == Reported(0xFFFFFFF0, 37, 2)
    with pytest.raises(
        ExchangeTimeoutError, match="rank 1 did not send its part of row 37 within 5 s, in launch 42949"
    ):
        launch(None, 1, 2)
    assert len(noted.launches) == 1


def test_ranks_of_one_process_have_tables_of_their_own() -> None:
    """What other tests run kernels with."""
    world = Ranks(kernel_of(plan_of(define("rms_norm", 512, 4, BF16), 8)), torch.device("cpu"))
    assert [int(own[2]) for own in world.tables] == [0, 1, 2, 3]
    assert len({tuple(own[3:8].tolist()) for own in world.tables}) == 1


# the start


MEGABYTES = 3
"""Of the memory of each of two ranks that the other writes to."""
HERE = threading.local()
"""``group``: that of the rank whose thread it is."""


class FakeGroup:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


def opened(asked: tuple[str, str], devices: Sequence[torch.device], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why each of two ranks has no arena, or what it raises."""
    store, here = dist.HashStore(), HERE
    monkeypatch.setattr(symmetric, "default_group", lambda: here.group)
    monkeypatch.setattr(symmetric, "default_store", lambda: store)

    def run(rank: int) -> str:
        here.group = FakeGroup(rank)
        try:
            symmetric.open_arena(devices[rank], asked[rank], MEGABYTES, 5.0)
        except ExchangeUnavailableError as error:
            return f"raised: {error}"
        world = symmetric._worlds.get(here.group)
        assert world is None or world.arena is None or world.arena.words == MEGABYTES << 17
        return "" if world is None else world.reason

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


class FakeDriver:
    """Memory of two GPUs; ``fails``: what the rank whose GPU has this index cannot do."""

    def __init__(self, fails: dict[int, str]) -> None:
        self.fails, self.closed, self.zeroed = fails, list[int](), list[int]()

    def allocate(self, device: int, size: int) -> int:
        self.check(device, "allocate")
        return 1000 + device

    def zero(self, address: int, size: int) -> None:
        assert size == MEGABYTES << 20
        self.zeroed.append(address)

    def exported(self, address: int) -> bytes:
        return address.to_bytes(2, "big")

    def opened(self, handle: bytes) -> int:
        self.check(1 - (int.from_bytes(handle, "big") - 1000), "open")
        return int.from_bytes(handle, "big") + 1000

    def close(self, address: int) -> None:
        if "close" in self.fails.values():
            raise RuntimeError("cannot close")
        self.closed.append(address)

    def has_atomics(self, own: int, other: int) -> bool:
        return self.fails.get(own) != "link"

    def check(self, device: int, what: str) -> None:
        if self.fails.get(device) == what:
            raise RuntimeError(f"cannot {what}")


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ({}, ""),
        ({1: "link"}, "rank 1: no NVLink joins GPU 1 of rank 1 and the GPU of rank 0"),
        ({1: "allocate"}, "rank 1: these GPUs cannot share memory: cannot allocate"),
        ({0: "open"}, "rank 0: these GPUs cannot share memory: cannot open"),
    ],
)
def test_one_rank_that_cannot_share_memory_has_none_share_it(
    fails: dict[int, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where auto has kernels exchange, both go on with collectives, and say why; asked for, it is an error on both."""
    driver = FakeDriver(fails)
    monkeypatch.setattr(symmetric, "peer_memory", driver)
    for name, value in (("device_count", 2), ("can_device_access_peer", True), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *of, value=value: value)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, dtype, device, pin_memory: zeros(*sizes, dtype=dtype))
    gpus = [torch.device("cuda", k) for k in range(2)]
    monkeypatch.setattr(symmetric, "_identity", lambda index: (f"gpu {index}", "132"))
    assert opened(("auto", "auto"), gpus, monkeypatch) == [says] * 2
    assert driver.closed == ([2000] if fails.get(0) == "open" else [])
    if says and "link" not in fails.values():
        for found in opened(("auto", "symmetric"), gpus, monkeypatch):
            assert found.startswith(f"raised: SHARDFUSE_EXCHANGE=symmetric, and {says}")


@pytest.mark.parametrize("fails", [{}, {1: "close"}])
def test_the_end_of_a_world_closes_what_it_can(
    fails: dict[int, str], fake: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the arena's device, whatever the current one is, and without an end of the rest."""
    driver, entered = FakeDriver(fails), list[torch.device]()
    group = dist.group.WORLD
    assert group is not None
    fake.arena.device = torch.device("cuda", 1)
    monkeypatch.setattr(symmetric, "peer_memory", driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    monkeypatch.setitem(symmetric._worlds, group, symmetric._World(fake.arena))
    with pytest.warns(UserWarning, match="was not closed: cannot close") if fails else nullcontext():
        symmetric.close_arena()
    assert driver.closed == ([] if fails else [1 << 20])
    assert entered == [fake.arena.device]
    assert symmetric.arena() == ""


def test_what_ranks_exchange_by_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, told in (
        ("", "collectives: tensors are on the CPU"),
        ("no two ranks are on one host", "collectives: no two ranks are on one host"),
        (FakeMesh(1 << 10).arena, "kernels"),
    ):
        monkeypatch.setattr(symmetric, "arena", lambda found=found: found)
        assert symmetric.how_ranks_exchange() == told


def test_auto_has_collectives_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word: ``explain()`` says of kernels what a GPU would have."""
    monkeypatch.setattr(symmetric, "peer_memory", None)
    assert opened(("auto", "auto"), [CPU] * 2, monkeypatch) == [""] * 2
    assert opened(("nccl", "nccl"), [torch.device("cuda", k) for k in range(2)], monkeypatch) == [
        "SHARDFUSE_EXCHANGE=nccl"
    ] * 2  # fmt: skip


def test_ranks_that_share_a_gpu_exchange_where_they_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns, which is for tests."""
    driver = FakeDriver({})
    monkeypatch.setattr(symmetric, "peer_memory", driver)
    for name, value in (("device_count", 1), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *of, value=value: value)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, dtype, device, pin_memory: zeros(*sizes, dtype=dtype))
    monkeypatch.setattr(symmetric, "_identity", lambda index: ("gpu", "132"))
    gpus = [torch.device("cuda", 0)] * 2
    assert opened(("auto", "auto"), gpus, monkeypatch) == ["rank 0 and rank 1 share a GPU"] * 2
    assert opened(("symmetric", "symmetric"), gpus, monkeypatch) == ["", ""]


def test_memory_is_zeroed_once_no_kernel_of_an_earlier_world_stores_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has given up is in the next world while a kernel of the one that it waited for runs."""
    driver, zeros, seen = FakeDriver({}), torch.zeros, list[int]()

    def end_of_kernels(device: torch.device) -> None:
        if device.index == 1:
            time.sleep(0.2)
            seen.append(len(driver.zeroed))

    monkeypatch.setattr(symmetric, "peer_memory", driver)
    monkeypatch.setattr(torch.cuda, "synchronize", end_of_kernels)
    for name, value in (("device_count", 2), ("can_device_access_peer", True)):
        monkeypatch.setattr(torch.cuda, name, lambda *of, value=value: value)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *sizes, dtype, device, pin_memory: zeros(*sizes, dtype=dtype))
    monkeypatch.setattr(symmetric, "_identity", lambda index: (f"gpu {index}", "132"))
    assert opened(("symmetric", "symmetric"), [torch.device("cuda", k) for k in range(2)], monkeypatch) == ["", ""]
    assert (seen, sorted(driver.zeroed)) == ([0], [1000, 1001])


def test_links_are_those_of_the_gpus_that_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUDA_VISIBLE_DEVICES=0,1,2 and 1,2,0: the ranks have the first and the last GPU of the host."""
    asked = dict[int, tuple[int, int]]()
    order = ("abc", "bca")

    def can_access(own: int, other: int) -> bool:
        asked[HERE.group.rank()] = own, other
        return False

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    monkeypatch.setattr(symmetric, "_identity", lambda index: (order[HERE.group.rank()][index], "132"))
    opened(("symmetric", "symmetric"), [torch.device("cuda", k) for k in range(2)], monkeypatch)
    assert asked == {0: (0, 2), 1: (1, 2)}


def test_gpus_of_unlike_kinds_have_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ranks would plan, and take regions of compiled graphs, each in a way of its own."""
    kinds = [f"NVIDIA {name} of 132 multiprocessors" for name in ("H200", "H100")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("can_device_access_peer", "has_atomics"):
        monkeypatch.setattr(torch.cuda if name[0] == "c" else symmetric.peer_memory, name, lambda own, other: True)
    monkeypatch.setattr(symmetric, "_identity", lambda index: (f"gpu {index}", kinds[index]))
    told = opened(("auto", "auto"), [torch.device("cuda", k) for k in range(2)], monkeypatch)
    assert told == [f"rank 1 has {kinds[1]}, rank 0 has {kinds[0]}"] * 2


def test_ranks_agree_on_whether_they_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = [torch.device("cpu")] * 2, [torch.device("cuda", 0)] * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(symmetric, "_identity", lambda index: (f"gpu of rank {HERE.group.rank()}", "132"))
    assert opened(("auto", "auto"), cpu, monkeypatch) == ["", ""]
    for found in opened(("symmetric", "nccl"), gpu, monkeypatch):
        assert "and rank 1: SHARDFUSE_EXCHANGE=nccl: set it alike" in found
    for found in opened(("symmetric", "symmetric"), gpu, monkeypatch):
        assert "and rank 0: GPU 0 of rank 0 does not reach the memory of the GPU of rank 1: set it alike" in found
    assert opened(("nccl", "nccl"), gpu, monkeypatch) == ["SHARDFUSE_EXCHANGE=nccl"] * 2
    for found in opened(("auto", "symmetric"), cpu, monkeypatch):
        assert found.startswith("raised: SHARDFUSE_EXCHANGE=symmetric, and tensors are on the CPU")
