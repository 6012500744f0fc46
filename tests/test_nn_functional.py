"""shardfuse.nn.functional against torch.nn.functional, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from module_cases import FLOATS
from torch import Tensor
from torch.nn import functional as theirs
from torch_answers import compare as check_near
from torch_gradients import leaf, with_gradients

from shardfuse.errors import ModuleArgumentError, ModuleInputError
from shardfuse.nn import functional

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def check(ours: Function, reference: Function, *tensors: Tensor) -> None:
    """Results and gradients of every tensor."""
    leaves = [leaf(t) for t in tensors]

    def several(function: Function, *given: Tensor) -> tuple[Tensor, ...]:
        found = function(*given)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    results = several(ours, *leaves)
    upstream = [torch.randn(t.shape, dtype=torch.float64).to(t.dtype) for t in results]
    torch.autograd.backward(results, upstream)
    expected = with_gradients(lambda *given: several(reference, *given), list(tensors), upstream)
    for k, (got, want) in enumerate(zip([*results, *(t.grad for t in leaves)], expected, strict=True)):
        assert got is not None
        check_near(f"result or gradient {k}", got.detach(), want)


def widened(function: Function) -> Function:
    """A loss in float32, which is what shardfuse returns."""
    return lambda x, *rest: function(x.to(torch.promote_types(x.dtype, torch.float32)), *rest)


@pytest.mark.parametrize("dtype", FLOATS)
def test_by_name(dtype: torch.dtype) -> None:
    x, other, w, b = (torch.randn(*n, dtype=torch.float64).to(dtype) for n in ((4, 5, 16), (4, 5, 16), (16,), (16,)))
    image, c, d = (torch.randn(*n, dtype=torch.float64).to(dtype) for n in ((3, 8, 4, 5), (8,), (8,)))
    target = torch.arange(20).view(4, 5) % 16
    check(
        lambda x, w: functional.rms_norm(x, (16,), w),
        lambda x, w: theirs.rms_norm(x, (16,), w, torch.finfo(dtype).eps),
        x,
        w,
    )
    check(lambda x: functional.rms_norm(x, [5, 16], eps=1e-6), lambda x: theirs.rms_norm(x, [5, 16], None, 1e-6), x)
    check(
        lambda x, w, b: functional.layer_norm(x, (16,), w, b),
        lambda x, w, b: theirs.layer_norm(x, (16,), w, b),
        x,
        w,
        b,
    )
    check(lambda x: functional.layer_norm(x, (4, 5, 16)), lambda x: theirs.layer_norm(x, (4, 5, 16)), x)
    check(
        lambda x, r, w, b: functional.add_layer_norm(x, r, (16,), w, b),
        lambda x, r, w, b: (theirs.layer_norm(r + x, (16,), w, b), r + x), x, other, w, b,
    )  # fmt: skip
    check(
        lambda x, r, w: functional.add_rms_norm(x, r, (16,), w),
        lambda x, r, w: (theirs.rms_norm(r + x, (16,), w, 1e-6), r + x), x, other, w,
    )  # fmt: skip
    check(lambda x, c, d: functional.group_norm(x, 4, c, d), lambda x, c, d: theirs.group_norm(x, 4, c, d), image, c, d)
    check(lambda x, c: functional.group_norm(x, 4, c, activation="silu"),
          lambda x, c: theirs.silu(theirs.group_norm(x, 4, c)), image, c)  # fmt: skip
    check(lambda x, c, d: functional.batch_norm(x, None, None, c, d, True),
          lambda x, c, d: theirs.batch_norm(x, None, None, c, d, True), image, c, d)  # fmt: skip
    check(lambda x: functional.softmax(x, 1), lambda x: theirs.softmax(x, 1), x)
    check(functional.log_softmax, lambda x: theirs.log_softmax(x, -1), x)
    check(functional.gelu, theirs.gelu, x)
    check(functional.geglu, lambda x, y: theirs.gelu(x) * y, x, other)
    check(functional.swiglu, lambda x: theirs.silu(x[..., :8]) * x[..., 8:], x)
    check(lambda x: functional.cross_entropy(x, target, label_smoothing=0.1),
          widened(lambda x: theirs.cross_entropy(x.mT, target, label_smoothing=0.1)), x)  # fmt: skip
    check(lambda x: functional.log_prob(x, target),
          widened(lambda x: -theirs.cross_entropy(x.mT, target, reduction="none")), x)  # fmt: skip


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
        (lambda: functional.layer_norm(x, (4,)), "layer_norm: x has shape"),
        (lambda: functional.layer_norm(x, (3,), torch.ones(4)), "layer_norm: weight has shape"),
        (lambda: functional.rms_norm(x, ()), "rms_norm: x has shape"),
        (lambda: functional.layer_norm(x.int(), (3,)), "layer_norm: x has dtype"),
        (lambda: functional.add_rms_norm(x, x[:1], (3,)), "residual has shape"),
        (lambda: functional.group_norm(x, 3), "group_norm: x has shape"),
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
