"""Tools around sharded programs."""

from .simulate import simulate

__all__ = ["simulate"]
