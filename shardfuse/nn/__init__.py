"""Fused modules of a transformer, plain or on a device mesh, with autograd."""

from .activation import SwiGLU
from .fused import FusionTimer
from .layer_norm import AddLayerNorm, DropoutAddNorm, LayerNorm
from .loss import CrossEntropyLoss
from .norm import AddRMSNorm, RMSNorm
from .redistribution import redistribute
from .rotary import RotaryEmbedding

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "DropoutAddNorm",
    "FusionTimer",
    "LayerNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "redistribute",
]
