"""The ways in: fusion definitions, and the cache that runs them."""

from .definition import FusionDefinition

__all__ = ["FusionDefinition"]
