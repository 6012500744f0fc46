# pyright: reportUntypedBaseClass=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Overrides of torchtitan's norms; importing this module imports torchtitan and registers them, and replaces nothing.

    torchtitan_train --module llama3 --config llama3_8b \\
        --override.imports shardfuse.adapters.torchtitan_norms.rms_norm

torchtitan then builds each ``RMSNorm.Config`` of its tree as a norm of shardfuse, and logs each.  Parameters, their
names and their initialisation are torchtitan's.  DTensors, as tensor parallelism makes them, take torch's norm.
Source: ``torchtitan/overrides/README.md``; the decorator took a name first in its earlier versions.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch

from ..frontend.detection import has_dtensor
from ..nn import functional

_log = logging.getLogger("shardfuse.adapters")
_config: Any = importlib.import_module("torchtitan.config")
_theirs: Any = importlib.import_module("torchtitan.models.common.nn_modules")


class ShardfuseRMSNorm(_theirs.RMSNorm):
    """torchtitan's RMSNorm, of which one kernel forward and one backward are shardfuse's."""

    @dataclass(kw_only=True, slots=True)
    class Config(_theirs.RMSNorm.Config):
        """That of torchtitan's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = (x,) if self.weight is None else (x, self.weight)
        if has_dtensor(given):
            return super().forward(x)
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class ShardfuseLayerNorm(_theirs.LayerNorm):
    """torchtitan's LayerNorm, likewise."""

    @dataclass(kw_only=True, slots=True)
    class Config(_theirs.LayerNorm.Config):
        """That of torchtitan's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        given = [t for t in (input, self.weight, self.bias) if t is not None]
        if has_dtensor(given):
            return super().forward(input)
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def _override(name: str, target: Any) -> Any:
    """``override`` of torchtitan for configurations that are ``target`` itself."""
    first = (name,) if "name" in inspect.signature(_config.override).parameters else ()
    return _config.override(*first, target=target, exact=True, description="norms of shardfuse")


@_override("shardfuse_rms_norm", _theirs.RMSNorm.Config)
def rms_norm(cfg: Any) -> Any:
    """The configuration that takes the place of an RMSNorm's."""
    _log.info("%s -> %s", type(cfg).__qualname__, ShardfuseRMSNorm.__qualname__)
    return _config.derive(cfg, ShardfuseRMSNorm.Config)


@_override("shardfuse_layer_norm", _theirs.LayerNorm.Config)
def layer_norm(cfg: Any) -> Any:
    """The configuration that takes the place of a LayerNorm's."""
    _log.info("%s -> %s", type(cfg).__qualname__, ShardfuseLayerNorm.__qualname__)
    return _config.derive(cfg, ShardfuseLayerNorm.Config)
