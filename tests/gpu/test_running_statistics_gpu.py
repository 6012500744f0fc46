"""Running statistics on a GPU: moved by one kernel, as torch moves them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.roundings import assert_near
from benchmarks.timing import count_kernels
from shardfuse.nn import BatchNorm2d
from shardfuse.nn.functional import batch_norm

pytestmark = pytest.mark.gpu
KEPT = ("running_mean", "running_var")


@pytest.mark.parametrize("momentum", [0.1, 0.75, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels", [3, 320, 2500])
def test_as_torchs(channels: int, dtype: torch.dtype, momentum: float | None) -> None:
    torch.manual_seed(channels)
    where = {"device": "cuda", "dtype": dtype}
    norm = BatchNorm2d(channels, momentum=momentum, **where)
    theirs, wide = (
        torch.nn.BatchNorm2d(channels, momentum=momentum, device="cuda", dtype=d) for d in (dtype, torch.float64)
    )
    for turn in range(3):
        x = torch.randn(2, channels, 4, 5, **where) * 2 + 1
        for module in (norm, theirs):
            module(x)
        wide(x.double())
        for name in KEPT:
            found, right, torchs = (getattr(m, name) for m in (norm, wide, theirs))
            assert_near(found, right, torchs, n=4 * (turn + 1), terms=right.abs() + 1, what=name)
    assert norm.num_batches_tracked.item() == 3


def test_launches() -> None:
    """The norm, and all that is kept of it."""
    x = torch.randn(2, 32, 8, 8, device="cuda", dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        norm = BatchNorm2d(32, device="cuda", dtype=dtype)
        for _ in range(3):
            norm(x)
        assert count_kernels(lambda norm=norm: norm(x)) == 2
        kept = [torch.zeros(32, device="cuda", dtype=dtype) for _ in KEPT]
        for _ in range(3):
            batch_norm(x, *kept, training=True)
        assert count_kernels(lambda kept=kept: batch_norm(x, *kept, training=True)) == 2


@pytest.mark.parametrize("channels", [16, 17])
def test_statistics_that_begin_between_two_words(channels: int) -> None:
    """After such as do not, and before: a kernel that was compiled for aligned ones is not theirs."""
    x = torch.randn(4, channels, 5, 5, device="cuda")
    whole = [torch.zeros(channels + 4, device="cuda") for _ in KEPT]
    for start in (0, 1, 0, 2, 1, 4):
        kept = [t[start : start + channels].zero_() for t in whole]
        wide = [torch.zeros(channels, device="cuda", dtype=torch.float64) for _ in KEPT]
        batch_norm(x, *kept, training=True)
        torch.nn.functional.batch_norm(x.double(), *wide, training=True)
        for found, right in zip(kept, wide, strict=True):
            assert_near(found, right, n=4, terms=right.abs() + 1, what=f"from {start} on")


def test_autograd_sees_that_they_are_written() -> None:
    norm = BatchNorm2d(8, device="cuda")
    before = [t._version for t in norm.buffers()]
    x = torch.randn(2, 8, 3, 3, device="cuda", requires_grad=True)
    result = norm.eval()(x)
    norm.train()(x)
    assert all(t._version > old for t, old in zip(norm.buffers(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_in_inference_mode() -> None:
    norm, x = BatchNorm2d(8, device="cuda"), torch.randn(2, 8, 3, 3, device="cuda")
    with torch.inference_mode():
        norm(x)
        inside = BatchNorm2d(8, device="cuda")
        inside(x)
    assert norm.num_batches_tracked.item() == inside.num_batches_tracked.item() == 1
    assert torch.equal(norm.running_mean, inside.running_mean)
