"""A small model of the modules that have parameters, sharded by hidden axis or rows, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from shardfuse import DeviceMesh
from shardfuse.nn import AddRMSNorm, RMSNorm, SwiGLU

EPS = 1e-6


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(list(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Tower(torch.nn.Module):
    """Norms and a gate, of ``hidden`` channels.  ``by``: Shard(-1) cuts the parameters, Shard(0) leaves them whole."""

    def __init__(self, hidden: int, mesh: DeviceMesh | None = None, by: Shard | None = None, **options: Any) -> None:
        super().__init__()
        options = {"dtype": torch.float64, "mesh": mesh, **options}
        self.add_norm = AddRMSNorm(hidden, EPS, bias=True, input=by, residual=by, **options)
        self.gate = SwiGLU(hidden, bias=True, input=by, **options)
        self.norm = RMSNorm(hidden, EPS, input=by, **options)

    def forward(self, x: Tensor, residual: Tensor, unsharded: Sequence[int] | None = None) -> Tensor:
        """x, residual: [rows, hidden], local -> the same."""
        normed, total = self.add_norm(x, residual, unsharded=unsharded)
        return self.norm(self.gate(normed, total, unsharded=unsharded), unsharded=unsharded)


class PlainTower(torch.nn.Module):
    """The same unsharded, in torch, with parameters of the same names."""

    def __init__(self, hidden: int, seed: int = 1) -> None:
        super().__init__()
        parts = {"add_norm": ["weight", "input_bias"], "gate": ["gate_bias", "up_bias"], "norm": ["weight"]}
        for part, names in parts.items():
            values = [(n, torch.nn.Parameter(numbers([hidden], seed + k))) for k, n in enumerate(names)]
            setattr(self, part, torch.nn.ParameterDict(values))  # a dict would be sorted
            seed += 10

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        total = residual + x + self.add_norm["input_bias"]
        normed = functional.rms_norm(total, total.shape[-1:], self.add_norm["weight"], EPS)
        gated = functional.silu(normed + self.gate["gate_bias"]) * (total + self.gate["up_bias"])
        return functional.rms_norm(gated, gated.shape[-1:], self.norm["weight"], EPS)


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, on every rank; each piece is of the size that torch gives it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_parameters(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Equal to float64's rounding, names and all."""
    wanted = dict(plain.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(wanted)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            whole(parameter), wanted[name].detach(), rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
