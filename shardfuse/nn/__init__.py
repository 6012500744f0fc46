"""Fused modules of a transformer, plain or on a device mesh, with autograd."""

from .activation import SwiGLU
from .library import define
from .loss import CrossEntropyLoss
from .norm import AddRMSNorm, RMSNorm
from .redistribution import Redistribution, redistribute
from .timer import FusionTimer

__all__ = ["AddRMSNorm", "CrossEntropyLoss", "FusionTimer", "RMSNorm", "Redistribution", "SwiGLU", "redistribute"]

for module in (RMSNorm, AddRMSNorm, SwiGLU, CrossEntropyLoss, Redistribution):
    define(module)
del module
