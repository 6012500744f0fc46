"""The ways in: fusion definitions, and the cache that runs them."""

from .definition import FusionDefinition
from .executor_cache import FusionExecutorCache
from .explain import Explanation

__all__ = ["Explanation", "FusionDefinition", "FusionExecutorCache"]
