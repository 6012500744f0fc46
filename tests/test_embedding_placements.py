"""What a vocabulary-parallel embedding gives, as an input of fusions and modules."""

from __future__ import annotations

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import S0, S1, P, R
from ranks import run_ranks
from torch.distributed.tensor import Placement
from torch.nn import functional
from torch_answers import assert_beside

from shardfuse import DeviceMesh, FusionDefinition, nn
from shardfuse.errors import PlacementError


@pytest.mark.parametrize("at", [R, S1], ids=str)
def test_the_result_of_a_vocabulary_parallel_embedding(at: Placement) -> None:
    """Each rank's summand of it is masked, by torch alone; redistributed as the error says, it is a module's input."""
    table, ids = numbers((6, 4), 0, torch.float64), torch.tensor([[0, 5, 3, 1], [2, 4, 4, 0]])
    weight = numbers((2, 4, 4), 1, torch.float64)
    plain = table.clone().requires_grad_()
    wanted = functional.rms_norm(functional.embedding(ids, plain), (4,), eps=1e-6)
    wanted.backward(weight)

    def run(rank: int, size: int) -> None:
        torch_mesh = make_mesh((2,))
        mesh = DeviceMesh(torch_mesh.mesh)
        given = distribute(table, torch_mesh, [S0]).requires_grad_()
        x = functional.embedding(distribute(ids, torch_mesh, [R]), given)
        with pytest.raises(PlacementError, match=r"x=.*Mask.*: redistribute it to Replicate\(\), or to a Shard, and"):
            nn.RMSNorm(4, mesh=mesh, input=P)(x)
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.neg(fd.define_tensor([-1, -1, -1], contiguity=True)))
        with pytest.raises(PlacementError, match=r"input 0=.*Mask.* does not fit a fusion: redistribute it to Replic"):
            fd.execute_with_dtensors([x.detach()])
        found = nn.RMSNorm(4, mesh=mesh, input=at, dtype=torch.float64)(x.redistribute(placements=[at]))
        assert_beside(found.full_tensor().detach(), wanted.detach(), "result")
        found.backward(distribute(weight, torch_mesh, [at]))
        assert_beside(given.grad.full_tensor(), plain.grad, "the table's gradient")

    run_ranks(2, run)
