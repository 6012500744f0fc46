"""nvFuser's Python module ``nvfuser_direct`` over shardfuse.

    import shardfuse.compat.nvfuser_direct as nvfuser_direct

runs programs that were written for nvFuser's; where those are to stay as they are, put this module into
``sys.modules["nvfuser_direct"]``.  Schedules by hand are refused: shardfuse schedules kernels by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch

from shardfuse.compat.nvfuser_direct import multidevice as multidevice
from shardfuse.compat.nvfuser_direct import nvfuser_direct_version as nvfuser_direct_version
from shardfuse.compat.nvfuser_direct import pytorch_utils as pytorch_utils
from shardfuse.compat.nvfuser_direct.distributed import execute_with_dtensors
from shardfuse.compat.nvfuser_direct.execution import Fusion, FusionExecutorCache, KernelExecutor, LRUCache, Sharding
from shardfuse.compat.nvfuser_direct.multidevice import Communicator, shard_tensor
from shardfuse.compat.nvfuser_direct.names import CommunicatorBackend, DataType, MemoryType, SchedulerType
from shardfuse.compat.nvfuser_direct.nvfuser_definition import (
    CurrentOperations,
    FusionDefinition,
    FusionGuard,
    Schedule,
    define_scalar,
    define_tensor,
)
from shardfuse.compat.nvfuser_direct.nvfuser_direct_version import Version, __version__
from shardfuse.compat.nvfuser_direct.profile import PythonProfiler, get_fusion_profile
from shardfuse.compat.nvfuser_direct.values import IterDomain, TensorDomain, TensorView, Val
from shardfuse.executor.binding import Argument
from shardfuse.frontend.descriptor import compute_tensor_descriptor
from shardfuse.frontend.validation import val_tolerances, validated
from shardfuse.mesh import DeviceMesh, ParallelType

P = ParamSpec("P")

ops = CurrentOperations()
schedule = Schedule()


def version() -> Version:
    """shardfuse's version; compares with strings."""
    return __version__


def get_val_tolerances(fusion: Fusion, inputs: Sequence[Argument]) -> list[tuple[float, float]]:
    """``(absolute, relative)`` for each output."""
    return val_tolerances(fusion.native, inputs)


def validate_with_auto_inferred_outputs(
    fusion: Fusion, fusion_outputs: Sequence[torch.Tensor], inputs: Sequence[Argument]
) -> None:
    """Compare outputs with the same ops in torch.  Raises ``ValidationError``."""
    home = next((x.device for x in fusion_outputs), None)
    validated(fusion.native, inputs, lambda: list(fusion_outputs), None, home)


class LruFusionCache:
    """A decorator for functions that make a FusionDefinition: equal definitions share one executor."""

    def __init__(self, max_fusions: int = 16384) -> None:
        self.cache = LRUCache(max_fusions)

    def __call__(self, create: Callable[P, FusionDefinition]) -> Any:
        @functools.wraps(create)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> FusionDefinition:
            definition = create(*args, **kwargs)
            if "fec" not in definition.__dict__:
                definition.fec = self.cache.cache_compile(definition.fusion)
                del definition._fusion  # pyright: ignore[reportPrivateUsage]
            return definition

        wrapper.stats = self.cache.stats  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        wrapper.num_fusions = self.cache.num_fusions  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        return wrapper


__all__ = [
    "Communicator",
    "CommunicatorBackend",
    "DataType",
    "DeviceMesh",
    "Fusion",
    "FusionDefinition",
    "FusionExecutorCache",
    "FusionGuard",
    "IterDomain",
    "KernelExecutor",
    "LRUCache",
    "LruFusionCache",
    "MemoryType",
    "ParallelType",
    "PythonProfiler",
    "SchedulerType",
    "Sharding",
    "TensorDomain",
    "TensorView",
    "Val",
    "__version__",
    "compute_tensor_descriptor",
    "define_scalar",
    "define_tensor",
    "execute_with_dtensors",
    "get_fusion_profile",
    "get_val_tolerances",
    "multidevice",
    "ops",
    "schedule",
    "shard_tensor",
    "validate_with_auto_inferred_outputs",
    "version",
]
