"""Modules of a linear layer's result as one node of autograd: the bits of the two calls, and what is left to these."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from shardfuse import DeviceMesh, nn
from shardfuse.errors import ChangedBeforeBackwardError, ModuleInputError, SecondDerivativeError, TransformError
from shardfuse.nn import linear as linear_layer
from shardfuse.nn import of_linear
from shardfuse.nn.functional import linear

HIDDEN, BATCH, SEQUENCE = 16, 2, 8
TABLES = nn.RotaryEmbedding(8).tables(torch.arange(SEQUENCE))
MODULES: dict[str, tuple[Callable[[], torch.nn.Module], int, Callable[[], Sequence[object]]]] = {
    "swiglu": (lambda: nn.SwiGLU(HIDDEN, bias=True), 2 * HIDDEN, list),
    "geglu": (nn.GeGLU, 2 * HIDDEN, list),
    "rotary": (lambda: nn.RotaryEmbedding(8, packed=(2, 2), batch_first=False), 48, lambda: [None, *TABLES]),
    "norm": (lambda: nn.LayerNorm(HIDDEN), HIDDEN, list),
    "residual": (lambda: nn.AddRMSNorm(HIDDEN, bias=True), HIDDEN, lambda: [drawn(SEQUENCE, BATCH, HIDDEN)]),
    "dropout": (lambda: nn.DropoutAddNorm(HIDDEN, 0.5), HIDDEN, lambda: [drawn(SEQUENCE, BATCH, HIDDEN)]),
    "dims": (lambda: nn.DropoutAddNorm((BATCH, HIDDEN), 0.5), HIDDEN, lambda: [drawn(SEQUENCE, BATCH, HIDDEN)]),
    "loss": (nn.CrossEntropyLoss, HIDDEN, lambda: [torch.arange(16).view(SEQUENCE, BATCH)]),
}
"""How a module is made, how many features the layer has, and the arguments beside its result."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def inputs(name: str, wide: torch.dtype = torch.float32) -> tuple[torch.nn.Module, list[Tensor], Sequence[object]]:
    torch.manual_seed(0)
    make, features, others = MODULES[name]
    x, weight = drawn(SEQUENCE, BATCH, 24), torch.randn(features, 24).to(wide).requires_grad_()
    return make(), [x, weight], others()


def composed(module: torch.nn.Module, x: Tensor, weight: Tensor, *others: object) -> object:
    return module(linear(x, weight), *others)


def merged(module: torch.nn.Module, *given: object) -> object:
    return module.of_linear(*given)


def as_tuple(found: object) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)  # pyright: ignore[reportArgumentType, reportUnknownVariableType, reportUnknownArgumentType]


def nodes(results: Sequence[Tensor]) -> set[str]:
    """The nodes of shardfuse's in the graph."""
    found, left = set[object](), [t.grad_fn for t in results]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [other for other, _ in node.next_functions]
    known = "_OfLinearBackward", "_LinearBackward", "_FusedBackward"
    return {node.name() for node in found} & {*known}  # pyright: ignore[reportAttributeAccessIssue]


def results_and_gradients(call: Callable[..., object], name: str, frozen: str = "") -> list[Tensor | None]:
    module, tensors, others = inputs(name)
    for key, tensor in zip(("x", "weight"), tensors, strict=True):
        tensor.requires_grad_(key not in frozen.split())
    torch.manual_seed(1)
    results = as_tuple(call(module, *tensors, *others))
    wanted = [*tensors, *[t for t in others if isinstance(t, Tensor) and t.requires_grad], *module.parameters()]
    given = [torch.randn(t.shape, generator=torch.Generator().manual_seed(2)).to(t.dtype) for t in results]
    torch.autograd.backward(results, given)
    return [*results, *[t.grad for t in wanted]]


def assert_same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for k, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert (f is None) == (e is None), k
        if f is not None and e is not None:
            assert (f.dtype, f.shape, f.stride()) == (e.dtype, e.shape, e.stride()), k
            assert torch.equal(f, e), k


@pytest.mark.parametrize("frozen", ["", "x", "weight", "x weight"])
@pytest.mark.parametrize("name", MODULES)
def test_bits_of_the_two_calls(name: str, frozen: str) -> None:
    if name in ("geglu", "rotary", "loss") and frozen == "x weight":
        return  # nothing is to be differentiated
    assert_same(results_and_gradients(merged, name, frozen), results_and_gradients(composed, name, frozen))


@pytest.mark.parametrize("name", MODULES)
def test_one_node(name: str) -> None:
    """But of a norm over several dims, which views them as one."""
    module, tensors, others = inputs(name)
    expected = {"_LinearBackward", "_FusedBackward"} if name == "dims" else {"_OfLinearBackward"}
    assert nodes(as_tuple(module.of_linear(*tensors, *others))) == expected
    assert nodes(as_tuple(composed(module, *tensors, *others))) == {"_LinearBackward", "_FusedBackward"}


def test_what_is_kept() -> None:
    """That is what the two nodes keep."""
    for name in MODULES:
        kept: list[list[tuple[object, ...]]] = []
        for call in (merged, composed):
            module, tensors, others = inputs(name)
            seen: list[tuple[object, ...]] = []

            def keep(t: Tensor, seen: list[tuple[object, ...]] = seen) -> Tensor:
                seen.append((t.numel(), t.dtype))
                return t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                call(module, *tensors, *others)
            kept.append(sorted(seen, key=str))
        assert kept[0] == kept[1], name


@pytest.mark.parametrize("call", [composed, merged])
@pytest.mark.parametrize("name", ["swiglu", "loss"])
def test_what_a_module_saved_is_let_go_before_the_matmuls(
    name: str, call: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss' logits would be there beside their gradient and that of the weights."""
    products, lives = list[StorageWeakRef](), list[bool]()

    def multiplied(*of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = linear_layer.multiplied_as_it_is(*of)
        products.append(StorageWeakRef(made[-1].untyped_storage()))
        return made

    def gradients_of(*of: object) -> object:
        lives.extend(not p.expired() for p in products)
        return linear_layer.gradients_of_as_it_is(*of)

    for replaced in (multiplied, gradients_of):
        function = getattr(linear_layer, replaced.__name__)
        monkeypatch.setattr(linear_layer, f"{replaced.__name__}_as_it_is", function, raising=False)
        for module in (linear_layer, of_linear):
            monkeypatch.setattr(module, replaced.__name__, replaced)
    module, given, others = inputs(name)
    results = as_tuple(call(module, *given, *others))
    torch.autograd.backward(results, [torch.ones_like(t) for t in results], retain_graph=True)
    torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    assert lives == [True, False], "the graph is kept once"


@pytest.mark.parametrize("name", MODULES)
def test_checkpoints_and_no_gradients(name: str) -> None:
    def again(module: torch.nn.Module, *given: object) -> object:
        return checkpoint(module.of_linear, *given, use_reentrant=False)

    assert_same(results_and_gradients(again, name), results_and_gradients(composed, name))
    module, tensors, others = inputs(name)
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            torch.manual_seed(1)
            found = as_tuple(module.of_linear(*tensors, *others))
            torch.manual_seed(1)
            assert_same(found, as_tuple(composed(module, *tensors, *others)))
            assert not any(t.requires_grad for t in found)


def test_second_derivatives_are_refused() -> None:
    module, tensors, _ = inputs("swiglu")
    wanted = [*tensors, *module.parameters()]
    plain = torch.autograd.grad(module.of_linear(*tensors).sum(), wanted)
    first = torch.autograd.grad(module.of_linear(*tensors).sum(), wanted, create_graph=True)
    assert_same(first, plain)
    with pytest.raises(SecondDerivativeError):
        first[1].sum().backward()
    y = module.of_linear(*tensors)
    with pytest.raises(TransformError):
        torch.autograd.grad(y, tensors[0], torch.ones(3, *y.shape, dtype=y.dtype), is_grads_batched=True)


@pytest.mark.parametrize("call", [composed, merged])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_no_constants(name: str, call: Callable[..., object]) -> None:
    """Of a graph that is kept or not, of a checkpoint, beside frozen tensors and views with gaps: what a penalty of
    them would leave out is refused.  Those of a rotary embedding depend on no more than of its layer."""
    module, (x, weight), others = inputs(name)
    base = x.detach().transpose(0, 2).contiguous().requires_grad_()

    def again(*given: object) -> object:
        return checkpoint(call, *given, use_reentrant=False)

    for of, layer, weights, wanted in (
        (call, x, weight, [x, weight]),
        (again, x, weight, [x, weight]),
        (call, base.transpose(0, 2), weight, [base, weight]),
        (call, x, weight.detach(), [x]),
        (call, x.detach(), weight, [weight]),
    ):
        for keeps in (False, True):
            torch.manual_seed(1)
            y = as_tuple(of(module, layer, weights, *others))[0].sum()
            found = torch.autograd.grad(y, wanted, create_graph=True, retain_graph=keeps)
            assert {g.requires_grad for g in found} == {name != "rotary" or len(wanted) == 2}
            if found[0].requires_grad:
                with pytest.raises(SecondDerivativeError):
                    (y.detach() + found[0].square().sum()).backward()


def test_threads_call_one_module() -> None:
    """Each hands its own product on, also while another one binds the module for its sizes."""
    module, (_, weight), _ = inputs("swiglu")
    begun, bind = threading.Barrier(2, timeout=30), module._bind  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    found: dict[int, set[str]] = {}

    def bind_together(*of: object) -> object:
        begun.wait()
        return bind(*of)

    def called(rows: int) -> None:
        begun.wait()
        found[rows] = nodes([module.of_linear(drawn(rows, 24), weight)])

    module.__dict__["_bind"] = bind_together
    threads = [threading.Thread(target=called, args=(rows,)) for rows in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {3: {"_OfLinearBackward"}, 5: {"_OfLinearBackward"}}


@pytest.mark.parametrize("frozen", ["x", "weight", None])
@pytest.mark.parametrize("name", ["norm", "swiglu"])
def test_a_second_derivative_of_one_leaf_alone_is_refused(name: str, frozen: str | None) -> None:
    """Also where the first one's graph is not kept, and where nothing that is saved is of autograd's graph."""
    module, tensors, _ = inputs(name)
    tensors = [t.detach().requires_grad_(n != frozen) for t, n in zip(tensors, ("x", "weight"), strict=True)]
    leaves = [t for t in tensors if t.requires_grad]
    for leaf in leaves:
        y = module.of_linear(*tensors)
        (plain,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True, retain_graph=False)
        assert torch.equal(first, plain)
        for other in leaves:
            with pytest.raises(SecondDerivativeError):
                torch.autograd.grad(first.float().square().sum(), other, allow_unused=True, retain_graph=True)


def test_a_write_before_the_backward_is_seen() -> None:
    module, (x, weight), _ = inputs("swiglu")
    y = module.of_linear(x, weight)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_write_into_a_dtensor_before_the_backward_is_seen() -> None:
    def run(rank: int, size: int) -> None:
        norm = nn.AddRMSNorm(HIDDEN, mesh=DeviceMesh(list(range(size))), input=Replicate())
        x, weight = drawn(SEQUENCE, BATCH, 24), torch.randn(HIDDEN, 24).requires_grad_()
        y = norm.of_linear(x, weight, drawn(SEQUENCE, BATCH, HIDDEN))[0]
        assert nodes([y]) == {"_OfLinearBackward"}
        with torch.no_grad():
            norm.weight.add_(1)
        with pytest.raises(ChangedBeforeBackwardError):
            y.sum().backward()

    run_ranks(2, run)


def test_what_a_module_views_first_is_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its class says of itself."""
    expected, own = results_and_gradients(composed, "swiglu"), nn.SwiGLU._forward  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        nn.SwiGLU, "_forward", lambda self, gate, *of, **named: own(self, gate.view_as(gate), *of, **named)
    )
    found = results_and_gradients(merged, "swiglu")
    assert nodes([t for t in found if t is not None and t.grad_fn is not None]) == {"_LinearBackward", "_FusedBackward"}
    assert_same(found, expected)


def test_hooks_and_other_forwards_are_called() -> None:
    """With what they take of two calls."""
    module, tensors, _ = inputs("swiglu")
    expected = module.of_linear(*tensors)
    seen: list[int] = []
    with torch.no_grad():
        half = module(linear(*tensors) / 2)
    handle = module.register_forward_pre_hook(lambda _, given: seen.append(1) or (given[0] / 2,))
    assert_same([module.of_linear(*tensors)], [half])
    handle.remove()
    for register in (
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(lambda *of: seen.append(1))
        module.of_linear(*tensors).sum().backward()
        handle.remove()
    assert len(seen) == 3

    class Doubled(nn.SwiGLU):
        def forward(self, gate: Tensor, up: Tensor | None = None, **named: object) -> Tensor:
            return super().forward(2 * gate, up) + gate[..., :HIDDEN]

    other = Doubled(HIDDEN, bias=True)
    assert nodes([other.of_linear(*tensors)]) == {"_LinearBackward", "_FusedBackward"}
    module.forward = lambda gate: gate  # pyright: ignore[reportAttributeAccessIssue]
    assert_same([module.of_linear(*tensors)], [linear(*tensors)])
    del module.forward
    assert_same([module.of_linear(*tensors)], [expected])


def test_autocast_and_equal_dtypes_are_left_to_two_calls() -> None:
    module, (x, weight), _ = inputs("swiglu", torch.bfloat16)
    assert nodes([module.of_linear(x, weight)]) == {"_FusedBackward"}
    x, weight = (t.detach().float().requires_grad_() for t in (x, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module.of_linear(x.half(), weight)
        assert "_OfLinearBackward" not in nodes([y])
        assert_same([y], [composed(module, x.half(), weight)])


def test_errors_are_those_of_two_calls() -> None:
    module, (x, weight), _ = inputs("swiglu")
    for wrong in ((x, weight[:, :5]), (x, weight[:31]), (x[0, 0], weight[0]), (None, weight), (x, 3)):
        with pytest.raises(Exception) as expected:  # noqa: PT011 whatever it is
            composed(module, *wrong)
        with pytest.raises(type(expected.value)) as found:
            module.of_linear(*wrong)
        assert str(found.value) == str(expected.value)
    with pytest.raises(ModuleInputError, match="residual"):
        nn.AddRMSNorm(HIDDEN).of_linear(x, weight[:HIDDEN], drawn(SEQUENCE, BATCH, 3))
    assert_same([module.of_linear(x, weight)], [composed(module, x, weight)])  # nothing is left behind


def test_a_graph_has_torchs_ops() -> None:
    module, tensors, _ = inputs("swiglu")
    compiled = torch.compile(module.of_linear, backend="eager", fullgraph=True)
    found, expected = compiled(*tensors), composed(module, *tensors)
    assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_bucketed", [False, True])
def test_on_ranks(is_bucketed: bool) -> None:
    """Partial sums of a row-parallel layer, whose norm gathers them: the collectives come in the same order."""

    def run(rank: int, size: int) -> list[list[Tensor | None]]:
        mesh, found = DeviceMesh(list(range(size))), []
        for call in (merged, composed):
            generator = torch.Generator().manual_seed(rank)
            norms = torch.nn.ModuleList(
                nn.AddRMSNorm(
                    HIDDEN, bias=True, mesh=mesh, input=Partial(), residual=Shard(0), output=Replicate(),
                    output_grad=Partial(), parameters="local",
                )
                for _ in range(2)
            )  # fmt: skip
            if is_bucketed:
                nn.bucket_gradients(norms)
            weights = [torch.randn(HIDDEN, HIDDEN, generator=generator).requires_grad_() for _ in norms]
            x, residual = (
                torch.randn(n, BATCH, HIDDEN, generator=generator).bfloat16().requires_grad_()
                for n in (SEQUENCE, SEQUENCE // size)
            )
            y, kept = x, residual
            for norm, weight in zip(norms, weights, strict=True):
                y, kept = call(norm, y, weight, kept)  # pyright: ignore[reportGeneralTypeIssues]
            torch.autograd.backward([y, kept], [torch.ones_like(y), torch.ones_like(kept)])
            found.append([y, kept, *[t.grad for t in (x, residual, *weights, *norms.parameters())]])
        return found

    for found, expected in run_ranks(2, run):
        assert_same(found, expected)
