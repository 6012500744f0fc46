"""Which regions gain of models that no rule was made for: each beside what both kernels took on an H200."""

from __future__ import annotations

import pytest
import torch
from compile_graphs import graph_of
from test_compile_cost import BF16, F, gradient, planned

from shardfuse.compile import region_border
from shardfuse.compile.cost import Cost
from shardfuse.compile.region_border import border_bytes
from shardfuse.compile.regions import regions_of

HALF = torch.float16


def test_a_masked_softmax_gains_where_rows_are_long() -> None:
    """384 x 512 x 512 of float32: 195 us, Inductor's 285; of rows of 128, 17 and 17."""

    def f(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = (x.view(32, -1, *x.shape[1:]) + bias).view(x.shape)
        is_left = ~(x == float("-inf")).logical_not().any(-1, True).logical_not().logical_not().logical_not()
        return torch.where(is_left, torch.softmax(x, -1), 0.0)

    bias = ((32, 1, 512, 512), torch.float32)
    assert planned(f, ((384, 512, 512), torch.float32), bias)[0].gains
    short = ((32, 1, 128, 128), torch.float32)
    assert not planned(f, ((384, 128, 128), torch.float32), short)[0].gains


def test_a_row_that_is_asked_something_else_is_read_as_any() -> None:
    """What is true anywhere of rows of 512: no softmax is beside it."""
    cost, _ = planned(lambda x: x.isinf().any(-1), ((384, 512, 512), torch.float32))
    assert not cost.gains, str(cost)


def test_what_inductor_holds_is_not_stored() -> None:
    """A LayerNorm of rows of 1024 of five tensors' sum is one kernel of Inductor's, which stores its result alone."""

    def f(w: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        total = given[0].float()
        for x in given[1:]:
            total = total + x
        return F.layer_norm(total, (1024,), w, w).bfloat16()

    five, four = (planned(f, ((1024,), torch.float32), *[((8192, 1024), BF16)] * n)[0] for n in (5, 4))
    assert five.inductor == pytest.approx(four.inductor * 6 / 5, rel=0.05)
    assert not five.gains


def test_axes_are_one_in_whatever_order_they_are_named() -> None:
    wide = ((16, 256, 64, 64), BF16)
    named = [
        planned(lambda x, axes=axes: x - x.float().mean(axes, True), wide)[0] for axes in ([2, 3], [3, 2], [-1, -2])
    ]
    assert named[0] == named[1] == named[2]


def test_parts_that_rest_on_reductions_are_computed_once() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.gelu(F.layer_norm(v, (1024,))) for v in (x, y)], -1)

    of_two, of_one = (
        planned(g, *[((8192, 1024), BF16)] * n)[0] for g, n in ((f, 2), (lambda x: F.gelu(F.layer_norm(x, (1024,))), 1))
    )
    assert of_two.inductor < 2.5 * of_one.inductor


def test_gradients_that_are_joined_gain() -> None:
    """Of a gated GELU, 8192 x 1152 and twice that: 27 us, Inductor's 70, which computes both parts for all of it."""

    def f(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        a, b, dy = a.float(), b.float(), dy.float()
        share = 0.5 * (1 + torch.erf(a * 0.7071067811865476))
        slope = share + a * torch.exp(a * a * -0.5) * 0.3989422804014327
        return torch.cat([(dy * b * slope).bfloat16(), (dy * a * share).bfloat16()], -1)

    cost, _ = planned(f, ((8192, 2304), BF16), ((8192, 1152), BF16), graphs=True)
    assert cost.gains, str(cost)


def test_the_gradient_of_heads_that_are_turned_into_a_bias_gains() -> None:
    """384 x 64 x 512 of float16: 21 us in twice as many programs, Inductor's 28."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (x.float().reshape(32, 12, 64, 512) * 0.35).permute(0, 1, 3, 2).half()
        rows = rows.permute(0, 2, 1, 3).reshape(16384, 768)
        return rows, rows.float().sum(0)

    cost, plan = planned(f, ((384, 64, 512), HALF))
    assert [s.turns for s in plan.segments] == [True]
    assert cost.gains, str(cost)
    cost, plan = planned(lambda x: (x * 2, x.float().sum(0)), ((16384, 768), HALF))
    assert [s.turns for s in plan.segments] == [False]


def _batch_norm_backward(
    dy: torch.Tensor, y: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Of a batch norm and ReLU behind a convolution with a bias."""
    axes = [0, *range(2, x.ndim)]
    n = x.numel() // x.shape[1]
    g, apart = torch.where(y <= 0, 0.0, dy).float(), x.float() - mean
    dots, total = (g * apart).sum(axes, True), g.sum(axes, True)
    dx = ((g - apart * (dots / n * rstd * rstd) - total / n) * (rstd * w)).to(x.dtype)
    return dx, dots * rstd, total, dx.float().sum(axes)


def test_gradients_of_batch_norms_of_contiguous_images_take_what_their_elements_take() -> None:
    """16 x 256 x 4096 of 16 bits: 100 us, Inductor's 80; 2 x 32 x 64 x 64 x 64 of 32 bits: 82 us, Inductor's 139."""

    def cost(dtype: torch.dtype, *shape: int) -> Cost:
        of_channels = ((1, shape[1], *(1 for _ in shape[2:])), torch.float32)
        return planned(_batch_norm_backward, *[(shape, dtype)] * 3, *[of_channels] * 3)[0]

    assert not cost(BF16, 16, 256, 4096).gains
    assert cost(torch.float32, 2, 32, 64, 64, 64).gains


def test_many_gradients_that_are_added_up_before_a_norm_s_are_left() -> None:
    """Ten of 4 x 256 x 64 x 64, float32, before an instance norm's: 168 us, Inductor's 69, which stores their sum."""

    def f(x: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dy = given[0]
        for g in given[1:]:
            dy = dy + g
        return dy, *gradient(lambda x: F.instance_norm(x))(x, dy)

    shape = ((4, 256, 64, 64), torch.float32)
    cost, _ = planned(f, *[shape] * 11)
    assert not cost.gains, str(cost)
    assert 50 < cost.inductor < 90, "the sum is read, and not the ten"


def test_gradients_of_norms_whose_operands_have_other_axes_innermost_gain() -> None:
    """Of a LayerNorm of 64 x 96 x 56 x 56: 206 us, Inductor's 507."""

    def f(
        dy: torch.Tensor, w: torch.Tensor, normed: torch.Tensor, rstd: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        g = dy.float().permute(0, 2, 3, 1)
        scaled = g * w
        row = scaled * 96 - scaled.sum(3, True) - normed * (scaled * normed).sum(3, True)
        dx = rstd * row
        return dx, (g * normed).sum([0, 1, 2]), g.sum([0, 1, 2]), (dx.permute(0, 3, 1, 2) * scale).bfloat16()

    image, pixel = (64, 96, 56, 56), (64, 56, 56, 1)
    wide = torch.float32
    normed = ((64, 56, 56, 96), wide, (0, 1, 3, 2))
    cost, _ = planned(
        f, (image, BF16, (0, 2, 3, 1)), ((96,), wide), normed, (pixel, wide), ((96, 1, 1), wide)
    )  # fmt: skip
    assert cost.gains, str(cost)


@pytest.mark.parametrize(
    ("shape", "dtype", "gains"),
    [((128, 240, 14, 14), BF16, True), ((128, 1152, 7, 7), BF16, True), ((64, 512, 7, 7), torch.float32, False)],
)
def test_a_mean_beside_a_batch_norm_whose_loop_has_the_whole_machine_gains(
    shape: tuple[int, ...], dtype: torch.dtype, *, gains: bool
) -> None:
    """In channels-last: 29 us, Inductor's 184, and 29 and 45; of the last, which has half of the machine, 53 and 21."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0, keepdim=True)
        y = F.silu((x.float() - mean) * torch.rsqrt(var + 1e-5) * w).to(x.dtype)
        return y, y.mean((2, 3), keepdim=True)

    cost, _ = planned(f, (shape, dtype, (0, 2, 3, 1)), ((1, shape[1], 1, 1), torch.float32))
    assert cost.gains is gains, str(cost)


def test_a_norm_of_an_image_that_inductor_computes_costs_it_more() -> None:
    """It may loop over it, as it lays out the image by itself; what a graph is given has its order."""

    def cost(*, computed: bool) -> Cost:
        def f(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            image = x + 1 if computed else x
            product = (image if computed else y).permute(0, 2, 3, 1).reshape(-1, 96) @ v
            total = image + product.reshape(64, 56, 56, 96).permute(0, 3, 1, 2)
            return F.layer_norm(total.permute(0, 2, 3, 1).float(), (96,), w, w).bfloat16()

        image = ((64, 96, 56, 56), BF16, (0, 2, 3, 1))
        return planned(f, image, image, ((96,), torch.float32), ((96, 96), BF16))[0]

    assert cost(computed=True).inductor > 1.3 * cost(computed=False).inductor


@pytest.mark.parametrize(("pixels", "gains"), [((7, 7), True), ((1, 49), True), ((14, 14), False)])
def test_sums_over_few_pixels_of_costly_functions_gain(pixels: tuple[int, int], *, gains: bool) -> None:
    """Of SiLU, 128 x 1152 x 7 x 7 in channels-last: 19 us, Inductor's 31; of more pixels Inductor's kernels loop."""

    def f(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return (g * F.silu(x.float()).bfloat16()).sum((2, 3))

    image = ((128, 1152 * 49 // (pixels[0] * pixels[1]), *pixels), BF16, (0, 2, 3, 1))
    cost, _ = planned(f, image, image, graphs=True)
    assert cost.gains is gains, str(cost)


def test_what_others_rematerialise_has_no_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that is stored for a region behind a product, which rematerialises what it scales."""

    def f(x: torch.Tensor, g: torch.Tensor, gate: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        opened = torch.sigmoid(gate)
        scaled = g * opened
        back = ((g * x).sum(1, True) * opened) @ v
        d = (scaled + back) * x
        return d.sum((0, 1)), d

    given = [torch.empty(shape) for shape in ((4, 96, 24), (4, 96, 24), (4, 1, 24), (24, 24))]
    first, second = regions_of(graph_of(f, given).graph)[0]
    assert [n.name for n in first.outputs if "sigmoid" in n.name]
    assert border_bytes(first) == 0
    monkeypatch.setattr(region_border, "_is_rematerialised", lambda n, region: False)
    assert border_bytes(first) > 0
    assert second.rematerialised
