"""Norms of rows that are given their parameters with each call, any of them: functions run and compile by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ir import DataType
from .fused import FusedModule, FusedOp
from .row_norm_fusions import RowNormSpec, row_norm_op


class RowNormOfFunction(FusedModule):
    """[rows..., hidden_size], then those that are ``given`` -> (normed[, new residual]).

    given: names of tensors, joined by spaces: of weight, bias, input_bias and residual, in this order.  The function
    has checked them.
    """

    family = "function_row_norm"

    def __init__(self, hidden_size: int, eps: float, centered: bool, dropout: float | None, given: str) -> None:
        super().__init__()
        self.mesh, self.given = None, given
        self.options: dict[str, Any] = {
            "hidden_size": hidden_size, "eps": eps, "centered": centered, "dropout": dropout
        }  # fmt: skip
        self.describe()

    def settings(self) -> dict[str, object]:
        return {**self.options, "given": self.given}

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *others = tensors
        named = zip(self.given.split(), others, strict=True)
        dtypes: dict[str, Any] = {f"{name}_dtype": DataType.from_torch(t.dtype) for name, t in named}
        return row_norm_op(RowNormSpec(ndim=x.ndim, dtype=DataType.from_torch(x.dtype), **self.options, **dtypes))


class DroppingNormOfFunction(RowNormOfFunction):
    """The same, which draws random numbers."""

    family = "function_dropping_norm"
    is_random = True
