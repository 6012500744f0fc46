"""``unsharded=`` beside DTensors, which know their own shape: the same one is taken, and another is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import S0, S1, S2, P, Placements, R
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Shard

from shardfuse import DeviceMesh, nn
from shardfuse.errors import ModuleInputError
from shardfuse.nn import quantized

LAST = Shard(-1)
SAID: dict[str, tuple[Callable[[DeviceMesh], torch.nn.Module], Sequence[int], Placements, int]] = {
    "rms_norm": (lambda m: nn.RMSNorm(6, mesh=m, input=S0), (5, 6), [S0], 1),
    "rms_norm_of_partial": (lambda m: nn.RMSNorm(6, mesh=m, input=P, output=S0), (4, 6), [P], 1),
    "layer_norm_of_two_dims": (lambda m: nn.LayerNorm((3, 4), mesh=m, input=S0), (5, 3, 4), [S0], 1),
    "add_rms_norm": (lambda m: nn.AddRMSNorm(6, mesh=m, input=S0, residual=S0), (5, 6), [S0], 2),
    "quantized": (lambda m: quantized.AddRMSNorm(6, mesh=m, input=S0, residual=S0), (5, 6), [S0], 2),
    "group_norm": (lambda m: nn.GroupNorm(2, 4, mesh=m, input=S2), (3, 4, 5, 2), [S2], 1),
    "batch_norm": (lambda m: nn.BatchNorm1d(4, mesh=m, input=S0), (5, 4, 3), [S0], 1),
    "softmax": (lambda m: nn.Softmax(mesh=m, input=LAST), (3, 7), [S1], 1),
    "masked softmax": (lambda m: nn.Softmax(mesh=m, input=S0), (3, 7), [S0], 2),
    "gelu": (lambda m: nn.GELU(mesh=m, input=S0), (3, 4), [S0], 1),
    "geglu": (lambda m: nn.GeGLU(mesh=m, input=LAST), (2, 3, 5), [S2], 2),
    "swiglu_packed": (lambda m: nn.SwiGLU(mesh=m, input=S0), (3, 2, 6), [S0], 1),
    "rotary": (lambda m: nn.RotaryEmbedding(6, mesh=m, input=S2), (2, 3, 5, 6), [S2], 2),
    "redistribution": (lambda m: nn.Redistribution(m, S0, R, R), (5, 6), [S0], 1),
    "replicated": (lambda m: nn.GELU(mesh=m), (3, 4), [R], 1),
}


def results(found: object) -> list[DTensor]:
    """Those of a call, with the values and the scales of a quantized one."""
    if isinstance(found, DTensor):
        return [found]
    return [result for part in found for result in results(part)]


@pytest.mark.parametrize("name", SAID)
def test_a_shape_that_is_said_of_dtensors_is_theirs(name: str) -> None:
    """The same one is taken; any other was ignored."""

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        make, whole, at, tensors = SAID[name]
        module, given = make(DeviceMesh(mesh.mesh)), [distribute(numbers(whole, k), mesh, at) for k in range(tensors)]
        with torch.no_grad():
            for right, found in zip(results(module(*given)), results(module(*given, unsharded=[*whole])), strict=True):
                assert torch.equal(right.to_local(), found.to_local())
            for shape in (given[0].to_local().shape, [9, *whole[1:]], (*whole, 1)):
                if tuple(shape) == tuple(whole):  # of replicas
                    continue
                sizes = re.escape(f"{list(shape)}, expected {list(whole)}")
                said = rf"^\w+: unsharded has sizes {sizes}, as \w+ is a DTensor: leave it out"
                with pytest.raises(ModuleInputError, match=said):
                    module(*given, unsharded=shape)

    run_ranks(2, run)


def test_a_shape_that_is_said_of_dtensor_logits_is_theirs() -> None:
    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        ours = DeviceMesh(mesh.mesh)
        logits = distribute(numbers((5, 7), 1), mesh, [S1])
        target = distribute(torch.arange(5), mesh, [R])
        for module in (nn.CrossEntropyLoss(mesh=ours, logits=LAST), nn.LogProb(mesh=ours, logits=LAST)):
            module(logits, target, unsharded=(5, 7))
            with pytest.raises(ModuleInputError, match=r"expected \[5, 7\], as logits is a DTensor: "):
                module(logits, target, unsharded=(5, 8))
        loss = nn.CrossEntropyLoss(mesh=ours, logits=LAST, num_classes=7)
        loss(logits.to_local(), target, unsharded=(5, 7))
        with pytest.raises(ModuleInputError, match=r"expected \[5, 7\], as target is a DTensor: "):
            loss(logits.to_local(), target, unsharded=(6, 7))

    run_ranks(2, run)
