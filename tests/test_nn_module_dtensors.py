"""The modules beside RMSNorm, SwiGLU and the losses of logits on DTensors, even and uneven, against torch unsharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import S0, S1, S2, P, Placements, R
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch_answers import assert_beside

from shardfuse import DeviceMesh, nn
from shardfuse.errors import ModuleInputError, PlacementError

Make = Callable[[DeviceMesh], torch.nn.Module]


@dataclass(frozen=True)
class Case:
    """A module of tensors of ``shape`` that live ``at`` these places, and its function of unsharded tensors."""

    make: Make
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    shape: Sequence[int]
    at: Placements
    tensors: int = 1


def layer_norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def entropy(x: Tensor) -> tuple[Tensor, ...]:
    logs = x.log_softmax(-1)
    return logs[..., 2], -(logs.exp() * logs).sum(-1)


LAST = Shard(-1)
CASES = {
    "layer_norm": Case(lambda m: nn.LayerNorm(6, mesh=m, input=S0), layer_norm, (5, 6), [S0]),
    "layer_norm_hidden": Case(lambda m: nn.LayerNorm(9, mesh=m, input=LAST), layer_norm, (4, 9), [S1]),
    "layer_norm_of_partial": Case(lambda m: nn.LayerNorm(6, mesh=m, input=P, output=S0), layer_norm, (4, 6), [P]),
    "layer_norm_of_two_dims": Case(
        lambda m: nn.LayerNorm((3, 4), mesh=m, input=S0), lambda x: functional.layer_norm(x, (3, 4)), (5, 3, 4), [S0]
    ),
    "add_layer_norm": Case(
        lambda m: nn.AddLayerNorm(6, mesh=m, input=S0, residual=S0),
        lambda x, r: (layer_norm(x + r), x + r), (3, 6), [S0], 2,
    ),
    "group_norm": Case(
        lambda m: nn.GroupNorm(2, 4, activation="silu", mesh=m, input=S2),
        lambda x: functional.silu(functional.group_norm(x, 2)), (3, 4, 5, 2), [S2],
    ),
    "group_norm_channels": Case(
        lambda m: nn.GroupNorm(2, 4, mesh=m, input=S1), lambda x: functional.group_norm(x, 2), (3, 4, 5), [S1]
    ),
    "batch_norm": Case(
        lambda m: nn.BatchNorm1d(4, mesh=m, input=S0),
        lambda x: functional.batch_norm(x, None, None, training=True), (5, 4, 3), [S0],
    ),
    "softmax": Case(lambda m: nn.Softmax(mesh=m, input=LAST), lambda x: x.softmax(-1), (3, 7), [S1]),
    "log_softmax": Case(lambda m: nn.LogSoftmax(0, mesh=m, input=S1), lambda x: x.log_softmax(0), (3, 7), [S1]),
    "gelu": Case(lambda m: nn.GELU(mesh=m, input=S0), functional.gelu, (3, 4), [S0]),
    "geglu": Case(
        lambda m: nn.GeGLU(mesh=m, input=LAST), lambda g, u: functional.gelu(g) * u, (2, 3, 5), [S2], 2
    ),
    "swiglu_packed": Case(
        lambda m: nn.SwiGLU(mesh=m, input=S0), lambda x: functional.silu(x[..., :3]) * x[..., 3:], (3, 2, 6), [S0]
    ),
    "replicated": Case(lambda m: nn.GELU(mesh=m), functional.gelu, (3, 4), [R]),
}  # fmt: skip


def check(case: Case, torch_mesh: object) -> None:
    mesh = DeviceMesh(torch_mesh.mesh)
    module = case.make(mesh)
    full = [numbers(case.shape, k, torch.float64) for k in range(case.tensors)]
    given = [distribute(t, torch_mesh, case.at).requires_grad_() for t in full]
    wanted = [t.clone().requires_grad_() for t in full]
    found, expected = module(*given), case.function(*wanted)
    found = (found,) if isinstance(found, Tensor) else found
    expected = (expected,) if isinstance(expected, Tensor) else expected
    weights = [numbers(t.shape, 20 + k, torch.float64) for k, t in enumerate(expected)]
    for result, want in zip(found, expected, strict=True):
        assert isinstance(result, DTensor)
        assert result.shape == want.shape
        assert_beside(result.full_tensor().detach(), want.detach(), "result")
    torch.autograd.backward(list(expected), weights)
    torch.autograd.backward(
        list(found), [distribute(w, torch_mesh, r.placements) for w, r in zip(weights, found, strict=True)]
    )
    for k, (leaf, want) in enumerate(zip(given, wanted, strict=True)):
        assert_beside(leaf.grad.full_tensor(), want.grad, f"gradient {k}")


def test_every_module() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        for name, case in CASES.items():
            try:
                check(case, mesh)
            except Exception as error:
                error.add_note(f"case {name}")
                raise

    run_ranks(2, run)


def test_rotary_and_log_prob() -> None:
    q, k = numbers((2, 4, 5, 6), 1, torch.float64), numbers((2, 4, 5, 6), 2, torch.float64)
    logits, target = numbers((5, 7), 3, torch.float64), torch.full((5,), 2)
    alone = nn.RotaryEmbedding(6)(q, k)

    def run(rank: int, size: int) -> None:
        torch_mesh = make_mesh((2,))
        mesh = DeviceMesh(torch_mesh.mesh)
        module = nn.RotaryEmbedding(6, mesh=mesh, input=S2)
        turned = module(*(distribute(t, torch_mesh, [S2]) for t in (q, k)))
        for got, want in zip(turned, alone, strict=True):
            assert_beside(got.full_tensor(), want)
        whole = torch.arange(5)
        for named in ({"positions": whole}, dict(zip(("cos", "sin"), module.tables(whole), strict=True))):
            for placed in (S0, R):
                given = {name: distribute(t, torch_mesh, [placed]) for name, t in named.items()}
                for some in (q, distribute(q, torch_mesh, [S2])):
                    with pytest.raises(ModuleInputError, match=f"{next(iter(named))} has a DTensor"):
                        module(some, **given)
        probability = nn.LogProb(mesh=mesh, logits=LAST, entropy=True)
        found = probability(distribute(logits, torch_mesh, [S1]), distribute(target, torch_mesh, [R]))
        for got, want in zip(found, entropy(logits), strict=True):
            assert_beside(got.full_tensor(), want)

    run_ranks(2, run)


def test_a_packed_dtensor_whose_features_are_sharded_is_refused() -> None:
    """Its halves would not be each rank's gate and up."""

    def run(rank: int, size: int) -> None:
        torch_mesh = make_mesh((2,))
        module = nn.SwiGLU(mesh=DeviceMesh(torch_mesh.mesh), input=LAST)
        with pytest.raises(PlacementError, match="holds gate and up"):
            module(distribute(torch.randn(3, 8), torch_mesh, [S1]))

    run_ranks(2, run)


def test_a_parameter_that_is_written_before_the_backward() -> None:
    """Autograd compares the versions of what it saves; a DTensor counts changes, and its local tensor does not."""
    wide = (4, 6)
    cases: dict[str, tuple[Make, Sequence[int]]] = {
        "rms_norm": (lambda m: nn.RMSNorm(6, mesh=m, input=S0), wide),
        "rms_norm_hidden": (lambda m: nn.RMSNorm(12, mesh=m, input=LAST), wide),
        "layer_norm": (lambda m: nn.LayerNorm(6, mesh=m, input=S0), wide),
        "layer_norm_of_two_dims": (lambda m: nn.LayerNorm((3, 4), mesh=m, input=S0), (4, 3, 4)),
        "group_norm": (lambda m: nn.GroupNorm(2, 4, mesh=m, input=S0), (3, 4, 5)),
        "batch_norm": (lambda m: nn.BatchNorm1d(4, mesh=m, input=S0), (5, 4, 3)),
    }

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        for name, (make, shape) in cases.items():
            module = make(mesh)
            weight = module.get_parameter("weight")
            assert isinstance(weight, DTensor)
            for is_frozen in (False, True):
                weight.requires_grad_(not is_frozen)
                x = numbers(shape, rank).requires_grad_()
                loss = module(x).square().sum()
                with torch.no_grad():
                    weight.mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
                assert x.grad is None, name
                module(x).square().sum().backward()
                assert x.grad is not None, name

    run_ranks(2, run)


def test_an_activation_that_is_written_before_the_backward() -> None:
    """A DTensor counts changes, and the local tensor that a module saves of it does not."""
    cases: dict[str, tuple[Make, bool]] = {
        "rms_norm": (lambda m: nn.RMSNorm(6, mesh=m, input=S0), True),
        "gelu": (lambda m: nn.GELU(mesh=m, input=S0), True),
        "softmax": (lambda m: nn.Softmax(-1, mesh=m, input=S0), False),  # whose backward reads its result
    }

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        torch_mesh = mesh.to_torch("cpu")
        for name, (make, is_read) in cases.items():
            module = make(mesh)
            leaf = distribute(numbers((4, 6), 0), torch_mesh, [S0]).requires_grad_()
            x = leaf * 1.5
            loss = module(x).square().sum()
            with torch.no_grad():
                x.mul_(2)
            if is_read:
                with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
                    loss.backward()
            else:
                loss.backward()
            assert (leaf.grad is None) is is_read, name
            leaf.grad = None
            module(leaf * 1.5).square().sum().backward()
            assert leaf.grad is not None, name

    run_ranks(2, run)


def test_a_result_that_is_written_before_the_backward() -> None:
    """Each module's DTensor results may be written in place where those of the module without a mesh may."""

    def refused(results: Tensor | tuple[Tensor, ...], k: int, leaves: list[Tensor]) -> bool:
        several = (results,) if isinstance(results, Tensor) else results
        loss = sum(r.square().sum() for r in several)
        written = several[k]
        with torch.no_grad():
            written.mul_(2)
        caught = None
        try:
            loss.backward()
        except RuntimeError as error:
            caught = error
        is_refused = "modified by an inplace operation" in str(caught)
        assert is_refused == (caught is not None), caught
        assert not is_refused or all(leaf.grad is None for leaf in leaves)
        return is_refused

    def run(rank: int, size: int) -> None:
        torch_mesh = make_mesh((2,))
        mesh = DeviceMesh(torch_mesh.mesh)
        for name, case in CASES.items():
            if name in ("layer_norm_of_partial", "layer_norm_hidden", "softmax"):
                continue  # which reach the others: a rank that raises would leave them
            for k in range(case.tensors if "add" in name else 1):
                full = [numbers(case.shape, j, torch.float64) for j in range(case.tensors)]
                plain = [t.clone().requires_grad_() for t in full]
                given = [distribute(t, torch_mesh, case.at).requires_grad_() for t in full]
                module = case.make(mesh)
                alone = case.make(DeviceMesh([rank]))
                if isinstance(module, nn.BatchNorm1d):
                    module.eval(), alone.eval()
                assert refused(module(*given), k, given) == refused(alone(*plain), k, plain), f"{name} {k}"

    run_ranks(2, run)


def test_shapes_that_only_inference_mode_has_seen() -> None:
    """Parameters that are DTensors have no version there that a detached one could share."""

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        torch_mesh = mesh.to_torch("cpu")
        for make in (
            lambda: nn.RMSNorm(6, mesh=mesh, input=S0),
            lambda: nn.GroupNorm(2, 6, mesh=mesh, input=S0),
            lambda: nn.BatchNorm1d(6, mesh=mesh, input=S0).eval(),
            lambda: nn.SwiGLU(3, bias=True, mesh=mesh, input=S0),
        ):
            module = make()
            module(distribute(numbers((8, 6), 0), torch_mesh, [S0]))
            x = distribute(numbers((4, 6), 1), torch_mesh, [S0])
            with torch.inference_mode():
                found = module(x)
            assert torch.equal(found.full_tensor(), make()(x).full_tensor())

    run_ranks(2, run)


def test_a_residual_that_is_no_piece_as_the_module_takes_it() -> None:
    def run(rank: int, size: int) -> None:
        module = nn.AddRMSNorm(6, mesh=DeviceMesh(range(size)), input=S1)
        x = numbers((2, 4, 6), rank)
        with pytest.raises(ModuleInputError, match=r"residual has shape \(2, 4, 6\), expected \(2, 8, 6\)"):
            module(x, x)
        module(x, numbers((2, 8, 6), 0))

    run_ranks(2, run)


class Ops(TorchDispatchMode):
    """Notes the names of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_parameter_that_is_written_where_a_mode_takes_ops() -> None:
    """A mode that sees torch's ops, as one that counts them, is handed a module as one op."""

    def run(rank: int, size: int) -> None:
        module = nn.RMSNorm(6, mesh=DeviceMesh(range(size)), input=S0)
        x = numbers((4, 6), rank).requires_grad_()
        with Ops() as seen:
            loss = module(x).square().sum()
            unchanged = module(x).square().sum()
            unchanged.backward()
            assert x.grad is not None
            x.grad = None
        assert seen.names.count("shardfuse::rms_norm_v1") == 2
        with torch.no_grad():
            module.get_parameter("weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert x.grad is None

    run_ranks(2, run)


def test_hooks_that_copy_what_is_saved_let_a_parameter_be_written() -> None:
    """As with torch's modules, autograd then reads the copies, and compares no versions."""

    def run(rank: int, size: int) -> None:
        module = nn.RMSNorm(6, mesh=DeviceMesh(range(size)), input=S0)
        x = numbers((4, 6), rank).requires_grad_()
        (right,) = torch.autograd.grad(module(x).square().sum(), x)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            loss = module(x).square().sum()
        with torch.no_grad():
            module.get_parameter("weight").mul_(2)
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, right)

    run_ranks(2, run)


def test_functions_name_dtensors_and_what_takes_them() -> None:
    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        x = distribute(numbers((4, 6), 0), mesh.to_torch("cpu"), [S0])
        weight = distribute(numbers((6,), 1), mesh.to_torch("cpu"), [R])
        said = "does not fit {}, which takes tensors of one rank: make a module of shardfuse.nn with mesh="
        for call, argument, name in (
            (lambda: nn.functional.rms_norm(x, (6,), weight), "input=", "rms_norm"),
            (lambda: nn.functional.rms_norm(numbers((4, 6), 0), (6,), weight), "weight=", "rms_norm"),
            (lambda: nn.functional.softmax(x), "input=", "softmax"),
            (lambda: nn.functional.swiglu(x, x), "gate=", "swiglu"),
            (lambda: nn.functional.batch_norm(x, None, None, training=True), "input=", "batch_norm"),
        ):
            with pytest.raises(PlacementError) as raised:
                call()
            assert str(raised.value).startswith(argument)
            assert said.format(name) in str(raised.value)
        loss = nn.LinearCrossEntropyLoss(mesh=mesh, logits=Shard(-1))
        with pytest.raises(ModuleInputError, match=r"pass x.full_tensor\(grad_placements=\[Partial\(\)\]"):
            loss(x, numbers((5, 6), 2), torch.zeros(4, dtype=torch.int64))

    run_ranks(2, run)
