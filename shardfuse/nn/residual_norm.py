"""Norms over the last dims of the sum of an input and a residual."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..frontend.detection import has_dtensor
from .dtensor_autograd import Given, Result, on_local_tensors
from .fused import PLAIN, FusedOp
from .row_norm import RowNorm


class ResidualNorm(RowNorm):
    """A norm of the sum of its input and a residual."""

    takes_residual = True

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, *, unsharded: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [..., *normalized_shape] (local) -> (normed in x's dtype, new residual in residual's dtype).

        ``unsharded``: their shape as wholes, where local tensors are shards that differ in size.
        """
        if unsharded is None:
            results = self._again(x, residual)
            if results is not None:
                return results[0], results[1]
        if (type(x) not in PLAIN or type(residual) not in PLAIN) and has_dtensor((x, residual)):
            given = [Given("x", x, self._input), Given("residual", residual, self._at)]
            shape = self.unsharded_of(given, unsharded)
            results = [Result(shape, self._output, self._output_grad), Result(shape, self._at, self._at)]
            return on_local_tensors(partial(self._added, unsharded=shape), self.mesh, given, results)
        return self._added(x, residual, unsharded=unsharded)

    def _added(
        self, x: torch.Tensor, residual: torch.Tensor, *, unsharded: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_decomposed():
            self.check_same("residual", residual, "x", x.shape)
            return self._traced(x, residual)
        if self._is_of_last_dim and x.ndim > 1:
            results = self._called(x, (residual,), unsharded)
            return results[0], results[1]
        if residual.ndim != x.ndim:  # rows of one number of dims may be made of both
            self.check_same("residual", residual, "x", x.shape)
        rows, others = self._as_rows("x", x), self._as_rows("residual", residual)
        results = self._called(rows, (others,), self._shape_of_rows(unsharded))
        return self._as_given(results[0], x.ndim), self._as_given(results[1], x.ndim)

    def op(self, x: torch.Tensor, residual: torch.Tensor, unsharded: Sequence[int] | None = None) -> FusedOp:
        """The fusions for such tensors, forward and backward; equal modules share them.

        ``unsharded``: the whole shape, where shards differ in size.
        """
        return self.bind((x, *self._parameters_here(), residual), unsharded)
