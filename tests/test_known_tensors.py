"""Calls of modules that know their tensors again by one look: whatever else has changed is seen all the same.

Each test warms a module up with calls that are alike, changes one thing, and compares with what that asks for.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse import DeviceMesh
from shardfuse.errors import ModuleInputError, ShardfuseError, TransformError
from shardfuse.executor import tensor_guard
from shardfuse.executor.tensor_guard import check_of
from shardfuse.frontend.repeat import Repeated
from shardfuse.nn import (
    AddLayerNorm,
    AddRMSNorm,
    FusionTimer,
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    bucket_gradients,
    fused,
)
from shardfuse.nn.bound_op import BoundOp
from shardfuse.nn.fused import FusedModule
from shardfuse.nn.gated import _TOGETHER

WARM = 4


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients_of(module: torch.nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Results, and gradients of inputs and parameters."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    results = as_list(module(*leaves))
    learned = [p for p in module.parameters() if p.requires_grad]
    given = [drawn(*r.shape, seed=5 + k, dtype=r.dtype) for k, r in enumerate(results)]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, [*leaves, *learned], given)]


def warmed(module: torch.nn.Module, *inputs: Tensor) -> torch.nn.Module:
    for _ in range(WARM):
        gradients_of(module, *inputs)
        with torch.no_grad():
            module(*inputs)
    return module


def check_as_new(module: torch.nn.Module, new: torch.nn.Module, *inputs: Tensor) -> None:
    """It computes what one does that has not been called before."""
    new.load_state_dict(module.state_dict())
    for found, wanted in zip(gradients_of(module, *inputs), gradients_of(new, *inputs), strict=True):
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)
    with torch.no_grad():
        for result, expected in zip(as_list(module(*inputs)), as_list(new(*inputs)), strict=True):
            assert result.dtype is expected.dtype
            assert torch.equal(result, expected)


def as_list(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[BoundOp]:
    """The calls that found their tensors by all of their metadata."""
    found: list[BoundOp] = []
    call = BoundOp.__call__

    def noted(self: BoundOp, *of: object) -> Sequence[Tensor]:
        found.append(self)
        return call(self, *of)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(BoundOp, "__call__", noted)
    return found


def test_calls_that_are_alike_look_once(looked: list[BoundOp]) -> None:
    for module, inputs in (
        (AddRMSNorm(16), (drawn(4, 16), drawn(4, 16, seed=1))),
        (RMSNorm((16,)), (drawn(4, 16),)),
        (SwiGLU(8, bias=True), (drawn(4, 16),)),
    ):
        warmed(module, *inputs)
        looked.clear()
        gradients_of(module, *inputs)
        with torch.no_grad():
            module(*inputs)
        assert not looked


@pytest.mark.parametrize("kind", [RMSNorm, AddRMSNorm, LayerNorm, AddLayerNorm])
def test_a_norm_without_gradients_asks_the_last_call(kind: type[FusedModule], monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1 + kind.__name__.startswith("Add")
    module, inputs, others = kind(16), (drawn(4, 16),) * count, (drawn(3, 16),) * count
    inputs = tuple(t.clone() for t in inputs)  # one tensor that comes twice is not known again
    others = tuple(t.clone() for t in others)
    asked: list[tuple[int, ...]] = []
    run_again = FusedModule.run_again

    def noted(self: FusedModule, tensors: Sequence[Tensor], *of: object) -> Sequence[Tensor] | None:
        asked.append(tuple(tensors[0].shape))
        return run_again(self, tensors, *of)  # pyright: ignore[reportArgumentType]

    with torch.no_grad():
        for _ in range(WARM):
            module(*inputs)
        monkeypatch.setattr(FusedModule, "run_again", noted)
        module(*inputs)
        assert asked == []
        module(*others)
        assert asked
    asked.clear()
    module(*inputs)  # a gradient is recorded
    assert asked


def test_a_dispatch_mode_sees_a_norm_without_gradients() -> None:
    seen: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    module, x = RMSNorm(16), drawn(4, 16)
    with torch.no_grad():
        for _ in range(WARM):
            wanted = module(x)
        with Noted():
            found = module(x)
    assert seen == ["shardfuse.rms_norm_v1.default"]
    assert torch.equal(found, wanted)


def test_a_setting_that_changes_while_another_thread_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread keeps what it has found where nobody looks any more."""
    module, x = RMSNorm(16), drawn(4, 16)
    is_in, may_go, caller = threading.Event(), threading.Event(), list[int]()
    known = fused.modes

    def modes() -> int:
        if threading.get_ident() in caller and not is_in.is_set():
            is_in.set()
            assert may_go.wait(20)
        return known()

    def call() -> None:
        caller.append(threading.get_ident())
        with torch.no_grad():
            module(x)

    with torch.no_grad():
        for _ in range(WARM):
            module(x)
        vars(module)["_last_call"] = None  # as behind a call of another kind
        monkeypatch.setattr(fused, "modes", modes)
        thread = threading.Thread(target=call)
        thread.start()
        assert is_in.wait(20)
        module.eps = 5.0
        may_go.set()
        thread.join()
        for _ in range(WARM):
            torch.testing.assert_close(module(x), functional.rms_norm(x, (16,), module.weight, 5.0))


def test_a_subclass_may_have_what_names_it_likes() -> None:
    class Kept(RMSNorm):
        def __init__(self) -> None:
            super().__init__(16)
            self.last = torch.nn.Linear(16, 16)

        def forward(self, x: Tensor, **named: object) -> Tensor:
            return self.last(super().forward(x))

    module, x = Kept(), drawn(4, 16)
    with torch.no_grad():
        for _ in range(WARM):
            torch.testing.assert_close(module(x), module.last(functional.rms_norm(x, (16,), None, 1e-6)))


def test_without_the_function_of_torch(monkeypatch: pytest.MonkeyPatch, looked: list[BoundOp]) -> None:
    monkeypatch.setattr(tensor_guard, "_Guards", None)
    module = warmed(RMSNorm(16), drawn(4, 16))
    looked.clear()
    check_as_new(module, RMSNorm(16), drawn(4, 16, seed=3))
    assert looked


def test_settings() -> None:
    x = drawn(4, 16)
    module = warmed(RMSNorm(16), x)
    assert isinstance(module, RMSNorm)
    module.eps = 0.5
    check_as_new(module, RMSNorm(16, eps=0.5), x)
    warmed(module, x)
    module.zero_centered = True
    check_as_new(module, RMSNorm(16, eps=0.5, zero_centered=True), x)
    timer = FusionTimer()
    warmed(module, x).timer = timer
    for is_recording in [True] * WARM + [False] * WARM:
        timer.reset()
        with torch.set_grad_enabled(is_recording):
            module(x)
        assert timer.seconds() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    module, x, residual = AddRMSNorm(16), drawn(4, 16), drawn(4, 16, seed=1)
    warmed(module, x, residual)
    check_as_new(module, AddRMSNorm(16), x.to(dtype), residual)
    check_as_new(module, AddRMSNorm(16), x, residual.to(dtype))
    module.weight = torch.nn.Parameter(drawn(16, seed=2, dtype=dtype))
    check_as_new(module, AddRMSNorm(16, dtype=dtype), x, residual)
    module.weight.data = drawn(16, seed=3)
    check_as_new(module, AddRMSNorm(16), x, residual)


def test_parameters_that_come_and_go() -> None:
    module, x = RMSNorm(16), drawn(4, 16)
    warmed(module, x)
    module.weight = None
    check_as_new(module, RMSNorm(16, elementwise_affine=False), x)
    module.weight = torch.nn.Parameter(drawn(16, seed=2))
    check_as_new(module, RMSNorm(16), x)
    gate, x = SwiGLU(8, bias=True), drawn(4, 16)
    warmed(gate, x)
    gate.gate_bias = gate.up_bias = None
    check_as_new(gate, SwiGLU(8), x)
    warmed(gate, x)
    gate.gate_bias = torch.nn.Parameter(drawn(8))
    with pytest.raises(ModuleInputError, match="up_bias"):
        gate(x)


def test_what_requires_a_gradient() -> None:
    module, x = warmed(RMSNorm(16), drawn(4, 16)), drawn(4, 16)
    module.requires_grad_(False)
    assert not module(x).requires_grad
    module.requires_grad_(True)
    y = module(x)
    y.sum().backward()
    assert next(module.parameters()).grad is not None
    with torch.no_grad():
        assert not module(x.requires_grad_()).requires_grad
    assert module(x).requires_grad
    with torch.inference_mode():
        assert module(x).is_inference()
    assert not module(x).is_inference()


def test_other_layouts() -> None:
    for x in (drawn(16, 4).T, drawn(4, 32)[:, ::2], drawn(16).expand(4, 16), drawn(4, 20)[:, :16]):
        module = warmed(RMSNorm(16), drawn(4, 16))
        for _ in range(WARM):
            assert torch.equal(module(x), module(x.contiguous()))
        for _ in range(WARM):
            assert torch.equal(module(x), RMSNorm(16)(x.contiguous()))
    for z in (torch.complex(drawn(4, 16), drawn(4, 16)).conj().imag, torch._neg_view(drawn(4, 16))):
        module = warmed(RMSNorm(16), drawn(4, 16))
        for _ in range(WARM):
            assert torch.equal(module(z), RMSNorm(16)(z.resolve_neg()))


def test_gradients_that_are_stored_otherwise() -> None:
    module, x = warmed(RMSNorm(16), drawn(4, 16)), drawn(4, 16).requires_grad_()
    for gradient in (drawn(16, 4).T, drawn(1).expand(4, 16), torch._neg_view(drawn(4, 16))):
        wanted = torch.autograd.grad(RMSNorm(16)(x), x, gradient.resolve_neg().contiguous())
        for _ in range(WARM):
            found = torch.autograd.grad(module(x), x, gradient)
            assert torch.equal(found[0], wanted[0])


def test_a_tensor_that_is_there_twice() -> None:
    x = drawn(4, 16)
    check_as_new(warmed(AddRMSNorm(16), x, drawn(4, 16, seed=1)), AddRMSNorm(16), x, x)
    module = warmed(AddRMSNorm(16), x, x)
    assert torch.equal(module(x, x)[1], x + x)


def test_sizes_that_do_not_fit_are_refused() -> None:
    module = warmed(AddRMSNorm(16), drawn(4, 16), drawn(4, 16))
    for x, residual in ((drawn(4, 16), drawn(5, 16)), (drawn(4, 17), drawn(4, 17)), (drawn(4, 16), drawn(1, 4, 16))):
        with pytest.raises(ShardfuseError):
            module(x, residual)


def test_rows_of_a_norm_over_several_dims_are_no_input_of_it() -> None:
    module = warmed(LayerNorm((4, 8), elementwise_affine=False), drawn(3, 4, 8))
    for shape in ((3, 32), (32,)):
        with pytest.raises(ModuleInputError, match="its last dims"):
            module(drawn(*shape).requires_grad_())


def test_other_views_of_the_same_tensors() -> None:
    module, x = warmed(SwiGLU(8), drawn(4, 16)), drawn(4, 16)
    with torch.no_grad():
        assert module.run_again((x.requires_grad_(),), _TOGETHER) is None
        assert module.run_again((x.detach(),), _TOGETHER) is not None
        assert module.run_again((x.detach(),)) is None


class Seen(TorchDispatchMode):
    """Which ops there were."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_dispatch_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = warmed(RMSNorm(16), drawn(4, 16)), drawn(4, 16)
    with Seen() as seen:
        y = module(x)
    assert any("rms_norm" in name for name in seen.names)
    assert torch.equal(y, module(x))
    with FakeTensorMode(allow_non_fake_inputs=True), monkeypatch.context() as patched:
        patched.setattr(Repeated, "__call__", lambda *of: pytest.fail("a program would write into what is no memory"))
        assert isinstance(module(x), FakeTensor)
    assert torch.equal(y, module(x))


def test_autocast() -> None:
    x = drawn(4, 16)
    module = warmed(RMSNorm(16), x)
    wanted = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(WARM):
            assert torch.equal(module(x), wanted)
    assert torch.equal(module(x), wanted)


TRANSFORMS: dict[str, Callable[[torch.nn.Module, Tensor], object]] = {
    "vmap": lambda module, x: torch.func.vmap(module)(x[None]),
    "grad": lambda module, x: torch.func.grad(lambda t: module(t).sum())(x),
    "jvp": lambda module, x: torch.func.jvp(module, (x,), (x,)),
    "functionalize": lambda module, x: torch.func.functionalize(lambda t: module(t * 1))(x),
    "inside": lambda module, x: torch.func.vmap(lambda t: (module(x), t)[1])(x),
    "trace": lambda module, x: torch.jit.trace(module, (x,), check_trace=False),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    """They end as those of a module that has not been called before."""

    def end_of(module: torch.nn.Module) -> object:
        try:
            TRANSFORMS[name](module, drawn(4, 16))
        except Exception as error:  # noqa: BLE001 which one is compared
            return type(error), str(error).splitlines()[:1]
        return None

    assert end_of(warmed(RMSNorm(16), drawn(4, 16))) == end_of(RMSNorm(16))


def test_tangents_and_batches_of_gradients() -> None:
    module, x = warmed(RMSNorm(16), drawn(4, 16)), drawn(4, 16)
    for recording in (nullcontext, torch.no_grad):
        with forward_ad.dual_level(), recording(), pytest.raises(TransformError):
            module(forward_ad.make_dual(x, x))
    x.requires_grad_()
    with pytest.raises(TransformError, match="batched"):
        torch.autograd.grad(module(x), x, drawn(2, 4, 16), is_grads_batched=True)
    (once,) = torch.autograd.grad(module(x), x, drawn(4, 16), create_graph=True)
    with pytest.raises(ShardfuseError):
        once.sum().backward()


def test_saved_tensors_that_hooks_change() -> None:
    module, x = warmed(RMSNorm(16), drawn(4, 16)), drawn(4, 16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.mT.clone().mT if t.ndim > 1 else t):
        y = module(x)
    (found,) = torch.autograd.grad(y, x, drawn(4, 16, seed=2))
    (wanted,) = torch.autograd.grad(module(x), x, drawn(4, 16, seed=2))
    assert torch.equal(found, wanted)
    y = module(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    x, weight = drawn(4, 16).bfloat16(), drawn(16, 16)
    module = AddRMSNorm(16)
    for _ in range(WARM):
        module.of_linear(x.requires_grad_(), weight, drawn(4, 16))
    with torch.no_grad():
        for _ in range(WARM):
            module(drawn(4, 16), drawn(4, 16, seed=1))
    assert vars(module)["_last_call"] is not None
    other = copied(module)
    assert vars(other)["_last_call"] is None
    assert isinstance(other, AddRMSNorm)
    other.eps = 0.5
    new = AddRMSNorm(16, eps=0.5)
    check_as_new(other, new, drawn(4, 16), drawn(4, 16, seed=1))
    assert torch.equal(other.of_linear(x, weight, drawn(4, 16))[0], new.of_linear(x, weight, drawn(4, 16))[0])


def test_tables_of_a_rotary_embedding() -> None:
    module, x = RotaryEmbedding(8, packed=(2, 2)), drawn(2, 6, 6 * 8)
    cos, sin = module.tables(torch.arange(6))
    for _ in range(WARM):
        wanted = module(x, cos=cos, sin=sin)
    with pytest.raises(ModuleInputError, match="gradient that is wanted"):
        module(x, cos=cos.clone().requires_grad_(), sin=sin)
    with pytest.raises(ModuleInputError, match="not both"):
        module(x, cos=cos, sin=sin, positions=torch.arange(6))
    with pytest.raises(ModuleInputError):
        module(drawn(2, 5, 6 * 8), cos=cos, sin=sin)
    for tables in ((cos[None], sin[None]), (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))):
        found = module(x, cos=tables[0], sin=tables[1])
        assert all(map(torch.equal, found, wanted))
    module.interleaved = True
    new = RotaryEmbedding(8, packed=(2, 2), interleaved=True)
    assert all(map(torch.equal, module(x, cos=cos, sin=sin), new(x, cos=cos, sin=sin)))


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_queries_and_keys(heads_dim: int, looked: list[BoundOp]) -> None:
    def make() -> RotaryEmbedding:
        return RotaryEmbedding(8, heads_dim=heads_dim)

    module, query, key = make(), drawn(2, 6, 6, 8), drawn(2, 6, 6, 8, seed=1)
    cos, sin = module.tables(torch.arange(6))
    for _ in range(WARM):
        module(query, key, cos, sin)
        module(query, None, cos, sin)
    looked.clear()
    found = *module(query, key, cos, sin), module(query, None, cos, sin)
    assert not looked
    wanted = *make()(query, key, cos, sin), make()(query, cos=cos, sin=sin)
    assert all(map(torch.equal, found, wanted))
    for other in (key[:, :2], key[:, :, :2], key.double(), key[..., :6], key[0]):
        ends: list[object] = []
        for one in (module, make()):
            try:
                ends.append([t.sum().item() for t in one(query, other, cos, sin)])
            except ShardfuseError as error:
                ends.append(str(error).splitlines()[0])
        assert ends[0] == ends[1]


def test_a_product_knows_its_tensors_again() -> None:
    module, x, weight = RMSNorm(16), drawn(4, 8).bfloat16(), drawn(16, 8).requires_grad_()

    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        found = module.of_linear(x, weight)
        return found, module(functional.linear(x, weight.to(x.dtype)))

    def check(x: Tensor, weight: Tensor, context: AbstractContextManager[object] | None = None) -> None:
        with context or nullcontext():
            found, wanted = both(x, weight)
        assert found.requires_grad is wanted.requires_grad
        assert torch.equal(found, wanted)

    for _ in range(WARM):
        check(x, weight)
    check(x, weight, torch.no_grad())
    with torch.no_grad():
        assert not module.of_linear(x, weight).requires_grad
        assert not torch.is_grad_enabled()
    check(x.float(), weight)
    check(x, weight.detach())
    check(drawn(2, 3, 8).bfloat16(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module.of_linear(x, weight), module(functional.linear(x, weight)))
    with forward_ad.dual_level(), pytest.raises(TransformError):
        module.of_linear(forward_ad.make_dual(x, x), weight)
    seen: list[object] = []
    with module.register_forward_hook(lambda *of: seen.append(of)):
        check(x, weight)
    assert len(seen) == 2
    with pytest.raises(ShardfuseError):
        module.of_linear(x, drawn(16, 9).requires_grad_())


def test_another_world() -> None:
    """Fusions are bound to the process group of the ranks that they run on."""
    kept: list[AddRMSNorm] = []

    def run(rank: int, size: int) -> Tensor:
        mesh = DeviceMesh(list(range(size)))
        if rank == 0 and not kept:
            kept.append(AddRMSNorm(16, mesh=mesh, input=Partial(), output=Replicate(), parameters="local"))
        module = kept[0] if rank == 0 else AddRMSNorm(
            16, mesh=mesh, input=Partial(), output=Replicate(), parameters="local"
        )  # fmt: skip
        x, residual = drawn(4, 16, seed=rank), drawn(4, 16, seed=7)
        with torch.no_grad():
            for _ in range(WARM):
                found = module(x, residual)[1]
        return found

    for _ in range(2):
        for found in run_ranks(2, run):
            torch.testing.assert_close(found, drawn(4, 16) + drawn(4, 16, seed=1) + drawn(4, 16, seed=7))


def test_parameters_that_are_dtensors() -> None:
    """Another placement, dtype or mesh of a parameter, a plain tensor in its place, and an input that is a DTensor."""
    x, residual = drawn(4, 16), drawn(4, 16, seed=1)

    def end_of(module: AddRMSNorm, weight: Tensor, x: Tensor) -> list[Tensor] | type[Exception]:
        module.weight = torch.nn.Parameter(weight)
        try:
            results = module(x, residual)
            if not torch.is_grad_enabled():
                return [t.full_tensor() if isinstance(t, DTensor) else t for t in results]
            gradients = torch.autograd.grad(results[0], [module.weight], torch.ones_like(results[0]))
        except Exception as error:  # noqa: BLE001 which one is compared
            return type(error)
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in (*results, *gradients)]

    def run(rank: int, size: int) -> None:
        torch_mesh = init_device_mesh("cpu", (size,))
        mesh = DeviceMesh.from_torch(torch_mesh)
        whole = drawn(16, seed=2)

        def put(weight: Tensor, *placements: Placement) -> Tensor:
            return distribute_tensor(weight, torch_mesh, placements)

        changes: list[tuple[Callable[[], Tensor], Tensor]] = [
            (lambda: put(whole, Replicate()), x),
            (lambda: put(whole, Shard(0)), x),
            (lambda: put(whole.double(), Replicate()), x),
            (lambda: whole, x),
            (lambda: put(whole, Replicate()), put(x, Replicate())),
        ]
        for (weight, given), is_recording in itertools.product(changes, (True, False)):
            module, new = (AddRMSNorm(16, mesh=mesh, output=Replicate()) for _ in range(2))
            with torch.set_grad_enabled(is_recording):
                for _ in range(WARM):
                    module(x, residual)
                found, wanted = end_of(module, weight(), given), end_of(new, weight(), given)
            if isinstance(wanted, type):
                assert found is wanted
            else:
                assert not isinstance(found, type)
                assert all(map(torch.equal, found, wanted))

    run_ranks(2, run)


@pytest.mark.parametrize("is_bucketed", [False, True])
def test_writes_into_parameters_before_the_backward(is_bucketed: bool) -> None:
    """Their local tensors count none of them, and those behind a bucket's node neither."""

    def run(rank: int, size: int) -> None:
        module = AddRMSNorm(16, mesh=DeviceMesh([0, 1]), input=Partial(), residual=Shard(0), output=Replicate())
        if is_bucketed:
            assert bucket_gradients(torch.nn.ModuleList([module])) == 1
        x, residual = drawn(4, 16).requires_grad_(), drawn(2, 16, seed=1)
        for _ in range(WARM):
            module(x, residual)[0].sum().backward()
        y, _ = module(x, residual)
        with torch.no_grad():
            module.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run_ranks(2, run)


def test_dtensors_are_known_again(looked: list[BoundOp]) -> None:
    def run(rank: int, size: int) -> None:
        module, inputs = AddRMSNorm(16, mesh=DeviceMesh([0])), (drawn(4, 16), drawn(4, 16, seed=1))
        assert isinstance(module.weight, DTensor)
        warmed(module, *inputs)
        looked.clear()
        gradients_of(module, *inputs)

    run_ranks(1, run)
    assert not looked


def test_what_a_check_knows() -> None:
    x, weight = drawn(4, 16), torch.nn.Parameter(drawn(16))
    check = check_of([x, weight])
    assert check is not None
    assert check(drawn(4, 16, seed=1), torch.nn.Parameter(drawn(16)))
    for other in (x.double(), x.T, drawn(8, 4).T, drawn(4, 17), x.to("meta"), x.clone().requires_grad_(), x[None]):
        assert not check(other, weight)
    assert not check(x, weight.detach())
    other = x.as_subclass(type("Other", (Tensor,), {}))
    assert not check(other, weight)
    assert check_of([other]) is None
