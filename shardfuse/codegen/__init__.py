"""Kernel plans to Triton text."""

from .generate import generate
from .source import KernelSource

__all__ = ["KernelSource", "generate"]
