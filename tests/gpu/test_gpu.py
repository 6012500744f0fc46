"""What CPU tests hold generated kernels to under the interpreter, on a GPU: random fusions and the modules."""

from __future__ import annotations

import pytest
import torch
from fusion_check import check
from nn_cases import ON_LINE, Here
from random_fusions import random_case
from torch_answers import Argument

from shardfuse import DeviceMesh
from shardfuse.nn import CrossEntropyLoss

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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_target_that_is_no_class_is_nan(reduction: str) -> None:
    """Without waiting for the GPU; its row's gradient is NaN too, and the other rows' losses are theirs."""
    x = torch.randn(6, 7, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).requires_grad_()
    target = torch.tensor([0, -100, 7, 3, -1, 6], device="cuda")
    known = torch.tensor([0, -100, 0, 3, 0, 6], device="cuda")
    loss = CrossEntropyLoss(reduction=reduction)(x, target)
    loss.sum().backward()
    strays = torch.tensor([False, False, True, False, True, False], device="cuda")
    assert torch.equal(x.grad.isnan().all(1), strays)
    assert torch.equal(x.grad.isnan().any(1), strays)
    if reduction != "none":
        assert loss.isnan()
        return
    want = torch.nn.functional.cross_entropy(x.detach(), known, reduction="none")
    assert torch.equal(loss.isnan(), strays)
    torch.testing.assert_close(loss[~strays], want[~strays])
