"""shardfuse: fusions over tensors that are sharded over a device mesh, compiled to Triton kernels and collectives."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .config import VERSION
from .errors import ShardfuseError
from .executor.plain_arguments import NoGradientsWarning
from .executor.turns import run_in_this_thread
from .frontend.definition import FusionDefinition
from .ir.dtype import DataType
from .ir.scalar import Scalar
from .ir.tensor_view import TensorView
from .mesh import DeviceMesh, ParallelType
from .mesh.process import ProcessContext, finalize, initialize

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import collectives as collectives
    from . import compat as compat
    from . import compile as compile
    from . import nn as nn
    from . import optim as optim
    from .tools.simulation import simulate

__version__ = VERSION

__all__ = [
    "DataType",
    "DeviceMesh",
    "FusionDefinition",
    "NoGradientsWarning",
    "ParallelType",
    "ProcessContext",
    "Scalar",
    "ShardfuseError",
    "TensorView",
    "finalize",
    "initialize",
    "run_in_this_thread",
    "simulate",
]


_MODULES = ("adapters", "collectives", "compat", "compile", "nn", "optim")


def __getattr__(name: str) -> object:
    """What is imported when it is first asked for: these modules, and ``simulate``, which brings test groups along."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name == "simulate":
        from shardfuse.tools.simulation import simulate

        return simulate
    raise AttributeError(f"module 'shardfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "simulate"})
