"""Large tensors that one region would store for another are rematerialised in it, where that reads no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from compile_graphs import check, graph_of, listed, regions_in
from image_graphs import numbers
from torch._inductor import inductor_prims
from torch.fx import Node

from shardfuse.compile import graph_pass, random_op, rematerialised
from shardfuse.compile.graph_pass import hand_over
from shardfuse.compile.regions import Region, regions_of

B16 = torch.bfloat16
Tensor = torch.Tensor
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Function = Callable[..., tuple[Tensor, ...]]


def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of [n, pixels, channels] two, of channels one, a matrix for these, and a gate of [n, channels]."""
    x, g = numbers(4, 96, 24).to(dtype), numbers(4, 96, 24, seed=1).to(dtype)
    return [x, g, numbers(24).to(dtype), numbers(24, 24).to(dtype), numbers(4, 24).to(dtype)]


def squeeze_backward(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    """Sums over pixels, a product of them, and sums over all rows that wait for it."""
    s = torch.sigmoid(x * w)
    summed = (g * (x * s)).sum(1)
    opened = torch.sigmoid(gate)
    scaled = g * opened[:, None]
    back = ((summed * opened) @ v)[:, None]
    d = (scaled + back) * (s + x * s * (1 - s))
    return d.sum((0, 1)), (d * x).sum((0, 1)), d


def regions(f: Function, inputs: list[Tensor]) -> list[Region]:
    return regions_of(graph_of(f, inputs).graph)[0]


def remade(f: Function, dtype: torch.dtype = torch.float32) -> list[str]:
    """Ops whose results regions rematerialise."""
    return sorted({str(n.target).split(".")[1] for r in regions(f, given(dtype)) for n in r.rematerialised})


def large(region: Region) -> tuple[list[str], list[str]]:
    """Names of what it reads and of what it gives, of tensors as large as ``x``."""
    of = (region.inputs, region.outputs)
    read, gives = (sorted(n.name for n in nodes if n.meta["val"].numel() >= 4 * 96 * 24) for nodes in of)
    return read, gives


def unread(f: Function, inputs: list[Tensor]) -> list[Node]:
    """Nodes of the graph behind the pass that nothing reads; the numbers are eager's."""
    gm = graph_of(f, inputs)
    hand_over(gm.graph, "all")
    gm.graph.lint()
    gm.recompile()
    expected = f(*(x.clone() for x in inputs))
    for mine, right in zip(listed(gm(*inputs)), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-4)
    return [n for n in gm.graph.nodes if not n.users and n.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, B16])
def test_nothing_large_is_handed_over(dtype: torch.dtype) -> None:
    first, second = regions(squeeze_backward, given(dtype))
    assert large(first) == (["arg0_1", "arg1_1"], [])
    assert large(second)[0] == ["arg0_1", "arg1_1"]
    assert "sigmoid_1" in [n.name for n in second.inputs], "a function of few numbers is computed once"
    assert len(large(second)[1]) == 1
    check(squeeze_backward, given(dtype), n=8, regions=2, terms=True)


def test_no_copy_is_left_in_the_graph() -> None:
    assert unread(squeeze_backward, given()) == []


@pytest.mark.parametrize("left", [0, 1])
def test_where_one_of_the_two_is_left_to_inductor_all_is_handed_over(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor rounds elsewhere, so that both would not compute the same."""
    weigh = graph_pass._weigh

    def but_one(region: Region, *rest: object, **options: object) -> object:
        found = weigh(region, *rest, **options)
        is_first = any(n.name == "sum_1" for n in region.nodes)
        return replace(found, taken=is_first == bool(left))

    monkeypatch.setattr(graph_pass, "_weigh", but_one)
    assert unread(squeeze_backward, given()) == []
    taken = [r for r in regions_in(graph_of(squeeze_backward, given())) if r.taken]
    assert [r.outputs for r in taken] == [4 if left else 3]


def of_two(
    make: Callable[..., Tensor], use: Callable[..., Tensor], more: Callable[..., Tensor] | None = None
) -> Function:
    """``make`` gives a tensor that a first group sums, and ``use`` computes of it what a second sums."""

    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        h = make(x, g, w)
        back = (h.sum(1) @ v)[:, None]
        d = use(h, back, x, g)
        total = d.sum((0, 1))
        return total, d, *(() if more is None else (more(h, total[None] @ v),))

    return f


def product(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return x * w


def both(h: Tensor, back: Tensor, x: Tensor, g: Tensor) -> Tensor:
    return (h + back) * x


def test_what_is_read_anyway_is_not_stored_too() -> None:
    assert remade(of_two(product, both)) == ["mul"]


@pytest.mark.parametrize(
    "more",
    [lambda h, v: h @ (v.T @ v), lambda h, v: h.reshape(-1, 24) @ (v.T @ v), lambda h, v: h * v],
    ids=["product", "view", "outside"],
)
def test_what_others_than_regions_read_is_stored(more: Callable[..., Tensor]) -> None:
    assert remade(of_two(product, both, more)) == []


def test_a_wider_copy_that_a_product_reads_is_stored_narrow() -> None:
    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        h = x * w
        wide = h.float()
        back = (wide.sum(1) @ v.float())[:, None]
        d = (h + back) * x
        return d.sum((0, 1)), d, wide @ v.float()

    assert remade(f, B16) == []


def test_what_is_made_of_more_than_it_has_is_handed_over() -> None:
    """The second group reads neither of the two tensors that it is made of."""
    f = of_two(lambda x, g, w: x + g, lambda h, back, x, g: h * back)
    assert remade(f) == []
    first, second = regions(f, given())
    assert large(first) == (["arg0_1", "arg1_1"], ["add"])
    assert large(second)[0] == ["add"]


def test_what_saves_less_than_it_has_is_handed_over() -> None:
    """Of 4 and 2 bytes an element, in 4: half of what it has."""

    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        h = x.float() + g.half().float()
        back = (h.sum(1) @ v.float())[:, None]
        d = h * back
        return d.sum((0, 1)), d

    (n,) = [n for r in regions(f, given())[:1] for n in r.outputs if n.name.startswith("add")]
    assert n.meta["val"].dtype == torch.float32
    assert remade(f) == []


@pytest.mark.parametrize(("times", "made"), [(1, ["erf"]), (6, [])])
def test_what_takes_longer_to_compute_than_to_read_is_handed_over(times: int, made: list[str]) -> None:
    def make(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        for _ in range(times):
            x = torch.erf(x)
        return x

    assert remade(of_two(make, both)) == made


def test_what_one_reads_serves_the_next() -> None:
    """Of three that the second group is handed, the last is made of what the others are made of."""

    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        a, b, c = x * w, g * w, x * g
        back = ((a + b + c).sum(1) @ v)[:, None]
        d = (a + back) * (b + back) * (c - back)
        return d.sum((0, 1)), d

    first, second = regions(f, given())
    assert len(second.rematerialised) == 3
    assert large(first)[1] == []


def test_what_others_are_made_of_stays() -> None:
    """A third group rematerialises from it what it reads."""

    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        a = x * w
        first = (a.sum(1) @ v)[:, None]
        b = torch.relu(a + first) * a
        second = (b.sum(1) @ v)[:, None]
        d = (b + second) * a * g
        return d.sum((0, 1)), d

    found = regions(f, given())
    made = {n for r in found for n in r.rematerialised}
    assert made
    check(f, given(), n=64, regions=len(found), terms=True)
    assert unread(f, given()) == []


def test_what_is_stored_anyway_is_read() -> None:
    """The caller gets a tensor of which, and of a function of few numbers, another is made that is handed over."""

    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        a = torch.tanh(gate)[:, None] + x
        h = a * w
        back = (h.sum(1) @ v)[:, None]
        d = (h + back) * a
        return a, d.sum((0, 1)), d

    first, second = regions(f, given())
    assert [n.name for n in second.rematerialised] == ["mul"]
    assert large(first)[1] == ["add"]
    assert large(second)[0] == ["add"]
    assert unread(f, given()) == []


def test_a_part_of_it_is_handed_over() -> None:
    """Half of what the first group computes; the second reads no more of what it is made of."""
    f = of_two(
        lambda x, g, w: g * torch.relu(x * w), lambda h, back, x, g: (h[:, :48] + back) * (x[:, :48] - g[:, :48])
    )
    assert remade(f) == []
    assert unread(f, given()) == []


def test_what_is_compared_for_equality_is_handed_over() -> None:
    """As the largest of each column is: another kernel may contract a product and a sum in another way."""

    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        h = x * w + g
        top = h.amax(1)
        back = (top @ v)[:, None]
        d = torch.where(h == top[:, None], x, g) * back
        return d.sum((0, 1)), d

    assert remade(f) == []
    check(f, given(), n=8, regions=2, terms=True)


def test_what_rests_on_a_tensor_that_changes_is_handed_over() -> None:
    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        s = x * w
        back = ((g * s).sum(1) @ v)[:, None]
        x.add_(1.0)
        d = (g + back) * s
        return d.sum((0, 1)), d

    assert remade(f) == []
    unread(f, given())


@pytest.mark.parametrize("inside", [True, False])
def test_random_numbers_are_drawn_once(*, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the region that they drop elements in, or by Inductor's kernels."""
    monkeypatch.setattr(random_op, "draws_in_triton", lambda device: inside)

    def dropped(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return x * w * (inductor_prims.random(list(x.shape), w[0].long(), "rand") > 0.5)

    assert remade(of_two(dropped, both)) == []
    assert remade(of_two(lambda x, g, w: x * w * (x > 0.5), both)) == ["mul"]


@pytest.mark.parametrize("name", ["sum_1", "sum_2"])
def test_regions_with_collectives_are_left_as_all_ranks_have_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rematerialised, "is_start", lambda n: n.name == name)
    assert remade(of_two(product, both)) == []


def test_symbolic_sizes_come_from_what_it_is_made_of() -> None:
    """A region takes the sizes of its results from its inputs, which have to have them."""

    def f(x: Tensor, g: Tensor, w: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        h = x.reshape(-1, 24) * w
        back = (h.reshape(x.shape).sum(1) @ v).sum()
        d = (h + back) * x.reshape(-1, 24)
        return d.sum(0), d

    found, _ = regions_of(graph_of(f, given(), symbolic=True).graph)
    assert [n for r in found for n in r.rematerialised] == []
