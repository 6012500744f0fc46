"""Promises: one order of additions for any number of rows, what is refused with which errors, what tuning changes."""

from __future__ import annotations

import inspect
import re
import warnings
from functools import partial

import pytest
import torch
import torch._dynamo.config
from functional_promises import CALLS, listed, with_gradient
from promise_cases import CASES, define
from torch._dynamo.exc import Unsupported

import shardfuse
from benchmarks.sm90 import sources_of
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, nn
from shardfuse.codegen.source import KernelSource
from shardfuse.compiler import Plan
from shardfuse.device import H200
from shardfuse.errors import DefinitionError, ProgramMismatchError, PromiseError
from shardfuse.ir.tensor_view import TensorView
from shardfuse.nn import functional
from shardfuse.schedulers import kernels_of
from shardfuse.schedulers.candidates import candidates, may_run
from shardfuse.schedulers.schedule import ScheduleError
from shardfuse.segments.space import Space

ROWS = (1, 2, 3, 17, 127, 500, 8192, 20000)
LENGTHS = (96, 777, 4096, 16384, 50257, 131072)
SUMMED = ("rms_norm_backward", "layer_norm_backward")
"""Cases that sum over rows too: how many programs share that sum depends on the rows."""


BATCH = {"running_mean": None, "running_var": None, "training": True, "invariant": "batch"}


def planned(fd: FusionDefinition, rows: int) -> tuple[Plan, list[KernelSource]]:
    shapes = {t: (rows, *t.shape[1:]) if t.ndim == 2 else tuple(t.shape) for t in fd.fec.tensors()}
    plan = fd.fec.plan(shapes)
    return plan, list(sources_of(plan, [torch.empty(s, dtype=t.dtype.torch, device="meta") for t, s in shapes.items()]))


def of_rows(name: str, plan: Plan, sources: list[KernelSource]) -> list[object]:
    """All that a row's result depends on: which statements there are, and not whether all loads come first."""
    options = [(s.num_warps, s.contracts) for s in sources]
    if name not in SUMMED:
        return [*options, *((sorted(s.text.split("\n")), s.num_stages, s.max_registers) for s in sources)]
    schedules = [k.schedule for s in plan.segments for k in s.kernels if k.space.walked]
    return [options[0], *((s.order, s.residency, s.group, s.access, s.launch.warps) for s in schedules)]


def is_of_few(plan: Plan, rows: int) -> bool:
    """Is its text one of a small batch?  ``test_promised_layouts.py`` compares what these add up."""
    kernels = [k for s in plan.segments for k in s.kernels]
    is_one_turn = any(k.space.walked and k.schedule.split is None for k in kernels)
    return is_one_turn or (rows == 1 and any(k.schedule.group and not k.schedule.is_held for k in kernels))


def largest_difference(name: str, n: int, dtype: DataType) -> str | None:
    fd = define(name, n, dtype)
    plans = {rows: planned(fd, rows) for rows in ROWS}
    found = {rows: of_rows(name, *plan) for rows, plan in plans.items() if not is_of_few(plan[0], rows)}
    assert 500 in found
    others = [rows for rows in found if found[rows] != found[500]]
    return f"{name} of {others[-1]} x {n} is another kernel than of 500" if others else None


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_for_any_number_of_rows(name: str) -> None:
    for n in LENGTHS:
        assert largest_difference(name, n, DataType.BFloat16) is None
    assert largest_difference(name, 4096, DataType.Float) is None


def test_a_schedule_that_counts_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "is_invariant", False)
    for name in CASES:
        if name not in SUMMED:  # whose small batches have a text of their own
            assert largest_difference(name, 4096, DataType.BFloat16) is not None, name


def test_a_program_that_has_all_rows_meets_nobody() -> None:
    """One row, whose gradient of the weight needs no other program's part."""
    for invariant in ("batch", None):
        fd = define("rms_norm_backward", 1024, DataType.BFloat16, invariant)
        rows = 1 if invariant else 3  # of a turn; a row that no promise calls a batch is a kernel without a walk
        (source,) = planned(fd, rows)[1]
        assert (source.grid, source.mailbox, source.is_cooperative) == (1, 0, False)
        assert "meet_all" not in source.text
        assert "partial" not in source.text
        assert "tl.range" not in source.text
    (source,) = planned(define("rms_norm_backward", 1024, DataType.BFloat16), 64)[1]
    assert source.mailbox == 1
    assert source.is_cooperative


def test_sums_over_the_batch_are_finished_as_without_a_promise() -> None:
    """Partial results of columns whose number every call has, of which no mask asks how many there are."""
    promised, other = (
        planned(define("layer_norm_backward", 4096, DataType.BFloat16, p), 512)[1] for p in ("batch", None)
    )
    assert [s.text for s in promised] == [s.text for s in other]
    assert [(s.contracts, t.contracts) for s, t in zip(promised, other, strict=True)] == [(False, True)]


@pytest.mark.parametrize(("classes", "members"), [(32768, 0), (50257, 0), (65536, 4), (128256, 4), (151936, 8)])
def test_long_rows_are_shared_whatever_their_number(classes: int, members: int) -> None:
    """Of few rows a program each leaves the machine idle; loads of odd rows take the registers of one."""
    fd = define("cross_entropy", classes, DataType.BFloat16)
    for rows in (1, 2048):
        schedules = [k.schedule for s in planned(fd, rows)[0].segments for k in s.kernels]
        assert [schedule.members for schedule in schedules] == [members]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax"])
def test_more_than_two_ranks_add_up_in_their_order(name: str) -> None:
    """Whatever the number of rows; NCCL's own order depends on it."""
    kinds: list[list[str]] = []
    for rows in (1, 64, 100_000):
        fd = define(name, 4096, DataType.BFloat16)
        x = fd.fusion.inputs[0].val
        assert isinstance(x, TensorView)
        x.set_device_mesh(DeviceMesh(range(4)))
        x.outer_split(1, 4)
        x.axis(1).parallelize(ParallelType.mesh_x)
        sizes = {t: (rows, *t.shape[1:]) if t.ndim == 2 else tuple(t.shape) for t in fd.fec.tensors()}
        kinds.append([c.kind for c in fd.explain(sizes=sizes).collectives])
    assert kinds == [["all_gather"]] * 3


def test_segments_that_ranks_do_not_divide_are_refused() -> None:
    fd = define("rms_norm", 4096 * 3, DataType.BFloat16, "ranks")
    x = fd.fusion.inputs[0].val
    assert isinstance(x, TensorView)
    x.set_device_mesh(DeviceMesh(range(3)))
    x.outer_split(1, 3)
    x.axis(1).parallelize(ParallelType.mesh_x)
    with pytest.raises(PromiseError, match="not whole segments, 8 of an axis: shard the outermost axis") as found:
        fd.explain(sizes={t: (2, *t.shape[1:]) if t.ndim == 2 else tuple(t.shape) for t in fd.fec.tensors()})
    assert "what T5 = sum(T4) adds up" in str(found.value)


def test_rows_do_not_begin_within_words_that_they_share() -> None:
    fd = define("softmax", 50257, DataType.BFloat16)
    assert not any(k.schedule.is_aligned_down for s in planned(fd, 4096)[0].segments for k in s.kernels)


def test_promises_are_part_of_the_text() -> None:
    with FusionDefinition(invariant=("ranks", "batch"), accumulate="float32") as fd:
        fd.add_output(fd.ops.sum(fd.define_tensor([-1, 8], contiguity=True), [1]))
    assert "fd.promise(invariant=('batch', 'ranks'), accumulate=\"float32\")" in repr(fd)
    scope = {"DataType": DataType, "FusionDefinition": FusionDefinition}
    exec(repr(fd), scope)
    with FusionDefinition() as again:
        scope["nvfuser_fusion"](again)  # pyright: ignore[reportCallIssue]
    assert again.fusion.promises == fd.fusion.promises


def test_explain_says_what_is_promised() -> None:
    fd = define("rms_norm", 4096, DataType.BFloat16)
    text = str(fd.explain(sizes={t: (64, 4096) if t.ndim == 2 else (4096,) for t in fd.fec.tensors()}))
    assert "promised: invariant=('batch',)" in text
    assert re.search(r"promised: persistent_T\d+: 8 warps, \d+ elements at a time, for any number of rows", text)


@pytest.mark.parametrize("arguments", [{"invariant": "rows"}, {"invariant": ("batch", "x")}, {"accumulate": "float64"}])
def test_unknown_promises_are_refused(arguments: dict[str, str]) -> None:
    with pytest.raises(DefinitionError, match=r"expected 'batch' or 'ranks'|expected 'float32'"):
        FusionDefinition(**arguments)  # pyright: ignore[reportArgumentType]


def refused(build: str, invariant: str) -> str:
    with FusionDefinition(invariant=invariant) as fd:
        x, y = (fd.define_tensor([-1, 8], contiguity=True) for _ in range(2))
        made = {
            "matmul": lambda: fd.ops.matmul(x, fd.ops.permute(y, [1, 0])),
            "cumsum": lambda: fd.ops.cumsum(x, 1),
            "uniform": lambda: fd.ops.add(x, fd.ops.uniform(0.0, 1.0, [4, 8])),
        }[build]()
        fd.add_output(made)
    with pytest.raises(PromiseError) as found:
        fd.fec.plan(dict.fromkeys(fd.fec.tensors(), (4, 8)))
    return str(found.value)


@pytest.mark.parametrize("build", ["matmul", "cumsum", "uniform"])
def test_ops_that_cannot_keep_it_are_named(build: str) -> None:
    text = refused(build, "batch")
    assert text.startswith("invariant=('batch',) cannot be kept: ")
    assert f"= {build})" in text
    assert "or leave the promise out" in text


def test_torch_itself_keeps_no_order() -> None:
    fd = define("rms_norm", 8, DataType.Float)
    with pytest.raises(PromiseError, match="operations would be torch's own, on cpu: run it by generated kernels"):
        fd.execute([torch.ones(2, 8), torch.ones(8)])


def two_promises() -> str:
    rank = shardfuse.initialize().rank
    with FusionDefinition(accumulate="float32" if rank else None) as fd:
        x = fd.define_tensor([2, 8], contiguity=True)
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(1, 2)
        x.axis(1).parallelize(ParallelType.mesh_x)
        fd.add_output(fd.ops.sum(x, [1]))
    with pytest.raises(ProgramMismatchError) as found:
        fd.execute([torch.ones(2, 4)])
    return str(found.value)


def test_ranks_that_promise_different_things_are_told() -> None:
    for text in shardfuse.simulate(two_promises, 2):
        assert 'fd.promise(accumulate="float32")' in text


def test_tuning_keeps_the_order_of_additions() -> None:
    for name, invariant in (("rms_norm", None), ("rms_norm", "batch")):
        fd = define(name, 4096, DataType.BFloat16, invariant)
        (segment,) = planned(fd, 64)[0].segments
        (kernel,) = segment.kernels
        tried = candidates(segment.scheduler, segment.segment, kernel.schedule, H200)
        other = kernel.schedule.with_warps(2 * kernel.schedule.launch.warps)
        assert any(c.launch.warps != kernel.schedule.launch.warps for c in tried) == (invariant is None)
        assert may_run(segment.scheduler, segment.segment, other, H200) == (invariant is None)


def test_what_is_converted_promises() -> None:
    found = nn.convert(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Softmax(-1)), invariant="batch").model
    assert all("promises" in part.text for part in found)  # pyright: ignore[reportAttributeAccessIssue]
    nn.promise(found)
    assert not any("promises" in part.text for part in found)  # pyright: ignore[reportAttributeAccessIssue]


def test_complex_sums_are_refused() -> None:
    with FusionDefinition(invariant="batch") as fd:
        x = fd.define_tensor([-1, 8], contiguity=True, dtype=DataType.ComplexFloat)
        fd.add_output(fd.ops.sum(x, [1]))
    with pytest.raises(PromiseError, match="torch adds complex numbers in an order that follows sizes"):
        fd.explain(sizes={fd.fusion.inputs[0].val: (4, 8)})


def test_a_row_for_each_rank_is_refused() -> None:
    """It is no axis of the rank's kernels, which then are others than those of more rows."""
    with FusionDefinition(invariant="batch") as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        fd.add_output(fd.ops.sum(x, [1]))
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    sizes = {fd.fusion.inputs[0].val: (2, 8)}
    with pytest.raises(
        PromiseError, match=r"each rank has a single element of axis 0 of T0, of 2 in all.*[Pp]artial sums.*all_reduce"
    ):
        fd.explain(sizes=sizes)
    fd.explain(sizes=dict.fromkeys(sizes, (4, 8)))


@pytest.mark.parametrize("invariant", [5, True, ["batch", 5]])
def test_promises_that_are_no_names_are_refused(invariant: object) -> None:
    with pytest.raises(DefinitionError, match="invariant="):
        FusionDefinition(invariant=invariant)


@pytest.mark.parametrize("settings", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_norms_by_the_mean_of_the_batch_are_refused(settings: dict[str, bool]) -> None:
    norm = nn.BatchNorm2d(4, **settings).promise(invariant="batch")
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    with pytest.raises(PromiseError, match="BatchNorm2d norms each row by the mean and variance of the whole batch"):
        norm(x)
    if norm.num_batches_tracked is not None and norm.running_mean is not None:
        assert int(norm.num_batches_tracked) == 0
        assert not norm.running_mean.any()


def test_a_model_without_a_module_that_could_promise_is_told() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"no module of shardfuse.nn that.*in Sequential: call shardfuse.nn.convert"):
        assert nn.promise(model, invariant="batch") is model
    with pytest.warns(UserWarning, match="matrix products promise nothing"):
        nn.promise(nn.Linear(2, 2), invariant="ranks")
    with FusionDefinition() as fd, pytest.raises(DefinitionError, match="argument 1 'ranks', expected invariant, acc"):
        fd.promise("ranks")  # type: ignore[call-arg]
    with pytest.raises(DefinitionError, match="promise: found invariant='rows'"):
        nn.promise(model, invariant="rows")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.promise(model)
        nn.promise(torch.nn.Sequential(nn.RMSNorm(2)), invariant="batch")


@pytest.mark.parametrize("name", CALLS)
def test_functions_promise_or_refuse(name: str) -> None:
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    with pytest.raises(DefinitionError, match=rf"{name}.*invariant='rows'.*'batch' or 'ranks'"):
        CALLS[name](x, invariant="rows")
    with pytest.raises(PromiseError, match=r"operations would be torch's own, on cpu"):
        CALLS[name](x, invariant="batch")
    wide, plain = (listed(CALLS[name](x, **kept)) for kept in ({"accumulate": "float32"}, {}))
    assert all(torch.equal(a, b) for a, b in zip(wide, plain, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_functions_that_promise_compile_whole(name: str) -> None:
    """Forward and backward, for any batch, the same bits as uncompiled."""
    torch._dynamo.reset()
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    call = partial(CALLS[name], accumulate="float32")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with_gradient(compiled, x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (4, 6):
            for found, wanted in zip(with_gradient(compiled, x[:rows]), with_gradient(call, x[:rows]), strict=True):
                assert torch.equal(found, wanted)


def test_a_compiled_call_refuses_what_cannot_be_promised() -> None:
    torch._dynamo.reset()
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    for call, error, message in (
        (partial(functional.softmax, invariant="batch"), PromiseError, "operations would be torch's own, on cpu"),
        (partial(functional.softmax, invariant="rows"), Unsupported, "DefinitionError"),
        (partial(functional.batch_norm, **BATCH), Unsupported, "PromiseError"),
    ):
        with pytest.raises(error, match=message):
            torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(PromiseError, match="norms each row by the mean and variance of the whole batch"):
        torch.compile(partial(functional.batch_norm, **BATCH), backend="aot_eager")(x)


def test_options_of_a_compiled_call_are_constants() -> None:
    """A number that is an argument of the compiled function, and would be a symbol, is one too."""
    torch._dynamo.reset()
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))

    def call(x: torch.Tensor, scale: float, eps: float) -> torch.Tensor:
        softmax = functional.softmax(x, scale=scale, accumulate="float32")
        return functional.rms_norm(softmax, x.shape[-1:], None, eps, accumulate="float32")

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for numbers in ((1.0, 1e-5), (0.5, 1e-3), (0.25, 1e-3)):
        assert torch.equal(compiled(x, *numbers), call(x, *numbers))


def test_a_function_that_norms_by_the_batch_cannot_promise() -> None:
    with pytest.raises(PromiseError, match="batch_norm norms each row by the mean and variance of the whole batch"):
        nn.functional.batch_norm(torch.ones(4, 8), None, None, training=True, invariant="batch")


def test_every_function_but_those_with_products_can_promise() -> None:
    modules = (nn.functional.__name__, nn.functional_losses.__name__)
    public = {n for n, f in vars(nn.functional).items() if getattr(f, "__module__", "") in modules and n[0] != "_"}
    can = {n for n in public if "invariant" in inspect.signature(getattr(nn.functional, n)).parameters}
    assert public - can == {"linear_cross_entropy"}
    assert can == set(CALLS)


def test_one_turn_has_all_rows() -> None:
    """The tuner tries fewer rows in a turn, which are not all of them."""
    plan, _ = planned(define("layer_norm_backward", 96, DataType.Float, None), 13)
    (found,) = plan.segments
    (kernel,) = found.kernels
    assert (kernel.schedule.split, kernel.schedule.kept) == (None, 16)
    with pytest.raises(ScheduleError, match="13 rows in one turn of 8"):
        kernels_of("mix_order", found.segment, H200, kernel.schedule.sized(kept=8))
