"""Large tensors that one region would hand to another are made anew in it, where that reads no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from compile_graphs import check, graph_of, listed, regions_in
from image_graphs import numbers

from shardfuse.compile import graph_pass
from shardfuse.compile.graph_pass import hand_over
from shardfuse.compile.made_anew import made_anew
from shardfuse.compile.regions import Region, regions_of

F = torch.nn.functional
BF16 = torch.bfloat16
Squeeze = Callable[..., tuple[torch.Tensor, ...]]


def squeeze_backward(
    x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, v: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Of [n, pixels, channels]: sums over pixels, a product of them, and sums over all rows that wait for it."""
    s = torch.sigmoid(x * w)
    summed = (g * (x * s)).sum(1)
    opened = torch.sigmoid(gate)
    scaled = g * opened[:, None]
    back = ((summed * opened) @ v)[:, None]
    d = (scaled + back) * (s + x * s * (1 - s))
    return d.sum((0, 1)), (d * x).sum((0, 1)), d


def given(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    x, g = numbers(4, 96, 24).to(dtype), numbers(4, 96, 24, seed=1).to(dtype)
    return [x, g, numbers(24).to(dtype), numbers(24, 24).to(dtype), numbers(4, 24).to(dtype)]


def regions(f: Squeeze, inputs: list[torch.Tensor]) -> list[Region]:
    return regions_of(graph_of(f, inputs).graph)[0]


def large(region: Region) -> tuple[list[str], list[str]]:
    """Names of what it reads and of what it gives, of tensors as large as ``x``."""
    read, gives = (
        [n.name for n in of if n.meta["val"].numel() >= 4 * 96 * 24] for of in (region.inputs, region.outputs)
    )
    return read, gives


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_nothing_large_is_handed_over(dtype: torch.dtype) -> None:
    first, second = regions(squeeze_backward, given(dtype))
    assert large(first) == (["arg0_1", "arg1_1"], [])
    assert sorted(large(second)[0]) == ["arg0_1", "arg1_1"]
    assert "sigmoid_1" in [n.name for n in second.inputs], "a function of few numbers is computed once"
    assert len(large(second)[1]) == 1
    check(squeeze_backward, given(dtype), n=8, regions=2, terms=True)


@pytest.mark.parametrize("left", [0, 1])
def test_right_where_one_of_the_two_is_left_to_inductor(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weigh = graph_pass._weigh
    seen: list[Region] = []

    def but_one(region: Region, *rest: object, **options: object) -> object:
        seen.append(region)
        found = weigh(region, *rest, **options)
        return replace(found, taken=len(seen) - 1 != left)

    monkeypatch.setattr(graph_pass, "_weigh", but_one)
    gm = graph_of(squeeze_backward, given())
    (report, *_) = [r for r in regions_in(gm) if r.taken]
    assert report.outputs == (3 if left == 0 else 2)
    for mine, expected in zip(listed(gm(*given())), squeeze_backward(*given()), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-4)


def with_product(x: torch.Tensor, g: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    s = torch.sigmoid(x * rest[0])
    summed = (g * s).sum(1)
    back = (summed @ rest[1])[:, None]
    d = (g + back) * s
    return d.sum((0, 1)), d, s @ rest[1]


def test_what_a_product_reads_is_stored_and_made_anew_beside() -> None:
    """A kernel asks for it in memory, and so the region that reads it reads that."""
    first, second = regions(with_product, given())
    assert len(large(first)[1]) == 1
    assert len(large(second)[0]) == 2


def with_more_inputs(x: torch.Tensor, g: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The second group reads neither of the two tensors that the sum is of."""
    h = x + g
    summed = h.sum(1)
    back = (summed @ rest[1])[:, None]
    d = h * back
    return d.sum((0, 1)), d


def test_what_would_be_made_of_more_than_it_has_is_handed_over() -> None:
    first, second = regions(with_more_inputs, given())
    assert large(first) == (["arg0_1", "arg1_1"], ["add"])
    assert large(second)[0] == ["add"]


def with_mutation(x: torch.Tensor, g: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    s = torch.sigmoid(x * rest[0])
    back = ((g * s).sum(1) @ rest[1])[:, None]
    x.add_(1.0)
    d = (g + back) * s
    return d.sum((0, 1)), d


def test_what_rests_on_a_tensor_that_changes_is_not_made_anew() -> None:
    expected = with_mutation(*given())
    gm = graph_of(with_mutation, given())
    hand_over(gm.graph, "all")
    gm.recompile()
    for mine, right in zip(listed(gm(*given())), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-4)


def test_random_numbers_are_drawn_once() -> None:
    def f(x: torch.Tensor, g: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s = torch.sigmoid(x) * torch.rand_like(x)
        back = ((g * s).sum(1) @ rest[1])[:, None]
        d = (g + back) * s
        return d.sum((0, 1)), d

    gm = graph_of(f, given())
    groups = [list(gm.graph.nodes)]
    assert not any("rand" in n.name for n in made_anew(groups, dict.fromkeys(gm.graph.nodes, 0)).made)
