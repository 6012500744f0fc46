"""What a compiled graph writes in place into a DTensor that its backward reads, and into one that it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import S0
from ranks import run_ranks
from torch import Tensor

from shardfuse import DeviceMesh, nn

WRITTEN: dict[str, tuple[Callable[[DeviceMesh], torch.nn.Module], int, bool, bool]] = {
    # the module, its tensors, and whether its backward reads its input and its last result
    "softmax": (lambda m: nn.Softmax(mesh=m, input=S0), 1, False, True),
    "add_rms_norm": (lambda m: nn.AddRMSNorm(6, mesh=m, input=S0, residual=S0), 2, False, True),
    "rms_norm": (lambda m: nn.RMSNorm(6, mesh=m, input=S0), 1, True, False),
}


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("name", WRITTEN)
def test_written_before_the_backward(name: str) -> None:
    """One that the backward reads is refused while the graph is made, as torch's own softmax is; others may be."""
    make, tensors, reads_input, reads_result = WRITTEN[name]

    def gradients(module: torch.nn.Module, written: str, given: list[Tensor], is_compiled: bool) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in given]

        def call(*leaves: Tensor) -> Tensor:
            inputs = [t * 1.5 for t in leaves]
            results = module(*inputs)
            results = (results,) if isinstance(results, Tensor) else results
            if written == "input":
                inputs[0].mul_(2)
            if written == "result":
                results[-1].mul_(2)
            return sum(r.square().sum() for r in results)

        torch._dynamo.reset()
        run = torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call
        run(*leaves).backward()
        return [leaf.grad.full_tensor() for leaf in leaves]

    def run(rank: int, size: int) -> None:
        torch_mesh = make_mesh((1,))
        module = make(DeviceMesh(torch_mesh.mesh))
        given = [distribute(numbers((4, 6), k, torch.float64), torch_mesh, [S0]) for k in range(tensors)]
        for written, is_read in (("", False), ("input", reads_input), ("result", reads_result)):
            if is_read:
                for is_compiled in (False, True):
                    with pytest.raises(Exception, match="modified by an inplace operation: a tensor of shape"):
                        gradients(module, written, given, is_compiled)
            else:
                found, wanted = (gradients(module, written, given, is_compiled) for is_compiled in (True, False))
                for a, b in zip(found, wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    run_ranks(1, run)
