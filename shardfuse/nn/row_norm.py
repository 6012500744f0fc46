"""What norms over the last dims share: sizes, parameters, placements, and the call of their fusions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import ModuleInputError, PlacementError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from . import traced
from .default_eps import rms_norm_eps
from .dtensor_autograd import placements_of
from .fused import PLAIN, FusedOp
from .fusion_run import LastCall
from .of_linear import TakesProducts
from .parameters import ParameterKind, ParameterModule
from .placement import TensorPlacement
from .row_norm_fusions import RowNormSpec, row_norm_op
from .settings import Setting
from .shaping import deferring
from .tensor_kinds import are_torchs, modes

if TYPE_CHECKING:
    from .placement import Placements


@dataclass(frozen=True)
class NormSwitches:
    """Which norm: is the mean subtracted, which parameters there are, and what is added to the weight."""

    centered: bool
    weight: bool
    bias: bool
    input_bias: bool
    weight_offset: float


class RowNorm(TakesProducts, ParameterModule):
    """A norm over the last dims.  ``residual``: where that is, of a norm that takes one."""

    eps: Setting[float | None] = Setting()
    elementwise_affine: Setting[bool] = Setting()
    normalized_shape: Setting[tuple[int, ...]] = Setting()
    takes_residual = False
    vectors = ("weight", "bias", "input_bias")
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    input_bias: torch.nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        switches: NormSwitches,
        *,
        mesh: DeviceMesh | None,
        parameters: ParameterKind,
        input: Placements | None,
        output: Placements | None,
        output_grad: Placements | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        residual: Placements | None = None,
    ) -> None:
        placed = TensorPlacement.of("input", input, mesh)
        # The argument that says where the norm is computed, and its value: a norm needs whole values.
        at = ("output", output) if placed.is_partial else ("input", input)
        if self.takes_residual:
            at = ("residual", residual)
        # A parameter is cut along the hidden axis only where that is named as Shard(-1): rows are sharded otherwise.
        super().__init__(mesh, TensorPlacement.of(*at, mesh).only(-1), parameters)
        shape: tuple[int, ...] = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        is_size = len(shape) > 0 and all(n >= 1 for n in shape)
        self.check_argument("normalized_shape", normalized_shape, is_size, "sizes of 1 or more")
        if eps is not None:
            self.check_eps(eps)
        if len(shape) > 1 and not self._parameter.is_uncut:
            raise PlacementError(at[0], (at[1],), f"a norm over {len(shape)} dims", "shard rows, or norm one dim")
        self.normalized_shape, self.eps = shape, eps
        self.elementwise_affine, self._switches = switches.weight, switches
        self._deferrable: dict[Hashable, bool] = {}
        self._input = placed
        self._at_name, self._at = at[0], TensorPlacement.of(*at, mesh)
        self._output = self._output_grad = self._at
        if output is not None:
            self._output = self._output_grad = TensorPlacement.of("output", output, mesh)
        if output_grad is not None:
            self._output_grad = TensorPlacement.of("output_grad", output_grad, mesh)
        for argument, placement, given in ((at[0], self._at, at[1]), ("output", self._output, output)):
            if placement.is_partial:
                raise PlacementError(argument, (given,), "a norm, which needs whole values", "pass Shard or Replicate")
        self._check_fitting(placed, (input, output_grad))
        size = shape if len(shape) > 1 else self._hidden
        starts = (1.0 - switches.weight_offset, 0.0, 0.0)
        are_there = (switches.weight, switches.bias, switches.input_bias)
        for name, start, is_there in zip(self.vectors, starts, are_there, strict=True):
            made = self.make_parameter(name, size, start, device, dtype) if is_there else None
            self.register_parameter(name, made)
        self.describe()

    def _check_fitting(self, placed: TensorPlacement, given: tuple[object, object]) -> None:
        """Raise PlacementError for placements that no tensors of a call could fit.  given: input and output_grad."""
        sizes = self.mesh.shape if self.mesh is not None else ()
        if any(n > 1 and a == -1 != b for n, a, b in zip(sizes, placed.shards, self._at.shards, strict=True)):
            against = f"{self._at_name}, where the norm is computed and the hidden axis is whole"
            raise PlacementError("input", (given[0],), against, "shard the hidden axis in both, or rows of the input")
        pairs = zip(sizes, self._output.shards, self._output_grad.shards, strict=True)
        if any(n > 1 and (a is None) != (b is None) for n, a, b in pairs):
            against = "the output, of whose size a gradient is on each rank"
            raise PlacementError("output_grad", (given[1],), against, "shard both alike, or neither of them")

    def describe(self) -> None:
        if self.__dict__.get("_measured") != self.normalized_shape:
            self._is_of_last_dim = self.hands_on = len(self.normalized_shape) == 1
            whole = torch.empty(self._hidden, device="meta")
            self._local_size, self._deferrable = self._parameter.local(self.mesh, whole).shape[0], {}
            self._measured = self.normalized_shape
        super().describe()

    def settings(self) -> dict[str, object]:
        options = {"eps": self.eps, "elementwise_affine": self.elementwise_affine, **self.own_settings()}
        placements = {"input": self._input, "output": self._output, "output_grad": self._output_grad}
        residual = {"residual": self._at} if self.takes_residual else {}
        return {**options, "given": " ".join(self.given), "mesh": self.mesh, **placements, **residual}

    def own_settings(self) -> dict[str, object]:
        """Those arguments that say which norm of what size this is, by the names that its class has for them."""
        biases = {"bias": self._switches.bias}
        if self.takes_residual:
            biases["input_bias"] = self._switches.input_bias
        return {"normalized_shape": self.normalized_shape, **biases}

    def whole(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> Sequence[int] | None:
        """Where x is whole every rank sees the same sizes, so that all may conclude from them what shards there are."""
        return tensors[0].shape if unsharded is None and self._input.is_uncut else unsharded

    @property
    def _hidden(self) -> int:
        """How many elements are normed together, unsharded."""
        return math.prod(self.normalized_shape)

    @property
    def dropout(self) -> float | None:
        """The probability that an element of x is dropped in this call; None where none can be."""
        return None

    def reset_parameters(self) -> None:
        """The weight so that it multiplies by one, biases to zero."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self._switches.weight_offset)
        for bias in (self.bias, self.input_bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        affine = f"elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"
        return f"{self.normalized_shape}, eps={self.eps}, {affine}, mesh={self.mesh}"

    def _traced(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """By torch's own ops."""
        given = {"residual": residual, "weight": self.weight, "bias": self.bias, "input_bias": self.input_bias}
        self.check_plain(x=x, **given)
        dims = len(self.normalized_shape)
        if tuple(x.shape[-dims:]) != self.normalized_shape:
            self._check_last_dims("x", x)
        flat = {name: t.flatten(-dims) if t is not None and dims > 1 else t for name, t in given.items()}
        results = traced.norm(
            x.flatten(-dims), self._eps_of(x), **flat, dropout=self.dropout,
            centered=self._switches.centered, weight_offset=self._switches.weight_offset,
        )  # fmt: skip
        return results[0].view(x.shape), results[1].view(x.shape)

    def _eps_of(self, x: torch.Tensor) -> float:
        """What is added to the mean square: torch's own number for x's dtype where eps is None."""
        return rms_norm_eps(x.dtype) if self.eps is None else self.eps

    def _as_given(self, rows: torch.Tensor, ndim: int) -> torch.Tensor:
        """[rows..., hidden] with the dims of an argument of ``ndim`` dims."""
        result = rows if self._is_of_last_dim else rows.view(*rows.shape[:-1], *self.normalized_shape)
        return result[0] if ndim == len(self.normalized_shape) else result

    def _as_rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[rows..., hidden], with one row at least."""
        if self._is_of_last_dim and x.ndim == 1 and x.shape[0] == self._local_size:
            return x[None]  # checked where its fusions are looked up
        self._check_last_dims(name, x)
        flat = x if self._is_of_last_dim else x.flatten(-len(self.normalized_shape))
        return flat[None] if flat.ndim == 1 else flat

    def _shape_of_rows(self, unsharded: Sequence[int] | None) -> Sequence[int] | None:
        """The unsharded shape of what ``_as_rows`` makes."""
        if unsharded is None or (self._is_of_last_dim and len(unsharded) > 1):
            return unsharded
        whole = (*unsharded[: -len(self.normalized_shape)], self._hidden)
        return (1, *whole) if len(whole) == 1 else whole

    def _check_last_dims(self, name: str, x: torch.Tensor) -> None:
        dims = len(self.normalized_shape)
        if dims > 1 and tuple(x.shape[-dims:]) != self.normalized_shape:
            found, expected = f"shape {tuple(x.shape)}", f"{self.normalized_shape} as its last dims"
            raise ModuleInputError(type(self).__name__, name, found, expected, "make the module for this shape")
        placement = self._input if name == "x" else self._at
        here = placement.resolve(name, max(x.ndim, 1))
        normed = range(max(x.ndim - dims, 0), max(x.ndim, 1))
        along = here.only(x.ndim - 1)
        is_cut = along.shards == self._parameter.shards
        if any(d in normed for d in here.shards) and (dims > 1 or (not is_cut and placement.only(-1).is_uncut)):
            said = "input" if name == "x" else name
            found = tuple(f"Shard({d})" for d in here.shards if d in normed)
            if dims > 1:
                raise PlacementError(said, found, "the dims that are normed", "shard rows, or norm one dim")
            raise PlacementError(said, found, "the hidden axis", "shard that axis as Shard(-1)")
        if dims == 1:
            own = self._local_size if is_cut else along.local_shape(self.mesh, (self._hidden,))[0]
            self.check_size(name, x, -1, own)  # partial sums may be cut along fewer mesh dimensions than the norm

    def _check_residual(self, x: torch.Tensor, residual: torch.Tensor, unsharded: Sequence[int] | None) -> None:
        """The residual is this rank's piece, as ``residual=`` cuts it, of what x is a piece of."""
        source, at = self._input.gradient().resolve("input", x.ndim), self._at.resolve("residual", x.ndim)
        if source == at:
            self.check_same("residual", residual, "x", x.shape)
            return
        whole = unsharded or [n * source.parts(self.mesh, k) for k, n in enumerate(x.shape)]
        placed = placements_of(at, x.ndim)
        self.check_same(
            "residual", residual, f"this rank's piece of x with residual={placed}", at.local_shape(self.mesh, whole)
        )

    def _parameters_here(self) -> Sequence[torch.Tensor]:
        """The parameters that there are, as vectors."""
        present = self.vectors_here()
        if self._is_of_last_dim:
            return present
        if torch.compiler.is_compiling():
            return [self.traced(p).flatten() for p in present]
        return [p.flatten() for p in self.local_parameters(**{str(k): cast("Any", p) for k, p in enumerate(present)})]

    @property
    def cut_rows(self) -> tuple[bool, ...]:
        """For each mesh dimension, does it cut rows?  Told of norms over one dim whose parameters are whole."""
        return tuple(d is not None and self._parameter.is_uncut and self._is_of_last_dim for d in self._at.shards)

    def _again(self, x: torch.Tensor, *residual: torch.Tensor) -> Sequence[torch.Tensor] | None:
        """As ``_called``, of tensors like those of a call before, of which nothing is asked but that; None of others.

        Of a norm over one dim: of others the rows are a view, which has to be checked first.
        """
        if torch.compiler.is_compiling() or not (self._ready and self._is_of_last_dim):
            return None
        vectors = self.vectors_here()
        if torch.is_grad_enabled():
            bucket = self.bucket
            behind = None if bucket is None else bucket.of(self, vectors)
            if behind is None:
                return self.run_again((x, *vectors, *residual)) if bucket is None else None
            return self.run_again((x, *behind, *residual), deferring(len(behind)), (x, *vectors, *residual))
        given = (x, *vectors, *residual)
        last = self._last_call
        results = None if last is None else self._as_last_call(last, given)
        return self.run_again(given) if results is None else results

    def _as_last_call(self, last: LastCall, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Of tensors like those of the last call without gradients; None of others.

        What a backward would read may stand behind the results.
        """
        check, again, specs, taken, shape, ready = last
        if ready is not self._ready or modes():
            return None
        if specs:
            if tensors[0].shape != shape or any(getattr(tensors[k], "_spec", None) is not spec for k, spec in specs):
                return None
            tensors = taken(tensors)
        return again(tensors) if check(*tensors) else None

    def _called(
        self, x: torch.Tensor, residual: Sequence[torch.Tensor], unsharded: Sequence[int] | None
    ) -> Sequence[torch.Tensor]:
        """The results of rows; with the gradients of parameters left to the bucket, where there is one for them."""
        bucket = self.bucket
        if bucket is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            vectors = self.vectors_here()
            behind = bucket.of(self, vectors) if self._is_deferrable(x, vectors, residual, unsharded) else None
            if behind is not None:
                given, origins = (x, *behind, *residual), (x, *vectors, *residual)
                return self.run(given, unsharded, deferring(len(behind)), origins)
        origins = () if self._is_of_last_dim else self._origins(x, residual)
        return self.run((x, *self._parameters_here(), *residual), unsharded, None, origins)

    def _origins(self, x: torch.Tensor, residual: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What a call is given, with the parameters themselves."""
        return x, *self.vectors_here(), *residual

    def _is_deferrable(
        self,
        x: torch.Tensor,
        vectors: Sequence[torch.Tensor],
        residual: Sequence[torch.Tensor],
        unsharded: Sequence[int] | None,
    ) -> bool:
        """Can this rank's summands of the gradients be had, unrounded: of even shards, in the parameters' dtype?

        Sums that are promised the same bits on any number of ranks are no all-reduce of such summands.
        """
        if self.promises is not None and self.promises.ranks:
            return False
        given = (x, *residual)
        if not are_torchs(given):
            return False
        dtypes = [p.dtype for p in vectors]
        key = (x.shape, x.dtype, *[t.dtype for t in residual], *dtypes, unsharded and tuple(unsharded))
        found = self._deferrable.get(key)
        if found is None:
            whole = self.whole((x,), unsharded)
            is_even = x.numel() > 0 and not self._at.resolve("at", x.ndim).for_shape(self.mesh, whole).uneven
            computed = torch.float64 if torch.float64 in (*dtypes, *(t.dtype for t in given)) else torch.float32
            found = is_even and set(dtypes) == {computed}
            self._deferrable[key] = found
        return found

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *others = tensors
        residual = others.pop() if self.takes_residual else None
        if self._is_of_last_dim:
            self._check_last_dims("x", x)
        if residual is not None:
            if self._is_of_last_dim:
                self._check_last_dims("residual", residual)
            self._check_residual(x, residual, unsharded)
        dtypes = self.vector_dtypes(others, self._local_size)
        unsharded = self.whole(tensors, unsharded)
        named = (("at", self._at), ("output", self._output), ("output_grad", self._output_grad), ("input", self._input))
        resolved = [p.resolve(name, x.ndim).for_shape(self.mesh, unsharded) for name, p in named]
        at, output, output_grad, source = resolved
        if at.only(x.ndim - 1).shards != self._parameter.shards:
            found = (f"Shard({x.ndim - 1})",)
            raise PlacementError(self._at_name, found, "the hidden axis", "shard that axis as Shard(-1)")
        return self.op_of(
            RowNormSpec(
                ndim=x.ndim,
                hidden_size=self._hidden,
                eps=self._eps_of(x),
                centered=self._switches.centered,
                dropout=self.dropout,
                weight_offset=self._switches.weight_offset,
                mesh=self.mesh,
                x=source,
                at=at,
                output=output,
                output_grad=output_grad,
                dtype=self.check_dtype("x", x),
                residual_dtype=None if residual is None else self.check_dtype("residual", residual),
                **dtypes,
            )
        )

    def op_of(self, spec: RowNormSpec) -> FusedOp:
        """The fusions of a spec."""
        return row_norm_op(spec)


class InputNorm(RowNorm):
    """A norm of its input alone."""

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: [..., *normalized_shape] (local) -> the same shape, in x's dtype, placed as ``output``.

        ``unsharded``: the shape of the whole x, where local tensors are shards that differ in size.
        """
        if unsharded is None:
            results = self._again(x)
            if results is not None:
                return results[0]
        if type(x) not in PLAIN and has_dtensor((x,)):
            return self.on_dtensor(self._normed, x, self._input, unsharded, (self._output, self._output_grad))
        return self._normed(x, unsharded=unsharded)

    def _normed(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        if self.is_decomposed():
            return self._traced(x, None)[0]
        if self._is_of_last_dim and x.ndim > 1:
            return self._called(x, (), unsharded)[0]
        rows = self._as_rows("x", x)
        normed = self._called(rows, (), self._shape_of_rows(unsharded))[0]
        return self._as_given(normed, x.ndim)

    def op(self, x: torch.Tensor, unsharded: Sequence[int] | None = None) -> FusedOp:
        """The fusions for such an x, forward and backward; equal modules share them.

        x: [rows..., hidden size] (local); ``unsharded``: its whole shape, where its shards differ in size.
        """
        return self.bind((x, *self._parameters_here()), unsharded)
