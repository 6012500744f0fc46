"""What a trace of torch's profiler shows of fusions: ranges under names that say what runs, and nothing without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exchange_cases import define, inputs, piece
from ranks import run_ranks
from torch.autograd.profiler import profile
from torch.distributed.tensor import Shard

import shardfuse.compile
from shardfuse import DataType, DeviceMesh, FusionDefinition, nn
from shardfuse.compile.region_call import RegionCall
from shardfuse.frontend import profiled

TEXT = """def nvfuser_fusion(fd : FusionDefinition) -> None :
    T0 = fd.define_tensor(shape=[-1, 4, 8], dtype=DataType.Float, is_cpu=False)
    T1 = fd.ops.sum(T0, dims=[1, 2], keepdim=True, dtype=DataType.Float)
    T2 = fd.ops.mul(T0, T1)
    fd.add_output(T2)
"""


def ranges(call: Callable[[], object]) -> list[str]:
    """Names of shardfuse's ranges, in the order in which they began; custom ops of torch have no range."""
    with profile() as found:
        call()
    begun = sorted(found.function_events, key=lambda event: event.time_range.start)
    return [e.name for e in begun if e.name.startswith("shardfuse") and "_v1" not in e.name]


def rms_norm() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 16], contiguity=True, dtype=DataType.BFloat16)
        wide = fd.ops.cast(x, DataType.Float)
        mean_square = fd.ops.mean(fd.ops.mul(wide, wide), [-1], keepdim=True)
        rstd = fd.ops.rsqrt(fd.ops.add(mean_square, 1e-6))
        fd.add_output(fd.ops.cast(fd.ops.mul(wide, rstd), DataType.BFloat16))
    return fd


def test_a_definition_is_shown_by_its_ops_and_sizes() -> None:
    """In each of the ways in which its program is found."""
    fd, x = rms_norm(), torch.randn(8, 16).bfloat16()
    for call in range(4):  # made, found, found by a comparison with the call before, and once more
        assert ranges(lambda: fd.execute([x])) == ["shardfuse: 2 mul, sum, div, add, rsqrt [8, 16]"], call
    assert ranges(lambda: fd.execute([x[:3]])) == ["shardfuse: 2 mul, sum, div, add, rsqrt [3, 16]"]


def test_a_long_definition_is_cut_and_one_that_computes_nothing_is_shown_all_the_same() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True, dtype=DataType.Float)
        number = fd.define_scalar(dtype=DataType.Double)
        y = fd.ops.mul(fd.ops.cos(fd.ops.sin(fd.ops.exp(fd.ops.tanh(fd.ops.abs(x))))), number)
        fd.add_output(fd.ops.neg(fd.ops.neg(y)))
    assert ranges(lambda: fd.execute([torch.ones(3), 2.0])) == ["shardfuse: abs, tanh, exp, sin, cos, mul, ... [3]"]
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True, dtype=DataType.Float)
        fd.add_output(fd.ops.cast(x, DataType.Half))
    assert ranges(lambda: fd.execute([torch.ones(5)])) == ["shardfuse: cast [5]"]
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.full([2], fd.define_scalar(1.0), DataType.Float))
    assert ranges(lambda: fd.execute([])) == ["shardfuse: full"]


def test_a_module_is_shown_by_its_class_forward_and_backward() -> None:
    norm, x = nn.AddRMSNorm(16), torch.randn(4, 16).requires_grad_()

    def step() -> None:
        sum(y.sum() for y in norm(x, x)).backward()

    first = [name for name in ranges(step) if "::" in name]
    assert first == ["shardfuse::AddRMSNorm", "shardfuse::AddRMSNorm backward"]
    step()
    assert ranges(step) == first, "and no more, once its programs are known"
    with torch.no_grad():
        norm(x, x)
        assert ranges(lambda: norm(x, x)) == first[:1]
    nn.functional.softmax(x, -1)
    assert ranges(lambda: nn.functional.softmax(x, -1)) == ["shardfuse::Softmax"]


def test_parts_of_a_loss_are_shown_by_what_the_caller_has_called() -> None:
    x, weight = torch.randn(64, 4).requires_grad_(), torch.randn(64, 4)
    loss, target = nn.LinearCrossEntropyLoss(chunk_rows=16), torch.arange(64)

    def step() -> None:
        (loss(x, weight, target) * 3).backward()

    step()
    step()
    whole = "shardfuse::LinearCrossEntropyLoss"
    assert list(dict.fromkeys(ranges(step))) == [whole, f"{whole} backward"]


def test_modules_of_one_fusion_keep_their_names() -> None:
    x = torch.randn(4, 16)
    for _ in range(3):
        for module in (nn.DropoutAddNorm(16).eval(), nn.AddLayerNorm(16)):
            module(x, x)
            assert ranges(lambda: module(x, x)) == [f"shardfuse::{type(module).__name__}"]  # noqa: B023


@pytest.mark.parametrize("is_static", [True, False])
def test_a_region_is_shown_by_its_ops_and_lines(is_static: bool) -> None:
    torch._dynamo.reset()
    shardfuse.compile.report(clear=True)
    options = {"shardfuse.take": "all", "force_disable_caches": True}

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    compiled = torch.compile(model, backend="shardfuse", options=options, dynamic=not is_static)
    line = model.__code__.co_firstlineno + 1
    for rows in (5, 6):
        x = torch.randn(rows, 16, requires_grad=True)
        compiled(x).sum().backward()
        found = ranges(lambda: compiled(x).sum().backward())  # noqa: B023
        assert found[0] == f"shardfuse: max, sub, exp, sum, div [{rows}, 16] at test_profiled.py:{line} (forward)"
        assert found[1].startswith("shardfuse: ")
        assert found[1].endswith(f"[{rows}, 16] at test_profiled.py:{line} (backward)")
        assert len(found) == 2
    shardfuse.compile.report(clear=True)


def test_a_region_of_a_cached_graph_is_shown_by_its_ops() -> None:
    region, base = RegionCall(TEXT, {0: ((3, 4, 8), (32, 8, 1))}), torch.randn(6, 16)
    region.run(base)
    assert ranges(lambda: region.run(base)) == ["shardfuse: sum, mul [3, 4, 8]"], "the shape of the view"


def test_a_definition_on_ranks() -> None:
    def run(rank: int, size: int) -> list[str]:
        fd = define("rms_norm", 16, size, DataType.Float)
        here = [piece("rms_norm", k, v, size, rank) for k, v in enumerate(inputs("rms_norm", 4, 16, torch.float32))]
        norm = nn.RMSNorm(16, mesh=DeviceMesh(range(size)), input=Shard(-1), parameters="local")

        def step() -> None:
            fd.execute(here)
            norm(here[0])

        for _ in range(3):
            step()
        if rank:
            step()
            return []
        return ranges(step)

    found = set(run_ranks(2, run)[0])  # of both: ranks are threads of one process
    assert found == {"shardfuse: 3 mul, sum, div, add, rsqrt [4, 8]", "shardfuse::RMSNorm"}


def test_without_a_profiler_nothing_is_asked_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("no profiler runs")

    fd, x = rms_norm(), torch.randn(8, 16).bfloat16()
    norm, rows = nn.RMSNorm(16), torch.randn(8, 16).requires_grad_()
    region = RegionCall(TEXT)
    monkeypatch.setattr(profiled.torch_profiler, "record_function", refuse)
    for _ in range(4):
        fd.execute([x])
        norm(rows).sum().backward()
        region.run(torch.randn(2, 4, 8))
    with pytest.raises(AssertionError, match="no profiler runs"):
        ranges(lambda: fd.execute([x]))
