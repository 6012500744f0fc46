"""GPUs as records: what a schedule may count on, read from the driver or from a table of named GPUs."""

from .here import device_here
from .invariant_rows import InvariantRows
from .measured import Measured
from .rates import Rates
from .record import (
    A100,
    B200,
    H200,
    LEAST_COPY,
    LINE_BYTES,
    MAX_REGISTERS,
    MAX_THREADS,
    NAMED,
    REGISTER_STEP,
    RTX_5090,
    SECTOR_BYTES,
    WARP,
    Device,
)

__all__ = [
    "A100",
    "B200",
    "H200",
    "LEAST_COPY",
    "LINE_BYTES",
    "MAX_REGISTERS",
    "MAX_THREADS",
    "NAMED",
    "REGISTER_STEP",
    "RTX_5090",
    "SECTOR_BYTES",
    "WARP",
    "Device",
    "InvariantRows",
    "Measured",
    "Rates",
    "device_here",
]
