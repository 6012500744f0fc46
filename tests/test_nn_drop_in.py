"""Modules in torch's place: parameters that a caller assigns, and arguments of the installed torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from module_cases import ONE, assert_state_dicts_fit, check_module, each_rank
from nn_cases import S0, Here, Placements, R, along
from torch import Tensor
from torch.nn import functional

from shardfuse import nn
from shardfuse.errors import ModuleArgumentError, ModuleInputError

Norm = Callable[..., tuple[Tensor, ...]]
EPS = 1e-5


def rms(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    normed = functional.rms_norm(x, x.shape[-1:], weight, EPS)
    return normed if bias is None else normed + bias


def layer(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def added(norm: Callable[..., Tensor]) -> Norm:
    def function(
        x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
        input_bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        total = residual + (x if input_bias is None else x + input_bias)
        return norm(total, weight, bias), total

    return function


def alone(norm: Callable[..., Tensor]) -> Norm:
    return lambda *tensors, **named: (norm(*tensors, **named),)


def group(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, silu: bool = False) -> Tensor:
    weight = x.new_ones(8) if weight is None else weight  # without one torch's own backward fails beside a bias
    y = functional.group_norm(x, 4, weight, bias, EPS)
    return functional.silu(y) if silu else y


def batch(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return functional.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)


def kept_batch(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    zeros, ones = x.new_zeros(8), x.new_ones(8)
    return functional.batch_norm(x, zeros, ones, weight, bias, False, 0.1, EPS)


WEIGHT_AND_BIAS = ("weight", "bias")
ALL = (*WEIGHT_AND_BIAS, "input_bias")
AFFINE: dict[str, Any] = {"elementwise_affine": False}
NORMS: dict[str, tuple[Callable[..., torch.nn.Module], Norm, tuple[str, ...], int, bool]] = {
    "RMSNorm": (partial(nn.RMSNorm, 8, EPS, False), alone(rms), WEIGHT_AND_BIAS, 1, True),
    "LayerNorm": (partial(nn.LayerNorm, 8, EPS, False), alone(layer), WEIGHT_AND_BIAS, 1, True),
    "AddRMSNorm": (partial(nn.AddRMSNorm, 8, EPS, **AFFINE), added(rms), ALL, 2, True),
    "AddLayerNorm": (partial(nn.AddLayerNorm, 8, EPS, **AFFINE), added(layer), ALL, 2, True),
    "DropoutAddNorm": (partial(nn.DropoutAddNorm, 8, 0.0, EPS, **AFFINE), added(layer), ALL, 2, True),
    "GroupNorm": (partial(nn.GroupNorm, 4, 8, EPS, False), alone(group), WEIGHT_AND_BIAS, 1, False),
    "GroupNorm, silu": (
        partial(nn.GroupNorm, 4, 8, EPS, False, activation="silu"), alone(partial(group, silu=True)), WEIGHT_AND_BIAS,
        1, False,
    ),
    "BatchNorm1d": (partial(nn.BatchNorm1d, 8, EPS, 0.1, False), alone(batch), WEIGHT_AND_BIAS, 1, False),
    "BatchNorm1d, eval": (
        lambda **named: nn.BatchNorm1d(8, EPS, 0.1, False, **named).eval(), alone(kept_batch), WEIGHT_AND_BIAS, 1,
        False,
    ),
}  # fmt: skip
"""A module without parameters, what it computes, names of parameters, how many activations, is the last dim normed?"""


def check_assigned(
    here: Here, name: str, given: Sequence[str], at: Placements | None = None, dtype: torch.dtype = torch.float64
) -> None:
    """A module that has run without parameters, and then with those that the caller assigns."""
    make, function, names, count, is_last = NORMS[name]
    where: dict[str, Any] = {} if at is None else {"mesh": here.mesh, "input": at, "parameters": "local"}
    if at is not None and count == 2:
        where["residual"] = at
    module = make(**where, dtype=dtype)
    shape = (6, 4, 8) if is_last else (6, 8, 4)
    placed = [R] * here.mesh.ndim if at is None else at
    x, residual = (here.sample(placed, shape, dtype, k) for k in (1, 2))
    activations = {"x": x, "residual": residual} if count == 2 else {"x": x}
    module(*(t.local for t in activations.values()))
    channel_dim = 2 if is_last else 1
    samples = {
        p: here.sample(along(placed, channel_dim), (8,), dtype, 5 + k) for k, p in enumerate(names) if p in given
    }
    for p in given:
        setattr(module, p, torch.nn.Parameter(torch.zeros_like(samples[p].local)))
    upstream = [here.sample(placed, shape, dtype, 3 + k) for k in range(count)]
    with torch.no_grad():
        for p, sample in samples.items():
            getattr(module, p).copy_(sample.local)

    def named(*tensors: Tensor) -> tuple[Tensor, ...]:
        return function(*tensors[:count], **dict(zip(samples, tensors[count:], strict=True)))

    call = partial(module, unsharded=shape) if at is not None else module
    check_module(module, named, activations, samples, upstream, dtype, call=call)


SUBSETS = [(name, given) for name in NORMS for n in (1, 2, 3) for given in combinations(NORMS[name][2], n)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_assigned_parameters_are_used(dtype: torch.dtype) -> None:
    for name, given in SUBSETS:
        check_assigned(ONE, name, given, dtype=dtype)


def test_assigned_parameters_on_a_mesh() -> None:
    single = [("GroupNorm", ("weight",)), ("BatchNorm1d", ("bias",)), ("LayerNorm", ("bias",))]
    chosen = [*((name, entry[2]) for name, entry in NORMS.items() if name != "BatchNorm1d, eval"), *single]
    each_rank(
        [2], {f"{name} {given}": partial(check_assigned, name=name, given=given, at=[S0]) for name, given in chosen}
    )


def test_parameters_that_come_and_go() -> None:
    """Results are those of torch's module of the same parameters, also under torch.compile and torch.func."""
    x = ONE.sample([R], (6, 8, 4), torch.float64, 1).full
    vectors = {name: ONE.sample([R], (8,), torch.float64, 5 + k).full for k, name in enumerate(WEIGHT_AND_BIAS)}
    pairs = (
        (nn.LayerNorm(8), torch.nn.LayerNorm(8)), (nn.GroupNorm(4, 8), torch.nn.GroupNorm(4, 8)),
        (nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8)), (nn.BatchNorm1d(8).eval(), torch.nn.BatchNorm1d(8).eval()),
    )  # fmt: skip
    for ours, theirs in pairs:
        given = x.mT if isinstance(ours, nn.LayerNorm) else x
        for names in ((), ("weight",), ("bias",), ("weight",), WEIGHT_AND_BIAS, ("bias",), ()):
            for module in (ours.double(), theirs.double()):
                for name in WEIGHT_AND_BIAS:
                    setattr(module, name, torch.nn.Parameter(vectors[name].clone()) if name in names else None)
            wanted = theirs(given)
            torch.testing.assert_close(ours(given), wanted, msg=lambda m, n=names, o=ours: f"{o} {n}: {m}")
            if names == ("bias",):
                torch._dynamo.reset()
                torch.testing.assert_close(torch.compile(ours, backend="aot_eager", fullgraph=True)(given), wanted)
            assert list(ours.state_dict()) == list(theirs.state_dict())
            swapped = {name: vectors[name] * 2 for name in names}
            twice = torch.func.functional_call(theirs, swapped, given)
            torch.testing.assert_close(torch.func.functional_call(ours, swapped, given), twice)
        for module in (ours, theirs):
            with pytest.raises(TypeError, match="cannot assign"):
                module.weight = torch.ones(8)


def test_assigned_parameters_of_a_compiled_module_on_a_mesh() -> None:
    """Such a module is one op of the graph, which knows by a text which parameters there are."""
    x = ONE.sample([R], (6, 8, 8), torch.float64, 1).full
    bias = ONE.sample([R], (8,), torch.float64, 2).full
    mesh: dict[str, Any] = {"mesh": ONE.mesh, "input": S0}
    for module, wanted in (
        (nn.LayerNorm(8, EPS, False, **mesh), layer(x, None, bias)),
        (nn.GroupNorm(4, 8, EPS, False, **mesh), group(x, None, bias)),
        (nn.BatchNorm1d(8, EPS, 0.1, False, **mesh), batch(x, None, bias)),
    ):
        module.double()(x)
        module.bias = torch.nn.Parameter(bias.clone())
        torch._dynamo.reset()
        found = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(found, wanted)
        (grad,) = torch.autograd.grad(found.sum(), module.bias)
        torch.testing.assert_close(grad, torch.full((8,), 48.0, dtype=torch.float64))


def test_a_batch_norm_that_no_longer_tracks() -> None:
    """As torch's: the flag may be set later, and one of the two running statistics alone is refused."""
    x = ONE.sample([R], (6, 8, 4), torch.float64, 1).full
    for momentum in (0.1, None):
        for ours, theirs in ((nn.BatchNorm1d(8, momentum=momentum), torch.nn.BatchNorm1d(8, momentum=momentum)),):
            for module in (ours.double(), theirs.double()):
                module(x)
                module.track_running_stats = False
                module(2 * x)
                module.track_running_stats = True
                module.num_batches_tracked = None
                module(3 * x)
            for name, tensor in theirs.state_dict().items():
                torch.testing.assert_close(ours.state_dict()[name], tensor)
            torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
            ours.running_var = None
            with pytest.raises(ModuleInputError, match="running_var has None, expected a tensor"):
                ours(x)


TORCHS: dict[str, Sequence[str]] = {
    "RMSNorm": ("normalized_shape",),
    "LinearCrossEntropyLoss": ("in_features", "out_features", "bias", "device", "dtype", "weight", "options"),
}
"""Arguments of torch's modules that ours have not, each named in docs/modules.md."""
TORCHS_FUNCTIONS: dict[str, Sequence[str]] = {
    "linear_cross_entropy": ("linear_weight", "linear_bias", "options"),
    "softmax": ("_stacklevel",),
    "log_softmax": ("_stacklevel",),
}


def parameters_of(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:  # written in C
        return {}


def test_modules_take_what_the_installed_torchs_take() -> None:
    for name in nn.__all__:
        ours, theirs = getattr(nn, name), getattr(torch.nn, name, None)
        if not (inspect.isclass(ours) and inspect.isclass(theirs)):
            continue
        has, wanted = parameters_of(ours.__init__), parameters_of(theirs.__init__)
        missing = [parameter for parameter in wanted if parameter not in has]
        known = set(TORCHS.get(name, ()))
        assert set(missing) <= known, f"{name}: {missing}"
        if not known and name != "CrossEntropyLoss":  # whose options go by keyword
            positional = [p.name for p in wanted.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert list(has)[: len(positional)] == positional, name
            kinds = {has[p].kind for p in positional}
            assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}, f"{name}: {kinds}"


def test_functions_take_what_the_installed_torchs_take() -> None:
    for name in dir(nn.functional):
        ours, theirs = getattr(nn.functional, name), getattr(torch.nn.functional, name, None)
        if not inspect.isfunction(ours) or theirs is None:
            continue
        has = parameters_of(ours)
        missing = [parameter for parameter in parameters_of(theirs) if parameter not in has]
        assert set(missing) <= set(TORCHS_FUNCTIONS.get(name, ())), f"{name}: {missing}"


def test_a_norm_with_a_weight_alone() -> None:
    """``bias=False``, which torch 2.13 has, whatever torch is installed."""
    x = ONE.sample([R], (6, 8, 4), torch.float64, 1)
    for name in ("GroupNorm", "BatchNorm1d"):
        _, function, _, _, _ = NORMS[name]
        sizes = (4, 8) if name == "GroupNorm" else (8,)
        module = getattr(nn, name)(*sizes, bias=False, dtype=torch.float64)
        assert module.bias is None
        samples = {"weight": ONE.sample([R], (8,), torch.float64, 5)}
        check_module(module, function, {"x": x}, samples, [ONE.sample([R], (6, 8, 4), torch.float64, 3)], torch.float64)
        module.reset_parameters()
        assert torch.equal(module.weight, torch.ones(8))
        theirs = getattr(torch.nn, name)
        if "bias" in parameters_of(theirs.__init__):
            assert_state_dicts_fit(module, theirs(*sizes, bias=False, dtype=torch.float64))
            model = torch.nn.Sequential(theirs(*sizes, bias=False, dtype=torch.float64))
            wanted = model(x.full)
            assert [done.name for done in nn.convert(model).replaced] == ["0"]
            torch.testing.assert_close(model(x.full), wanted)
        assert getattr(nn, name)(*sizes, affine=False, bias=True).bias is None


def layouts() -> dict[str, Tensor]:
    """Tensors of one kind each of memory order, most of them [4, 8, 6, 10]."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))

    image = numbers(4, 8, 6, 10)
    last = torch.channels_last
    found = {"contiguous": image, "channels-last": image.to(memory_format=last)}
    for order in ((0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)):
        found[f"permuted {order}"] = image.permute(order).contiguous().permute([order.index(k) for k in range(4)])
    return found | {
        "expanded": numbers(1, 8, 6, 10).expand(4, 8, 6, 10),
        "expanded within": numbers(4, 8, 1, 10).expand(4, 8, 6, 10),
        "every other": numbers(4, 8, 6, 20)[..., ::2],
        "sliced": numbers(4, 16, 6, 10)[:, 3:11],
        "channels of channels-last": numbers(4, 16, 6, 10).to(memory_format=last)[:, 3:11],
        "columns of channels-last": numbers(4, 8, 6, 20).to(memory_format=last)[..., :10],
        "volumes": numbers(2, 8, 3, 4, 5).to(memory_format=torch.channels_last_3d),
        "matrices": numbers(4, 6, 8).mT,
        "a matrix": numbers(6, 8).t(),
        "a vector": numbers(20)[::2],
    }


def row_axes(x: Tensor) -> Sequence[int]:
    return x.shape[-1:]


Way = Callable[[Tensor], Tensor]
LAID_OUT: dict[str, tuple[Way, Way, int]] = {
    "gelu": (nn.functional.gelu, functional.gelu, 1),
    "gelu by tanh": (
        partial(nn.functional.gelu, approximate="tanh"), partial(functional.gelu, approximate="tanh"), 1
    ),
    "softmax": (partial(nn.functional.softmax, dim=-1), partial(functional.softmax, dim=-1), 1),
    "softmax of rows": (partial(nn.functional.softmax, dim=0), partial(functional.softmax, dim=0), 1),
    "log_softmax": (partial(nn.functional.log_softmax, dim=-1), partial(functional.log_softmax, dim=-1), 1),
    "layer_norm": (
        lambda x: nn.functional.layer_norm(x, row_axes(x)), lambda x: functional.layer_norm(x, row_axes(x)), 1
    ),
    "group_norm": (lambda x: nn.functional.group_norm(x, 2), lambda x: functional.group_norm(x, 2), 3),
    "batch_norm": (
        lambda x: nn.functional.batch_norm(x, None, None, training=True),
        lambda x: functional.batch_norm(x, None, None, training=True), 2,
    ),
    "swiglu": (lambda x: nn.functional.swiglu(x, x + 1), lambda x: functional.silu(x) * (x + 1), 1),
    "swiglu of another order": (
        lambda x: nn.functional.swiglu(x, (x + 1).contiguous()), lambda x: functional.silu(x) * (x + 1), 1
    ),
    "geglu": (lambda x: nn.functional.geglu(x, x + 1), lambda x: functional.gelu(x) * (x + 1), 1),
}  # fmt: skip
"""Ours, torch's, and from how many dims."""


@pytest.mark.parametrize("name", LAID_OUT)
def test_results_lie_in_memory_as_torchs_do(name: str) -> None:
    """Values, strides, and gradients, of inputs of every order."""
    ours, theirs, dims = LAID_OUT[name]
    for layout, x in layouts().items():
        if x.ndim < dims:
            continue
        wanted, found = theirs(x), ours(x)
        assert found.stride() == wanted.stride(), layout
        torch.testing.assert_close(found, wanted, msg=lambda m, layout=layout: f"{layout}: {m}")
        leaf, other = (x.double().requires_grad_() for _ in range(2))
        (grad,) = torch.autograd.grad(ours(leaf).square().sum(), leaf)
        (expected,) = torch.autograd.grad(theirs(other).square().sum(), other)
        torch.testing.assert_close(grad, expected, msg=lambda m, layout=layout: f"gradient, {layout}: {m}")


def test_shapes_of_permuted_gates_are_those_of_the_caller() -> None:
    gate, up = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0)).mT
    wanted = functional.silu(gate) * up
    torch.testing.assert_close(nn.SwiGLU(8)(gate, up), wanted)
    rows = torch.stack([gate, up]).transpose(0, 1)  # the last dim is the last in memory too
    assert nn.SwiGLU(8)(rows, rows).stride() == functional.silu(rows).stride()
    with pytest.raises(ModuleInputError, match=r"gate has shape \(6, 8\), expected 6 along dim -1"):
        nn.SwiGLU(6)(gate, up)
    with pytest.raises(ModuleInputError, match=r"up has shape \(6, 7\), expected \(6, 8\)"):
        nn.SwiGLU()(gate, up[:, :7])


def test_torchs_options_of_an_embedding() -> None:
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    indices = torch.tensor([[1, 1, 2], [0, 5, 1]])
    for options in ({"padding_idx": 1}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}, {"sparse": True}):
        ours, theirs = (table.clone().requires_grad_(not options.get("max_norm")) for _ in range(2))
        found = nn.functional.embedding(indices, ours, torch.float32, **options)
        wanted = functional.embedding(indices, theirs, **options)
        assert torch.equal(found, wanted.float())
        if ours.requires_grad:
            grads = [
                torch.autograd.grad(t.double().sum(), leaf)[0].to_dense()
                for t, leaf in ((found, ours), (wanted, theirs))
            ]
            assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [0, torch.int32, torch.bool, "float32"])
def test_rows_of_an_embedding_are_floats(dtype: Any) -> None:
    """A number there is torch's padding_idx by position; as a device, which ``to`` takes too, it would be ignored."""
    table, indices = torch.ones(6, 4), torch.tensor([1, 0])
    with pytest.raises(
        ModuleArgumentError, match=r"embedding\(dtype=.*\): expected (None or a torch.dtype of floats|a dtype or None)"
    ):
        nn.functional.embedding(indices, table, dtype)
    compiled: Any = torch.compile(nn.functional.embedding, backend="eager", fullgraph=True)
    assert compiled(indices, table, torch.bfloat16).dtype == torch.bfloat16


def test_one_bias_of_two_is_refused() -> None:
    module = nn.SwiGLU(8)
    x = torch.ones(2, 8)
    for name, missing in (("gate_bias", "up_bias"), ("up_bias", "gate_bias")):
        setattr(module, name, torch.nn.Parameter(torch.ones(8)))
        for call in (module, torch.compile(module, backend="eager")):
            with pytest.raises(ModuleInputError, match=f"SwiGLU: {missing} has None, expected a bias"):
                call(x, x)
        setattr(module, missing, torch.nn.Parameter(torch.zeros(8)))
        torch.testing.assert_close(module(x, x), functional.silu(x + module.gate_bias) * (x + module.up_bias))
        setattr(module, name, None)
        setattr(module, missing, None)
