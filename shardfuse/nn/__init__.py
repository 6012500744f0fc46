"""Fused modules of a transformer, plain or on a device mesh, with autograd."""

from .activation import SwiGLU
from .fused import FusionTimer
from .loss import CrossEntropyLoss
from .norm import AddRMSNorm, RMSNorm
from .redistribution import redistribute

__all__ = ["AddRMSNorm", "CrossEntropyLoss", "FusionTimer", "RMSNorm", "SwiGLU", "redistribute"]
