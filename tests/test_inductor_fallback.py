"""Fallbacks of the ops of modules are registered with Inductor, which then prints nothing of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import ir, lowering
from torch._inductor.utils import run_and_get_code
from torch._library.utils import get_layout_constraint_tag

from shardfuse import DeviceMesh
from shardfuse.nn import AddRMSNorm, LinearCrossEntropyLoss
from shardfuse.nn.inductor_fallback import register_module_op

COLUMNS, CLASSES = 16, 32


class Model(nn.Module):
    """Layers whose results are read twice each: there are 2**layers paths from the loss to the first."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        mesh = DeviceMesh(range(1))  # without one a norm is made of torch's own ops
        self.norms = nn.ModuleList(AddRMSNorm(COLUMNS, mesh=mesh, parameters="local") for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS) for _ in range(layers))
        self.loss = LinearCrossEntropyLoss()
        self.head = nn.Linear(COLUMNS, CLASSES, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        residual = x
        for norm, linear in zip(self.norms, self.linears, strict=True):
            normed, residual = norm(linear(x), residual)
            x = normed * torch.sigmoid(normed)
        return self.loss(x, self.head.weight, target)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of nodes of Inductor's that are printed; torch keeps no graph of an earlier test."""
    names: list[str] = []
    kept: Any = ir.IRNode.str_helper

    def noted(node: ir.IRNode, *args: Any, **named: Any) -> str:
        names.append(type(node).__name__)
        return kept(node, *args, **named)

    monkeypatch.setattr(ir.IRNode, "str_helper", noted)
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield names
    torch._dynamo.reset()


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Inductor has not seen the ops of modules."""
    of_torch: Any = lowering
    tables: list[dict[Any, Any]] = [lowering.lowerings, of_torch._maybe_layout_constraints]
    seen = [{op: known for op, known in table.items() if str(op).startswith("shardfuse.")} for table in tables]
    for table, found in zip(tables, seen, strict=True):
        for op in found:
            del table[op]
    yield
    for table, found in zip(tables, seen, strict=True):
        table.update(found)


def test_a_model_is_compiled_without_printing_it(printed: list[str], forgotten: None) -> None:
    torch.manual_seed(0)
    model = Model(3)
    x, target = torch.randn(8, COLUMNS), torch.arange(8)
    expected = torch.autograd.grad(model(x, target), list(model.parameters()))
    found = torch.autograd.grad(torch.compile(model, fullgraph=True)(x, target), list(model.parameters()))
    assert printed == []
    for mine, own in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own)


def test_ops_keep_the_strides_that_torch_asks_for_by_itself(forgotten: None) -> None:
    op: Any = torch.ops.shardfuse.add_rms_norm_v1.default
    register_module_op(op)
    of_torch: Any = lowering
    default = of_torch.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
    assert of_torch.maybe_layout_constraints(op) is default
    known = lowering.lowerings[op]
    register_module_op(op)
    assert lowering.lowerings[op] is known


def test_norms_with_collectives_keep_their_order(printed: list[str], forgotten: None) -> None:
    """Less memory is needed where the second runs first; how much, and so the order, would depend on the shard."""
    mesh = DeviceMesh(range(1))
    norms = [AddRMSNorm(columns, mesh=mesh, parameters="local") for columns in (32, 24)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        held = norms[0](x, x)[0]
        return (held * norms[1](y, y)[0].sum()).sum()

    x, y = torch.randn(4096, 32), torch.randn(4096, 24)
    with torch.no_grad():
        expected = step(x.double(), y.double())
        _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, y)
        found, (wide,) = run_and_get_code(torch.compile(step, fullgraph=True), x.double(), y.double())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)
    for written in (code, wide):
        assert re.findall(r'add_rms_norm_v1.default\(.*"hidden_size":(\d+)', written) == ["32", "24"]
