"""Each module of shardfuse.nn under what torch offers around a module, on plain tensors: results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch._functorch.config
from functorch.compile import make_boxed_func
from module_ways import TABLE, TWICE, WAYS, Trial, compiled, differentiated_twice, run, table
from nn_cases import add_rms_norm, rms_norm, swiglu
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional
from torch_answers import Expected
from torch_answers import compare as check_near
from torch_gradients import with_gradients

from shardfuse import DeviceMesh
from shardfuse.errors import CompiledElsewhereError, SecondDerivativeError
from shardfuse.nn import AddRMSNorm, CrossEntropyLoss, FusionTimer, Redistribution, RMSNorm, SwiGLU, library
from shardfuse.nn.settings import parsed

SHAPE = (4, 3, 32)
TARGET = torch.tensor([[0, 5, -100], [31, 7, 2], [1, 1, 30], [-100, 9, 3]])
EXAMPLES = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A module, torch's function of (arguments..., parameters...), and how many tensors it is of."""

    make: Callable[[], torch.nn.Module]
    function: Callable[..., tuple[Tensor, ...]]
    arguments: int
    results: int = 1
    order: tuple[int, ...] | None = None


def cross_entropy(logits: Tensor) -> tuple[Tensor, ...]:
    return (functional.cross_entropy(logits.flatten(0, 1), TARGET.flatten()),)


CASES = {
    "RMSNorm": Case(lambda: RMSNorm(32), rms_norm, 1),
    "AddRMSNorm": Case(lambda: AddRMSNorm(32, bias=True), add_rms_norm, 2, 2, (0, 2, 3, 1)),
    "SwiGLU": Case(lambda: SwiGLU(32, bias=True), swiglu, 2),
    "CrossEntropyLoss": Case(CrossEntropyLoss, cross_entropy, 1),
}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trial_of(name: str) -> Trial:
    case, module = CASES[name], CASES[name].make()
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=10 + k))
    arguments = [normal(*SHAPE, seed=k) for k in range(case.arguments)]
    is_loss = name == "CrossEntropyLoss"
    gradients = [normal(*(() if is_loss else SHAPE), seed=20 + k) for k in range(case.results)]
    return Trial(module, [*arguments, TARGET] if is_loss else arguments, gradients)


@cache
def expected(name: str) -> list[Expected]:
    """In the order in which a trial gives them."""
    case, trial = CASES[name], trial_of(name)
    tensors = [*(t for t in trial.arguments if t.is_floating_point()), *(p.detach() for p in trial.module.parameters())]
    order = case.order or tuple(range(len(tensors)))
    found = with_gradients(case.function, [tensors[k] for k in order], trial.gradients)
    results, gradients = found[: case.results], found[case.results :]
    return [*results, *(gradients[order.index(k)] for k in range(len(tensors)))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str, name: str) -> None:
    trial = trial_of(name)
    found = WAYS[way](trial)
    for k, (got, want) in enumerate(zip(found, expected(name), strict=True)):
        check_near(f"result or gradient {k}", got, want)


@pytest.mark.parametrize("name", CASES)
def test_double_backward_is_refused(name: str) -> None:
    assert differentiated_twice(trial_of(name)) == TWICE


def test_the_page_shows_the_table() -> None:
    page = (EXAMPLES / "docs/modules.md").read_text()
    assert table() in page
    assert set(WAYS) < set(TABLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


# --- the ops -----------------------------------------------------------------------------------------------

MESH = DeviceMesh([0])
SHARDED = {
    "rms_norm": (RMSNorm(32, mesh=MESH, input=Shard(1)), [SHAPE, (32,)]),
    "add_rms_norm": (
        AddRMSNorm(32, bias=True, mesh=MESH, input=Partial(), residual=Shard(1), output=Replicate()),
        [SHAPE, (32,), (32,), SHAPE],
    ),
    "swiglu": (SwiGLU(32, bias=True, mesh=MESH, input=Shard(-1)), [SHAPE, SHAPE, (32,), (32,)]),
    "cross_entropy": (CrossEntropyLoss(mesh=MESH, logits=Shard(-1), reduction="none"), [SHAPE]),
    "redistribute": (Redistribution(MESH, Replicate(), Shard(1), Replicate()), [SHAPE]),
}


@pytest.mark.parametrize("name", SHARDED)
def test_opcheck(name: str) -> None:
    module, shapes = SHARDED[name]
    tensors = [normal(*shape, seed=k).requires_grad_() for k, shape in enumerate(shapes)]
    if name == "cross_entropy":
        tensors.append(TARGET[..., None])
    torch.library.opcheck(module.library_op, (tensors, module.text, None))
    torch.library.opcheck(module.library_op, (tensors, module.text, list(SHAPE)))


@pytest.mark.parametrize("name", SHARDED)
def test_a_text_makes_the_module_again(name: str) -> None:
    module = SHARDED[name][0]
    arguments, rank = parsed(module.text)
    assert rank == 0
    assert type(module).made_again(arguments).text == module.text


def test_an_op_of_another_rank_is_refused() -> None:
    module, _ = SHARDED["rms_norm"]
    text = module.text.replace('"rank":0', '"rank":1')
    with pytest.raises(CompiledElsewhereError, match="rms_norm_v1 was compiled for rank 1 and called on rank 0"):
        module.library_op([normal(*SHAPE, seed=0), module.weight], text, None)


def test_an_op_is_not_differentiated_twice() -> None:
    module, _ = SHARDED["rms_norm"]
    x = normal(*SHAPE, seed=0).requires_grad_()
    result = module.library_op([x, module.weight], module.text, None)[0]
    (first,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="rms_norm_v1 has no second derivative"):
        first.sum().backward()


def test_a_compiled_graph_holds_one_op_each_way() -> None:
    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(
            [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "shardfuse" in str(n.target)]
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    module, _ = SHARDED["add_rms_norm"]
    x, residual = (normal(*SHAPE, seed=k).requires_grad_() for k in range(2))
    timer = FusionTimer().watch(module)
    normed, total = torch.compile(module, fullgraph=True, backend=backend)(x, residual)
    (normed.sum() + total.sum()).backward()
    assert graphs == [["shardfuse.add_rms_norm_v1.default"], ["shardfuse.add_rms_norm_backward_v1.default"]]
    assert timer.seconds() > 0
    module.timer = None


def test_a_cached_graph_makes_its_module_again() -> None:
    """The op is found by its arguments alone: what this process knew of the module is forgotten in between."""
    module, _ = SHARDED["rms_norm"]
    x = normal(*SHAPE, seed=0).requires_grad_()
    hits = []
    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            library._module.cache_clear()
            counters.clear()
            result = torch.compile(module, fullgraph=True)(x)
            result.sum().backward()
            assert torch.equal(result, module(x))
            hits.append([counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "bypass")])
    assert hits == [[0, 0], [1, 0]]


# --- one look-up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_second_call_checks_and_binds_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(name)
    first = run(trial)
    with torch.no_grad():
        trial.module(*trial.arguments)

    def refuse(*_: object) -> None:
        raise AssertionError("it was bound before")

    monkeypatch.setattr(type(trial.module), "bind", refuse)
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
