"""The gated MLP of many models, with its gate as one fusion."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import PlacementError
from ..frontend.detection import has_dtensor
from ..ir.promises import Promises
from ..mesh import DeviceMesh
from ..mesh.groups import world_key
from .activation import SwiGLU
from .activation_functions import Activation
from .attributes_read import Read, attributes_read
from .gated import GeGLU
from .settings import checked_module
from .stand_in import StandIn
from .timer import FusionTimer
from .trial import Case, apart, is_close, likeness, why_other

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Module = torch.nn.Module


@checked_module
class GatedMLP(StandIn):
    """A gated MLP of three given layers: down_proj(act(gate_proj(x)) * up_proj(x)).

    activation: "silu", "gelu" or "gelu_tanh".  The state dict is that of the MLP whose layers they are.

    The parameters may be DTensors: the gate is computed where gate_proj and up_proj leave their results.
    Column-parallel gate_proj and up_proj (``Shard(0)`` of their weights) with a row-parallel down_proj (``Shard(1)``)
    are a tensor-parallel MLP.
    Raises ModuleArgumentError; a call raises PlacementError where those are not the same Shard and Replicate.
    """

    def __init__(
        self,
        gate_proj: Module,
        up_proj: Module,
        down_proj: Module,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.gate = _gate(activation)

    def __call__(self, *tensors: object, **named: object) -> Any:
        if named and self.input_name in named:
            tensors = (named.pop(self.input_name), *tensors)
        return super().__call__(*tensors, **named)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features] -> what down_proj makes of the gated features."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        unit = self.gate
        if unit.mesh is None and has_dtensor((gate, up)) and not unit.is_decomposed():
            unit = _gate_on(world_key(), unit.activation, unit.promises, unit.timer, *_found_on(gate, up))
        return self.down_proj(unit(gate, up))


def _found_on(gate: torch.Tensor, up: torch.Tensor) -> tuple[TorchDeviceMesh, tuple[Placement, ...]]:
    """The mesh and the placements that both have.  Raises PlacementError."""
    from torch.distributed.tensor import Replicate, Shard

    for name, other_name, found, other in (("gate", "up", gate, up), ("up", "gate", up, gate)):
        if not has_dtensor((found,)):
            against = f"a plain tensor, which is what {name}_proj gives"
            advice = "make the weights of both layers DTensors, or of neither"
            raise PlacementError(f"{other_name}_proj(x)", cast("DTensor", other).placements, against, advice)
        placements = cast("DTensor", found).placements
        if any(type(p) not in (Shard, Replicate) for p in placements):
            advice = f"make {name}_proj column-parallel, or redistribute what it gives to Shard or Replicate"
            raise PlacementError(f"{name}_proj(x)", placements, "GatedMLP, which gates whole values", advice)
    has, wanted = cast("DTensor", up), cast("DTensor", gate)
    if (has.device_mesh, has.placements) != (wanted.device_mesh, wanted.placements):
        against = f"{wanted.placements} on {wanted.device_mesh}, where gate_proj(x) is"
        raise PlacementError("up_proj(x)", has.placements, against, "shard the weights of both layers alike")
    return wanted.device_mesh, tuple(wanted.placements)


def _gate(
    activation: Activation, mesh: DeviceMesh | None = None, input: tuple[Placement, ...] | None = None
) -> SwiGLU | GeGLU:
    if activation == "silu":
        return SwiGLU(mesh=mesh, input=input)
    return GeGLU("tanh" if activation == "gelu_tanh" else "none", mesh=mesh, input=input)


@lru_cache(maxsize=256)
def _gate_on(
    world: tuple[int, int],
    activation: Activation,
    promises: Promises | None,
    timer: FusionTimer | None,
    mesh: TorchDeviceMesh,
    placements: tuple[Placement, ...],
) -> SwiGLU | GeGLU:
    """A gate of tensors that live so.  world: its fusions are bound to the process group."""
    unit = _gate(activation, DeviceMesh.from_torch(mesh), placements)
    unit.promises, unit.timer = promises, timer
    vars(unit)["made_at"] = ()  # errors name the line of the call alone
    return unit


_CASES = Case((16,)), Case((2, 3, 4), 30.0)
"""Few, as the layers of a model are large."""
_FAR = Case((2,), 1e5, has_nan=True)
"""What clips large numbers, or replaces NaNs, is no gated MLP."""
_ACT_NAMES = "act_fn", "activation_fn"
Tried = str | tuple[str, ...]
"""Why an MLP is left, or the functions by which its forward computes."""
_TORCHS = torch.nn.SiLU, torch.nn.GELU
"""Whose attributes say no more than which activation they are."""


def gated_mlp_of(module: Module, tried: dict[Hashable, Tried]) -> GatedMLP | str:
    """A GatedMLP of the layers of an MLP that computes one; else a reason.

    It is tried on random numbers, in a copy of it; only plain linear layers are taken.  tried: what came of that, of
    modules alike: a model has one in each layer, and a trial of 35 million parameters takes a second.
    """
    children = dict(module.named_children())
    layers = {name: child for name, child in children.items() if name.endswith("_proj")}
    if list(layers) != ["gate_proj", "up_proj", "down_proj"] or list(module.named_parameters(recurse=False)):
        return "it has other layers or parameters beside gate_proj, up_proj and down_proj"
    if not all(type(layer) is torch.nn.Linear for layer in layers.values()):
        return "its layers are not all torch.nn.Linear"
    act_name = next((name for name in _ACT_NAMES if name in children), None)
    if act_name is None:
        return f"its activation is not a module called {' or '.join(_ACT_NAMES)}"
    act = children[act_name]
    activation = _activation_of(act)
    if activation is None:
        return f"its {act_name} is neither SiLU nor GELU"
    others = [name for name in children if name not in (*layers, act_name)]
    if others or list(module.buffers(recurse=False)) or list(act.parameters()):
        further = ", ".join(others) or f"buffers, or parameters of {act_name}"
        return f"it holds more than its layers and {act_name}: {further}"
    alike = likeness(module)
    try:
        if alike not in tried:
            tried[alike] = _tried(module, act_name, act)
    except Exception as error:  # noqa: BLE001 the caller's code may raise anything; the reason is reported
        return f"it failed on random numbers: {error}"
    found = tried[alike]
    if isinstance(found, str):
        return found
    made = GatedMLP(layers["gate_proj"], layers["up_proj"], layers["down_proj"], activation)
    made.stand_for(module, {}, (act_name, *found))
    return made


def _tried(module: Module, act_name: str, act: Module) -> Tried:
    """Whether a GatedMLP would compute what ``module`` does, now and once a caller has set an attribute."""
    features = cast(Any, module).gate_proj.in_features
    reason = why_other(module, partial(_gated, act_name), features, (*_CASES, _FAR), 0.1)
    if reason is not None:
        return f"it computes something else than down_proj({act_name}(gate_proj(x)) * up_proj(x)): {reason}"
    read = attributes_read(module, features, _CASES)
    of_act = Read() if type(act) in _TORCHS else attributes_read(act, features, _CASES)
    inner = [[f"{act_name}.{name}" for name in names] for names in (of_act.state, of_act.written)]
    both = Read(written=(*read.written, *inner[1]), outside=(*read.outside, *of_act.outside))
    why = both.why_not([*read.state, *inner[0]], "a GatedMLP")
    if why is None:
        return read.functions
    return f"{why}: if nothing changes that, put a GatedMLP of its layers in its place yourself"


def _gated(act_name: str, module: Module, x: torch.Tensor) -> torch.Tensor:
    layers = cast(Any, module)
    return layers.down_proj(getattr(layers, act_name)(layers.gate_proj(x)) * layers.up_proj(x))


def _activation_of(act: object) -> Activation | None:
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
