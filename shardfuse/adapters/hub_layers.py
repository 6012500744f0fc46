"""Layers for ``kernels``, the library by which transformers' models take kernels of the Hugging Face hub.

A model marks the layers whose ``forward`` may be replaced by a name, ``"RMSNorm"`` for Llama's and its like.  A mapping
says for each name and device where the layer is that has the other ``forward``::

    import kernels
    from shardfuse.adapters import hub_layers

    hub_layers.register()  # or: with kernels.use_kernel_mapping(hub_layers.mapping()): ...
    model = kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cuda")

Layers of the hub have no state and no constructor: ``forward`` runs as a method of the module whose it replaces.
Source: the documentation of ``kernels``, "Layers", and ``_validate_layer`` of version 0.16.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..nn import functional

_log = logging.getLogger("shardfuse.adapters")


class RMSNorm(torch.nn.Module):
    """In place of an RMSNorm with ``weight`` and ``variance_epsilon``, rounded once, where those round twice."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = cast(torch.Tensor, self.weight)
        normed = functional.rms_norm(hidden_states, tuple(weight.shape), weight, cast(float, self.variance_epsilon))
        return normed.to(torch.promote_types(weight.dtype, hidden_states.dtype))


_LAYERS: dict[str, type[torch.nn.Module]] = {"RMSNorm": RMSNorm}


@dataclass(frozen=True)
class InstalledLayer:
    """Where ``kernels`` finds a layer: in this package, instead of a repository of the hub."""

    layer_name: str

    def load(self) -> type[torch.nn.Module]:
        """The class, as ``kernels`` asks for it when it replaces the first module."""
        found = _LAYERS[self.layer_name]
        _log.info("layers named %s run %s.%s", self.layer_name, found.__module__, found.__qualname__)
        return found

    def __str__(self) -> str:
        return f"shardfuse, layer `{self.layer_name}`"


def mapping(device: str = "cuda") -> dict[str, dict[str, InstalledLayer]]:
    """Each layer name with its layer on ``device``, as ``kernels.register_kernel_mapping`` takes it."""
    return {name: {device: InstalledLayer(name)} for name in _LAYERS}


def register(device: str = "cuda") -> None:
    """Add ``mapping(device)`` to those that ``kernels`` has; models that are kernelized from now on take it."""
    kernels: Any = importlib.import_module("kernels")
    kernels.register_kernel_mapping(mapping(device))
    _log.info("layers of shardfuse are registered on %s: %s", device, ", ".join(_LAYERS))
