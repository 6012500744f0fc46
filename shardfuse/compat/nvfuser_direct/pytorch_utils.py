"""Types of torch and of Python as nvFuser's, and what its tests ask of the device."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from shardfuse.compat.nvfuser_direct.names import DataType as DataType
from shardfuse.ir.dtype import DataType as NativeDataType

P = ParamSpec("P")
R = TypeVar("R")

_PYTHON: dict[type, NativeDataType] = {
    complex: NativeDataType.ComplexDouble,
    float: NativeDataType.Double,
    int: NativeDataType.Int,
    bool: NativeDataType.Bool,
}


def torch_dtype_to_nvfuser_dtype(dtype: torch.dtype | type) -> NativeDataType:
    """Raises ``KeyError`` for a dtype that shardfuse does not have."""
    return NativeDataType.from_torch(dtype) if isinstance(dtype, torch.dtype) else _PYTHON[dtype]


def python_scalar_to_nvfuser_dtype(value: complex | bool) -> NativeDataType:
    """The type of a Python number."""
    return _PYTHON[type(value)]


def retry_on_oom_or_skip_test(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` once more after an out-of-memory error, with torch's cache emptied."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
        return function(*args, **kwargs)

    return call


def get_device_properties() -> dict[str, str | int]:
    """Name and limits of the current GPU."""
    p = cast(Any, torch.cuda).get_device_properties(torch.cuda.current_device())
    return {
        "gpu_name": p.name,
        "gpu_compute_capability_major": p.major,
        "gpu_compute_capability_minor": p.minor,
        "gpu_gmem_bytes": p.total_memory,
        "gpu_sm_count": p.multi_processor_count,
    }


DEVICE_PROPERTIES = get_device_properties() if torch.cuda.is_available() else None
