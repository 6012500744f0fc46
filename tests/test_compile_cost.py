"""Which regions are expected to gain, at sizes of real models: graphs of fake tensors, nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from compile_graphs import graph_of
from torch._inductor import config, inductor_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardfuse.compile import random_op
from shardfuse.compile.cost import Cost, cost_of, why_never
from shardfuse.compile.graph_pass import _plan
from shardfuse.compile.hidden_host import hides_host
from shardfuse.compile.region_op import program_of
from shardfuse.compile.regions import regions_of
from shardfuse.compile.replacement import program_of_region
from shardfuse.device.region_costs import BYTES_PER_US, KERNEL_US
from shardfuse.frontend.explain import Explanation

F = torch.nn.functional
BF16 = torch.bfloat16
Shaped = tuple[tuple[int, ...], torch.dtype] | tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]
"""A shape, a dtype, and the axes as they are in memory, the outermost first."""


def empty(shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...] = ()) -> torch.Tensor:
    axes = order or tuple(range(len(shape)))
    return torch.empty([shape[d] for d in axes], dtype=dtype).permute([axes.index(d) for d in range(len(shape))])


def planned(
    f: Callable[..., object], *shapes: Shaped, graphs: bool = False, mixed: bool = True
) -> tuple[Cost, Explanation]:
    """Of the one region of ``f``."""
    with FakeTensorMode():
        gm = graph_of(f, [empty(*shaped) for shaped in shapes])
        (region,) = regions_of(gm.graph)[0]
    plan = _plan(program_of(program_of_region(region).text).fd, region)
    return cost_of(region, plan, is_host_hidden=graphs, is_mix_order=mixed), plan


def gradient(f: Callable[..., torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    def g(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        *inputs, dy = given
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            return torch.autograd.grad(f(*leaves), leaves, dy)

    return g


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def norm_shapes(rows: int, columns: int, *, backward: bool) -> list[Shaped]:
    x: Shaped = ((rows, columns), BF16)
    return [x, ((columns,), BF16), ((columns,), BF16), *([x] if backward else [])]


@pytest.mark.parametrize(("rows", "columns"), [(32768, 4096), (16384, 5140), (16384, 8192), (576000, 384)])
def test_gradients_of_large_norms_gain(rows: int, columns: int) -> None:
    cost, plan = planned(gradient(layer_norm), *norm_shapes(rows, columns, backward=True))
    assert cost.gains, str(cost)
    assert why_never(plan) is None


def test_a_kernel_of_inductor_s_that_sums_rows_and_columns_counts_once() -> None:
    shapes = norm_shapes(131072, 1024, backward=True)
    mixed, apart = (planned(gradient(layer_norm), *shapes, mixed=m)[0] for m in (True, False))
    assert mixed.inductor < 0.9 * apart.inductor
    few = [planned(gradient(layer_norm), *norm_shapes(2048, 4096, backward=True), mixed=m)[0] for m in (True, False)]
    assert few[0] == few[1], "it asks for more rows than twice the columns"


def test_losses_and_long_rows_gain() -> None:
    cases: list[tuple[Callable[..., object], list[Shaped]]] = [
        (lambda x, y: F.cross_entropy(x.float(), y), [((8192, 32000), BF16), ((8192,), torch.int64)]),
        (lambda x: x.softmax(-1), [((4096, 65536), BF16)]),
    ]
    for f, shapes in cases:
        cost, _ = planned(f, *shapes)
        assert cost.gains, str(cost)


def test_small_work_and_what_inductor_does_as_well_is_left() -> None:
    for f, shapes in (
        (layer_norm, norm_shapes(64, 1024, backward=False)),
        (gradient(layer_norm), norm_shapes(16, 1024, backward=True)),
        (lambda x: x.softmax(-1), [((32768, 512), BF16)]),
        (lambda x: x.sum(), [((64,), torch.float32)]),
    ):
        cost, _ = planned(f, *shapes)
        assert not cost.gains, str(cost)


def test_gelu_between_products_gains_where_its_bytes_are_few() -> None:
    """8192 x 4096 of 16 bits take Inductor 53 us on an H200, shardfuse 37; in float32 both are bound by bytes."""
    large, plan = planned(F.gelu, ((8192, 4096), BF16))
    assert large.gains, str(large)
    assert why_never(plan) is None
    assert large.inductor == pytest.approx(53, rel=0.1)
    assert large.ours == pytest.approx(37, rel=0.1)
    for shape in (((512, 1024), BF16), ((8192, 4096), torch.float32)):
        small, _ = planned(F.gelu, shape)
        assert not small.gains, str(small)


def test_the_host_counts_outside_of_cuda_graphs() -> None:
    shapes = norm_shapes(2048, 2048, backward=False)
    outside, inside = (planned(layer_norm, *shapes, graphs=g)[0] for g in (False, True))
    assert outside.host > inside.host == 0
    assert (outside.ours, outside.inductor) == (inside.ours, inside.inductor)


def test_what_inductor_would_have_kept_in_registers_counts_against_a_region() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x).softmax(-1)  # a pointwise op that is not in the table

    apart, _ = planned(f, ((4096, 4096), torch.float32))
    alone, _ = planned(lambda x: x.softmax(-1), ((4096, 4096), torch.float32))
    assert apart.border > alone.border == 0


def test_what_inductor_computes_where_it_is_read_costs_its_writing_and_its_reading() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, others: int) -> tuple[torch.Tensor, ...]:
        made = torch.special.bessel_j0(x)
        read = [made @ w, made + 1][:others]
        return made.softmax(-1), *read

    shapes: list[Shaped] = [((4096, 4096), torch.float32), ((4096, 64), torch.float32)]
    own, stored = (planned(lambda x, w, n=n: f(x, w, n), *shapes)[0].border for n in (0, 1))
    assert own - KERNEL_US == pytest.approx(2 * (stored - KERNEL_US)), "a product reads it, so that it is stored"


def test_an_input_that_is_read_behind_a_matrix_product_costs_nothing_at_the_border() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        residual = torch.special.bessel_j0(x)
        return ((residual @ w) @ v + residual).softmax(-1)

    cost, _ = planned(f, ((8192, 512), BF16), ((512, 64), BF16), ((64, 512), BF16))
    assert cost.border == 0


@pytest.mark.parametrize(("channels", "share"), [(64, 0.88), (96, 0.88), (200, 0.88 * 200 / 224), (40, 0.44)])
def test_loops_over_columns_are_as_fast_as_their_programs_are_many(channels: int, share: float) -> None:
    """Of 40 channels there are 64 programs; in tiles of 56 the last of four has 32 of 200 channels."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.permute(0, 3, 1, 2)  # in channels-last
        var, mean = torch.var_mean(y.float(), (0, 2, 3), correction=0, keepdim=True)
        return ((y - mean) * torch.rsqrt(var + 1e-5)).bfloat16()

    side = 28 if channels == 40 else 56
    cost, plan = planned(f, ((96, side, side, channels), BF16))
    assert [s.scheduler for s in plan.segments if s.scheduler != "no_op"] == ["looped"]
    assert cost.ours == pytest.approx(KERNEL_US + plan.bytes / (BYTES_PER_US * share), rel=0.01)


def test_tensors_contiguous_along_different_axes_are_left() -> None:
    """A dropout's mask beside gradients in channels-last: 260 us measured on an H200, where Inductor takes 168."""

    def f(dy: torch.Tensor, mask: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = dy * mask * x.float().sigmoid()
        return found, found.sum((0, 2, 3))

    def in_channels_last(dy: torch.Tensor, mask: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return f(dy.permute(0, 3, 1, 2), mask, x.permute(0, 3, 1, 2))

    shape, turned = (16, 640, 32, 32), (16, 32, 32, 640)
    alike, _ = planned(f, (shape, BF16), (shape, torch.bool), (shape, BF16))
    apart, _ = planned(in_channels_last, (turned, BF16), (shape, torch.bool), (turned, BF16))
    assert not apart.gains, str(apart)
    assert apart.ours > alike.ours


@pytest.mark.parametrize(("side", "schedulers"), [(64, ["persistent"]), (63, ["reduction", "pointwise"])])
def test_gradients_of_group_norms_reduce_their_groups_once(side: int, schedulers: list[str]) -> None:
    """The sums of a group's channels are a small kernel: made anew for each pixel they took the large one 147 us.

    One kernel holds the groups, unless their images are of an odd width and so have no blocks.
    """
    pixels = side * side

    def f(dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor) -> object:
        given = dy.float() * x.float().sigmoid(), x.float(), mean, rstd, w
        dx, dw, db = torch.ops.aten.native_group_norm_backward(*given, 16, 320, pixels, 32, [True, True, True])
        return dx.bfloat16(), dw, db

    image, group = ((16, 320, side, side), BF16), ((16, 32), torch.float32)
    _, plan = planned(f, image, image, group, group, ((320,), torch.float32))
    assert [s.scheduler for s in plan.segments if s.bytes > 16 * 320 * pixels] == schedulers, str(plan)
    assert plan.kernels == 3, str(plan)


def group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, 32, w, b))


@pytest.mark.parametrize(("shape", "gains"), [((16, 320, 64, 64), True), ((2, 64, 8, 8), False)])
def test_group_norms_of_a_diffusion_model_gain(shape: tuple[int, ...], gains: bool) -> None:
    """Measured on an H200, of the large one: 41 us against 47."""
    cost, _ = planned(group_norm, (shape, BF16), ((shape[1],), BF16), ((shape[1],), BF16))
    assert cost.gains == gains, str(cost)


def test_values_for_each_channel_and_sample_in_a_group_s_rows_are_left() -> None:
    """Measured on an H200: 90 us, where Inductor takes 64."""

    def f(x: torch.Tensor, time: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return group_norm(x + time[:, :, None, None], w, b)

    cost, _ = planned(f, ((16, 320, 64, 64), BF16), ((16, 320), BF16), ((320,), BF16), ((320,), BF16))
    assert not cost.gains, str(cost)


def test_a_residual_that_is_read_behind_a_matrix_product_costs_nothing_at_the_border() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, near: bool) -> torch.Tensor:
        normed = F.layer_norm(x, (512,))
        product = normed @ w
        return normed + (torch.special.bessel_j0(normed) if near else product), product

    shapes: list[Shaped] = [((8192, 512), BF16), ((512, 512), BF16)]
    far, _ = planned(lambda x, w: f(x, w, False), *shapes)
    near, _ = planned(lambda x, w: f(x, w, True), *shapes)
    assert near.border > far.border == 0


def test_gradients_of_modulated_norms_have_a_plan() -> None:
    """Three sums over 1024 rows of each of 16 conditions: the partial results of 64 programs, 21 columns at once."""

    def f(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, (x.shape[-1],)) * (1 + scale[:, None]) + shift[:, None]
        return x + gate[:, None] * normed

    x, row = ((16, 1024, 1152), BF16), ((16, 1152), BF16)
    cost, plan = planned(gradient(f), x, row, row, row, x)
    assert plan.kernels <= 3, str(plan)
    assert cost.gains, str(cost)


def test_a_call_of_torch_is_never_worth_it() -> None:
    _, plan = planned(lambda x: torch.fmod(x, 3).sum(-1), ((64, 64), torch.int64))
    assert "fmod" in str(why_never(plan))


def test_inductor_has_the_settings_that_are_read() -> None:
    assert isinstance(config.triton.cudagraphs, bool)
    assert isinstance(config.triton.mix_order_reduction, bool)


def product_and_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x @ w, (w.shape[1],))


@pytest.mark.parametrize(
    ("rows", "device", "hidden"), [(8192, "cuda", True), (1024, "cuda", False), (8192, "cpu", False)]
)
def test_a_gpu_that_is_behind_hides_the_host(rows: int, device: str, hidden: bool) -> None:
    """8192 rows of 1024 times a matrix of 1024 x 4096 take an H200 70 us at least, 1024 rows 9."""
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=BF16, device=device) for shape in ((rows, 1024), (1024, 4096))]
        graph = graph_of(product_and_norm, given).graph
    assert hides_host(graph) is hidden


@pytest.mark.parametrize(("columns", "gains"), [(1024, True), (768, True), (1600, True), (64, False)])
def test_a_dropout_before_a_norm(columns: int, gains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200, 8192 rows and more of bfloat16: 34 us where Inductor took 38, 27 and 38, 128 and 189."""

    monkeypatch.setattr(random_op, "draws_in_triton", lambda device: True)

    def f(x: torch.Tensor, r: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        kept = inductor_prims.random(list(x.shape), seed, "rand") > 0.1
        return F.layer_norm(torch.where(kept, x * 1.1, 0.0) + r, (columns,))

    x: Shaped = ((16384 if columns == 1600 else 8192, columns), BF16)
    cost, _ = planned(f, x, x, ((), torch.int64), graphs=True)
    assert cost.gains is gains, str(cost)


def test_a_dropout_before_a_norm_that_a_gradient_is_taken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in BERT-large under autocast: 43.2 us on an H200, where Inductor took 48.3, and 39.8 and 49.9 in its step."""
    monkeypatch.setattr(random_op, "draws_in_triton", lambda device: True)

    def f(x: torch.Tensor, r: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = inductor_prims.random(list(x.shape), seed, "rand") > 0.1
        variance, mean = torch.var_mean(total := (kept * x) * 1.1 + r, -1, correction=0, keepdim=True)
        y = (centred := total - mean) * torch.rsqrt(variance + 1e-12)
        return kept, centred, y, y.bfloat16()

    cost, _ = planned(f, ((8192, 1024), BF16), ((8192, 1024), torch.float32), ((), torch.int64), graphs=True)
    assert cost.ours == pytest.approx(43.2, rel=0.05)
    assert cost.inductor == pytest.approx(48.3, rel=0.05)
    assert cost.gains


@pytest.mark.parametrize("stores", [False, True])
def test_a_mask_of_16_bit_rows_is_stored_once(stores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate in which bytes alone count: the mask's are those of half of a row."""
    monkeypatch.setattr(random_op, "draws_in_triton", lambda device: True)
    monkeypatch.setattr("shardfuse.compile.inductor_cost.INDUCTOR_POINTWISE_OPS_PER_US", 1e12)

    def f(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = inductor_prims.random(list(x.shape), seed, "rand") > 0.1
        y = F.layer_norm(x * kept * 1.1, (1024,))
        return (kept, y) if stores else (y,)

    cost, _ = planned(f, ((8192, 1024), BF16), ((), torch.int64), graphs=True)
    moved = 8192 * 1024 * (2 + 2 + stores)
    assert cost.inductor == pytest.approx(KERNEL_US + moved / BYTES_PER_US, rel=0.01)


def test_a_draw_for_each_row_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """As stochastic depth has it: what is known of a plan's share of a copy stays."""
    monkeypatch.setattr(random_op, "draws_in_triton", lambda device: True)

    def f(x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * kept
        return torch.var_mean(y, 0), y.sum(1)

    def drawn(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return f(x, inductor_prims.random([x.shape[0], 1], seed, "rand") > 0.1)

    x: Shaped = ((100000, 256), torch.float32)
    given, _ = planned(f, x, ((100000, 1), torch.bool), graphs=True)
    made, _ = planned(drawn, x, ((), torch.int64), graphs=True)
    assert made.ours == pytest.approx(given.ours, rel=0.02)
    assert made.gains == given.gains


def test_what_counts_as_work() -> None:
    """Of a convolution's gradients, of which one may not be wanted, and of attention."""
    aten = torch.ops.aten

    def gradient_of_weight(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        wanted = [False, True, False]
        return aten.convolution_backward(dy, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted)[1]

    with FakeTensorMode():
        x, w, q = (
            torch.empty(shape, dtype=BF16, device="cuda")
            for shape in ((32, 256, 56, 56), (256, 256, 3, 3), (8, 16, 4096, 64))
        )
        assert hides_host(graph_of(lambda x, w: F.conv2d(x, w, padding=1), [x, w]).graph)
        assert hides_host(graph_of(gradient_of_weight, [x, w, torch.empty_like(x)]).graph)
        assert hides_host(graph_of(aten._scaled_dot_product_flash_attention, [q, q, q]).graph)
        assert not hides_host(graph_of(lambda x: x.sum(), [x]).graph)


def test_symbols_of_products_stay_symbols() -> None:
    """Sizes of the call count, and nothing is guarded; one that only the run tells counts for nothing."""
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        given = [torch.empty(shape, dtype=BF16, device="cuda") for shape in ((8192, 1024), (1024, 4096))]
        graph = graph_of(product_and_norm, given, symbolic=True).graph
        assert hides_host(graph)
        (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        unknown = shape_env.create_unbacked_symint()
        product.meta["val"] = torch.empty((unknown, 4096), dtype=BF16, device="cuda")
        assert not hides_host(graph)
