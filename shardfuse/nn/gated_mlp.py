"""The gated MLP of many models, with its gate as one fusion."""

from __future__ import annotations

import copy
from typing import Any, Literal, cast

import torch

from .activation import SwiGLU
from .gated import GeGLU

Module = torch.nn.Module


class GatedMLP(Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), of the three layers that it is given.

    activation: "silu", "gelu" or "gelu_tanh".  The state dict is that of the MLP whose layers they are.
    """

    def __init__(
        self,
        gate_proj: Module,
        up_proj: Module,
        down_proj: Module,
        activation: Literal["silu", "gelu", "gelu_tanh"] = "silu",
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        is_silu = activation == "silu"
        self.gate = SwiGLU() if is_silu else GeGLU("tanh" if activation == "gelu_tanh" else "none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features] -> what down_proj makes of the gated features."""
        return self.down_proj(self.gate(self.gate_proj(x), self.up_proj(x)))


def gated_mlp_of(module: Module) -> GatedMLP | str:
    """A GatedMLP of the layers of an MLP that computes one; else a reason.

    It is tried on random numbers, in copies of its layers; only plain linear layers are taken.
    """
    layers = {name: child for name, child in module.named_children() if name.endswith("_proj")}
    if list(layers) != ["gate_proj", "up_proj", "down_proj"] or list(module.named_parameters(recurse=False)):
        return "it has other layers or parameters beside gate_proj, up_proj and down_proj"
    if not all(type(layer) is torch.nn.Linear for layer in layers.values()):
        return "its layers are not all torch.nn.Linear"
    activation = _activation_of(getattr(module, "act_fn", None))
    if activation is None:
        return "its act_fn is neither SiLU nor GELU"
    try:
        trial = copy.deepcopy(module).to_empty(device="cpu").float().eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in trial.parameters():
                p.normal_(std=0.1, generator=generator)
            x = torch.randn(3, cast(Any, layers["gate_proj"]).in_features, generator=generator)
            got = trial(x)
            children = dict(trial.named_children())
            act = cast("Module", cast(Any, trial).act_fn)
            wanted = children["down_proj"](act(children["gate_proj"](x)) * children["up_proj"](x))
    except Exception as error:  # noqa: BLE001 the caller's code may raise anything; the reason is reported
        return f"it failed on random numbers: {error}"
    if not is_close(got, wanted):
        return "it computes something else than down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    return GatedMLP(layers["gate_proj"], layers["up_proj"], layers["down_proj"], activation)


def _activation_of(act: object) -> Literal["silu", "gelu", "gelu_tanh"] | None:
    """Which activation a module is, as it computes it."""
    if not isinstance(act, Module):
        return None
    x = torch.linspace(-4.0, 4.0, 17)
    with torch.no_grad():
        got: object = act(x)
    gelu = torch.nn.functional.gelu
    known = {"silu": torch.nn.functional.silu(x), "gelu": gelu(x), "gelu_tanh": gelu(x, approximate="tanh")}
    return next((cast(Any, name) for name, wanted in known.items() if is_close(got, wanted, 1e-6)), None)


def is_close(got: object, wanted: torch.Tensor, off: float = 1e-4) -> bool:
    """Is what a module gave a float32 tensor of these numbers, by the fraction ``off`` at most?"""
    return isinstance(got, torch.Tensor) and got.shape == wanted.shape and torch.allclose(got, wanted, off, off / 10)
