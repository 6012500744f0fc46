"""What Inductor pads, slices and puts among zeros around regions: their inputs, one pad for two, picked elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compile_graphs import assert_near, calls_in, check, graph_of, listed, regions_in

from shardfuse.compile import graph_pass
from shardfuse.compile.graph_pass import hand_over
from shardfuse.compile.padded import SharedPad, share_pads
from shardfuse.compile.region_op import REGION, program_of

F = torch.nn.functional
aten = torch.ops.aten
prims = torch.ops.prims


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def texts(f: object, *inputs: torch.Tensor) -> list[str]:
    gm = graph_of(f, inputs)  # pyright: ignore[reportArgumentType]
    regions_in(gm)
    return [str(n.args[0]) for n in gm.graph.find_nodes(op="call_function", target=REGION)]


def test_a_slice_that_is_all_that_is_read_is_an_input() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w)[:, :13].reshape(2, 3, 13).softmax(-1)

    x, w = numbers(6, 8), numbers(8, 16)
    check(f, [x, w], n=4)
    (text,) = texts(f, x, w)
    assert "slice" not in text
    assert "shape=[6, 13]" in text


def test_slices_of_what_is_read_whole_stay_inside() -> None:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.cat((-x[..., 4:], x[..., :4]), -1)).sum(-1)

    def selected(x: torch.Tensor) -> torch.Tensor:
        return (x[:, 0] - x[:, 1]).sum(-1)

    for f in (rotated, selected):
        check(f, [numbers(6, 5, 8)], n=4)
        assert len(program_of(texts(f, numbers(6, 5, 8))[0]).fd.fusion.inputs) == 1


def test_a_view_of_a_slice_of_a_view() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = x.reshape(4, 6, 5)[:, 1:4].permute(0, 2, 1)
        return part.sum(-1), part.amax(-1)

    check(f, [numbers(24, 5)])


def test_gradients_of_selected_elements_are_part_of_a_region() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = q.new_zeros(3, *q.shape)
        parts = [aten.select_scatter.default(zeros, t, 0, i) for i, t in enumerate((q, k, v))]
        whole = (parts[0] + parts[1] + parts[2]).permute(1, 3, 0, 2, 4).reshape(2, 5, -1).clone()
        return whole, whole.sum((0, 1))

    given = [numbers(2, 5, 4, 8, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    found = check(f, given)
    assert found[0].kernels == 1
    assert found[0].inputs == 3


@pytest.mark.parametrize("index", [0, 2, -1])
def test_select_scatter(index: int) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = aten.select_scatter.default(x.new_full((4, 3, 5), 2.0), x, 1, index)
        return y, y.sum(-1)

    check(f, [numbers(4, 5)])


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (2, 8), (3, 2**63 - 1), (-6, -1)])
def test_slice_scatter(start: int, stop: int) -> None:
    length = len(range(9)[start:stop])

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = aten.slice_scatter.default(x.new_full((4, 9), -1.0), x, 1, start, stop)
        return y, y.sum(-1)

    check(f, [numbers(4, length)])


def test_scatters_into_other_tensors_are_left() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (aten.slice_scatter.default(y, x, 1, 2, 6) + 1).sum(-1)

    check(f, [numbers(4, 4), numbers(4, 9)])


# --- one pad for two ---------------------------------------------------------------------------------------


def gradient(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.softmax(-1)
    pad = aten.constant_pad_nd.default(y, [0, 3])
    turned = aten.constant_pad_nd.default(y.permute(1, 0), [0, 0, 0, 3])
    return pad @ w, turned @ v, y.sum(0), y.sum(0, True)


def test_two_pads_of_one_tensor_become_one() -> None:
    given = [numbers(4, 13), numbers(16, 8), numbers(4, 8)]
    gm = graph_of(gradient, given)
    right = listed(gm(*given))
    share_pads(gm.graph)
    gm.graph.lint()
    gm.recompile()
    pads = gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert len(pads) == 1
    assert list(pads[0].meta["val"].shape) == [4, 16]
    for mine, expected in zip(listed(gm(*given)), right, strict=True):
        assert torch.equal(mine, expected)
    assert regions_in(gm)[0].outputs == 3
    assert calls_in(gm) == 1


def test_other_pads_stay() -> None:
    def in_front(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return aten.constant_pad_nd.default(y.permute(1, 0), [0, 0, 3, 0]) @ w

    def read_by_others(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pad = aten.constant_pad_nd.default((x * 2).permute(1, 0), [0, 0, 0, 3])
        return pad @ w, pad + 1

    def of_two_values(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        one, other = aten.constant_pad_nd.default(y, [0, 3]), y.permute(1, 0)
        return one @ v, aten.constant_pad_nd.default(other, [0, 0, 0, 3], 1.0) @ w

    given = [numbers(4, 13), numbers(4, 8), numbers(16, 8)]
    for f in (in_front, read_by_others, of_two_values):
        gm = graph_of(f, given[: f.__code__.co_argcount])
        before = str(gm.graph)
        share_pads(gm.graph)
        assert str(gm.graph) == before, f.__name__


def test_pads_of_a_symbolic_width_stay() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        k = w.shape[0] - 13
        return aten.constant_pad_nd.default(y, [0, k]).mm(w) + aten.constant_pad_nd.default(
            y.permute(1, 0), [0, 0, 0, k]
        ).mm(w[:4]).sum(0)

    gm = graph_of(f, [numbers(4, 13), numbers(16, 8)], symbolic=True)
    x = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0]
    x.meta["val"] = torch.empty(4, 13, device="meta")  # the width alone is a symbol
    before = str(gm.graph)
    assert share_pads(gm.graph) == []
    assert str(gm.graph) == before


@pytest.mark.parametrize("axes", [None, []])
def test_sums_along_all_axes_stay_beside_one_pad(axes: list[int] | None) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.softmax(-1)
        turned = aten.constant_pad_nd.default(y.permute(1, 0), [0, 0, 0, 3])
        return aten.constant_pad_nd.default(y, [0, 3]) @ w, turned @ v, aten.sum.dim_IntList(y, axes)

    given = [numbers(4, 13), numbers(16, 8), numbers(4, 8)]
    gm = graph_of(f, given)
    right = listed(gm(*given))
    assert len(share_pads(gm.graph)) == 1
    gm.recompile()
    for mine, expected in zip(listed(gm(*given)), right, strict=True):
        assert torch.equal(mine, expected)


def test_pads_of_a_tensor_that_no_region_stores_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [numbers(4, 13), numbers(16, 8), numbers(4, 8)]
    gm = graph_of(gradient, given)
    right = listed(gm(*given))
    before = str(gm.graph)
    assert share_pads(gm.graph, only_gpu=True) == []
    hand_over(gm.graph, "auto")
    assert str(gm.graph) == before
    shared: list[SharedPad] = []

    def share(graph: torch.fx.Graph, *, only_gpu: bool) -> list[SharedPad]:
        """As if the graph were of a GPU, where the costs say that nothing is gained."""
        assert only_gpu
        shared.extend(share_pads(graph))
        return shared

    monkeypatch.setattr(graph_pass, "share_pads", share)
    hand_over(gm.graph, "auto")
    assert len(shared) == 1
    gm.graph.lint()
    gm.recompile()
    pads = gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert sorted(tuple(p.args[1]) for p in pads) == [(0, 0, 0, 3), (0, 3, 0, 0)]
    assert not gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    for mine, expected in zip(listed(gm(*given)), right, strict=True):
        assert torch.equal(mine, expected)


# --- one element of each row ---------------------------------------------------------------------------------


def picked(labels: torch.Tensor, scale: torch.Tensor, keepdim: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    places = prims.iota.default(7, start=0, step=1, dtype=torch.int64, device=labels.device, requires_grad=False)
    hit = labels[:, None].expand(5, 7) == places.reshape(1, 7)
    rows = torch.where(hit, aten.scalar_tensor.default(-1.5), aten.scalar_tensor.default(0.0)) * scale[:, None]
    return aten.sum.dim_IntList(rows, [1], keepdim), rows


@pytest.mark.parametrize("keepdim", [False, True])
def test_a_sum_of_one_element_of_each_row_walks_over_none(keepdim: bool) -> None:
    labels, scale = torch.tensor([0, 6, 3, -100, 7]), numbers(5)
    scale[1] = 0.0

    def f(labels: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, rows = picked(labels, scale, keepdim)
        return total, rows.amax(-1)

    check(f, [labels, scale])
    (text,) = texts(f, labels, scale)
    assert "fd.ops.sum" not in text
    (text,) = texts(lambda labels, scale: picked(labels, scale)[1].sum(0), labels, scale)
    assert "fd.ops.sum" in text, "over the labels, which pick one of each row"


def of_fills(
    labels: torch.Tensor, one: float, dtype: torch.dtype, *scales: torch.Tensor, total: torch.dtype | None = None
) -> torch.Tensor:
    """The sums of rows of 7 that are ``one`` at their labels."""
    places = prims.iota.default(7, start=0, step=1, dtype=torch.int64, device=labels.device, requires_grad=False)
    hit = labels[:, None] == places
    rows = torch.where(hit, aten.full.default([], one, dtype=dtype), aten.full.default([], 0, dtype=dtype))
    for scale in scales:
        rows = rows * scale[:, None]
    return aten.sum.dim_IntList(rows, [1], dtype=total)


LABELS = torch.tensor([0, 6, 3, -100, 7])
BIG = torch.full((5,), 2**53 + 1)
BF16 = numbers(5, dtype=torch.bfloat16)


def check_picked(f: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a region without a sum over the row gives, and what ``f`` gives: equal, bit by bit but for signs of 0."""
    gm = graph_of(f, given)
    regions_in(gm)
    (call,) = gm.graph.find_nodes(op="call_function", target=REGION)
    assert "fd.ops.sum" not in str(call.args[0])
    (mine,), right = listed(gm(*given)), f(*given)
    assert mine.dtype == right.dtype
    assert torch.equal(mine.isnan(), right.isnan())
    assert torch.equal(mine.nan_to_num(), right.nan_to_num())
    return mine, right


@pytest.mark.parametrize(
    ("one", "dtype", "scales", "total"),
    [
        (16777217, torch.int64, (), None),
        (2**62 + 1, torch.int64, (), None),
        (3, torch.int64, (BIG,), None),
        (100, torch.int8, (torch.full((5,), 3, dtype=torch.int8),), None),
        (2, torch.int64, (numbers(5),), None),
        (True, torch.bool, (), None),
        (0.1, torch.float64, (numbers(5, dtype=torch.float64),), None),
        (1e-300, torch.float64, (numbers(5, dtype=torch.float64),), None),
        (1.005, torch.bfloat16, (), torch.float32),
        (1.00390625, torch.bfloat16, (BF16, BF16 + 1), torch.float32),
        (1.5, torch.bfloat16, (numbers(5),), None),
        (-1.0, torch.float32, (torch.tensor([float("inf"), float("nan"), 1.0, -float("inf"), -2.0]),), None),
        (-1.0, torch.float32, (numbers(5), numbers(5) / 0), None),
    ],
)
def test_one_element_of_a_row_has_its_dtype(
    one: float, dtype: torch.dtype, scales: tuple[torch.Tensor, ...], total: torch.dtype | None
) -> None:
    def f(labels: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return of_fills(labels, one, dtype, *scales, total=total)

    mine, right = check_picked(f, [LABELS, *scales])
    if right.is_floating_point():
        assert torch.equal(mine.nan_to_num().signbit(), right.nan_to_num().signbit())


@pytest.mark.parametrize("casts", [(torch.bfloat16,), (torch.bfloat16, torch.float32), (torch.float16, torch.float64)])
@pytest.mark.parametrize("scale", [[0.1, 1e-3, 3.0, 70000.0, 1.0], [float("inf"), float("nan"), -0.0, 1e-30, -2.0]])
def test_casts_behind_one_element_of_a_row_round_it(casts: tuple[torch.dtype, ...], scale: list[float]) -> None:
    """The gradient of a loss under autocast is rounded to 16 bits and cast back before its rows are summed."""

    def f(labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = picked(labels, scale)[1]
        for dtype in casts:
            rows = prims.convert_element_type.default(rows, dtype)
        return aten.sum.dim_IntList(rows, [1], True)

    check_picked(f, [LABELS, torch.tensor(scale)])


def test_a_cast_to_integers_behind_one_element_is_summed_as_it_is() -> None:
    def f(labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = prims.convert_element_type.default(picked(labels, scale)[1], torch.int64)
        return aten.sum.dim_IntList(rows, [1])

    check(f, [LABELS, torch.tensor([0.1, 1e3, -7.0, 2.0, 1.0])])
    assert "fd.ops.sum" in texts(f, LABELS, numbers(5))[0]


def test_the_padded_gradient_of_a_loss_under_autocast_is_one_kernel() -> None:
    """With the head's bias: the logits are read once, their gradient is stored once, padded, and summed on the way."""

    def f(
        logits: torch.Tensor, sums: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor, w: torch.Tensor
    ) -> object:
        grad = prims.convert_element_type.default(picked(labels, scale)[1], torch.bfloat16).float()
        chance = (logits.float() - sums).bfloat16().float().exp()
        y = (grad - chance * grad.sum(-1, keepdim=True)).bfloat16()
        pad = aten.constant_pad_nd.default(y, [0, 1])
        turned = aten.constant_pad_nd.default(y.permute(1, 0), [0, 0, 0, 1])
        return pad @ w, turned @ w[:5], y.sum(0)

    logits = numbers(5, 7).bfloat16()
    given = [logits, logits.float().logsumexp(-1, keepdim=True), LABELS, numbers(5).abs(), numbers(8, 4).bfloat16()]
    gm = graph_of(f, given)
    (found,) = regions_in(gm)
    stored = 2 * logits.nbytes + 2 * 5 * 1 + 4 * 5 * 2 + 8 * 5 + 2 * 8  # padded by one, statistics, labels, sums
    assert (found.kernels, found.bytes) == (1, stored)
    for mine, right in zip(listed(gm(*given)), listed(f(*given)), strict=True):
        assert_near(mine, right.double(), right, n=2)


def test_a_fraction_that_fills_integers_counts_as_they_do() -> None:
    def f(labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return of_fills(labels, 2.5, torch.int64, scale)

    gm = graph_of(f, [LABELS, BIG])
    regions_in(gm)
    assert torch.equal(listed(gm(LABELS, BIG))[0], f(LABELS, BIG))


@pytest.mark.parametrize("labels", [LABELS + 0.5, LABELS.double(), LABELS > 0], ids=["half", "float64", "bool"])
def test_labels_that_are_no_integers_are_compared(labels: torch.Tensor) -> None:
    def f(labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return of_fills(labels, -1.0, torch.float32, scale)

    gm = graph_of(f, [labels, numbers(5)])
    regions_in(gm)
    assert torch.equal(listed(gm(labels, numbers(5)))[0], f(labels, numbers(5)))


def test_labels_of_a_narrow_type_and_a_longer_row() -> None:
    def f(labels: torch.Tensor) -> torch.Tensor:
        places = prims.iota.default(300, start=0, step=1, dtype=torch.int64, device="cpu", requires_grad=False)
        return torch.where(labels[:, None] == places, aten.full.default([], 2.0), aten.full.default([], 0.0)).sum(1)

    labels = torch.tensor([0, 100, 255], dtype=torch.uint8)
    gm = graph_of(f, [labels])
    regions_in(gm)
    assert torch.equal(listed(gm(labels))[0], f(labels))


@pytest.mark.parametrize("symbolic", [False, True])
def test_fills_of_more_rows_than_labels_are_summed(symbolic: bool) -> None:
    def f(labels: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = prims.iota.default(7, start=0, step=1, dtype=torch.int64, device="cpu", requires_grad=False)
        rows = torch.where(labels == places, x.new_full((x.shape[0], 7), -1.0), x.new_full((x.shape[0], 7), 0.0))
        return rows.sum(1), (x + rows).sum(1)

    given = [torch.tensor([[3]]), numbers(6, 7)]
    gm = graph_of(f, given, symbolic=symbolic)
    regions_in(gm)
    for mine, right in zip(listed(gm(*given)), f(*given), strict=True):
        assert mine.shape == right.shape
        torch.testing.assert_close(mine, right)


def test_a_product_that_reads_the_tensor_as_it_is_reads_a_slice_of_the_padded_one() -> None:
    """A weight's gradient of logits whose other product was padded: their rows begin aligned for both."""

    def f(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.softmax(-1)
        return aten.constant_pad_nd.default(y, [0, 3]) @ w, y.t() @ a, y.sum(0)

    given = [numbers(6, 13), numbers(16, 4), numbers(6, 5)]
    gm = graph_of(f, given)
    regions_in(gm)
    (region,) = gm.graph.find_nodes(op="call_function", target=REGION)
    stored = sorted(tuple(v.shape) for v in region.meta["val"])
    assert stored == [(6, 16), (16,)]
    (turned,) = gm.graph.find_nodes(op="call_function", target=aten.permute.default)
    assert turned.args[0].meta["val"].stride() == (16, 1)
    for mine, expected in zip(listed(gm(*given)), f(*given), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("columns", [125, 127])
def test_a_products_rows_are_padded_where_they_begin_no_tile(columns: int) -> None:
    """And cut off behind it; undone where no region stores the padded tensor."""

    def f(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.softmax(-1)
        return aten.constant_pad_nd.default(y, [0, 3]) @ w, y.t() @ a, a.t() @ y

    given = [numbers(6, columns), numbers(columns + 3, 4), numbers(6, 5)]
    gm = graph_of(f, given)
    assert len(share_pads(gm.graph)) == 1
    gm.graph.lint()
    products = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    rows = 128 if columns == 125 else columns
    assert sorted(tuple(n.meta["val"].shape) for n in products) == sorted([(6, 4), (rows, 5), (5, columns)])
    gm.recompile()
    for mine, expected in zip(listed(gm(*given)), f(*given), strict=True):
        torch.testing.assert_close(mine, expected)
    assert regions_in(gm)[0].outputs == 1
    gm = graph_of(f, given)
    (shared,) = share_pads(gm.graph)
    shared.undo()
    gm.graph.lint()
    gm.recompile()
    targets = [[n.target for n in g.nodes] for g in (gm.graph, graph_of(f, given).graph)]
    assert sorted(map(str, targets[0])) == sorted(map(str, targets[1]))
    for mine, expected in zip(listed(gm(*given)), f(*given), strict=True):
        torch.testing.assert_close(mine, expected)


def _undone(f: Callable[..., tuple[torch.Tensor, ...]], given: list[torch.Tensor]) -> None:
    """Shares are made and undone, and what is left computes what ``f`` does."""
    gm = graph_of(f, given)
    before = sorted(str(n.target) for n in gm.graph.nodes)
    shared = share_pads(gm.graph)
    assert shared
    gm.graph.lint()
    for s in shared:
        s.undo()
    gm.graph.lint()
    gm.recompile()
    assert sorted(str(n.target) for n in gm.graph.nodes) == before
    for mine, expected in zip(listed(gm(*given)), f(*given), strict=True):
        torch.testing.assert_close(mine, expected)


def test_two_padded_tensors_that_multiply_each_other_are_undone() -> None:
    pad = aten.constant_pad_nd.default

    def other_is_cut(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = x.softmax(-1), z.softmax(-1)
        return pad(y, [0, 3]) @ w, pad(z, [0, 3]) @ v, z.t() @ y

    def other_is_padded(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = x.softmax(-1), z.softmax(-1)
        return pad(y, [0, 3]) @ w, y.t() @ pad(z, [0, 3]), z @ v

    _undone(other_is_cut, [numbers(6, 125), numbers(128, 4), numbers(16, 5), numbers(6, 13)])
    _undone(other_is_padded, [numbers(6, 125), numbers(128, 4), numbers(13, 5), numbers(6, 13)])


@pytest.mark.parametrize("name", ["no transpose", "the second operand", "padded rows"])
def test_other_products_stay_as_they_are(name: str) -> None:
    pad = aten.constant_pad_nd.default
    cases: dict[str, tuple[Callable[..., tuple[torch.Tensor, ...]], list[torch.Tensor]]] = {
        "no transpose": (
            lambda x, w, a: (pad(y := x.softmax(-1), [0, 3]) @ w, y.permute(0, 1) @ a),
            [numbers(6, 125), numbers(128, 4), numbers(125, 5)],
        ),
        "the second operand": (
            lambda x, w, a: (pad(y := x.softmax(-1), [0, 3]) @ w, a @ y.t()),
            [numbers(6, 125), numbers(128, 4), numbers(5, 125)],
        ),
        "padded rows": (
            lambda x, w, a: (w @ pad(y := x.softmax(-1), [0, 0, 0, 3]), y.t() @ a),
            [numbers(125, 6), numbers(4, 128), numbers(125, 5)],
        ),
    }
    f, given = cases[name]
    gm = graph_of(f, given)
    share_pads(gm.graph)
    gm.graph.lint()
    gm.recompile()
    shapes = [tuple(n.meta["val"].shape) for n in gm.graph.find_nodes(op="call_function", target=aten.mm.default)]
    assert shapes == [tuple(t.shape) for t in f(*given)]
    for mine, expected in zip(listed(gm(*given)), f(*given), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.layer_norm(x[:, 1:, 2:], (5,)),
        lambda x: F.layer_norm(x[1][:, 2:], (5,)),
        lambda x: x[:, :-1, :5].log_softmax(-1),
        lambda x: F.pad(F.layer_norm(x, (7,)), [2, 1])[:, 1:] + 1,
    ],
    ids=["rows and columns", "one of a batch", "a shifted vocabulary", "a padded norm"],
)
def test_gradients_of_slices_are_zero_outside(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Which are pads of pads, of what a reduction is part of."""
    x = numbers(3, 4, 7).requires_grad_()
    found = torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"})(x)
    wide = x.detach().double().requires_grad_()
    right = f(wide)
    weight = numbers(*right.shape)
    (grad,), (expected,) = (
        torch.autograd.grad((y * weight.to(y.dtype)).sum(), t) for y, t in ((found, x), (right, wide))
    )
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)
