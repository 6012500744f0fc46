"""Each module of shardfuse.nn under what torch offers around a module, on plain tensors: results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch._functorch.config
from module_ways import TABLE, TWICE, WAYS, Trial, compiled, differentiated_twice, run, table
from nn_cases import add_rms_norm, rms_norm, swiglu
from torch import Tensor
from torch.nn import functional
from torch_answers import Expected
from torch_answers import compare as check_near
from torch_gradients import with_gradients

from shardfuse import nn
from shardfuse.nn import AddRMSNorm, CrossEntropyLoss, FusionTimer, RMSNorm, SwiGLU
from shardfuse.nn.fused import FusedModule

SHAPE = (4, 3, 32)
TARGET = torch.tensor([[0, 5, -100], [31, 7, 2], [1, 1, 30], [-100, 9, 3]])
EXAMPLES = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A module, torch's function of (arguments..., parameters...), and how many tensors it is of.

    further: shapes of arguments behind those of ``shape``.  dtype: of the arguments.  has_products: does autocast take
    matrix products in it?
    """

    make: Callable[[], torch.nn.Module]
    function: Callable[..., tuple[Tensor, ...]]
    arguments: int
    results: int = 1
    order: tuple[int, ...] | None = None
    shape: tuple[int, ...] = SHAPE
    has_target: bool = False
    further: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float32
    has_products: bool = False


def cross_entropy(logits: Tensor) -> tuple[Tensor, ...]:
    return (functional.cross_entropy(logits.flatten(0, 1), TARGET.flatten()),)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (functional.layer_norm(x, weight.shape, weight, bias),)


def added(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, input_bias: Tensor) -> tuple[Tensor, ...]:
    total = residual + (x + input_bias)
    return (*layer_norm(total, weight, bias), total)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (functional.silu(functional.group_norm(x, 4, weight, bias)),)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (functional.batch_norm(x, None, None, weight, bias, training=True),)


def rotary(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    angles = torch.arange(q.shape[2], device=q.device)[:, None] * 1e4 ** -(torch.arange(0, 8, 2) / 8)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    halves = [t.chunk(2, -1) for t in (q, k)]
    return tuple(torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in halves)


def log_prob(logits: Tensor) -> tuple[Tensor, ...]:
    logs = (logits / 0.7).log_softmax(-1)
    counted = TARGET != -100
    chosen = logs.gather(-1, TARGET.clamp_min(0)[..., None])[..., 0]
    return tuple(torch.where(counted, t, 0.0) for t in (chosen, -(logs.exp() * logs).sum(-1)))


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    return (functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down),)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (functional.linear(x, weight.to(x.dtype), bias.to(x.dtype)),)


def linear_cross_entropy(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return cross_entropy(functional.linear(x, weight))


def layer(inputs: int, outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, bias=False)


CASES = {
    "RMSNorm": Case(lambda: RMSNorm(32), rms_norm, 1),
    "AddRMSNorm": Case(lambda: AddRMSNorm(32, bias=True), add_rms_norm, 2, 2, (0, 2, 3, 1)),
    "SwiGLU": Case(lambda: SwiGLU(32, bias=True), swiglu, 2),
    "CrossEntropyLoss": Case(CrossEntropyLoss, cross_entropy, 1, has_target=True),
    "LayerNorm": Case(lambda: nn.LayerNorm(32), layer_norm, 1),
    "AddLayerNorm": Case(lambda: nn.AddLayerNorm(32, input_bias=True), added, 2, 2),
    "DropoutAddNorm": Case(lambda: nn.DropoutAddNorm(32, input_bias=True).eval(), added, 2, 2),
    "GroupNorm": Case(lambda: nn.GroupNorm(4, 8, activation="silu"), group_norm, 1, shape=(3, 8, 2, 5)),
    "BatchNorm1d": Case(lambda: nn.BatchNorm1d(4), batch_norm, 1, shape=(3, 4, 5)),
    "BatchNorm2d": Case(lambda: nn.BatchNorm2d(4), batch_norm, 1, shape=(3, 4, 2, 5)),
    "BatchNorm3d": Case(lambda: nn.BatchNorm3d(4), batch_norm, 1, shape=(3, 4, 2, 2, 3)),
    "SyncBatchNorm": Case(lambda: nn.SyncBatchNorm(4), batch_norm, 1, shape=(3, 4, 2, 5)),
    "Softmax": Case(lambda: nn.Softmax(scale=0.5), lambda x: ((0.5 * x).softmax(-1),), 1),
    "LogSoftmax": Case(lambda: nn.LogSoftmax(1), lambda x: (x.log_softmax(1),), 1),
    "GELU": Case(nn.GELU, lambda x: (functional.gelu(x),), 1),
    "GeGLU": Case(nn.GeGLU, lambda x: (functional.gelu(x[..., :16]) * x[..., 16:],), 1),
    "RotaryEmbedding": Case(lambda: nn.RotaryEmbedding(8), rotary, 2, 2, shape=(3, 2, 5, 8)),
    "LogProb": Case(lambda: nn.LogProb(entropy=True, temperature=0.7), log_prob, 1, 2, has_target=True),
    "Linear": Case(lambda: nn.Linear(32, 8), linear, 1, dtype=torch.bfloat16, has_products=True),
    "GatedMLP": Case(lambda: nn.GatedMLP(layer(32, 16), layer(32, 16), layer(16, 32)), gated_mlp, 1, has_products=True),
    "LinearCrossEntropyLoss": Case(
        lambda: nn.LinearCrossEntropyLoss(chunk_rows=5),
        linear_cross_entropy,
        1,
        shape=(4, 3, 16),
        further=((32, 16),),
        has_target=True,
        has_products=True,
    ),
}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trial_of(name: str) -> Trial:
    case, module = CASES[name], CASES[name].make()
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=10 + k))
    shapes = [*[case.shape] * case.arguments, *case.further]
    arguments = [normal(*shape, seed=k).to(case.dtype) for k, shape in enumerate(shapes)]
    given = [*arguments, TARGET] if case.has_target else arguments
    with torch.no_grad():
        results = module(*given)
    shapes = [t.shape for t in (results if isinstance(results, tuple) else (results,))]
    return Trial(module, given, [normal(*shape, seed=20 + k) for k, shape in enumerate(shapes)])


def autocast_to_half(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """As ``WAYS`` has it; float64 stays as it is."""

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*tensors)

    return call


@cache
def expected(name: str, *, is_autocast: bool = False) -> list[Expected]:
    """In the order in which a trial gives them."""
    case, trial = CASES[name], trial_of(name)
    function = autocast_to_half(case.function) if is_autocast and case.has_products else case.function
    tensors = [*(t for t in trial.arguments if t.is_floating_point()), *(p.detach() for p in trial.module.parameters())]
    order = case.order or tuple(range(len(tensors)))
    found = with_gradients(function, [tensors[k] for k in order], trial.gradients)
    results, gradients = found[: case.results], found[case.results :]
    return [*results, *(gradients[order.index(k)] for k in range(len(tensors)))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str, name: str) -> None:
    trial = trial_of(name)
    found = WAYS[way](trial)
    wanted = expected(name, is_autocast=way == "autocast")
    for k, (got, want) in enumerate(zip(found, wanted, strict=True)):
        check_near(f"result or gradient {k}", got, want)


@pytest.mark.parametrize("name", CASES.keys() - {"RotaryEmbedding"})  # which is linear: the gradient is a constant
def test_double_backward_is_refused(name: str) -> None:
    assert TWICE.fullmatch(differentiated_twice(trial_of(name)))


def test_the_page_shows_the_table() -> None:
    page = (EXAMPLES / "docs/modules.md").read_text()
    assert table() in page
    assert set(WAYS) < set(TABLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_module_rounds_once(name: str, dtype: torch.dtype) -> None:
    """What it decomposes into computes in float32, as the fusion does."""
    trial = trial_of(name)
    trial.module.to(dtype)
    half = [t.to(dtype) if t.is_floating_point() else t for t in trial.arguments]
    trial = replace(trial, arguments=half)
    results = CASES[name].results
    for got, want in zip(compiled(trial)[:results], run(trial)[:results], strict=True):
        assert got.dtype == want.dtype
        apart = (got.double() - want.double()).abs()
        assert (apart <= torch.finfo(want.dtype).eps * want.double().abs().clamp_min(1e-3)).all()


def test_inductor() -> None:
    torch._dynamo.reset()
    name = "AddRMSNorm"
    trial = trial_of(name)
    found = run(trial, torch.compile(trial.module, fullgraph=True))
    for k, (got, want) in enumerate(zip(found, expected(name), strict=True)):
        check_near(f"result or gradient {k}", got, want)


def test_stray_and_ignored_targets_of_a_compiled_loss() -> None:
    """As on a GPU: a target that is no class makes NaN; an ignored row has no gradient, whatever its logits."""
    torch._dynamo.reset()
    logits = normal(3, 8, seed=0)
    logits[2] = torch.inf
    logits.requires_grad_()
    loss = torch.compile(CrossEntropyLoss(reduction="none"), fullgraph=True, backend="aot_eager")
    result = loss(logits, torch.tensor([8, 1, -100]))
    result.sum().backward()
    assert result.isnan().tolist() == [True, False, False]
    assert logits.grad.isnan().any(-1).tolist() == [True, False, False]
    assert torch.equal(logits.grad[2], torch.zeros(8))


# --- one look-up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_second_call_checks_and_binds_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(name)
    first = run(trial)
    with torch.no_grad():
        trial.module(*trial.arguments)

    def refuse(*_: object) -> None:
        raise AssertionError("it was bound before")

    for part in trial.module.modules():
        if isinstance(part, FusedModule):
            monkeypatch.setattr(type(part), "bind", refuse)
    for a, b in zip(first, run(trial), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(trial.module(*trial.arguments)))


def test_changes_of_a_module_are_noticed() -> None:
    x = normal(4, 32, seed=0)
    module = RMSNorm(32)
    first = module(x)
    module.eps = 1.0
    assert torch.allclose(module(x), functional.rms_norm(x, (32,), None, 1.0), atol=1e-6)
    assert '"eps":1.0' in module.text
    module.eps = 1e-6
    assert torch.equal(module(x), first)
    module.weight = torch.nn.Parameter(torch.full((32,), 2.0))
    assert torch.equal(module(x), first * 2)
    module.half()
    assert module(x.half()).dtype == torch.float16
    assert module(x).dtype == torch.float32
    timer = FusionTimer().watch(module)
    module(x)
    assert timer.seconds() > 0
    loss = CrossEntropyLoss()
    loss(x, torch.zeros(4, dtype=torch.int64))
    loss.reduction = "none"
    assert loss(x, torch.zeros(4, dtype=torch.int64)).shape == (4,)


def test_a_dispatch_mode_sees_one_op() -> None:
    """Selective checkpointing, counters and fake tensors see an op with a formula, not what it runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    module, x = RMSNorm(32), normal(4, 32, seed=0).requires_grad_()
    expected = module(x)
    with Seeing():
        result = module(x)
    assert [op for op in seen if "detach" not in op] == ["shardfuse.rms_norm_v1.default"]
    assert torch.equal(result, expected)
    result.sum().backward()
    assert x.grad is not None
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(mode.from_tensor(x)).shape == (4, 32)
