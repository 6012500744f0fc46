"""LinearCrossEntropyLoss in training: how much is multiplied and kept, how it is cut into chunks, and how exactly."""

from __future__ import annotations

import io
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from module_cases import FLOATS, NARROW
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch_answers import compare
from torch_gradients import leaf, with_gradients

from benchmarks.roundings import EAGER, accumulator, spacing
from shardfuse import DeviceMesh
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PromiseError, SecondDerivativeError, TransformError
from shardfuse.nn import LinearCrossEntropyLoss, promise

ROWS, FEATURES, CLASSES = 77, 16, 40
CHUNK = 32
"""Rows of a chunk: the third has 13."""


def drawn(dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    x, weight, bias = (scale * torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def targets(rows: int = ROWS, ignored: int = 5) -> Tensor:
    target = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(7))
    target[:ignored] = -100
    return target


def gradients(
    loss: Callable[..., Tensor], tensors: Sequence[Tensor], target: Tensor, upstream: float = 1.0
) -> list[Tensor]:
    """The loss, and the gradient of each."""
    leaves = [leaf(t) for t in tensors]
    made = loss(*leaves[:2], target, *leaves[2:])
    (upstream * made.sum()).backward()
    assert all(t.grad is not None for t in leaves)
    return [made.detach(), *(t.grad for t in leaves if t.grad is not None)]


def torchs(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: object) -> Tensor:
    logits = functional.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits, target, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("upstream", [1.0, -3.7])
def test_gradients(dtype: torch.dtype, upstream: float) -> None:
    """Chunks of 32, 32 and 13 rows."""
    tensors, target = drawn(dtype), targets()
    found = gradients(LinearCrossEntropyLoss(chunk_rows=CHUNK), tensors, target, upstream)
    statistics = torch.promote_types(dtype, torch.float32)
    expected = with_gradients(
        lambda x, weight, bias: (torchs(x, weight, target, bias),),
        [t.double() for t in tensors], [torch.tensor(upstream, dtype=torch.float64)], dtype,
        [*((accumulator(dtype), t.double()) for t in tensors), (statistics, torch.tensor(upstream).double())],
    )  # fmt: skip
    for what, got, want in zip(("loss", "x", "weight", "bias"), found, expected, strict=True):
        compare(what, got, want)


@pytest.mark.parametrize("dtype", NARROW[1:], ids=str)
def test_the_weights_gradient_is_rounded_once(dtype: torch.dtype) -> None:
    """Of 77 chunks, whose summands would each be rounded to 16 bits if they were added up in these."""
    tensors, target = drawn(dtype), targets(ignored=0)
    got = gradients(LinearCrossEntropyLoss(chunk_rows=1), tensors, target)[2]
    whole = gradients(LinearCrossEntropyLoss(chunk_rows=ROWS), tensors, target)[2]
    exact = gradients(torchs, [t.double() for t in tensors], target)[2]
    # Roundings of the logits, and of their gradient, move it as much without chunks.
    moved = (whole.double() - exact).abs().amax(-1, keepdim=True)
    assert ((got.double() - exact).abs() <= spacing(exact, dtype) + EAGER * moved).all()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_gradients_that_are_asked_for_are_made(wanted: Sequence[int]) -> None:
    tensors, target = [leaf(t) if k in wanted else t for k, t in enumerate(drawn())], targets()
    for chunk in (CHUNK, ROWS):
        for t in tensors:
            t.grad = None
        LinearCrossEntropyLoss(chunk_rows=chunk)(*tensors[:2], target, tensors[2]).backward()
        expected = gradients(torchs, drawn(), target)[1:]
        for k, t in enumerate(tensors):
            assert (t.grad is not None) == (k in wanted)
            if t.grad is not None:
                torch.testing.assert_close(t.grad, expected[k])


# --- how much is computed ----------------------------------------------------------------------------------


def products(run: Callable[[], object]) -> int:
    """How many matrix products it takes, by the calls of torch's kernels."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    calls = Counter(event.name for event in found.events() or ())
    return calls["aten::mm"] + calls["aten::addmm"]


@pytest.mark.parametrize("bias", [False, True])
def test_the_logits_are_multiplied_once(bias: bool) -> None:
    x, weight, its = (leaf(t) for t in drawn())
    target, chunks = targets(), -(-ROWS // CHUNK)
    for chunk, forward, both in ((CHUNK, chunks, 3 * chunks), (ROWS, 1, 3)):
        loss = partial(LinearCrossEntropyLoss(chunk_rows=chunk), x, weight, target, its if bias else None)
        loss().backward()
        assert products(lambda loss=loss: loss().backward()) == both
        with torch.no_grad():
            assert products(loss) == forward
        assert not loss.args[0].grad.isnan().any()


def test_one_chunks_logits_are_there_at_a_time() -> None:
    x, weight, _ = (leaf(t) for t in drawn())
    module, made = LinearCrossEntropyLoss(chunk_rows=CHUNK), list[weakref.ref[Tensor]]()

    def look(part: torch.nn.Module, given: tuple[Tensor, ...], results: tuple[Tensor, Tensor]) -> None:
        assert all(logits() is None for logits in made)
        made.extend(weakref.ref(logits) for logits in (given[0], results[1]))

    module.loss_and_gradient.register_forward_hook(look)
    module(x, weight, targets())
    assert len(made) == 2 * 3
    assert all(logits() is None for logits in made)


def test_what_is_kept_between_forward_and_backward() -> None:
    """The gradients, and with them the inputs that they are of: no logits, whose rows are 40 long."""
    kept: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(tuple(t.shape))
        return t

    x, weight, _ = (leaf(t) for t in drawn())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = LinearCrossEntropyLoss(chunk_rows=CHUNK)(x, weight, targets())
    assert sorted(kept) == sorted([(), *2 * [(ROWS, FEATURES), (CLASSES, FEATURES)]])
    loss.backward()


@pytest.mark.parametrize(
    ("rows", "features", "classes", "expected"),
    [
        (1024, 1024, 8192, 1024),  # logits are smaller than the weight
        (8192, 4096, 8192, 8192),
        (8192, 4096, 32000, 4096),
        (8192, 4096, 128256, 4096),
        (16384, 4096, 32000, 5504),
        (8192, 256, 32000, 256),
        (1000, 16, 32000, 128),
        (0, 16, 40, 0),
    ],
)
def test_chunks_are_as_large_as_the_inputs(rows: int, features: int, classes: int, expected: int) -> None:
    """Their logits have no more elements than x and the weight, but that a chunk has at least 128 rows."""
    size = LinearCrossEntropyLoss()._chunk_rows(rows, features, classes)
    assert size == expected
    assert size <= 128 or size * classes <= (rows + classes) * features


def test_ranks_cut_alike() -> None:
    """Shards of the classes that differ in size: 13 and 12 of them."""

    def run(rank: int, size: int) -> tuple[int, list[Tensor]]:
        mesh = DeviceMesh([0, 1])
        module = LinearCrossEntropyLoss(mesh=mesh, logits=Shard(-1), num_classes=25)
        x, weight, _ = drawn()
        mine = mesh.shard_tensor(weight[:25], 0)
        target = targets() % 25
        chosen = module._chunk_rows(1300, 12, mine.shape[0])
        module.chunk_rows = CHUNK
        return chosen, [t.detach() for t in gradients(module, [x, mine], target)]

    (first, (loss, x, one)), (second, (other, its, two)) = run_ranks(2, run)
    assert first == second
    assert torch.equal(loss, other)
    tensors = drawn()[:2]
    expected = gradients(torchs, [tensors[0], tensors[1][:25]], targets() % 25)
    for got, want in zip((loss, x + its, torch.cat([one, two])), expected, strict=True):
        torch.testing.assert_close(got, want)


# --- where else it is called -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW[1:], ids=str)
@pytest.mark.parametrize("chunk", [CHUNK, ROWS])
def test_under_autocast(dtype: torch.dtype, chunk: int) -> None:
    """float32 parameters have float32 gradients, which chunks do not round to 16 bits; x may be of either."""
    target = targets()
    for x_dtype in (torch.float32, dtype):
        x, weight, bias = drawn()
        x = x.to(dtype).to(x_dtype)
        with torch.autocast("cpu", dtype):
            made = gradients(LinearCrossEntropyLoss(chunk_rows=chunk), (x, weight, bias), target)
            theirs = gradients(torchs, (x, weight, bias), target)
        wide = gradients(torchs, (x.double(), weight.to(dtype).double(), bias.to(dtype).double()), target)
        for got, eager, exact in zip(made, theirs, wide, strict=True):
            assert got.dtype == eager.dtype
            rounded = EAGER * (eager.double() - exact).abs().amax() + spacing(exact.abs().amax(), dtype)
            assert (got.double() - exact).abs().amax() <= rounded


def test_backward_twice_and_through_checkpoint() -> None:
    tensors, target = drawn(), targets()
    expected = gradients(torchs, tensors, target)
    module = LinearCrossEntropyLoss(chunk_rows=CHUNK)
    for use_reentrant in (False, True):
        call = partial(checkpoint, module, use_reentrant=use_reentrant)
        for got, want in zip(gradients(call, tensors, target), expected, strict=True):
            torch.testing.assert_close(got, want)
    leaves = [leaf(t) for t in tensors]
    loss = module(*leaves[:2], target, leaves[2])
    loss.backward(retain_graph=True)
    loss.backward()
    for got, want in zip(leaves, expected[1:], strict=True):
        torch.testing.assert_close(got.grad, 2 * want)


def test_a_second_derivative_and_batches_of_gradients_are_refused() -> None:
    x, weight, _ = (leaf(t) for t in drawn())
    loss = LinearCrossEntropyLoss(chunk_rows=CHUNK)(x, weight, targets())
    (first,) = torch.autograd.grad(loss, [x], create_graph=True)
    with pytest.raises(SecondDerivativeError):
        torch.autograd.grad(first.square().sum(), [weight])
    loss = LinearCrossEntropyLoss(chunk_rows=CHUNK)(x, weight, targets())
    with pytest.raises(TransformError):
        torch.autograd.grad(loss, [x], torch.ones(3), is_grads_batched=True)


def test_rows_that_are_all_ignored() -> None:
    """The mean of none is NaN, as torch's, and no gradient comes of it."""
    tensors = drawn()
    loss, *rest = gradients(LinearCrossEntropyLoss(chunk_rows=CHUNK), tensors, torch.full((ROWS,), -100))
    assert loss.isnan()
    assert all(not t.any() for t in rest)
    loss, *rest = gradients(
        LinearCrossEntropyLoss(chunk_rows=CHUNK, reduction="sum"), tensors, torch.full((ROWS,), -100)
    )
    assert loss == 0
    assert all(not t.any() for t in rest)


def test_a_mean_over_many_rows_keeps_small_gradients_in_float16() -> None:
    """1 / rows would be lost in 16 bits if logits' gradients had that factor: it comes with the loss's scale."""
    tensors, target = drawn(torch.float16, scale=2.0), targets()
    scale = 2.0**-10
    scaled = [t.double() for t in gradients(LinearCrossEntropyLoss(chunk_rows=CHUNK), tensors, target, scale)]
    exact = gradients(torchs, [t.double() for t in tensors], target, scale)
    for got, want in zip(scaled[1:], exact[1:], strict=True):
        allowed = 4 * spacing(want, torch.float16) + 2.0**-9 * want.abs().amax()
        assert ((got - want).abs() <= allowed).all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rows", [2, CHUNK, None])
def test_targets_that_are_no_classes_are_named(training: bool, reduction: str, rows: int | None) -> None:
    """By the module that was called, at the place in the whole target, with how many there are in all chunks."""
    x, weight, _ = (t.requires_grad_(training) for t in drawn())
    target = targets()
    first, last = target.numel() // 2, target.numel() - 1
    target.view(-1)[first], target.view(-1)[last] = CLASSES, -7
    place = [int(k) for k in torch.unravel_index(torch.tensor(first), target.shape)]
    sentence = (
        f"LinearCrossEntropyLoss: target has 2 values that are no classes (on this rank first {CLASSES} at {place})"
    )
    with pytest.raises(ModuleInputError, match=re.escape(sentence)):
        LinearCrossEntropyLoss(chunk_rows=rows, reduction=reduction)(x, weight, target)


def compiled(module: LinearCrossEntropyLoss, backend: str = "aot_eager", **options: bool) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("chunk", [CHUNK, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiled(chunk: int | None, reduction: str) -> None:
    """In one graph, chunks and all: where gradients are made with the loss, by one op."""
    tensors, target = drawn(), targets()
    call = compiled(LinearCrossEntropyLoss(chunk_rows=chunk, reduction=reduction))
    for size in (ROWS, ROWS - 6, ROWS - 11):  # the second makes the size a symbol
        given = (tensors[0][:size], *tensors[1:])
        expected = gradients(partial(torchs, reduction=reduction), given, target[:size])
        for got, want in zip(gradients(call, given, target[:size]), expected, strict=True):
            torch.testing.assert_close(got, want)
    leaves = [leaf(t) for t in tensors]
    once = 1 if chunk is None else -(-ROWS // CHUNK)
    again = reduction == "none" and chunk is not None
    assert products(lambda: call(*leaves[:2], target, leaves[2]).sum().backward()) == (4 if again else 3) * once
    with torch.no_grad():
        torch.testing.assert_close(
            call(*tensors[:2], target, tensors[2]), torchs(*tensors[:2], target, tensors[2], reduction=reduction)
        )


def test_compiled_with_some_gradients_and_under_autocast() -> None:
    x, weight, bias = drawn()
    for wanted in ([x], [weight], [x, bias]):
        leaves = {id(t): leaf(t) for t in wanted}
        given = [leaves.get(id(t), t) for t in (x, weight, bias)]
        for is_autocast in (False, True):
            found = []
            made = [LinearCrossEntropyLoss(chunk_rows=CHUNK) for _ in range(3)]
            for call in (made[0], compiled(made[1]), torch.compile(made[2], backend="eager", fullgraph=True)):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                    loss = call(*given[:2], targets(), given[2])
                found.append([loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))])
            for want, *others in zip(*found, strict=True):
                for got in others:
                    torch.testing.assert_close(got, want)


def test_the_op_of_a_compiled_loss() -> None:
    x, weight, bias = (leaf(t) for t in drawn())
    op = torch.ops.shardfuse.linear_cross_entropy_v1.default
    for is_mean in (False, True):
        options = (LinearCrossEntropyLoss().loss_and_gradient.text, CHUNK, torch.float32, is_mean, [True] * 3)
        # test_aot_dispatch_dynamic has gradients come to all results, of which only the first is differentiated.
        utils = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, (x, weight, targets(), bias, *options), test_utils=utils)
    loss = compiled(LinearCrossEntropyLoss(chunk_rows=CHUNK), "eager")(x, weight, targets())
    (first,) = torch.autograd.grad(loss, [x], create_graph=True)
    with pytest.raises(SecondDerivativeError):
        torch.autograd.grad(first.square().sum(), [weight])


def test_a_promise_after_the_first_call_is_asked_for() -> None:
    """On a CPU, where torch's own ops run, none is kept."""
    tensors, module = drawn(), LinearCrossEntropyLoss(chunk_rows=CHUNK)
    gradients(module, tensors, targets())
    promise(module, invariant="batch")
    with pytest.raises(PromiseError):
        gradients(module, tensors, targets())


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("reduction", "sum", "avg"),
        ("reduction", "none", None),
        ("ignore_index", 3, 0.5),
        ("label_smoothing", 0.3, 3.0),
        ("z_loss", 0.1, -1.0),
        ("temperature", 0.5, 0.0),
        ("chunk_rows", 7, 0),
    ],
)
@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_settings_that_change_after_a_call(name: str, value: object, wrong: object, chunk: int | None) -> None:
    """They are noticed, in one chunk and in several, and one that is refused changes nothing."""
    tensors, target = drawn(), targets(ignored=0)
    options: dict[str, Any] = {"chunk_rows": chunk, name: value}
    wanted = gradients(LinearCrossEntropyLoss(**options), tensors, target)
    module = LinearCrossEntropyLoss(chunk_rows=chunk)
    before = gradients(module, tensors, target)
    with pytest.raises(ModuleArgumentError, match=rf"\({name}="):
        setattr(module, name, wrong)
    assert all(map(torch.equal, gradients(module, tensors, target), before))
    setattr(module, name, value)
    assert getattr(module, name) == value
    assert all(map(torch.equal, gradients(module, tensors, target), wanted))


def test_saved_and_loaded() -> None:
    module = LinearCrossEntropyLoss(chunk_rows=CHUNK, label_smoothing=0.1)
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    tensors, target = drawn(), targets()
    for got, want in zip(gradients(loaded, tensors, target), gradients(module, tensors, target), strict=True):
        assert torch.equal(got, want)
