"""shardfuse.nn.functional against torch.nn.functional, by name."""

from __future__ import annotations

import math
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
        with pytest.raises(ModuleInputError, match="x has 0 dims, expected a dim 1"):
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
