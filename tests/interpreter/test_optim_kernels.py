"""The optimiser's own kernels under the interpreter: against torch in float64, and within their tensors."""

from __future__ import annotations

import math

import pytest
import torch
from interpreted import poisoned
from optim_cases import (
    BF16,
    CASES,
    F16,
    F32,
    Case,
    check_moments_without_memory,
    compare,
    gradients,
    parameters,
)  # fmt: skip
from torch.nn import Parameter

from benchmarks.roundings import assert_near
from shardfuse import optim
from shardfuse.optim.tensor_lists import Launcher

CPU = torch.device("cpu")
TRIED = ("options", "clip by sums of powers", "masters", "all types")
EDGES = (1, 2047, 8192, 8193)
"""Elements: below a tile, a whole chunk of an update, one more."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, as they are launched."""
    names: list[str] = []
    real = Launcher.bind

    def bind(self: Launcher, name: str, *arguments: object) -> object:
        launch = real(self, name, *arguments)

        def recording(*given: object) -> None:
            names.append(name)
            launch(*given)

        return recording

    monkeypatch.setattr(Launcher, "bind", bind)
    return names


@pytest.mark.parametrize("case", [c for c in CASES if c.name in TRIED], ids=str)
def test_steps_are_those_of_torch_in_float64(case: Case, launched: list[str]) -> None:
    compare(case, CPU, steps=2)
    assert "adamw" in launched


def test_moments_without_memory(launched: list[str]) -> None:
    check_moments_without_memory(CPU)
    assert "adamw" in launched


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping(norm_type: float, launched: list[str]) -> None:
    tensors = [*parameters([(70_000,), ()], F32, CPU), *parameters([(9, 5)], BF16, CPU), *parameters([(33,)], F16, CPU)]
    gradients(tensors, 0)
    wide = [Parameter(p.detach().double()) for p in tensors]
    for p, q in zip(tensors, wide, strict=True):
        q.grad = p.grad.double()
    norm = torch.nn.utils.clip_grad_norm_(wide, 2.0, norm_type)
    assert_near(optim.clip_grad_norm_(tensors, 2.0, norm_type), norm, n=4)
    assert launched == ["norm_partials", "finish_norm", "scale_gradients"]
    for p, q in zip(tensors, wide, strict=True):
        assert_near(p.grad, q.grad, n=2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_that_are_not_finite(value: float, norm_type: float) -> None:
    own, plain = (parameters([(50,), (3,)], F32, CPU) for _ in range(2))
    for tensors in (own, plain):
        gradients(tensors, 0)
        tensors[0].grad[17] = value
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, norm_type)
    torch.testing.assert_close(optim.clip_grad_norm_(own, 1.0, norm_type), expected, equal_nan=True)
    for p, q in zip(own, plain, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)
    for tensors in (own, plain):
        gradients(tensors, 0)
        tensors[0].grad[17] = value
    optim.clip_grad_norm_(own, math.inf, norm_type)
    torch.nn.utils.clip_grad_norm_(plain, math.inf, norm_type)
    for p, q in zip(own, plain, strict=True):
        assert p.grad.isnan().all()
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_stores_stay_within_their_tensors(dtype: torch.dtype, launched: list[str]) -> None:
    tensors, buffers = list[Parameter](), list[torch.Tensor]()
    for k, size in enumerate(EDGES):
        data, buffer = poisoned((size,), dtype)
        data.copy_(torch.linspace(-1, 1, size))
        tensors.append(Parameter(data))
        gradient, its = poisoned((size,), dtype)
        tensors[-1].grad = gradient.fill_(0.5 + k)
        buffers += [buffer, its]
    optimizer = optim.AdamW(tensors, max_norm=1.0, amsgrad=True)
    for p in tensors:
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            moment, buffer = poisoned((p.numel(),), F32)
            optimizer.state[p][key] = moment.zero_()
            buffers.append(buffer)
    optimizer.step()
    optim.clip_grad_norm_(tensors, 1.0)
    assert launched == [
        "norm_partials", "finish_norm_and_prepare", "adamw", "norm_partials", "finish_norm", "scale_gradients"
    ]  # fmt: skip
    for buffer in buffers:
        ends = torch.cat([buffer[:64], buffer[-64:]]).view(torch.uint8)
        assert (ends == 0x5A).all(), "a store left its tensor"
    assert all(optimizer.state[p]["exp_avg"].abs().min() > 0 for p in tensors), "all elements are written"


def test_norms_are_bitwise_the_same_in_each_run() -> None:
    tensors = parameters([(70_000,), (333,)], F32, CPU)
    assert len({optim.get_total_norm(tensors).item() for _ in range(3)}) == 1
