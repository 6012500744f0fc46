"""The intermediate representation: digits, layouts, domains, TensorViews, Exprs and fusions."""

from .dtype import DataType
from .tensor_view import TensorView

__all__ = ["DataType", "TensorView"]
