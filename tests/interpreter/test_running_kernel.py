"""The kernel that moves running statistics, run by Triton's interpreter, against torch."""

from __future__ import annotations

import importlib

import pytest
import torch

from shardfuse.nn import running_kernel


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("channels", [1, 320, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_statistics_move(channels: int, momentum: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 beside float32: Triton's interpreter does not round bfloat16.  Nothing beside them changes."""
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kernels = importlib.reload(running_kernel)  # its functions are interpreted ones
    torch.manual_seed(channels)
    kept = [torch.randn(channels + 2).to(dtype) for _ in range(2)]
    before = [t.clone() for t in kept]
    batch, count = [torch.randn(channels) for _ in range(2)], torch.tensor(6)
    for counted in (count, None):
        inner = [t[1:-1] for t in kept]
        wanted = [t.double().lerp(b.double(), momentum) for t, b in zip(inner, batch, strict=True)]
        kernels.move_statistics[(-(-channels // kernels.BLOCK),)](
            *inner, *batch, count, channels, momentum, IS_COUNTED=counted is not None, BLOCK=kernels.BLOCK
        )
        for found, right, b in zip(inner, wanted, batch, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=0, atol=4 * torch.finfo(dtype).eps)
            assert momentum < 1 or torch.equal(found, b.to(dtype))
    assert count.item() == 7
    for found, old in zip(kept, before, strict=True):
        assert torch.equal(found[[0, -1]], old[[0, -1]])
