"""Fused modules of a transformer, plain or on a device mesh, with autograd."""

from .activation import SwiGLU
from .fused import FusionTimer
from .gated import GeGLU
from .gelu import GELU
from .layer_norm import AddLayerNorm, DropoutAddNorm, LayerNorm
from .loss import CrossEntropyLoss
from .norm import AddRMSNorm, RMSNorm
from .redistribution import redistribute
from .rotary import RotaryEmbedding
from .softmax import LogSoftmax, Softmax

__all__ = [
    "GELU",
    "AddLayerNorm",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "DropoutAddNorm",
    "FusionTimer",
    "GeGLU",
    "LayerNorm",
    "LogSoftmax",
    "RMSNorm",
    "RotaryEmbedding",
    "Softmax",
    "SwiGLU",
    "redistribute",
]
