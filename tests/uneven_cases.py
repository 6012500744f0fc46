"""DTensors whose shards differ in size, are of one element or empty, for modules of shardfuse.nn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from dtensor_cases import distribute, numbers
from nn_cases import S0, S1, R, along
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch_answers import assert_beside

from shardfuse import DeviceMesh

Placements = Sequence[Placement]
LAST = Shard(-1)

UNEVEN = {
    "rows": ((4,), [S0], (5, 6)),
    "fewer_rows_than_ranks": ((4,), [S0], (3, 6)),
    "one_row": ((4,), [S0], (1, 6)),
    "no_row": ((4,), [S0], (0, 6)),
    "sequence": ((4,), [S1], (2, 7, 6)),
    "hidden": ((4,), [LAST], (3, 5)),
    "fewer_columns_than_ranks": ((4,), [LAST], (2, 3)),
    "vector": ((4,), [LAST], (6,)),
    "batch_and_sequence": ((2, 2), [S0, S1], (3, 5, 6)),
    "one_row_on_two_dims": ((2, 2), [S0, S0], (1, 6)),
    "two_rows_on_two_dims": ((2, 2), [S0, S0], (2, 6)),
    "one_row_and_columns": ((2, 2), [S0, LAST], (1, 5)),
    "rows_of_replicas": ((2, 2), [S0, R], (3, 6)),
    "rows_that_torch_cuts_elsewhere": ((2, 2), [S0, S0], (9, 6)),
    "columns_that_torch_cuts_elsewhere": ((2, 2), [LAST, LAST], (3, 9)),
}
"""The shape of the mesh, where the activations live, and their shape."""


class Check:
    """Tensors on this rank's mesh, their results and gradients against a function of the unsharded tensors."""

    def __init__(self, mesh: TorchMesh, placements: Placements, shape: Sequence[int]) -> None:
        self.mesh, self.shape = mesh, tuple(shape)
        self.ours = DeviceMesh(mesh.mesh)
        self.at = self.resolved(placements)
        self.leaves: list[tuple[Tensor, Tensor, Placements]] = []

    def resolved(self, placements: Placements) -> list[Placement]:
        return [Shard(p.dim % len(self.shape)) if isinstance(p, Shard) else p for p in placements]

    def activation(self, placements: Placements | None = None) -> DTensor:
        """A DTensor that needs a gradient."""
        at = self.at if placements is None else self.resolved(placements)
        full = numbers(self.shape, len(self.leaves), torch.float64)
        given = distribute(full, self.mesh, at).requires_grad_()
        self.leaves.append((given, full, [R if p.is_partial() else p for p in at]))
        return given

    def parameter(self, module: torch.nn.Module, name: str) -> None:
        """Fill a parameter along the last dim; of short parts that torch cuts elsewhere it is a DTensor."""
        full = numbers(self.shape[-1:], 10 + len(self.leaves), torch.float64)
        at = along(self.at, len(self.shape) - 1)
        parameter = torch.nn.Parameter(distribute(full, self.mesh, at))
        if not (at == [S0, S0] and full.shape[0] == 9):
            parameter = torch.nn.Parameter(parameter.detach().to_local())
        setattr(module, name, parameter)
        self.leaves.append((parameter, full, at))

    def compare(
        self,
        results: Sequence[Tensor],
        where: Sequence[Placements],
        function: Callable[..., Sequence[Tensor]],
        upstream: Sequence[Placements] | None = None,
    ) -> None:
        wanted = [full.clone().requires_grad_() for _, full, _ in self.leaves]
        expected = function(*wanted)
        gradients = [numbers(t.shape, 90 + k, torch.float64) for k, t in enumerate(expected)]
        torch.autograd.backward(expected, gradients)
        for result, want, placements in zip(results, expected, where, strict=True):
            assert isinstance(result, DTensor)
            assert (tuple(result.placements), result.shape) == (tuple(placements), want.shape)
            own = distribute(want.detach(), self.mesh, placements).to_local()
            assert_beside(result.to_local(), own, "result")
        given = [distribute(g, self.mesh, p) for g, p in zip(gradients, upstream or where, strict=True)]
        torch.autograd.backward(list(results), given)
        for k, ((leaf, _, placements), want) in enumerate(zip(self.leaves, wanted, strict=True)):
            assert leaf.grad is not None, f"no gradient of tensor {k}"
            own = distribute(want.grad, self.mesh, placements).to_local()
            grad = leaf.grad.to_local() if isinstance(leaf.grad, DTensor) else leaf.grad
            assert_beside(grad, own, f"gradient of tensor {k}")
