"""Fusions without inputs on a GPU, results that are changed in place, and autograd, where kernels make the results."""

from __future__ import annotations

import pytest
import torch
from inputless import INPUTLESS, check_inputless

from shardfuse import FusionDefinition, NoGradientsWarning
from shardfuse.nn import RMSNorm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", INPUTLESS)
def test_fusions_without_inputs(name: str) -> None:
    check_inputless(name, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_results_carry_no_graph_and_are_changed_in_place(backend: str) -> None:
    with FusionDefinition(backend=backend) as fd:
        x = fd.define_tensor([-1, 64], contiguity=True)
        total = fd.ops.sum(fd.ops.mul(x, x), [-1], keepdim=True)
        y = fd.ops.mul(x, fd.ops.rsqrt(total))
        fd.add_output(y)
        fd.add_output(fd.ops.reshape(y, [64, -1]))
        fd.add_output(total)
        fd.add_output(fd.ops.matmul(fd.ops.permute(y, [1, 0]), y))
    given = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
    with pytest.warns(NoGradientsWarning, match="input 0, T0"):
        outputs = fd.execute([given])
    weight = torch.ones((), device="cuda", requires_grad=True)
    for y in outputs:
        assert not y.requires_grad
        before = y.clone()
        y += weight
        assert torch.equal(y.detach(), before + 1)
        y.sum().backward()
    assert given.grad is None


def test_a_backward_in_autograds_own_thread_is_no_second_thread() -> None:
    module = RMSNorm(64, device=torch.device("cuda"))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
    for _ in range(2):
        y = module(x)
        y += 1
        y.sum().backward()
    assert x.grad is not None
