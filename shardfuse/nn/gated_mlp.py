"""The gated MLP of many models, with its gate as one fusion."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch

from .activation import SwiGLU
from .gated import GeGLU
from .trial import Case, apart, is_close, why_other

Module = torch.nn.Module


class GatedMLP(Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), of the three layers that it is given.

    activation: "silu", "gelu" or "gelu_tanh".  The state dict is that of the MLP whose layers they are.
    """

    input_name: str = ""
    """The name that callers have for x where this is in the place of another module."""

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

    def __call__(self, *tensors: object, **named: object) -> Any:
        if named and self.input_name in named:
            tensors = (named.pop(self.input_name), *tensors)
        return super().__call__(*tensors, **named)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features] -> what down_proj makes of the gated features."""
        return self.down_proj(self.gate(self.gate_proj(x), self.up_proj(x)))


_CASES = Case((16,)), Case((2, 3, 4), 30.0)
"""Few, as the layers of a model are large."""


def gated_mlp_of(module: Module) -> GatedMLP | str:
    """A GatedMLP of the layers of an MLP that computes one; else a reason.

    It is tried on random numbers, in a copy of it; only plain linear layers are taken.
    """
    children = dict(module.named_children())
    layers = {name: child for name, child in children.items() if name.endswith("_proj")}
    if list(layers) != ["gate_proj", "up_proj", "down_proj"] or list(module.named_parameters(recurse=False)):
        return "it has other layers or parameters beside gate_proj, up_proj and down_proj"
    if not all(type(layer) is torch.nn.Linear for layer in layers.values()):
        return "its layers are not all torch.nn.Linear"
    act = children.get("act_fn")
    activation = _activation_of(act)
    if act is None or activation is None:
        return "its act_fn is neither SiLU nor GELU"
    others = [name for name in children if name not in (*layers, "act_fn")]
    if others or list(module.buffers(recurse=False)) or list(act.parameters()):
        return f"it holds more than its layers and act_fn: {', '.join(others) or 'buffers, or parameters of act_fn'}"
    try:
        reason = why_other(module, _gated, cast(Any, layers["gate_proj"]).in_features, _CASES, 0.1)
    except Exception as error:  # noqa: BLE001 the caller's code may raise anything; the reason is reported
        return f"it failed on random numbers: {error}"
    if reason is not None:
        return f"it computes something else than down_proj(act_fn(gate_proj(x)) * up_proj(x)): {reason}"
    return GatedMLP(layers["gate_proj"], layers["up_proj"], layers["down_proj"], activation)


def _gated(module: Module, x: torch.Tensor) -> torch.Tensor:
    layers = cast(Any, module)
    return layers.down_proj(layers.act_fn(layers.gate_proj(x)) * layers.up_proj(x))


def _activation_of(act: object) -> Literal["silu", "gelu", "gelu_tanh"] | None:
    """Which activation a module is, as it computes it."""
    if not isinstance(act, Module):
        return None
    gelu = torch.nn.functional.gelu
    with apart(), torch.no_grad():
        x = torch.linspace(-4.0, 4.0, 17, dtype=torch.float32)
        got: object = act(x)
        known = {"silu": torch.nn.functional.silu(x), "gelu": gelu(x), "gelu_tanh": gelu(x, approximate="tanh")}
    if not isinstance(got, torch.Tensor):
        return None
    return next((cast(Any, name) for name, wanted in known.items() if is_close(got, wanted, 1e-6)), None)
