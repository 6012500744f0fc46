"""The op that stands for a region, and the text of its program: read as data, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compile_graphs import assert_near, graph_of, regions_in
from torch import library

from shardfuse import DataType, FusionDefinition
from shardfuse.compile import report
from shardfuse.compile.aten_table import why_not
from shardfuse.compile.compile_errors import ProgramTextError, UntranslatableError
from shardfuse.compile.program_text import on_lines, printed, rebuilt, statements_of
from shardfuse.compile.region_op import REGION, program_of
from shardfuse.compiler import compile_fusion

F = torch.nn.functional


def norm_text() -> str:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8, 4], dtype=DataType.BFloat16, stride_order=[2, 0, 1])
        n = fd.define_scalar(dtype=DataType.Int)
        wide = fd.ops.cast(x, DataType.Float)
        var, mean = fd.ops.var_mean(wide, [1, 2], 0, True)
        y = fd.ops.mul(fd.ops.sub(wide, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5)))
        y = fd.ops.where(fd.ops.gt(y, float("-inf")), y, 0.0)
        fd.add_output(fd.ops.mul(fd.ops.reshape(y, [-1, 32]), n))
        fd.add_output(fd.ops.set(y), stride_order=[2, 0, 1])
    return repr(fd)


def test_a_printed_definition_is_rebuilt() -> None:
    text = norm_text()
    assert repr(rebuilt(text)) == text


@pytest.mark.parametrize(
    "statement",
    [
        "__import__('os').getcwd()",
        "T1 = fd.ops.neg(T0).__class__",
        "T1 = fd.ops.__class__(T0)",
        "T1 = fd.fusion.close()",
        "T1 = fd.execute([T0])",
        "T1 = T0.domain",
        "T1 = T0.set_device_mesh(T0)",
        "T1 = [T0 for _ in range(3)]",
        "T1 = fd.ops.mul(T0, 2 ** 64)",
        "T1 = open('x')",
        "T1 = fd.ops.mul(T0, nobody)",
        "import os",
        "T1 = float('1') if T0 else T0",
        "def f(): pass",
    ],
)
def test_text_that_no_definition_prints_is_refused(statement: str) -> None:
    head = "def nvfuser_fusion(fd : FusionDefinition) -> None :\n"
    text = f"{head}    T0 = fd.define_tensor(shape=[4], dtype=DataType.Float, is_cpu=False)\n    {statement}\n"
    with pytest.raises(ProgramTextError, match="statement 2"):
        rebuilt(text)


@pytest.mark.parametrize("text", ["", "x = 1", "def other(fd): pass", "def nvfuser_fusion(fd:", "1/0\n"])
def test_text_that_is_no_definition_is_refused(text: str) -> None:
    with pytest.raises(ProgramTextError, match="cannot be read"):
        rebuilt(text)


def test_the_op_is_what_its_fake_says() -> None:
    text = norm_text()
    x = torch.randn(3, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
    sizes = [3, 32, 3, 8, 4, 5]
    torch.library.opcheck(REGION, (text, [x], sizes), test_utils=("test_schema", "test_faketensor"))
    flat, whole = REGION(text, [x], sizes)
    assert flat.shape == (3, 32)
    assert whole.stride() == (32, 1, 8)
    assert program_of(text) is program_of(norm_text())


def test_a_region_of_a_cached_graph_is_in_the_report() -> None:
    text = norm_text().replace("1e-05", "1e-06")
    report(clear=True)
    for _ in range(2):
        REGION(text, [torch.randn(2, 4, 8, dtype=torch.bfloat16).transpose(1, 2)], [2, 32, 2, 8, 4, 5])
    (found,) = report(clear=True).regions
    assert found.graph == "cached"
    assert found.taken
    assert found.program == text


def test_results_share_no_storage_with_inputs_or_one_another() -> None:
    x = torch.randn(4, 8)
    gm = graph_of(lambda x: (x.clone(), x.view(8, 4).clone(), x.sum(-1), (x * 1).clone(), x.t().clone().sum(0)), [x])
    regions_in(gm)
    storages = [t.untyped_storage().data_ptr() for t in (x, *gm(x))]
    assert len(storages) == len(set(storages))


def test_a_region_that_cannot_be_planned_stays_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UntranslatableError("a test", "this", "that")

    monkeypatch.setattr("shardfuse.compile.graph_pass.program_of_region", refuse)
    gm = graph_of(lambda x: F.softmax(x, -1), [torch.randn(4, 8)])
    before = str(gm.graph)
    (region,) = regions_in(gm)
    assert not region.taken
    assert region.why == "a test is 'this', expected that"
    assert str(gm.graph) == before


def test_errors_that_are_no_refusals_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("shardfuse.compile.graph_pass.program_of_region", fail)
    with pytest.raises(ZeroDivisionError):
        regions_in(graph_of(lambda x: F.softmax(x, -1), [torch.randn(4, 8)]))


def test_reasons_name_what_ends_a_region() -> None:
    gm = graph_of(lambda x: torch.cumsum(x, 0).sum(-1), [torch.randn(4, 8)])
    reasons = {str(n.target): why_not(n) for n in gm.graph.nodes}
    assert reasons["aten.cumsum.default"] == "aten.cumsum.default is not in the table"
    assert reasons["aten.sum.dim_IntList"] is None


def test_collectives_stay_and_keep_their_order(tmp_path: Path) -> None:
    """What stands before and behind an all-reduce is fused apart; on one rank its result is its input."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        x, residual = torch.randn(6, 16), torch.randn(6, 16)
        group = dist.group.WORLD.group_name

        def f(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            partial = x.softmax(-1)
            reduced = torch.ops._c10d_functional.all_reduce(partial, "sum", group)
            second = torch.ops._c10d_functional.all_reduce(residual.sum(0), "sum", group)
            wait = torch.ops._c10d_functional.wait_tensor
            return F.rms_norm(wait(reduced) + residual, (16,)), wait(second)

        gm = graph_of(f, [x, residual])
        regions = regions_in(gm)
        for mine, right in zip(gm(x, residual), f(x.double(), residual.double()), strict=True):
            assert_near(mine, right, n=8, signed=False, terms=torch.ones(()))
    finally:
        dist.destroy_process_group()
    assert len([r for r in regions if r.taken]) >= 2, "\n".join(map(str, regions))
    names = [str(n.target) for n in gm.graph.nodes]
    assert names.count("_c10d_functional.all_reduce.default") == 2
    assert not any("all_reduce" in r.program for r in regions)


def test_a_program_that_is_given_inputs_up_is_planned_once_with_the_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pass plans a region to weigh it; which of its inputs die is known when Inductor has ordered its buffers."""
    planned: list[object] = []

    def counted(*arguments: object, **options: object) -> object:
        planned.append(arguments)
        return compile_fusion(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("shardfuse.frontend.executor_cache.compile_fusion", counted)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 40])
        fd.add_output(fd.ops.sub(x, fd.ops.sum(x, [1], keepdim=True)))
    text = repr(fd)
    program, dying = program_of(text), program_of(text, (0,))
    plan = program.fd.fec.plan({program.fd.fec.tensors()[0]: (6, 40)})
    assert dying.fd.fec.plan({dying.fd.fec.tensors()[0]: (6, 40)}) is plan
    assert len(planned) == 1
    assert (program.fd.fusion.given_up, dying.fd.fusion.given_up) == ((), (dying.fd.fusion.inputs[0].val,))
    given = torch.randn(6, 40)
    for made in (program, dying):
        torch.testing.assert_close(made.fd.execute([given.clone()])[0], given - given.sum(1, keepdim=True))
    assert len(planned) == 1


def test_the_text_in_a_graph_has_one_line() -> None:
    """Inductor writes the arguments of an op into comments; torch 2.11 breaks its code at a second line."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1) + 1

    gm = graph_of(f, [torch.randn(4, 8)])
    regions_in(gm)
    (region,) = gm.graph.find_nodes(op="call_function", target=REGION)
    assert "\n" not in str(region.format_node(include_tensor_metadata=True))
    text = str(region.args[0])
    parts = statements_of(text)
    assert "".join(parts) == text
    assert on_lines(text) == repr(rebuilt(text)).rstrip()


def test_a_refusal_says_which_statement() -> None:
    text = printed(rebuilt(norm_text()))
    refused = text.replace("fd.ops.rsqrt(", "fd.ops.rsqrt(2 ** ")
    number = 1 + text[: text.index("fd.ops.rsqrt(")].count("; ")
    with pytest.raises(ProgramTextError, match=rf"statement {number}: 2 \*\* T"):
        rebuilt(refused)


@pytest.mark.parametrize("name", ["sigmoid", "gelu"])
def test_an_op_is_recognised_only_where_all_of_it_is_in_the_region(name: str) -> None:
    """Another op changes ``x`` in between, and the last of what stands for one op is in a region of its own."""

    def halve(x: torch.Tensor) -> None:
        x.mul_(0.5)

    def f(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        half, share = x * 0.5, torch.erf(x * 0.5**0.5) + 1
        divisor = torch.exp(-x) + 1
        torch.ops.shardfuse_tests.halve_(x)
        made = a / divisor if name == "sigmoid" else half * share
        return (made + x).sum(-1)

    given = torch.randn(4, 64), torch.randn(4, 64)
    with library._scoped_library("shardfuse_tests", "FRAGMENT") as ops:
        ops.define("halve_(Tensor(a!) x) -> ()")
        ops.impl("halve_", halve, "CPU")
        ops.impl("halve_", lambda x: None, "Meta")
        gm = graph_of(f, [x.clone() for x in given])
        programs = [r.program for r in regions_in(gm)]
        assert programs
        assert all(f"{name}(" not in p for p in programs)
        right = f(*(x.double() for x in given))
        assert_near(gm(*(x.clone() for x in given)), right, n=8)


def test_what_torch_makes_of_silu_is_a_product_with_a_sigmoid() -> None:
    """And of its gradient; of a divisor that is anything else, or of float64, it stays a quotient."""

    def f(x: torch.Tensor, one: float) -> tuple[torch.Tensor, torch.Tensor]:
        divisor = torch.exp(-x) + one
        return (x / divisor).sum(-1), (torch.reciprocal(divisor) * x * x).sum(-1)

    for dtype, one, is_sigmoid in (
        (torch.float32, 1.0, True),
        (torch.float32, 2.0, False),
        (torch.float64, 1.0, False),
    ):
        x = torch.linspace(-30, 30, 4 * 64, dtype=dtype).reshape(4, 64)
        gm = graph_of(lambda x, one=one: f(x, one), [x])
        (found,) = regions_in(gm)
        assert found.program.count("sigmoid(") == 2 * is_sigmoid
        assert ("reciprocal(" in found.program) is not is_sigmoid
        for own, right in zip(gm(x), f(x.double(), one), strict=True):
            assert_near(own, right, n=8)
