"""Tools around sharded programs."""

from .simulation import simulate

__all__ = ["simulate"]
