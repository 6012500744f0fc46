"""shardfuse.nn over threads, plain, and what its modules refuse."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from nn_cases import (
    ON_LINE,
    ON_SQUARE,
    S0,
    S1,
    Here,
    P,
    R,
    add_rms_norm,
    rms_norm,
    swiglu,
)
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch_answers import assert_beside
from torch_answers import compare as check_near
from torch_gradients import answers, leaf, with_gradients

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh, ShardfuseError
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PeerLostError, PlacementError
from shardfuse.nn import AddLayerNorm, AddRMSNorm, CrossEntropyLoss, FusionTimer, RMSNorm, SwiGLU, redistribute

CPU = torch.device("cpu")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", ON_LINE)
@pytest.mark.parametrize("size", [2, 4])
def test_on_a_line_of_ranks(name: str, size: int) -> None:
    run_ranks(size, lambda rank, size: ON_LINE[name](Here(DeviceMesh(list(range(size))), CPU)))


@pytest.mark.parametrize("name", ON_SQUARE)
def test_on_a_square_of_ranks(name: str) -> None:
    run_ranks(4, lambda rank, size: ON_SQUARE[name](Here(DeviceMesh([[0, 1], [2, 3]]), CPU)))


@pytest.mark.parametrize("name", ["norm_add_sequence_parallel", "loss_classes", "redistribute_all_to_all"])
def test_ranks_in_another_order(name: str) -> None:
    run_ranks(4, lambda rank, size: ON_LINE[name](Here(DeviceMesh([2, 0, 3, 1]), CPU)))


@pytest.mark.parametrize("name", ON_LINE)
def test_on_one_rank(name: str) -> None:
    ON_LINE[name](Here(DeviceMesh([0]), CPU))


# --- without a mesh ----------------------------------------------------------------------------------------


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def check_plain(
    module: Callable[..., Tensor | tuple[Tensor, ...]],
    function: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
    parameters: list[torch.nn.Parameter],
    order: list[int] | None = None,
) -> None:
    """A module against a function of (inputs..., parameters...), taken in ``order`` where that is another one."""
    leaves = [leaf(t) for t in inputs]
    results = module(*leaves)
    results = (results,) if isinstance(results, Tensor) else results
    gradients = [normal(*out.shape, dtype=out.dtype, seed=50 + k) for k, out in enumerate(results)]
    torch.autograd.backward(results, gradients)
    tensors = [*leaves, *parameters]
    tensors = [tensors[k] for k in order] if order else tensors
    found = [*results, *(t.grad for t in tensors)]
    # eager torch in the dtype of the inputs: parameters of another one have their gradients in it
    for k, (got, want) in enumerate(
        zip(found, with_gradients(function, tensors, gradients, inputs[0].dtype), strict=True)
    ):
        assert got is not None
        check_near(f"result or gradient {k}", got.detach(), replace(want, eager=want.eager.to(got.dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 5, 48), (2, 3, 5, 48), (300, 48)])
def test_plain_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = normal(*shape, dtype=dtype, seed=1), normal(*shape, dtype=dtype, seed=2)
    norm, add_norm = RMSNorm(48, dtype=dtype), AddRMSNorm(48, bias=True, dtype=dtype)
    for seed, parameter in enumerate([norm.weight, add_norm.weight, add_norm.input_bias]):
        parameter.data.copy_(normal(48, dtype=dtype, seed=seed + 3))
    check_plain(norm, rms_norm, [x], [norm.weight])
    check_plain(add_norm, add_rms_norm, [x, residual], [add_norm.weight, add_norm.input_bias], [0, 2, 3, 1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 5, 24)])
def test_plain_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = normal(*shape, dtype=dtype, seed=1), normal(*shape, dtype=dtype, seed=2)
    check_plain(SwiGLU(), lambda a, b: (functional.silu(a) * b,), [gate, up], [])
    module = SwiGLU(24, bias=True, dtype=dtype)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(normal(24, dtype=dtype, seed=seed + 3))
    check_plain(module, swiglu, [gate, up], list(module.parameters()))


def test_the_last_axis_may_be_told_from_the_front() -> None:
    """``Shard(2)`` of three dims is ``Shard(-1)``, and another shape than this rank's is told so."""
    gate, up = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(0)).unbind(0)
    expected = functional.silu(gate.double()) * up.double()

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(range(size))
        module = SwiGLU(7, mesh=mesh, input=Shard(2))
        found = module(mesh.shard_tensor(gate, 2), mesh.shard_tensor(up, 2), unsharded=gate.shape)
        assert_near(found.detach(), mesh.shard_tensor(expected, 2))
        with pytest.raises(ModuleInputError, match=rf"gate has shape \(3, 4, 7\), expected {4 - rank} along dim -1"):
            module(gate, up, unsharded=gate.shape)
        with pytest.raises(PlacementError, match=r"Shard\(2\) does not fit biases along the last axis: .* Shard\(-1\)"):
            SwiGLU(7, bias=True, mesh=mesh, input=Shard(2))(gate, up)

    run_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Each element is the number of ``dtype`` nearest to float64, give or take float32's error: rounded once."""
    gate, up, upstream = (normal(64, 48, dtype=dtype, seed=k) for k in range(3))
    leaves = [leaf(gate), leaf(up)]
    result = SwiGLU()(*leaves)
    result.backward(upstream)
    expected = with_gradients(lambda a, b: (functional.silu(a) * b,), [gate, up], [upstream])
    for got, want in zip([result.detach(), *(t.grad for t in leaves)], expected, strict=True):
        assert got is not None
        assert_near(got, want.wide, n=0.51)
    norm = RMSNorm(48, dtype=dtype)
    assert_near(norm(gate).detach(), rms_norm(gate.double(), norm.weight.detach().double())[0], n=0.51)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
def test_plain_loss(reduction: str, smoothing: float) -> None:
    target = torch.arange(12).view(3, 4) % 7
    target[1, 2] = -1
    module = CrossEntropyLoss(reduction=reduction, ignore_index=-1, label_smoothing=smoothing)

    def cross_entropy(x: Tensor) -> tuple[Tensor, ...]:
        return (
            functional.cross_entropy(x.mT, target, reduction=reduction, ignore_index=-1, label_smoothing=smoothing),
        )

    check_plain(lambda x: module(x, target), cross_entropy, [normal(3, 4, 7)], [])


def test_residual_and_parameters_of_other_dtypes() -> None:
    """A float32 residual stream and parameters beside bfloat16 activations: each result in its own dtype."""
    module = AddRMSNorm(64, bias=True)
    x, residual = leaf(normal(6, 64, dtype=torch.bfloat16)), leaf(normal(6, 64, dtype=torch.float32, seed=1))
    normed, total = module(x, residual)
    (normed.float().square().sum() + total.sum()).backward()
    tensors = [x, module.weight, module.input_bias, residual]
    upstream = [2 * normed.detach(), torch.ones_like(total)]

    def in_bfloat16(*given: Tensor) -> tuple[Tensor, ...]:
        normed, total = add_rms_norm(*given)
        return normed.to(torch.bfloat16) if given[3].dtype is torch.float32 else normed, total

    assert [t.dtype for t in (normed, total, x.grad, residual.grad)] == [torch.bfloat16, torch.float32] * 2
    expected = with_gradients(in_bfloat16, [t.detach() for t in tensors], upstream)
    for k, (got, want) in enumerate(zip([normed, total, *(t.grad for t in tensors)], expected, strict=True)):
        assert got is not None
        check_near(f"result or gradient {k}", got.detach(), want)


@pytest.mark.parametrize("parameter", FLOATS)
@pytest.mark.parametrize("activation", FLOATS)
def test_parameters_of_another_dtype(activation: torch.dtype, parameter: torch.dtype) -> None:
    """Results and gradients in the dtypes of what they belong to, as near as computed in float32 at least."""
    norm, gate = RMSNorm(48, dtype=parameter), SwiGLU(48, bias=True, dtype=parameter)
    is_double = torch.float64 in (activation, parameter)
    computed = torch.finfo(torch.float64 if is_double else torch.float32).eps
    for seed, p in enumerate([norm.weight, gate.gate_bias, gate.up_bias]):
        p.data.copy_(normal(48, seed=seed + 3))
    x, up = normal(6, 48, dtype=activation, seed=1), normal(6, 48, dtype=activation, seed=2)
    for module, function, inputs in ((norm, rms_norm, [x]), (gate, swiglu, [x, up])):
        leaves = [leaf(t) for t in inputs]
        (result,) = [module(*leaves)]
        gradient = normal(6, 48, dtype=activation, seed=9)
        result.backward(gradient)
        tensors = [*leaves, *module.parameters()]
        wanted = answers(function, [t.detach().double() for t in tensors], [gradient.double()])
        for got, full in zip([result.detach(), *(t.grad for t in tensors)], wanted, strict=True):
            # One rounding of what it is stored in, and those of a sum over the rows.
            torch.testing.assert_close(got.double(), full, rtol=torch.finfo(got.dtype).eps, atol=16 * computed)
        assert result.dtype == activation
        assert [t.grad.dtype for t in tensors] == [t.dtype for t in tensors]


def test_strided_arguments_and_gradients() -> None:
    module = RMSNorm(16, dtype=torch.float64)
    x, gradient = normal(16, 6), normal(16, 6, seed=1)
    given = leaf(x)
    module(given.T).backward(gradient.T)
    expected = with_gradients(lambda x: (functional.rms_norm(x.T, (16,), eps=1e-6),), [x], [gradient.T])[1]
    assert given.grad is not None
    check_near("gradient", given.grad, expected)
    module(given.T).sum().backward()  # a gradient of stride 0


def test_no_rows() -> None:
    module = AddRMSNorm(8, bias=True)
    x = torch.zeros(0, 3, 8, requires_grad=True)
    normed, total = module(x, torch.zeros(0, 3, 8))
    (normed.sum() + total.sum()).backward()
    assert normed.shape == total.shape == x.grad.shape == (0, 3, 8)
    assert torch.equal(module.weight.grad, torch.zeros(8))


def test_autocast_changes_nothing_inside() -> None:
    module, x = RMSNorm(32), normal(4, 32, dtype=torch.float32)
    plain = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = module(x)
    assert torch.equal(plain, cast)
    assert cast.dtype == torch.float32


def test_without_gradients() -> None:
    module = RMSNorm(32)
    with torch.no_grad():
        assert not module(torch.ones(2, 32)).requires_grad
    module.weight.requires_grad_(False)
    x = torch.ones(2, 32, requires_grad=True)
    module(x).sum().backward()
    assert module.weight.grad is None
    assert x.grad is not None


def test_no_target_counts() -> None:
    x = normal(4, 5).requires_grad_()
    nothing = CrossEntropyLoss()(x, torch.full((4,), -100))
    nothing.backward()
    assert nothing.isnan()
    assert torch.equal(x.grad, torch.zeros(4, 5, dtype=torch.float64))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("stray", "ignored"), [(5, -100), (-1, -100), (-100, -1), (2**40, 3), (-(2**63), 0)])
def test_targets_that_are_no_class(reduction: str, smoothing: float, stray: int, ignored: int) -> None:
    """On a CPU, where torch raises too; a target that is ignored may be any number, a class too."""
    loss = CrossEntropyLoss(reduction=reduction, label_smoothing=smoothing, ignore_index=ignored)
    x, target = normal(2, 3, 5), torch.arange(6).view(2, 3) % 5
    good = target.clone()
    good[1, 1] = ignored
    want = functional.cross_entropy(x.mT, good, reduction=reduction, label_smoothing=smoothing, ignore_index=ignored)
    assert_beside(loss(x, good), want)
    target[1, 1] = stray
    message = rf"target has 1 values .* first {stray} at \[1, 1\]\), expected 0 to 4, or ignore_index={ignored}"
    with pytest.raises(ModuleInputError, match=message):
        loss(x, target)
    assert_beside(loss(x, good), want)


@pytest.mark.parametrize("logits", [Shard(0), Shard(-1), R], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_rank_hears_of_a_target_that_is_no_class(logits: Shard, reduction: str) -> None:
    """In a later call too, when no rank waits for another's program."""
    x, target = normal(8, 12), torch.arange(8)

    def run(rank: int, size: int) -> str:
        mesh = DeviceMesh(list(range(size)))
        loss = CrossEntropyLoss(mesh=mesh, logits=logits, reduction=reduction)
        rows = isinstance(logits, Shard) and logits.dim == 0
        local = mesh.shard_tensor(x, logits.dim) if isinstance(logits, Shard) else x
        bad = target.clone()
        bad[3] = 12
        good, bad = (mesh.shard_tensor(t, 0) if rows else t for t in (target, bad))
        first = loss(local, good)
        with pytest.raises(ModuleInputError, match="1 values") as refused:
            loss(local, bad)
        assert torch.equal(loss(local, good), first)
        return str(refused.value)

    found = run_ranks(4, run)
    for rank, text in enumerate(found):
        has_it = not (isinstance(logits, Shard) and logits.dim == 0) or rank == 1
        assert ("first 12 at" if has_it else "on other ranks") in text


def test_infinite_logits_of_ignored_rows() -> None:
    x = normal(3, 5)
    x[1] = math.inf
    x = leaf(x)
    loss = CrossEntropyLoss()(x, torch.tensor([0, -100, 2]))
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


def test_reset_parameters_and_repr() -> None:
    module = AddRMSNorm(4, bias=True)
    module.load_state_dict({"weight": torch.rand(4), "input_bias": torch.rand(4)})
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(4))
    assert torch.equal(module.input_bias, torch.zeros(4))
    assert repr(module) == "AddRMSNorm(4, eps=1e-06, bias=True, mesh=None)"


def test_timer_counts_what_it_watches() -> None:
    watched, other = torch.nn.Sequential(RMSNorm(8), RMSNorm(8)), RMSNorm(8)
    timer = FusionTimer().watch(watched)
    x = torch.ones(2, 8, requires_grad=True)
    other(x).sum().backward()
    assert timer.seconds() == 0.0
    y = watched(x)
    forward = timer.seconds()
    y.sum().backward()
    assert 0.0 < forward < timer.seconds() < 60.0
    timer.reset()
    assert timer.seconds() == 0.0


# --- plans -------------------------------------------------------------------------------------------------


def test_sequence_parallel_norm_is_one_fusion_each_way() -> None:
    """Reduce-scatter, one kernel, all-gather; backward the same with the parameters' gradients summed over ranks."""

    def plans(rank: int, size: int) -> tuple[list[str], int, list[str]]:
        mesh = DeviceMesh([0, 1])
        module = AddRMSNorm(64, bias=True, mesh=mesh, input=P, residual=S1, output=R, output_grad=P)
        x, residual = torch.ones(2, 8, 64, requires_grad=True), torch.ones(2, 4, 64, requires_grad=True)
        normed, _ = module(x, residual)
        normed.sum().backward()
        op = module.op(x, residual)
        forward, backward = op.forward.explain(), op.backward.explain()
        return [c.kind for c in forward.collectives], forward.kernels, sorted(c.kind for c in backward.collectives)

    forward, kernels, backward = run_ranks(2, plans)[0]
    assert forward == ["reduce_scatter", "all_gather"]
    assert kernels == 1
    assert backward == ["all_gather", "all_reduce", "reduce_scatter"]


def test_equal_modules_share_their_fusions() -> None:
    x = torch.ones(2, 8)
    a, b, c = RMSNorm(8), RMSNorm(8), RMSNorm(8, eps=1e-5)
    assert a.op(x) is b.op(x)
    assert a.op(x) is not c.op(x)
    assert a.op(x) is not a.op(x[None])


def test_import_is_light() -> None:
    heavy = "triton", "torch.distributed.tensor", "matplotlib"
    program = f"import sys, shardfuse.nn; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- refusals ----------------------------------------------------------------------------------------------

MESH = DeviceMesh([0])
X = torch.ones(2, 3, 8)
TARGET = torch.zeros(2, 3, dtype=torch.int64)
Refusal = tuple[Callable[[], object], type[ShardfuseError], str]
ARGUMENT_REFUSALS: dict[str, Refusal] = {
    "no hidden size": (lambda: RMSNorm(0), ModuleArgumentError, r"RMSNorm\(hidden_size=0\): expected one size"),
    "negative eps": (lambda: RMSNorm(8, -1.0), ModuleArgumentError, r"RMSNorm\(eps=-1.0\)"),
    "no mesh": (lambda: RMSNorm(8, input=S1), PlacementError, r"input=S\(1\) does not fit no mesh: pass mesh="),
    "two placements": (
        lambda: RMSNorm(8, mesh=MESH, input=[S0, S1]),
        PlacementError,
        r"input=S\(0\), S\(1\) does not fit a mesh of 1 dimensions: pass one placement for each",
    ),
    "partial residual": (
        lambda: AddRMSNorm(8, mesh=MESH, residual=P),
        PlacementError,
        "residual=P.* needs whole values",
    ),
    "partial output": (lambda: RMSNorm(8, mesh=MESH, output=P), PlacementError, "output=P.* does not fit a norm"),
    "biases of no size": (lambda: SwiGLU(bias=True), ModuleArgumentError, "features=None.: expected the unsharded"),
    "partial gate": (lambda: SwiGLU(mesh=MESH, input=P), PlacementError, "does not fit SwiGLU"),
    "no features": (lambda: SwiGLU(0), ModuleArgumentError, "features=0"),
    "a reduction": (lambda: CrossEntropyLoss(reduction="max"), ModuleArgumentError, 'expected "mean", "sum" or "none"'),
    "smoothing": (lambda: CrossEntropyLoss(label_smoothing=1.5), ModuleArgumentError, "a share from 0 to 1"),
    "partial logits": (lambda: CrossEntropyLoss(mesh=MESH, logits=P), PlacementError, "does not fit a loss"),
    "partial target": (lambda: redistribute(X, MESH, R, P), PlacementError, "target=P.* does not fit a redistribution"),
    **{
        f"partial {operation}": (
            lambda operation=operation: AddRMSNorm(8, mesh=MESH, input=Partial(operation)),
            PlacementError,
            rf"input=P\({operation}\) does not fit a sum",
        )
        for operation in ("avg", "max", "min", "product")
    },
    "partial average of a gradient": (
        lambda: redistribute(X, MESH, S0, R, grad=Partial("avg")),
        PlacementError,
        r"grad=P\(avg\) does not fit a sum",
    ),
    "strided shards": (
        lambda: redistribute(X, MESH, _StridedShard(0, split_factor=2), R),
        PlacementError,
        "source=.* take Shard, Repl",
    ),
    "a dim too far": (lambda: redistribute(X, MESH, R, Shard(3)), PlacementError, r"target=Shard\(3\) does not fit"),
}
CALL_REFUSALS: dict[str, Refusal] = {
    "another hidden size": (lambda: RMSNorm(16)(X), ModuleInputError, r"x has shape \(2, 3, 8\), expected 16 along"),
    "integers": (lambda: RMSNorm(8)(X.long()), ModuleInputError, "x has dtype torch.int64, expected one of torch.fl"),
    "residual": (lambda: AddRMSNorm(8)(X, X[:1]), ModuleInputError, r"residual has shape \(1, 3, 8\), expected \(2, 3"),
    "a residual of a row": (
        lambda: AddRMSNorm(8)(X[0, 0], X[0, :1]),
        ModuleInputError,
        r"residual .* \(8,\), the shape",
    ),
    "a residual of a row, of several dims": (
        lambda: AddLayerNorm((3, 8))(X[0], X[:1]),
        ModuleInputError,
        r"residual has shape \(1, 3, 8\), expected \(3, 8\), the shape of x",
    ),
    "hidden by number": (
        lambda: RMSNorm(8, mesh=MESH, input=Shard(2))(X),
        PlacementError,
        r"input=Shard\(2\) .* as Shard\(-1",
    ),
    "gate and up": (lambda: SwiGLU()(X, X[0]), ModuleInputError, r"up has shape \(3, 8\), expected \(2, 3, 8\)"),
    "gate and up of two dtypes": (
        lambda: SwiGLU()(X, X.bfloat16()),
        ModuleInputError,
        "up has dtype torch.bfloat16, expected torch.float32, the dtype of gate: cast one",
    ),
    "a weight of another kind": (
        lambda: RMSNorm(8).to(torch.float8_e4m3fn)(X),
        ModuleInputError,
        "weight has dtype torch.float8_e4m3fn, expected one of torch.float64",
    ),
    "gate's features": (lambda: SwiGLU(4)(X, X), ModuleInputError, "gate has shape .* expected 4 along dim -1"),
    "columns by number": (
        lambda: SwiGLU(8, bias=True, mesh=MESH, input=Shard(2))(X, X),
        PlacementError,
        r"input=Shard\(2\) .* as Shard\(-1\)",
    ),
    "targets' dtype": (
        lambda: CrossEntropyLoss()(X, TARGET.float()),
        ModuleInputError,
        "target has dtype torch.float32, expected torch.int64",
    ),
    "targets' shape": (
        lambda: CrossEntropyLoss()(X, TARGET.T),
        ModuleInputError,
        r"target has shape \(3, 2\), expected \(2, 3\)",
    ),
    "classes": (lambda: CrossEntropyLoss(num_classes=9)(X, TARGET), ModuleInputError, "expected 9 along dim -1"),
}


@pytest.mark.parametrize("name", ARGUMENT_REFUSALS)
def test_arguments_are_refused(name: str) -> None:
    make, error, message = ARGUMENT_REFUSALS[name]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", CALL_REFUSALS)
def test_calls_are_refused(name: str) -> None:
    call, error, message = CALL_REFUSALS[name]
    with pytest.raises(error, match=message):
        call()


def test_a_whole_tensor_where_a_shard_is_due() -> None:
    def call(rank: int, size: int) -> None:
        module = AddRMSNorm(8, mesh=DeviceMesh([0, 1]), input=P, residual=S1, output=R)
        module(torch.ones(2, 4, 8), torch.ones(2, 4, 8))

    with pytest.raises(
        ModuleInputError, match=r"residual has shape \(2, 4, 8\), expected \(2, 2, 8\), .*this rank's piece"
    ):
        run_ranks(2, call)


REFUSED_ON_ONE: dict[str, Callable[[DeviceMesh, int], object]] = {
    "a module": lambda mesh, rank: RMSNorm(8, mesh=mesh, input=Shard(1) if rank else S0)(torch.ones(4, 8)),
    "redistribute": lambda mesh, rank: redistribute(torch.ones(4, 8), mesh, Shard(2) if rank else S0, R),
}


@pytest.mark.parametrize("name", REFUSED_ON_ONE)
def test_what_is_refused_on_one_rank_is_told_to_the_others(name: str) -> None:
    def call(rank: int, size: int) -> None:
        with pytest.raises(PlacementError if rank else PeerLostError, match="shard"):
            REFUSED_ON_ONE[name](DeviceMesh([0, 1]), rank)

    run_ranks(2, call)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_norms_bias_is_not_that_of_the_input(bias: bool, strict: bool) -> None:
    """A LayerNorm adds its bias to the result, AddRMSNorm to what it norms: no state dict means the other by chance."""
    model = torch.nn.ModuleDict({"norm": AddRMSNorm(8, bias=bias)})
    other = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(8)})
    torch.nn.init.ones_(other["norm"].bias)
    expected = r"norm\.input_bias, which is added to x" if bias else "no bias"
    with pytest.raises(RuntimeError, match=rf"norm\.bias, which a LayerNorm adds to its result, expected {expected}"):
        model.load_state_dict(other.state_dict(), strict=strict)
    if bias:
        assert torch.equal(model["norm"].input_bias, torch.zeros(8))
    else:
        with pytest.raises(RuntimeError, match=r"norm\.bias"):
            torch.nn.ModuleDict({"norm": RMSNorm(8)}).load_state_dict(other.state_dict())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_are_counted_along_their_own_mesh_dimension(smoothing: float) -> None:
    """Rows over one dimension of a [2, 2] mesh, classes over the other: smoothing shares out over 6 classes, not 12."""
    full = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 5, 3, 2])

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(torch.arange(4).reshape(2, 2))
        row, column = divmod(rank, 2)
        logits = full.chunk(2)[row].chunk(2, 1)[column]
        module = CrossEntropyLoss(mesh=mesh, logits=(S0, Shard(-1)), label_smoothing=smoothing, reduction="none")
        loss = module(logits.contiguous(), target.chunk(2)[row])
        want = functional.cross_entropy(full, target, label_smoothing=smoothing, reduction="none")
        assert_beside(loss, want.chunk(2)[row])
        with pytest.raises(ModuleInputError, match="0 to 5"):
            module(logits.contiguous(), torch.full((2,), 6))

    run_ranks(4, run)


@pytest.mark.parametrize("classes", [6, 5])
def test_one_position_whose_classes_are_sharded(classes: int) -> None:
    """Logits of one dim, with the sizes of the whole said, and plain."""
    full = torch.randn(classes, generator=torch.Generator().manual_seed(0))
    assert_beside(CrossEntropyLoss()(full, torch.tensor(3)), functional.cross_entropy(full, torch.tensor(3)))

    def run(rank: int, size: int) -> None:
        module = CrossEntropyLoss(mesh=DeviceMesh([0, 1]), logits=Shard(-1), num_classes=classes)
        loss = module(full.chunk(2)[rank].clone(), torch.tensor(3), unsharded=(classes,))
        assert_beside(loss, functional.cross_entropy(full, torch.tensor(3)))

    run_ranks(2, run)
