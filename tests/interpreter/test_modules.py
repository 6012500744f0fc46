"""The kernels of every function of shardfuse.nn.functional, forward and backward, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from functional_cases import CASES, check


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about lanes that are masked
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_STRICT", "1")  # a kernel that fails is an error, not a call of torch
    for dtype in (torch.float32, torch.bfloat16):
        check(CASES[name], dtype)
