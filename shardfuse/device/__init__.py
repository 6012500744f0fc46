"""GPUs as records: what a schedule may count on, read from the driver or from a table of named GPUs."""

from .here import device_here
from .record import H200, NAMED, WARP, Device

__all__ = ["H200", "NAMED", "WARP", "Device", "device_here"]
