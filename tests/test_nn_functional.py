"""shardfuse.nn.functional against torch.nn.functional, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from functional_cases import CASES, Case, check, widened
from module_cases import FLOATS
from torch import Tensor
from torch.nn import functional as theirs

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh
from shardfuse.errors import ModuleArgumentError, ModuleInputError
from shardfuse.nn import AddRMSNorm, LinearCrossEntropyLoss, Softmax, functional, quantized
from shardfuse.nn.default_eps import rms_norm_eps
from shardfuse.nn.functional import cross_entropy, linear_cross_entropy


@pytest.mark.parametrize("dtype", FLOATS)
def test_by_name(dtype: torch.dtype) -> None:
    for case in CASES.values():
        check(case, dtype)


def test_a_type_to_convert_to_is_taken_as_by_torch() -> None:
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    for name in ("softmax", "log_softmax"):
        for dtype in (torch.float32, torch.float64, None):
            got, want = (getattr(module, name)(x, -1, dtype=dtype) for module in (functional, theirs))
            torch.testing.assert_close(got, want)
            traced = torch.compile(getattr(functional, name), backend="eager", fullgraph=True)
            torch.testing.assert_close(traced(x, -1, dtype=dtype), want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_of_few_dims(dtype: torch.dtype) -> None:
    target = torch.tensor(1)
    check(Case(functional.softmax, lambda x: theirs.softmax(x, -1), [()]), dtype)
    check(Case(functional.log_softmax, lambda x: theirs.log_softmax(x, 0), [()]), dtype)

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return functional.softmax(x, 0, mask=mask)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return widened(lambda logits: theirs.cross_entropy(logits, target))(theirs.linear(x, weight))

    check(Case(masked, lambda x, mask: theirs.softmax(x + mask, 0), [(), ()]), dtype)
    check(Case(lambda x, weight: functional.linear_cross_entropy(x, weight, target), loss, [(5,), (7, 5)]), dtype)


def test_a_softmax_of_no_dims() -> None:
    one = torch.tensor(3.0)
    for mask, wanted in ((torch.tensor(True), 1.0), (torch.tensor(False), math.nan)):
        torch.testing.assert_close(Softmax()(one, mask), torch.tensor(wanted), equal_nan=True)
    for function in (functional.softmax, functional.log_softmax):
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert torch.equal(compiled(one), function(one))
        with pytest.raises(ModuleInputError, match="input has 0 dims, expected a dim 1"):
            function(one, 1)
    with pytest.raises(ModuleInputError, match=r"mask has shape \(2,\), expected one that broadcasts to \(\)"):
        Softmax()(one, torch.ones(2))
    with pytest.raises(ModuleInputError, match="x has 0 dims"):
        Softmax(mesh=DeviceMesh([0]))(one)


def test_tensors_without_elements() -> None:
    for shape, normalized in (((0, 6), (0, 6)), ((0, 3, 6), (3, 6)), ((0, 6), (6,))):
        x = torch.empty(shape)
        assert functional.layer_norm(x, normalized).shape == theirs.layer_norm(x, normalized).shape == x.shape


def test_compiled_group_norm_of_empty_tensors() -> None:
    compiled = torch.compile(functional.group_norm, backend="eager", fullgraph=True)
    for shape in ((0, 4, 5), (2, 4, 0)):
        assert compiled(torch.empty(shape), 2).shape == shape
        assert functional.group_norm(torch.empty(shape, device="meta"), 2).shape == shape


def test_batch_norm_moves_and_reads_running_statistics() -> None:
    x = torch.randn(4, 3, 5)
    for training in (True, False):
        kept = [torch.zeros(3), torch.ones(3)]
        same = [t.clone() for t in kept]
        result = functional.batch_norm(x, *kept, training=training, momentum=0.3)
        torch.testing.assert_close(result, theirs.batch_norm(x, *same, training=training, momentum=0.3))
        torch.testing.assert_close(kept, same)


def test_rotary_embedding_as_hugging_face_calls_it() -> None:
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)
    angles = torch.randn(2, 6, 8)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))

    def turned(x: Tensor) -> Tensor:
        half = torch.cat((-x[..., 8:], x[..., :8]), -1)
        return x * cos[:, None] + half * sin[:, None]

    for got, want in zip(functional.rotary_embedding(q, k, cos, sin), (turned(q), turned(k)), strict=True):
        torch.testing.assert_close(got, want)
    part = functional.rotary_embedding(q, k, cos[..., :3], sin[..., :3])[0]
    assert torch.equal(part[..., 6:], q[..., 6:])


def test_dropout_add_norm_drops_by_torchs_generator() -> None:
    x, residual = torch.ones(40, 8), torch.zeros(40, 8)
    totals = []
    for _ in range(2):
        torch.manual_seed(5)
        totals.append(functional.dropout_add_norm(x, residual, (8,), p=0.5)[1])
    assert torch.equal(*totals)
    assert set(totals[0].unique().tolist()) == {0.0, 2.0}
    assert torch.equal(functional.dropout_add_norm(x, residual, (8,), p=0.5, training=False)[1], x)


def test_linear_cross_entropy() -> None:
    x, weight, target = torch.randn(10, 4), torch.randn(7, 4), torch.arange(10) % 7
    got = functional.linear_cross_entropy(x, weight, target, chunk_rows=3)
    torch.testing.assert_close(got, theirs.cross_entropy(x @ weight.T, target))


def test_bad_inputs() -> None:
    x = torch.ones(2, 4, 3)
    for call, message in (
        (lambda: functional.layer_norm(x, (4,)), "layer_norm: input has shape"),
        (lambda: functional.layer_norm(x, (3,), torch.ones(4)), "layer_norm: weight has shape"),
        (lambda: functional.rms_norm(x, ()), "rms_norm: input has shape"),
        (lambda: functional.layer_norm(x.int(), (3,)), "layer_norm: input has dtype"),
        (lambda: functional.add_rms_norm(x, x[:1], (3,)), "residual has shape"),
        (lambda: functional.group_norm(x, 3), "group_norm: input has shape"),
        (lambda: functional.group_norm(x[:1, :, :1], 4), "group_norm: input has .* one value per group"),
        (lambda: functional.batch_norm(x, None, None, torch.ones(3), training=True), "batch_norm: weight has shape"),
        (lambda: functional.batch_norm(x[:1, :, :1], None, None, training=True), "one value per channel"),
    ):
        with pytest.raises(ModuleInputError, match=message):
            call()
    for call, message in (
        (lambda: functional.dropout_add_norm(x, x, (3,), p=2.0), "p="),
        (lambda: functional.dropout_add_norm(x, x, (3,), norm="batch"), "norm="),
        (lambda: functional.group_norm(x, 2, activation="relu"), "activation="),
        (lambda: functional.batch_norm(x, None, None), "running_mean="),
        (lambda: functional.gelu(x, "exact"), "approximate="),
    ):
        with pytest.raises(ModuleArgumentError, match=message):
            call()


X, TARGET, WEIGHT, HEADS = torch.ones(3, 4), torch.arange(3), torch.ones(5, 4), torch.ones(1, 2, 3, 4)
ANGLES = torch.ones(3, 2)
NAMED: dict[str, Callable[[], object]] = {
    "cross_entropy(label_smoothing=2.0): expected a share": lambda: cross_entropy(X, TARGET, label_smoothing=2.0),
    "cross_entropy(z_loss=-1.0): ": lambda: cross_entropy(X, TARGET, z_loss=-1.0),
    "cross_entropy(temperature=0.0): ": lambda: cross_entropy(X, TARGET, temperature=0.0),
    "cross_entropy: target has shape (2,), ": lambda: cross_entropy(X, TARGET[:2]),
    "cross_entropy: target has 3 values that are no classes": lambda: cross_entropy(X, TARGET + 9),
    "cross_entropy: input has dtype torch.int64, ": lambda: cross_entropy(X.long(), TARGET),
    "cross_entropy: input has no classes": lambda: cross_entropy(X[:, :0], TARGET),
    "log_prob(temperature=-1.0): ": lambda: functional.log_prob(X, TARGET, temperature=-1.0),
    "log_prob: input has no dims": lambda: functional.log_prob(X[0, 0], TARGET[0]),
    "log_prob_and_entropy(temperature=-1.0): ": lambda: functional.log_prob_and_entropy(X, TARGET, temperature=-1.0),
    "log_prob_and_entropy: target has 1 values": lambda: functional.log_prob_and_entropy(X, TARGET + 2),
    "linear_cross_entropy(chunk_rows=0): ": lambda: linear_cross_entropy(X, WEIGHT, TARGET, chunk_rows=0),
    "linear_cross_entropy(temperature=0.0): ": lambda: linear_cross_entropy(X, WEIGHT, TARGET, temperature=0.0),
    "linear_cross_entropy: target has 2 values": lambda: linear_cross_entropy(X, WEIGHT, TARGET + 4, chunk_rows=2),
    "linear_cross_entropy: weight has shape (4, 5)": lambda: linear_cross_entropy(X, WEIGHT.T, TARGET),
    "linear_cross_entropy: input has no dims": lambda: linear_cross_entropy(X[0, 0], WEIGHT, TARGET),
    "rms_norm(eps=-1.0): expected 0 or more": lambda: functional.rms_norm(X, (4,), eps=-1.0),
    "layer_norm(eps=-1.0): ": lambda: functional.layer_norm(X, (4,), eps=-1.0),
    "add_rms_norm(eps=-1.0): ": lambda: functional.add_rms_norm(X, X, (4,), eps=-1.0),
    "add_layer_norm(eps=-1.0): ": lambda: functional.add_layer_norm(X, X, (4,), eps=-1.0),
    "dropout_add_norm(eps=-1.0): ": lambda: functional.dropout_add_norm(X, X, (4,), eps=-1.0),
    "group_norm(eps=-1.0): ": lambda: functional.group_norm(X, 2, eps=-1.0),
    "batch_norm(eps=-1.0): ": lambda: functional.batch_norm(X, None, None, training=True, eps=-1.0),
    "softmax(scale=inf): ": lambda: functional.softmax(X, scale=math.inf),
    "softmax: input has 2 dims, expected a dim 5: pass another dim=": lambda: functional.softmax(X, 5),
    "log_softmax: input has dtype": lambda: functional.log_softmax(X.long()),
    "gelu: input has dtype": lambda: functional.gelu(X.long()),
    "geglu: gate has 3 features": lambda: functional.geglu(X[:, :3]),
    "swiglu: up has shape (2, 4)": lambda: functional.swiglu(X, X[:2]),
    "rotary_embedding(heads_dim=7): ": lambda: functional.rotary_embedding(HEADS, HEADS, ANGLES, ANGLES, heads_dim=7),
    "rotary_embedding: cos has 3 numbers in its last dim": lambda: functional.rotary_embedding(HEADS, HEADS, X.T, X.T),
    "rotary_embedding: query has 3 dims": lambda: functional.rotary_embedding(HEADS[0], HEADS, ANGLES, ANGLES),
    "LinearCrossEntropyLoss(temperature=0.0): ": lambda: LinearCrossEntropyLoss(temperature=0.0),
    "LinearCrossEntropyLoss(z_loss=-1.0): ": lambda: setattr(LinearCrossEntropyLoss(), "z_loss", -1.0),
}


@pytest.mark.parametrize("sentence", NAMED)
def test_an_error_names_what_the_caller_has_called(sentence: str) -> None:
    """And the argument as that has it, not the module that it is made of."""
    with pytest.raises((ModuleInputError, ModuleArgumentError), match=f"^{re.escape(sentence)}"):
        NAMED[sentence]()


@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    """By torch's own ops, in one graph."""
    torch._dynamo.reset()
    case = CASES[name]
    check(replace(case, ours=torch.compile(case.ours, fullgraph=True, backend="aot_eager")), torch.float32)


def test_compiled_for_any_size() -> None:
    """Floats that are arguments become symbols then, also those that only a chunk of rows needs."""
    x, r, w, target = torch.randn(4, 8), torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)
    calls = (
        lambda x: functional.add_layer_norm(x, r, (8,))[0],
        lambda x: functional.add_rms_norm(x, r, (8,))[0],
        lambda x: functional.dropout_add_norm(x, r, (8,), p=0.0)[0],
        partial(LinearCrossEntropyLoss(chunk_rows=2, temperature=0.5, z_loss=0.1), weight=w, target=target),
    )
    for call in calls:
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
        found, wanted = (
            torch.autograd.grad(f(y := x.clone().requires_grad_()).sin().sum(), y)[0] for f in (compiled, call)
        )
        torch.testing.assert_close(found, wanted)
    torch._dynamo.reset()
    loss = torch.compile(functional.linear_cross_entropy, fullgraph=True, dynamic=True, backend="eager")
    for temperature in (1.0, 0.9, 0.8):
        options = {"chunk_rows": 2, "temperature": temperature}
        torch.testing.assert_close(
            loss(x, w, target, **options), functional.linear_cross_entropy(x, w, target, **options)
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_an_eps_that_is_left_out_is_torchs_in_every_function(dtype: torch.dtype) -> None:
    """Rows of which the mean square is no larger than it."""
    x = (1e-4 * torch.randn(3, 8, generator=torch.Generator().manual_seed(1))).to(dtype)
    wide = theirs.rms_norm(x.double(), (8,), eps=rms_norm_eps(dtype))
    for normed in (
        functional.rms_norm(x, (8,)),
        functional.add_rms_norm(x, torch.zeros_like(x), (8,))[0],
        AddRMSNorm(8, eps=None, dtype=dtype)(x, torch.zeros_like(x))[0],
    ):
        assert_near(normed, wide, theirs.rms_norm(x, (8,)))
    if dtype != torch.float64:
        one, other = quantized.rms_norm(x, (8,)), quantized.add_rms_norm(x, torch.zeros_like(x), (8,))[0]
        assert torch.equal(one.scales, other.scales)


IMAGE = torch.randn(2, 4, 3, 3)
BAD_OPTIONS: dict[str, Callable[[], object]] = {
    "cross_entropy(label_smoothing=2.0)": lambda: functional.cross_entropy(X, TARGET, label_smoothing=2.0),
    "cross_entropy(reduction='foo')": lambda: functional.cross_entropy(X, TARGET, reduction="foo"),  # pyright: ignore[reportArgumentType]
    "cross_entropy(temperature=0.0)": lambda: functional.cross_entropy(X, TARGET, temperature=0.0),
    "cross_entropy(z_loss=-1.0)": lambda: functional.cross_entropy(X, TARGET, z_loss=-1.0),
    "log_prob(temperature=-1.0)": lambda: functional.log_prob(X, TARGET, temperature=-1.0),
    "log_prob_and_entropy(temperature=-1.0)": lambda: functional.log_prob_and_entropy(X, TARGET, temperature=-1.0),
    "layer_norm(eps=-1.0)": lambda: functional.layer_norm(X, (4,), eps=-1.0),
    "rms_norm(eps=-1.0)": lambda: functional.rms_norm(X, (4,), eps=-1.0),
    "group_norm(eps=-1.0)": lambda: functional.group_norm(IMAGE, 2, eps=-1.0),
    "batch_norm(eps=-1.0)": lambda: functional.batch_norm(IMAGE, None, None, training=True, eps=-1.0),
    "linear_cross_entropy(temperature=0.0)": lambda: linear_cross_entropy(X, WEIGHT, TARGET, temperature=0.0),
    "linear_cross_entropy(chunk_rows=0)": lambda: linear_cross_entropy(X, WEIGHT, TARGET, chunk_rows=0),
}


@pytest.mark.parametrize("call", BAD_OPTIONS)
def test_options_that_are_out_of_range_are_refused_while_torch_compiles_too(call: str) -> None:
    for backend in (None, "eager"):
        torch._dynamo.reset()
        run = BAD_OPTIONS[call] if backend is None else torch.compile(BAD_OPTIONS[call], backend=backend)
        with pytest.raises(ModuleArgumentError) as raised:
            run()
        assert str(raised.value).startswith(f"{call}: expected ")
