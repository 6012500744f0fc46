"""LayerNorm, AddLayerNorm and DropoutAddNorm, plain and sharded, against torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from module_cases import CPU, FLOATS, NARROW, ONE, assert_state_dicts_fit, check_module, each_rank
from nn_cases import S0, S1, S2, Here, P, Placements, R, along, named
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch_answers import assert_beside

from shardfuse import DeviceMesh, initialize, simulate
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PlacementError
from shardfuse.nn import AddLayerNorm, AddRMSNorm, DropoutAddNorm, LayerNorm, RMSNorm
from shardfuse.nn.functional import add_layer_norm as add_layer

EPS = 1e-5


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    shape = x.shape[-1:] if weight is None else weight.shape
    return (functional.layer_norm(x, shape, weight, bias, EPS),)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    total = residual + (x + given)
    return functional.layer_norm(total, weight.shape, weight, bias, EPS), total


def check_layer(
    here: Here,
    x: Placements,
    output: Placements | None = None,
    output_grad: Placements | None = None,
    shape: Sequence[int] = (2, 8, 16),
    dtype: torch.dtype = torch.float64,
    affine: tuple[bool, bool] = (True, True),
    dims: int = 1,
) -> None:
    last = len(shape) - 1
    at = output if output is not None and any(p.is_partial() for p in x) else x
    names = [name for name, is_there in zip(("weight", "bias"), affine, strict=True) if is_there]
    parameters = {name: here.sample(along(at, last), shape[-dims:], dtype, 10 + k) for k, name in enumerate(names)}
    module = LayerNorm(
        shape[-dims:], EPS, *affine, mesh=here.mesh, input=named(x, last),
        output=None if output is None else named(output, last), output_grad=output_grad, dtype=dtype,
        device=here.device,
    )  # fmt: skip
    upstream = [here.sample(output_grad or output or at, shape, dtype, 3)]
    whole = partial(module, unsharded=tuple(shape)) if here.mesh.size > 1 else module
    results_at = [output or at]
    check_module(
        module, layer_norm, {"x": here.sample(x, shape, dtype, 1)}, parameters, upstream, dtype, results_at, whole
    )


def check_add(
    here: Here,
    x: Placements,
    residual: Placements,
    output: Placements | None = None,
    output_grad: Placements | None = None,
    shape: Sequence[int] = (2, 8, 16),
    dtype: torch.dtype = torch.float64,
) -> None:
    last = len(shape) - 1
    parameters = {
        name: here.sample(along(residual, last), shape[-1:], dtype, 10 + k)
        for k, name in enumerate(("weight", "bias", "input_bias"))
    }
    module = AddLayerNorm(
        shape[-1], EPS, input_bias=True, mesh=here.mesh, input=named(x, last), residual=named(residual, last),
        output=None if output is None else named(output, last), output_grad=output_grad, dtype=dtype,
        device=here.device,
    )  # fmt: skip
    activations = {"x": here.sample(x, shape, dtype, 1), "residual": here.sample(residual, shape, dtype, 2)}
    upstream = [here.sample(output_grad or output or residual, shape, dtype, 3), here.sample(residual, shape, dtype, 4)]
    results_at = [output or residual, residual]
    call = partial(module, unsharded=tuple(shape)) if here.mesh.size > 1 else module
    check_module(module, add_layer_norm, activations, parameters, upstream, dtype, results_at, call)


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain(dtype: torch.dtype) -> None:
    for shape in ((48,), (5, 48), (2, 3, 5, 48), (300, 48)):
        check_layer(ONE, [R], shape=shape, dtype=dtype)
    check_layer(ONE, [R], shape=(4, 3, 5, 8), dtype=dtype, dims=3)
    check_layer(ONE, [R], shape=(3, 5), dtype=dtype, dims=2)
    check_layer(ONE, [R], shape=(3, 24), dtype=dtype, affine=(True, False))
    check_layer(ONE, [R], shape=(3, 24), dtype=dtype, affine=(False, False))
    check_add(ONE, [R], [R], shape=(6, 48), dtype=dtype)


LINE = {
    "rows": partial(check_layer, x=[S1]),
    "gathered": partial(check_layer, x=[S1], output=[R], output_grad=[P]),
    "hidden": partial(check_layer, x=[S2]),
    "hidden_gathered": partial(check_layer, x=[S2], output=[R], output_grad=[P]),
    "partial": partial(check_layer, x=[P], output=[S1]),
    "replicated": partial(check_layer, x=[R]),
    "several_dims": partial(check_layer, x=[S0], shape=(8, 3, 5), dims=2),
    "weightless": partial(check_layer, x=[S2], affine=(False, False)),
    "add_sequence_parallel": partial(check_add, x=[P], residual=[S1], output=[R], output_grad=[P]),
    "add_hidden": partial(check_add, x=[P], residual=[S2]),
}
UNEVEN = {
    "rows": partial(check_layer, x=[S0], shape=(7, 16)),
    "hidden": partial(check_layer, x=[S1], shape=(3, 10)),
    "fewer_rows_than_ranks": partial(check_layer, x=[S0], shape=(3, 16)),
    "add": partial(check_add, x=[P], residual=[S1], output=[R], output_grad=[P], shape=(2, 7, 16)),
}


def test_on_a_line_of_ranks() -> None:
    narrow = {
        f"{name}_{dtype}": partial(LINE[name], dtype=dtype)
        for name in ("hidden", "add_sequence_parallel")
        for dtype in NARROW
    }
    each_rank([2], {**LINE, **narrow})


def test_shards_that_differ_in_size() -> None:
    each_rank([4], UNEVEN)


def test_on_a_square_of_ranks() -> None:
    rows_and_hidden = partial(check_layer, x=[S0, S2], shape=(4, 3, 16))
    added = partial(check_add, x=[S0, P], residual=[S0, S1], output=[S0, R], output_grad=[S0, P], shape=(4, 4, 16))
    cut_further = partial(check_layer, x=[S2, P], output=[S2, S2])
    added_further = partial(check_add, x=[S2, P], residual=[S2, S2])
    cases = {"cut_further": cut_further, "added_further": added_further}
    each_rank([2, 2], {"rows_and_hidden": rows_and_hidden, "added": added, **cases})


@pytest.mark.parametrize("shape", [8, (3, 4)])
@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, True)])
def test_state_dicts_are_torchs(shape: int | tuple[int, ...], affine: bool, bias: bool) -> None:
    theirs = torch.nn.LayerNorm(shape, 1e-5, affine, bias)
    module = LayerNorm(shape, 1e-5, affine, bias)
    assert_state_dicts_fit(module, theirs)
    assert module.normalized_shape == theirs.normalized_shape


def test_state_dicts_of_a_sharded_module() -> None:
    theirs = torch.nn.LayerNorm(10)
    torch.nn.init.normal_(theirs.weight)

    def run(rank: int, size: int) -> None:
        module = LayerNorm(10, mesh=DeviceMesh([0, 1, 2, 3]), input=Shard(-1))
        module.load_state_dict(theirs.state_dict())
        assert torch.equal(module.weight.full_tensor(), theirs.weight)
        module.reset_parameters()
        assert torch.equal(module.weight.full_tensor(), torch.ones(10))

    run_ranks(4, run)


# --- dropout -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_dropout_add_norm(norm: str, dtype: torch.dtype) -> None:
    """Against torch with the mask that ones show, drawn from the same state of the generator."""
    p = 0.3
    module = DropoutAddNorm(32, p, norm=norm, input_bias=True, dtype=dtype)
    x, residual = ONE.sample([R], (40, 32), dtype, 1), ONE.sample([R], (40, 32), dtype, 2)
    parameters = {name: ONE.sample([R], (32,), dtype, 5 + k) for k, (name, _) in enumerate(module.named_parameters())}
    state = torch.get_rng_state()
    kept = module(torch.ones(40, 32, dtype=dtype), torch.zeros(40, 32, dtype=dtype))[1] != 0
    assert 0.6 < kept.double().mean() < 0.8
    assert not torch.equal(torch.get_rng_state(), state)

    def reference(x: Tensor, residual: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        total = residual + torch.where(kept, (x + given[-1]) / (1 - p), 0.0)
        if norm == "rms":
            return functional.rms_norm(total, (32,), given[0], 1e-6), total
        return functional.layer_norm(total, (32,), *given[:2], 1e-5), total

    torch.set_rng_state(state)
    upstream = [ONE.sample([R], (40, 32), dtype, 8 + k) for k in range(2)]
    check_module(module, reference, {"x": x, "residual": residual}, parameters, upstream, dtype)


def test_dropout_is_repeated_by_seed_and_by_checkpointing() -> None:
    module = DropoutAddNorm(16, 0.5)
    x, residual = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(module(x, residual))
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(module(x, residual)[1], runs[0][1])  # the generator has moved on
    for is_reentrant in (False, True):
        gradients = []
        for run in (module, partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=is_reentrant)):
            torch.manual_seed(3)
            given = x.detach().clone().requires_grad_()
            sum(t.square().sum() for t in run(given, residual)).backward()
            gradients.append(given.grad)
        assert torch.equal(*gradients)


def test_no_dropout_in_eval_and_all_of_it() -> None:
    x, residual = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    module = DropoutAddNorm(16, 0.5).eval()
    before = torch.get_rng_state()
    normed, new = module(x, residual)
    assert torch.equal(new, residual + x)
    assert torch.equal(torch.get_rng_state(), before)
    assert_beside(normed.detach(), functional.layer_norm((residual + x).detach(), (16,)))
    _, new = DropoutAddNorm(16, 1.0)(x, residual)
    assert torch.equal(new, residual)
    new.sum().backward()
    assert torch.equal(x.grad, torch.zeros(8, 16))


@pytest.mark.parametrize("at", [S0, S1, R], ids=str)
def test_ranks_drop_what_one_rank_would(at: Shard) -> None:
    x, residual = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)
    torch.manual_seed(11)
    alone = DropoutAddNorm(16, 0.5, elementwise_affine=False)(x, residual)[1]

    def run() -> None:
        here = Here(DeviceMesh([0, 1]), CPU)
        torch.manual_seed(11 + initialize().rank)
        where = named([at], 1)
        module = DropoutAddNorm(16, 0.5, elementwise_affine=False, mesh=here.mesh, input=where, residual=where)
        new = module(here.cut(x, [at]), here.cut(residual, [at]))[1]
        assert torch.equal(new, here.cut(alone, [at]))

    simulate(run, 2)  # where each rank has random numbers of its own


# --- what is refused ---------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    for shape in (0, (), (4, 0), (-1,)):
        with pytest.raises(ModuleArgumentError, match="normalized_shape"):
            LayerNorm(shape)
    with pytest.raises(ModuleArgumentError, match="eps"):
        LayerNorm(4, -1.0)
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ModuleArgumentError, match="p="):
            DropoutAddNorm(4, p)
    with pytest.raises(ModuleArgumentError, match="norm="):
        DropoutAddNorm(4, norm="batch")
    with pytest.raises(PlacementError, match="no mesh"):
        LayerNorm(4, input=S0)
    with pytest.raises(PlacementError, match="2 dims"):
        LayerNorm((3, 4), mesh=DeviceMesh([0]), input=Shard(-1))
    mesh = DeviceMesh([0, 1])
    for make in (AddLayerNorm, AddRMSNorm, DropoutAddNorm):
        with pytest.raises(PlacementError, match=r"input=.* does not fit residual"):
            make(4, mesh=mesh, input=Shard(-1), residual=R)
    for output, gradient in ((S0, R), (R, S0), (S0, P)):
        for make in (LayerNorm, RMSNorm):
            with pytest.raises(PlacementError, match=r"output_grad=.* does not fit the output"):
                make(4, mesh=mesh, output=output, output_grad=gradient)
    for shape in ([], [4, 5], [0], 0):
        with pytest.raises(ModuleArgumentError, match="hidden_size="):
            RMSNorm(shape)
    assert RMSNorm([4]).normalized_shape == (4,)


def test_bad_inputs() -> None:
    for x in (torch.ones(3, 5), torch.ones(()), torch.ones(3, 4, dtype=torch.int64)):
        with pytest.raises(ModuleInputError, match="LayerNorm: x has"):
            LayerNorm(4)(x)
    with pytest.raises(ModuleInputError, match="LayerNorm: x has shape"):
        LayerNorm((3, 4))(torch.ones(4, 3))
    with pytest.raises(ModuleInputError, match="residual has shape"):
        AddLayerNorm(4)(torch.ones(3, 4), torch.ones(2, 4))
    with pytest.raises(PlacementError, match=r"Shard\(1\)"):
        LayerNorm(4, mesh=DeviceMesh([0]), input=S1)(torch.ones(3, 4))


@pytest.mark.parametrize(("kept", "of_sum"), [(torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)])
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, None])
def test_rows_far_from_zero(offset: float | None, kept: torch.dtype, of_sum: float) -> None:
    """The result is of the unrounded sum; the gradient reads the sum as kept, by ``of_sum`` of it off, as documented.

    None: rows of one number, whose deviation is 0.
    """
    features, rounding = 256, 2.0**-8
    drawn = torch.randn(16, features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide = torch.full_like(drawn, 0.8713) if offset is None else drawn + offset
    x = (0.37 * wide).bfloat16().requires_grad_()
    residual = (wide - x.detach().double()).to(kept)
    dy = drawn.flip(0).bfloat16()
    normed, _ = add_layer(x, residual, (features,), eps=EPS)
    normed.backward(dy)

    summed = x.detach().double() + residual.double()
    deviation = (summed.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    unit, g = (summed - summed.mean(-1, keepdim=True)) / deviation, dy.double()
    along = (g * unit).mean(-1, keepdim=True)
    wanted = (g - unit * along - g.mean(-1, keepdim=True)) / deviation
    off = (of_sum * summed.abs() / deviation).amax(-1, keepdim=True)  # of the unit
    allowed = off * (along.abs() + (unit.abs() + off) * g.abs().mean(-1, keepdim=True)) / deviation
    inexact = 2.0**-22 * (summed.abs().amax(-1, keepdim=True) / deviation + 1)  # of float32 sums, which may cancel
    assert ((normed.detach().double() - unit).abs() <= rounding * unit.abs() + inexact).all()
    assert ((x.grad.double() - wanted).abs() <= rounding * wanted.abs() + allowed + inexact / deviation).all()


# --- RMSNorm's options -------------------------------------------------------------------------------------


def check_rms(
    here: Here, x: Placements, dtype: torch.dtype = torch.float64, *, affine: bool, add: bool = False
) -> None:
    """Weightless, or with 1 + weight."""
    last, shape = 2, (2, 8, 16)
    where = {"mesh": here.mesh, "input": named(x, last), "dtype": dtype, "elementwise_affine": affine}
    where["zero_centered"] = affine
    activations = {"x": here.sample(x, shape, dtype, 1)}
    if add:
        module = AddRMSNorm(16, residual=named(x, last), **where)
        activations["residual"] = here.sample(x, shape, dtype, 2)
    else:
        module = RMSNorm(16, **where)
    parameters = {"weight": here.sample(along(x, last), [16], dtype, 3)} if affine else {}

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        total = sum(tensors[: 1 + add])
        weight = 1 + tensors[-1] if affine else None
        normed = functional.rms_norm(total, (16,), weight, 1e-6)
        return (normed, total) if add else (normed,)

    upstream = [here.sample(x, shape, dtype, 5 + k) for k in range(1 + add)]
    check_module(module, function, activations, parameters, upstream, dtype)


def test_options_of_rms_norm() -> None:
    def cases(**options: object) -> dict[str, object]:
        return {f"{affine}{add}{options}": partial(check_rms, affine=affine, add=add, **options)
                for affine in (True, False) for add in (True, False)}  # fmt: skip

    for dtype in FLOATS:
        for case in cases(x=[R], dtype=dtype).values():
            case(ONE)
    each_rank([2], {**cases(x=[S1]), **cases(x=[S2])})


def test_rms_norm_has_torchs_state_dicts() -> None:
    assert_state_dicts_fit(RMSNorm(8), torch.nn.RMSNorm(8))
    assert_state_dicts_fit(RMSNorm(8, elementwise_affine=False), torch.nn.RMSNorm(8, elementwise_affine=False))
    module = RMSNorm(8, zero_centered=True)
    assert torch.equal(module.weight, torch.zeros(8))
    module.weight.data.fill_(2)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.zeros(8))


def test_rms_norm_of_heads() -> None:
    """Queries [batch, sequence, heads, head_dim] are normed one head at a time, the heads sharded or not."""
    norm = RMSNorm(16)
    q = torch.randn(2, 5, 4, 16)
    assert_beside(norm(q).detach(), functional.rms_norm(q, (16,), eps=1e-6))


def test_the_norm_of_a_module_that_is_made_stays() -> None:
    """Its parameters are that norm's; the same norm may be assigned again."""
    module = DropoutAddNorm(8, p=0.0)
    x, residual = torch.randn(2, 4, 8)
    before = module(x, residual)
    with pytest.raises(
        ModuleArgumentError, match=r'DropoutAddNorm\(norm=.rms.\): expected "layer", .* make another one'
    ):
        module.norm = "rms"
    module.norm = "layer"
    assert all(map(torch.equal, module(x, residual), before))
