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

<<<<<<< HEAD
def _dtypes(given: str, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """ "weight_dtype" and so on.  given: names of tensors, joined by spaces."""
    return {f"{name}_dtype": DataType.from_torch(t.dtype) for name, t in zip(given.split(), tensors, strict=True)}


class _NormOfFunction(FusedModule):
    """A norm of whole tensors, which its function has checked."""

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__()
        self.mesh = None
        self.options = dict(options)
        self.describe()

    def settings(self) -> dict[str, object]:
        return self.options

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        return cls(**settings)


class RowNormOfFunction(_NormOfFunction):
    """[rows..., hidden_size], then those of ``VECTORS`` and "residual" that ``given`` has -> (normed[, new residual]).

    given: names of tensors, joined by spaces.
=======
    given: names of tensors, joined by spaces: of weight, bias, input_bias and residual, in this order.  The function
    has checked them.
>>>>>>> main
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
<<<<<<< HEAD
        options: Any = self.options
        spec = RowNormSpec(
            ndim=x.ndim,
            hidden_size=options["hidden_size"],
            eps=options["eps"],
            centered=options["centered"],
            dropout=options["dropout"],
            weight_offset=0.0,
            mesh=None,
            mesh_id=id(None),
            x=_WHOLE,
            at=_WHOLE,
            output=_WHOLE,
            output_grad=_WHOLE,
            dtype=DataType.from_torch(x.dtype),
            **_dtypes(options["given"], others),
        )
        return row_norm_op(spec)
=======
        named = zip(self.given.split(), others, strict=True)
        dtypes: dict[str, Any] = {f"{name}_dtype": DataType.from_torch(t.dtype) for name, t in named}
        return row_norm_op(RowNormSpec(ndim=x.ndim, dtype=DataType.from_torch(x.dtype), **self.options, **dtypes))
>>>>>>> main


class DroppingNormOfFunction(RowNormOfFunction):
    """The same, which draws random numbers."""

    family = "function_dropping_norm"
    is_random = True
<<<<<<< HEAD


class GroupNormOfFunction(_NormOfFunction):
    """[batch, channels, ...], or [batch, ..., channels] where ``is_last``, and the parameters that ``given`` names."""

    family = "function_group_norm"

    def __init__(self, groups: int, eps: float, activation: Activation | None, is_last: bool, given: str) -> None:
        named = {"groups": groups, "eps": eps, "activation": activation, "is_last": is_last, "given": given}
        super().__init__(named)

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *affine = tensors
        options: Any = self.options
        channel_dim = x.ndim - 1 if options["is_last"] else 1
        spec = GroupNormSpec(
            ndim=x.ndim,
            channel_dim=channel_dim,
            groups=options["groups"],
            channels=int(x.shape[channel_dim]),
            eps=options["eps"],
            activation=options["activation"],
            mesh=None,
            mesh_id=id(None),
            placement=_WHOLE,
            dtype=DataType.from_torch(x.dtype),
            **_dtypes(options["given"], affine),
        )
        return group_norm_op(spec)


class BatchNormOfFunction(_NormOfFunction):
    """As ``GroupNormOfFunction``; behind weight and bias the running statistics, where ``by_kept``.

    -> (normed), or (normed, mean, unbiased variance) of the batch.
    """

    family = "function_batch_norm"

    def __init__(self, eps: float, by_kept: bool, is_last: bool, given: str) -> None:
        super().__init__({"eps": eps, "by_kept": by_kept, "is_last": is_last, "given": given})

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *vectors = tensors
        options: Any = self.options
        affine, kept = (vectors[:-2], vectors[-2:]) if options["by_kept"] else (vectors, [])
        channel_dim = x.ndim - 1 if options["is_last"] else 1
        spec = BatchNormSpec(
            ndim=x.ndim,
            channel_dim=channel_dim,
            channels=int(x.shape[channel_dim]),
            eps=options["eps"],
            mesh=None,
            mesh_id=id(None),
            placement=_WHOLE,
            dtype=DataType.from_torch(x.dtype),
            **_dtypes(options["given"], affine),
            kept_dtype=DataType.from_torch(kept[0].dtype) if kept else None,
        )
        return batch_norm_op(spec)
=======
>>>>>>> main
