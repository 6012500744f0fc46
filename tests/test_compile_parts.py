"""Parts of a region that share nothing large: one that could run early does not keep its inputs until the others."""

from __future__ import annotations

import pytest
import torch
from compile_graphs import check, graph_of, listed, regions_in
from torch.fx import GraphModule

from shardfuse.compile import regions
from shardfuse.compile.node_facts import nbytes

Tensors = tuple[torch.Tensor, ...]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def inputs() -> list[torch.Tensor]:
    return [numbers(2, 64, 32, seed=k) for k in range(3)] + [numbers(32, 32)]


def gates(g: torch.Tensor, s: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """The gradients of a block's modulation: one is of what is there at once, one waits for products."""
    early = (g * 2) * (s + 1)
    late = g @ w @ w @ w
    return (torch.cat([early.sum(1), (late * x).sum(1)], 1),)


def peak(gm: GraphModule) -> int:
    """Bytes that are held at most where each tensor goes behind its last reader, inputs too, views with their base."""
    nodes = list(gm.graph.nodes)
    last = {a: k for k, n in enumerate(nodes) for a in n.all_input_nodes}
    held = most = sum(nbytes(n) for n in nodes if n.op == "placeholder")
    for k, n in enumerate(nodes):
        held += nbytes(n) if n.op == "call_function" else 0
        most = max(most, held)
        held -= sum(nbytes(a) for a, at in last.items() if at == k)
    return most


def test_a_part_that_is_ready_early_is_a_region_of_its_own() -> None:
    found = check(gates, inputs(), n=40, rows=None, regions=2)
    assert sorted(r.inputs for r in found) == [2, 3]
    gm = graph_of(gates, inputs())
    regions_in(gm)
    first, *_, last = [n for n in gm.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]
    assert "region_v1" in str(first.target)
    assert "region_v1" in str(last.target)


def test_less_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    cut = graph_of(gates, given)
    regions_in(cut)
    monkeypatch.setattr(regions, "parts_of", lambda group, *rest: [list(group)])
    whole = graph_of(gates, given)
    assert len(regions_in(whole)) == 1
    early = 2 * given[0].nbytes - 4 * 2 * 32
    assert peak(whole) - peak(cut) == early, "what the early part reads is held no longer, but for its sum"
    for mine, right in zip(listed(cut(*given)), listed(whole(*given)), strict=True):
        assert torch.equal(mine, right)


def test_parts_that_are_ready_together_stay_together() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return (x.square().sum() + y.square().sum(),)

    check(f, inputs()[:2], n=40)


def test_parts_that_share_a_large_tensor_stay_together() -> None:
    def f(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Tensors:
        late = g @ w
        return (torch.cat([(g * x).sum(1), (late * x).sum(1)], 1),)

    check(f, [*inputs()[:2], inputs()[3]], n=40)


def test_a_part_whose_results_are_as_large_as_its_inputs_stays() -> None:
    """Queries and keys, each normed behind its own product, turned by one table."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> Tensors:
        q, k = x @ w, x @ v
        return tuple(t * t.square().mean(-1, keepdim=True).rsqrt() * table for t in (q, k))

    check(f, [inputs()[0], numbers(32, 32), numbers(32, 32, seed=1), numbers(32)], n=40, rows=None)


def test_small_results_of_an_early_part_go_with_it() -> None:
    """Its scale, and what is made of it alone, before the other part reads it."""

    def f(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> Tensors:
        mean = ((g * scale.exp()).sum(1) * 0.5).tanh()
        return ((g @ w @ w @ w * mean[:, None]).sum(-1) * x[:, :, 0],)

    found = check(f, [*inputs()[:2], inputs()[3], numbers(32)], n=40, rows=None, regions=2)
    assert any(dict(r.ops).get("tanh") and dict(r.ops).get("exp") for r in found)


def test_an_early_part_that_waits_for_a_late_one_stays() -> None:
    def f(g: torch.Tensor, s: torch.Tensor, w: torch.Tensor) -> Tensors:
        late = (g @ w @ w).sum(1)
        return ((s * late[:, None]).sum(1),)

    gm = graph_of(f, [*inputs()[:2], inputs()[3]])
    regions_in(gm)
    gm.graph.lint()
    for mine, right in zip(listed(gm(*inputs()[:2], inputs()[3])), listed(f(*inputs()[:2], inputs()[3])), strict=True):
        torch.testing.assert_close(mine, right)
