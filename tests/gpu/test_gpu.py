"""What CPU tests hold generated kernels to under the interpreter, on a GPU: random fusions and the modules."""

from __future__ import annotations

import pytest
import torch
from fusion_check import check
from nn_cases import ON_LINE, Here
from random_fusions import random_case
from torch_answers import Argument

from shardfuse import DeviceMesh

pytestmark = pytest.mark.gpu

CASES = 400
PER_TEST = 20


@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_random_fusions(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        _, case = random_case(seed, worlds=(1,), backend="triton")
        check(case.fd, case.inputs, sizes=case.sizes, device="cuda")


def on_gpu(value: Argument) -> Argument:
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", ON_LINE)
def test_modules(name: str) -> None:
    ON_LINE[name](Here(DeviceMesh([0]), torch.device("cuda")))


def test_runs_are_bitwise_equal() -> None:
    for seed in range(40):
        _, case = random_case(seed, worlds=(1,), backend="triton")
        inputs = [on_gpu(x) for x in case.inputs]
        first = case.fd.execute(inputs, sizes=case.sizes)
        for _ in range(5):
            for a, b in zip(first, case.fd.execute(inputs, sizes=case.sizes), strict=True):
                assert torch.equal(bits(a), bits(b)), str(case)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)
