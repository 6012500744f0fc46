"""What compares interpreted kernels finds a wrong result, in bfloat16 as in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import checked, close, run, values
from segments import evaluate, rms_norm
from test_roundings import planted

from shardfuse.ir.dtype import DataType


@pytest.mark.parametrize("dtype", [DataType.BFloat16, DataType.Half, DataType.Float])
def test_what_is_wrong_is_found(tmp_path: Path, dtype: DataType) -> None:
    segment = rms_norm(6, 64, dtype)
    x, w = values(6, 64, dtype=dtype), values(64, dtype=dtype, seed=1)
    inputs = dict(zip(segment.inputs, (x, w), strict=True))
    (out,) = run(segment, inputs, tmp_path)
    wide = x.double()
    wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.double()
    close(out, wanted)
    expected = evaluate(segment, inputs)
    for wrong in planted(out).values():
        with pytest.raises(AssertionError, match=r"element \["):
            checked([wrong], expected)
        wrong.expected = expected[0]
        with pytest.raises(AssertionError, match=r"element \["):
            close(wrong, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_softmax_of_zeros_is_found(dtype: torch.dtype) -> None:
    """Of 1024 classes the largest probability is below what a bound of 1.6e-2 lets pass."""
    with pytest.raises(AssertionError, match=r"element \["):
        close(torch.zeros(4, 1024, dtype=dtype), values(4, 1024).double().softmax(1))
