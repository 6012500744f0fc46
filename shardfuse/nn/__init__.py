"""Fused modules of a transformer, plain or on a device mesh, with autograd."""

from . import functional, quantized
from .activation import SwiGLU
from .batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from .conversion import Conversion, convert
from .gated import GeGLU
from .gated_mlp import GatedMLP
from .gelu import GELU
from .gradient_buckets import bucket_gradients
from .group_norm import GroupNorm
from .layer_norm import AddLayerNorm, DropoutAddNorm, LayerNorm
from .library import define
from .linear import Linear
from .linear_loss import LinearCrossEntropyLoss
from .log_prob import LogProb
from .loss import CrossEntropyLoss
from .norm import AddRMSNorm, RMSNorm
from .promising import promise
from .redistribution import Redistribution, redistribute
from .rotary import RotaryEmbedding
from .softmax import LogSoftmax, Softmax
from .timer import FusionTimer

__all__ = [
    "GELU",
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conversion",
    "CrossEntropyLoss",
    "DropoutAddNorm",
    "FusionTimer",
    "GatedMLP",
    "GeGLU",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "LogProb",
    "LogSoftmax",
    "RMSNorm",
    "Redistribution",
    "RotaryEmbedding",
    "Softmax",
    "SwiGLU",
    "SyncBatchNorm",
    "bucket_gradients",
    "convert",
    "functional",
    "promise",
    "quantized",
    "redistribute",
]

for module in (
    RMSNorm, AddRMSNorm, SwiGLU, CrossEntropyLoss, Redistribution, LayerNorm, AddLayerNorm, DropoutAddNorm, GroupNorm,
    BatchNorm, Softmax, LogSoftmax, GELU, GeGLU, RotaryEmbedding, LogProb, quantized.AddRMSNorm,
):  # fmt: skip
    define(module)
del module
