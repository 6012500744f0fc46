"""Builders of torch calls: matrices, attention, indexing."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import OperandError, Words
from ..ir.call import AlongAxis, Call, Embedding, WithRoles
from ..ir.dtype import DataType
from ..ir.op import RngOffset, RngSeed
from ..ir.scalar import Number, Scalar, Size
from ..ir.tensor_view import TensorView
from .build_reductions import ReductionBuilder
from .builder import Operand, literal, normalize_dim, ranked, typed
from .call_signature import DRAWN

_NO_MATRICES = (DataType.Bool, DataType.UInt16, DataType.UInt32, DataType.UInt64, DataType.Float8_e8m0fnu)
"""Types of which torch has no product of matrices on any device."""


class CallBuilder(ReductionBuilder):
    """Ops that are one torch call each."""

    def matmul(self, a: TensorView, b: TensorView) -> TensorView:
        """torch.matmul; where the contracted axis is sharded, partial products and a collective."""
        for k, t in enumerate((a, b)):
            if self._tensor("matmul", t, k).ndim == 0:
                raise OperandError("matmul", f"operand {k}", t, "a tensor of at least 1 dim")
        self._are_multiplied("matmul", a, b)
        return self._call(Call("matmul"), [a, b], [a.dtype])[0]

    def linear(self, x: TensorView, weight: TensorView, bias: TensorView | None = None) -> TensorView:
        """``x @ weight.T + bias``; x [..., k], weight [n, k] or [k], bias [n]."""
        operands = [x, weight] if bias is None else [x, weight, bias]
        for k, t in enumerate(operands):
            self._tensor("linear", t, k)
        if x.ndim < 1 or weight.ndim not in (1, 2):
            raise OperandError("linear", "weight", weight, "a tensor of 1 or 2 dims, and x of at least 1")
        if bias is not None and bias.ndim != weight.ndim - 1:
            raise OperandError("linear", "bias", bias, f"a tensor of {weight.ndim - 1} dims")
        self._are_multiplied("linear", *operands)
        return self._call(Call("linear"), operands, [x.dtype])[0]

    def grouped_mm(self, mat1: TensorView, mat2: TensorView, offsets: TensorView) -> TensorView:
        """A product for each group; group g ends at ``offsets[g]`` along m (3-D mat2), n (3-D mat1) or k (both 2-D)."""
        given = {"mat1": mat1, "mat2": mat2, "offsets": offsets}
        return self._with_roles("grouped_mm", given, [mat1.dtype], dtype=mat1.dtype)[0]

    def scaled_grouped_mm(
        self,
        mat1: TensorView,
        mat2: TensorView,
        offsets: TensorView,
        scale1: TensorView,
        scale2: TensorView,
        alpha: TensorView | None = None,
        bias: TensorView | None = None,
        beta: TensorView | None = None,
        dtype: DataType = DataType.BFloat16,
    ) -> TensorView:
        """As ``grouped_mm``, with scales of mat1's rows and mat2's columns (of each group where groups share them)."""
        self._data_type("scaled_grouped_mm", dtype)
        given = {"mat1": mat1, "mat2": mat2, "offsets": offsets, "scale1": scale1, "scale2": scale2}
        given |= {"alpha": alpha, "bias": bias, "beta": beta}
        self._are_tensors("scaled_grouped_mm", given)
        for role, scale, matrix in (("scale1", scale1, mat1), ("scale2", scale2, mat2)):
            ndim = 3 if mat1.ndim == mat2.ndim == 2 else matrix.ndim
            if scale.ndim != ndim:
                raise OperandError("scaled_grouped_mm", role, ranked(scale), f"one of {ndim} dims")
        return self._with_roles("scaled_grouped_mm", given, [dtype], dtype=dtype)[0]

    def block_scaled_mm(
        self,
        mat1: TensorView,
        mat2: TensorView,
        scale1: TensorView,
        scale2: TensorView,
        alpha: TensorView | None = None,
        bias: TensorView | None = None,
        beta: TensorView | None = None,
        dtype: DataType = DataType.BFloat16,
    ) -> TensorView:
        """``(mat1 * scale1) @ (mat2 * scale2)`` with a scale for each block of the contracted axis, in float32."""
        self._data_type("block_scaled_mm", dtype)
        given = {"mat1": mat1, "mat2": mat2, "scale1": scale1, "scale2": scale2}
        given |= {"alpha": alpha, "bias": bias, "beta": beta}
        self._are_tensors("block_scaled_mm", given)
        for role, scale in (("scale1", scale1), ("scale2", scale2)):
            if scale.ndim > 2:
                raise OperandError("block_scaled_mm", role, ranked(scale), "one of 2 dims at most")
        return self._with_roles("block_scaled_mm", given, [dtype], dtype=dtype)[0]

    def sdpfa_fwd(
        self,
        query: TensorView,
        key: TensorView,
        value: TensorView,
        bias: TensorView | None = None,
        mask: TensorView | None = None,
        dropout_p: Operand | None = None,
        is_causal: Operand | None = None,
        scale: Operand | None = None,
    ) -> tuple[TensorView, ...]:
        """Flash attention of [..., heads, length, features]: output, log of sums (Float), seed and offset.

        Dropout draws from torch's generator; on a mesh the ranks agree on the first one's seed, which comes out.
        What flash attention does not take (a bias or a mask, float32 and float64, more than 256 features, a causal mask
        of unequal lengths) has all of its scores in memory at once, and drops the same on any number of ranks.  Keys
        and values may have one head for all of the query's.
        """
        given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
        numbers = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        self._are_tensors("sdpfa_fwd", given)
        self._are_numbers("sdpfa_fwd", numbers)
        self._are_heads("sdpfa_fwd", query=query, key=key, value=value)
        if dropout_p is not None and not (isinstance(dropout_p, int | float) and dropout_p == 0):
            numbers |= dict(zip(DRAWN, self._drawn(), strict=True))
        return self._with_roles(
            "sdpfa_fwd", {**given, **numbers}, [query.dtype, DataType.Float, DataType.UInt64, DataType.UInt64]
        )

    def sdpfa_bwd(
        self,
        grad_output: TensorView,
        query: TensorView,
        key: TensorView,
        value: TensorView,
        output: TensorView,
        logsumexp: TensorView,
        dropout_p: Operand | None,
        is_causal: Operand | None,
        philox_seed: TensorView,
        philox_offset: TensorView,
        scale: Operand | None = None,
    ) -> tuple[TensorView, ...]:
        """Gradients of query, key and value."""
        given = {"grad_output": grad_output, "query": query, "key": key, "value": value, "output": output}
        given |= {"logsumexp": logsumexp, "philox_seed": philox_seed, "philox_offset": philox_offset}
        numbers = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        self._are_tensors("sdpfa_bwd", given)
        self._are_numbers("sdpfa_bwd", numbers)
        self._are_heads("sdpfa_bwd", query=query, key=key, value=value, grad_output=grad_output, output=output)
        if logsumexp.ndim != query.ndim - 1:
            raise OperandError(
                "sdpfa_bwd", "logsumexp", Words(f"of {logsumexp.ndim} dims"), f"{query.ndim - 1}, a query's less 1"
            )
        return self._with_roles("sdpfa_bwd", {**given, **numbers}, [query.dtype, key.dtype, value.dtype])

    def _drawn(self) -> list[Scalar]:
        """Seed and offset from torch's generator, in every call, the same on all ranks."""
        seed, offset = (self._fusion.new_scalar(DataType.Int) for _ in range(2))
        self._fusion.record(RngSeed(), [], seed)
        self._fusion.record(RngOffset(), [seed], offset)
        return [seed, offset]

    def _are_tensors(self, op: str, given: Mapping[str, object]) -> None:
        for role, v in given.items():
            if v is not None and not isinstance(v, TensorView):
                raise OperandError(op, role, v, "a TensorView")

    def _are_numbers(self, op: str, given: Mapping[str, object]) -> None:
        for role, v in given.items():
            if isinstance(v, TensorView):
                raise OperandError(op, role, v, "a number or a scalar")

    def _are_heads(self, op: str, **given: TensorView) -> None:
        ndim = given["query"].ndim
        for role, t in given.items():
            if t.ndim < 2 or t.ndim != ndim:
                raise OperandError(op, role, ranked(t), f"{max(ndim, 2)}, [..., length, features]")

    def _with_roles(
        self, op: str, given: Mapping[str, object], dtypes: list[DataType], dtype: DataType | None = None
    ) -> tuple[TensorView, ...]:
        """A call whose inputs may be left out: the names of those that are there are kept."""
        there = {role: self._operand(op, k, v) for k, (role, v) in enumerate(given.items()) if v is not None}
        return self._call(WithRoles(op, tuple(there), dtype), list(there.values()), dtypes)

    def _are_multiplied(self, op: str, *operands: TensorView) -> None:
        """Of one type, of which torch multiplies matrices."""
        self._same_type(op, *operands)
        first = operands[0]
        if first.dtype in _NO_MATRICES:
            raise OperandError(op, first.name, typed(first), "floats or signed integers: cast it")

    def _same_type(self, op: str, *operands: TensorView) -> None:
        for t in operands[1:]:
            if t.dtype is not operands[0].dtype:
                raise OperandError(
                    op, t.name, Words(f"of {t.dtype.name}"), f"{operands[0].dtype.name}, as {operands[0].name}"
                )

    # indexing

    def _index(self, op: str, index: TensorView) -> TensorView:
        if not self._tensor(op, index, 1).dtype.is_integral or index.dtype is DataType.Bool:
            raise OperandError(op, "index", typed(index), "integers")
        return index

    def index_select(self, x: TensorView, index: TensorView, dim: int) -> TensorView:
        """Slices of ``dim`` at the indices of a vector."""
        at = normalize_dim("index_select", self._tensor("index_select", x), dim)
        if self._index("index_select", index).ndim > 1:
            raise OperandError("index_select", "index", ranked(index), "a vector")
        self._has_elements("index_select", x, at, index)
        return self._call(AlongAxis("index_select", at), [x, index], [x.dtype])[0]

    def gather(self, x: TensorView, index: TensorView, dim: int) -> TensorView:
        """torch.gather: ``x[i][index[i][j][k]][k]`` for dim 1."""
        at = self._ranks_fit("gather", x, index, dim)
        return self._call(AlongAxis("gather", at), [x, index], [x.dtype])[0]

    def take_along_axis(self, x: TensorView, index: TensorView, dim: int) -> TensorView:
        """As ``gather``; the other axes of the two are broadcast."""
        at = self._ranks_fit("take_along_axis", x, index, dim)
        return self._call(AlongAxis("take_along_axis", at), [x, index], [x.dtype])[0]

    def scatter(self, x: TensorView, index: TensorView, src: Operand, dim: int) -> TensorView:
        """A copy of ``x`` with the elements at ``index`` along ``dim`` replaced by ``src``'s."""
        at = self._ranks_fit("scatter", x, index, dim)
        source = self._operand("scatter", 2, src)
        if isinstance(source, TensorView):
            self._same_type("scatter", x, source)
            if source.ndim != x.ndim:
                raise OperandError("scatter", "src", ranked(source), f"{x.ndim} dims, as the source")
        else:
            self._number_for("scatter", "src", source, x.dtype)
        return self._call(AlongAxis("scatter", at), [x, index, source], [x.dtype])[0]

    def index_put_accumulate(self, x: TensorView, index: TensorView, value: TensorView) -> TensorView:
        """A copy of ``x`` with ``value`` added to the rows at ``index``, a vector."""
        self._same_type("index_put_accumulate", x, value)
        self._has_elements("index_put_accumulate", x, 0, index)
        return self._call(
            Call("index_put_accumulate"), [x, self._index("index_put_accumulate", index), value], [x.dtype]
        )[0]

    def _ranks_fit(self, op: str, x: TensorView, index: TensorView, dim: int) -> int:
        at = normalize_dim(op, self._tensor(op, x), dim)
        if self._index(op, index).ndim != x.ndim:
            raise OperandError(op, "index", ranked(index), f"{x.ndim} dims, as the source")
        self._has_elements(op, x, at, index)
        return at

    def _has_elements(self, op: str, x: TensorView, dim: int, index: TensorView) -> None:
        if x.ndim and x.shape[dim] == 0 and 0 not in index.shape:
            raise OperandError(op, f"axis {dim} of {x.name}", Words("of 0"), "elements for the indices to name")

    def embedding(
        self,
        index: TensorView,
        weight: TensorView,
        padding_idx: Size | None = None,
        max_norm: Operand | None = None,
        norm_type: Operand | None = None,
    ) -> TensorView:
        """Rows of ``weight`` [v, d] at ``index`` (integers, any shape)."""
        self._tensor("embedding", weight, 1)
        self._index("embedding", index)
        if weight.ndim != 2:
            raise OperandError("embedding", "weight", ranked(weight), "2 dims")
        self._has_elements("embedding", weight, 0, index)
        row = None if padding_idx is None else literal(padding_idx)
        options = Embedding(row, _constant("max_norm", max_norm), _constant("norm_type", norm_type))
        at, n = options.padding_idx, weight.shape[0]
        if isinstance(at, int) and n >= 0 and not -n <= at < n:
            raise OperandError("embedding", "padding_idx", at, f"a row from {-n} to {n - 1}")
        return self._call(options, [index, weight], [weight.dtype])[0]


def _constant(argument: str, value: Operand | None) -> Number | Scalar | None:
    """The number of a constant; a scalar of the fusion as it is."""
    if isinstance(value, TensorView):
        raise OperandError("embedding", argument, value, "a number or a scalar")
    return value.value if isinstance(value, Scalar) and value.is_literal and value.value is not None else value
