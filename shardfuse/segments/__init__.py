"""What a kernel is made for: segments, the spaces that they walk, and how segments are rewritten and ordered."""

from .segment import Segment
from .space import Space, analyse

__all__ = ["Segment", "Space", "analyse"]
