"""What generated code of Inductor calls in place of a region: its program, by nothing but its inputs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from compile_graphs import assert_near
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from shardfuse import DataType, FusionDefinition, ShardfuseError
from shardfuse.compile import region_lowering, report
from shardfuse.compile.compile_errors import OutputShapeError, UntranslatableError
from shardfuse.compile.region_call import RegionCall
from shardfuse.compile.region_op import REGION
from shardfuse.compile.translation import checked

F = torch.nn.functional
TEXT = """def nvfuser_fusion(fd : FusionDefinition) -> None :
    T0 = fd.define_tensor(shape=[-1, 4, 8], dtype=DataType.Float, is_cpu=False)
    T1 = fd.ops.sum(T0, dims=[1, 2], keepdim=True, dtype=DataType.Float)
    T2 = fd.ops.mul(T0, T1)
    fd.add_output(T2)
    fd.add_output(T1)
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    report(clear=True)
    with config.patch(force_disable_caches=True):
        yield


def normed(x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A region that reads a matrix product in another shape than that is made in."""
    return F.layer_norm(x @ w + x, (16,), weight).mul(2)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_generated_code_calls_the_program_itself(dynamic: bool) -> None:
    inputs = [torch.randn(s) for s in ((8, 4, 16), (16, 16), (16,))]
    f = torch.compile(normed, backend="shardfuse", options={"shardfuse.take": "all"}, dynamic=dynamic)
    found, (code,) = run_and_get_code(f, *inputs)
    assert_near(found, normed(*(x.double() for x in inputs)), normed(*inputs), terms=torch.ones(()), signed=False)
    call = next(line for line in code.splitlines() if " = region_" in line and "shardfuse_region(" not in line)
    assert ".at((s" in call if dynamic else ".run(buf" in call, call
    assert "torch.ops.shardfuse" not in code
    assert "assert_size_stride(buf" not in code, "of a region's outputs nothing is asserted"
    if not dynamic:
        assert "reinterpret_tensor" not in call, "a kernel takes the address of what is viewed"
    other = [torch.randn(8, 4, 16), *inputs[1:]]
    assert_near(f(*other), normed(*(x.double() for x in other)), normed(*other), terms=torch.ones(()), signed=False)


def test_another_host_language_calls_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_lowering, "_WRAPPERS", ())
    x = torch.randn(8, 16)
    f = torch.compile(lambda x: x.softmax(-1), backend="shardfuse", options={"shardfuse.take": "all"})
    found, (code,) = run_and_get_code(f, x)
    assert "torch.ops.shardfuse.region_v1.default(" in code
    assert "region_call" not in code
    assert_near(found, x.double().softmax(-1), x.softmax(-1), relative=True)


def test_views_are_made_for_programs_that_read_more_than_an_address() -> None:
    base = torch.randn(6, 16)
    call = RegionCall(TEXT, {0: ((3, 4, 8), (32, 8, 1))})
    whole = base.view(3, 4, 8)
    for _ in range(2):
        first, second = call.run(base)
        expected = whole.double() * whole.double().sum((1, 2), keepdim=True)
        assert_near(first, expected, n=4, terms=expected.abs().amax(), signed=False)
        assert second.shape == (3, 1, 1)


def test_what_was_bound_for_some_sizes_runs_at_those_alone() -> None:
    call = RegionCall(TEXT)
    for rows in (2, 5, 2, 5):
        x = torch.randn(rows, 4, 8)
        found = call.at((rows,), x)
        right = REGION(TEXT, [x], [rows, 4, 8, rows, 1, 1])
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert sorted(call.bound) == [(2,), (5,)]


def test_the_first_call_of_some_sizes_compares_the_shapes_of_the_outputs() -> None:
    x = torch.randn(3, 4, 8)
    for shapes, sizes in (([(3, 4, 8), (3, 1, 1)], ()), ([(-2, 4, 8), (None, 1, 1)], (7, 3))):
        call = RegionCall(TEXT, None, shapes)
        for _ in range(2):
            assert len(call.at(sizes, x) if sizes else call.run(x)) == 2
    for shapes, sizes in (([(3, 4, 8), (3, 4, 1)], ()), ([(-1, 4, 8), (-1, 1, 1)], (6,)), ([(3, 4, 8), (3,)], ())):
        call = RegionCall(TEXT, None, shapes)
        for _ in range(2):
            with pytest.raises(OutputShapeError, match="of a compiled region has the shape"):
                call.at(sizes, x) if sizes else call.run(x)


def test_generated_code_declares_the_shapes_of_the_outputs() -> None:
    f = torch.compile(lambda x: x.softmax(-1), backend="shardfuse", options={"shardfuse.take": "all"}, dynamic=True)
    found, (code,) = run_and_get_code(f, torch.randn(5, 16))
    assert found.shape == (5, 16)
    assert "[(-1, -2)]" in code or "[(-2, -1)]" in code, "by the names of the symbols"


def test_an_axis_of_one_is_not_taken_for_a_symbol() -> None:
    definition = FusionDefinition()
    with definition:
        one = definition.define_tensor(shape=[1, 4], dtype=DataType.Float)
        symbol = definition.define_tensor(shape=[-1, 4], dtype=DataType.Float)
        definition.add_output(definition.ops.add(one, symbol))

    def graph(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    gm = make_fx(graph, tracing_mode="symbolic")(torch.randn(6, 4))
    (rows,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    meta = rows.meta["val"]
    with pytest.raises(UntranslatableError, match="the shape of"):
        checked(rows, one, meta)
    with pytest.raises(UntranslatableError, match="the shape of"):
        checked(rows, symbol, torch.empty(1, 4))
    assert checked(rows, symbol, meta) is symbol


@pytest.mark.parametrize("is_on", [True, False])
def test_no_collection_interrupts_a_first_call(*, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walks through all objects of Inductor's; it is as it was behind the call, also where that failed."""
    seen: list[bool] = []
    checked_call = RegionCall._checked

    def watched(self: RegionCall, arguments: tuple[torch.Tensor, ...]) -> object:
        seen.append(gc.isenabled())
        return checked_call(self, arguments)

    monkeypatch.setattr(RegionCall, "_checked", watched)
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        call = RegionCall(TEXT)
        call.run(torch.randn(3, 4, 8))
        call.at((2,), torch.randn(2, 4, 8))
        with pytest.raises(ShardfuseError):
            RegionCall(TEXT).run(torch.randn(3, 4, 9))
        assert seen == [False] * 3
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()
