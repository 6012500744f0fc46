"""shardfuse: fusions over tensors that are sharded over a device mesh, compiled to Triton kernels and collectives."""

from __future__ import annotations

from .errors import ShardfuseError
from .frontend.definition import FusionDefinition
from .ir.dtype import DataType
from .ir.expr import Scalar
from .ir.tensor_view import TensorView
from .mesh import DeviceMesh, ParallelType
from .mesh.process import ProcessContext, finalize, initialize
from .tools.simulate import simulate

__version__ = "0.1.0"

__all__ = [
    "DataType",
    "DeviceMesh",
    "FusionDefinition",
    "ParallelType",
    "ProcessContext",
    "Scalar",
    "ShardfuseError",
    "TensorView",
    "finalize",
    "initialize",
    "simulate",
]
