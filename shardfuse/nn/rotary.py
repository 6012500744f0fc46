"""The rotary embedding of queries and keys, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import ModuleInputError, PlacementError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from . import traced
from .dtensor_autograd import Given, Result, on_local_tensors, unsharded_shapes
from .fused import PLAIN, FusedModule, FusedOp
from .of_linear import TakesProducts
from .placement import TensorPlacement
from .rotary_fusions import RotarySpec, packed_rotary_op, rotary_op
from .rotary_packing import count, heads_before, packing
from .settings import Setting, checked_module, printed
from .shaping import Shaping

if TYPE_CHECKING:
    from .placement import Placements

Tables = tuple[torch.Tensor, torch.Tensor]


@checked_module
class RotaryEmbedding(TakesProducts, FusedModule):
    """Rotary embedding of queries and keys: each pair of features is turned by an angle that grows with the position.

    Feature pair i at position p turns by p * base^(-2i / rotary_dim): (a, b) becomes (a cos - b sin, b cos + a sin).
    The gradient is turned by the negative angle.  One fusion takes queries and keys, one their gradients.

    head_dim: features of a head.  rotary_dim: how many of them turn, the first ones; all by default.
    interleaved: pairs are neighbours, (2i, 2i + 1), as GPT-J has them; else (i, i + rotary_dim / 2), as Llama has them.
    heads_dim: the dim of the heads, 1 for [batch, heads, sequence, head_dim], 2 for [batch, sequence, heads, head_dim].
    packed: numbers of query heads and of key heads, where a call passes queries, keys and values as one tensor, heads
    of queries first, as one matmul makes them; the results are the three as attention takes them, and their gradient
    is one.  Without a mesh; of heads that are sharded, the numbers are those of this rank.
    batch_first: False where what is packed has the sequence as its first dim, and the batch as its second one.
    mesh, input: on a mesh, how queries, keys and results are placed: Shard of batch, heads or sequence, or Replicate.
    Cosines and sines are computed in float32, for float64 queries in float64; the module has no parameters and an empty
    state dict.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Su et al. 2021.
    """

    family = "rotary"
    head_dim: Setting[int] = Setting()
    base: Setting[float] = Setting()
    rotary_dim: Setting[int] = Setting()
    interleaved: Setting[bool] = Setting()
    heads_dim: Setting[int] = Setting()
    packed: Setting[tuple[int, int] | None] = Setting()
    batch_first: Setting[bool] = Setting()

    def __init__(
        self,
        head_dim: int,
        base: float = 10_000.0,
        *,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        heads_dim: int = 1,
        packed: Sequence[int] | None = None,
        batch_first: bool = True,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
    ) -> None:
        super().__init__()
        turned = head_dim if rotary_dim is None else rotary_dim
        self.check_argument("head_dim", head_dim, head_dim >= 2, "2 or more")
        are_pairs = 2 <= turned <= head_dim and turned % 2 == 0
        if rotary_dim is None:
            self.check_argument("head_dim", head_dim, are_pairs, "an even number, or rotary_dim= for those that turn")
        self.check_argument("rotary_dim", turned, are_pairs, f"an even number from 2 to {head_dim}")
        self.check_argument("base", base, base > 0, "a number above 0")
        self.check_argument("heads_dim", heads_dim, heads_dim in (1, 2), "1 or 2")
        if packed is None:
            self.check_argument("batch_first", batch_first, batch_first, "True without packed=")
        else:
            are_two = len(packed) == 2 and min(packed) >= 1
            self.check_argument("packed", packed, are_two, "numbers of query heads and of key heads")
            found = f"{tuple(packed)} with " + ("a mesh" if mesh is not None else f"heads_dim={heads_dim}")
            is_alone = mesh is None and heads_dim == 1
            self.check_argument("packed", found, is_alone, "numbers of this rank's heads, and no more")
        self.head_dim, self.base, self.rotary_dim, self.batch_first = head_dim, base, turned, batch_first
        self.packed = None if packed is None else (packed[0], packed[1])
        self.interleaved, self.mesh = interleaved, mesh
        self.heads_dim = heads_dim if packed is None else 2  # as a matmul leaves them
        self._input = TensorPlacement.of("input", input, mesh)
        if self._input.is_partial:
            raise PlacementError("input", (input,), "a rotation of whole values", "pass Shard or Replicate")
        self.describe()

    def settings(self) -> dict[str, object]:
        turned = {"rotary_dim": self.rotary_dim, "interleaved": self.interleaved}
        heads_dim, packed = (self.heads_dim, None) if self.packed is None else (1, list(self.packed))
        heads = {"heads_dim": heads_dim, "packed": packed, "batch_first": self.batch_first}
        sizes = {"head_dim": self.head_dim, "base": self.base}
        return {**sizes, **turned, **heads, "mesh": self.mesh, "input": self._input}

    def describe(self) -> None:
        super().describe()
        apart = {name: value for name, value in self.settings().items() if name not in ("packed", "batch_first")}
        self.__dict__["_apart_text"] = printed({**apart, "heads_dim": self.heads_dim, **self.common_settings()})

    @property
    def _sequence_dim(self) -> int:
        return 3 - self.heads_dim if self.batch_first else 0

    def tables(self, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> Tables:
        """positions: [..., sequence] -> cosines and sines, [..., sequence, rotary_dim / 2] of ``dtype``, on its device.

        Layers that turn by the same angles compute them once, and pass them to each call.  dtype: of the angles too,
        float32 or float64; what is turned in float64 has the error of float32's angles else.
        """
        if dtype not in (torch.float32, torch.float64):
            expected, advice = "torch.float32 or torch.float64", "cast the tables to another type"
            raise ModuleInputError(self.checked_name, "dtype", str(dtype), expected, advice)
        self.check_type("positions", positions)
        _check_local(self, "positions", positions)
        if positions.is_complex():
            found = f"dtype {positions.dtype}"
            raise ModuleInputError(self.checked_name, "positions", found, "integers or real numbers", "cast it")
        exponents = torch.arange(0, self.rotary_dim, 2, device=positions.device, dtype=dtype) / self.rotary_dim
        angles = positions.to(dtype)[..., None] * self.base**-exponents
        return angles.cos(), angles.sin()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        unsharded: Sequence[int] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """query, key: [batch, heads, sequence, head_dim] (or as ``heads_dim`` says), local -> both turned.

        ``packed``: query is [batch, sequence, (heads + 2 * key heads) * head_dim], of queries, keys and values, or
        [sequence, batch, ...] where the batch is not first, and there is no key -> (query, key, value), [batch, heads,
        sequence, head_dim] each, the first two turned.

        The key may have fewer heads, and may be left out: then the turned query is the result.
        cos, sin: [sequence, rotary_dim / 2] or [batch, sequence, rotary_dim / 2], local as the query is; with twice as
        many features each angle is there twice, as Hugging Face's models have them.  They have no gradient, and are
        refused where they require one.
        positions: [sequence] or [batch, sequence], in place of cos and sin; 0, 1, ... of the whole sequence by default.
        unsharded: the query's shape as a whole, where local tensors are shards that differ in size.
        """
        tensors = (query,) if key is None else (query, key)
        if cos is not None and sin is not None and positions is None and unsharded is None:
            again = None if torch.compiler.is_compiling() else self._again(tensors, cos, sin)
            if again is not None:
                return again[0] if len(again) == 1 else tuple(again)
        if self.packed is not None:
            if key is not None:
                found, expected = "a key", "none, as the query holds all heads"
                raise ModuleInputError(self.checked_name, "key", found, expected, "leave it out")
            return self._packed(self.packed, query, cos, sin, positions)
        if has_dtensor(tensors):
            parts = self._input.resolve("input", 4).parts(self.mesh, self.heads_dim)
            wholes = unsharded_shapes(tensors, self.heads_dim, parts)
            self.check_said(unsharded, wholes[0], "query")
            given = [Given(name, t, self._input) for name, t in zip(("query", "key"), tensors, strict=False)]
            results = [Result(shape, self._input, self._input) for shape in wholes]
            here = partial(self._call, cos=cos, sin=sin, positions=positions, unsharded=wholes[0])
            turned = on_local_tensors(here, self.mesh, given, results)
        else:
            turned = self._call(*tensors, cos=cos, sin=sin, positions=positions, unsharded=unsharded)
        return cast("torch.Tensor | tuple[torch.Tensor, ...]", turned[0] if key is None else turned)

    def _again(
        self, tensors: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
    ) -> Sequence[torch.Tensor] | None:
        """The results of tensors like those of a call before, of which nothing else is asked; None of others."""
        x, half = tensors[0], self.rotary_dim // 2
        along = 3 - self.heads_dim if self.batch_first else 0  # `_sequence_dim`
        if not self._ready or x.ndim < 3 or not cos.shape == sin.shape == (x.shape[along], half):
            return None
        sizes = [1, 1, 1, half]
        sizes[2 if self.heads_dim == 1 else along] = x.shape[along]
        shaping = None if self.packed is None else packing(self.packed, self.head_dim, self.batch_first)
        return self.run_again((*tensors, cos.view(sizes), sin.view(sizes)), shaping)

    def _packed(
        self,
        packed: tuple[int, int],
        x: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of x, [batch, sequence, features]."""
        heads = count(packed)
        if type(x) not in PLAIN and has_dtensor((x,)):
            raise PlacementError("query", cast("Any", x).placements, "packed heads", "pass to_local()")
        if x.ndim != 3 or x.shape[-1] != heads * self.head_dim:
            first = "batch, sequence" if self.batch_first else "sequence, batch"
            expected = f"[{first}, {heads} * {self.head_dim}]: the heads of queries, keys and values"
            advice = "pass what one matmul makes of all three"
            raise ModuleInputError(self.checked_name, "query", f"shape {tuple(x.shape)}", expected, advice)
        tables = self._tables_of(x, cos, sin, positions, None)
        if torch.compiler.is_compiling():
            return tuple(self.as_op((x, *tables), None, None))
        return tuple(self.run((x, *tables), None, packing(packed, self.head_dim, self.batch_first)))

    def as_op(
        self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None, shaping: Shaping | None
    ) -> Sequence[torch.Tensor]:
        """Packed heads are turned by torch's ops: autograd would make one gradient of the op's one result.

        Torch's ops promise nothing: where this promises, queries and keys are turned as those of a module without
        ``packed`` are.
        """
        if self.packed is None:
            return super().as_op(tensors, unsharded, shaping)
        x, cos, sin = tensors
        self.check_plain(query=x, cos=cos)
        heads = x.view(*x.shape[:-1], count(self.packed), self.head_dim)
        query, key, value = heads.split_with_sizes([*self.packed, self.packed[1]], 2)
        if self.promises is not None:
            turned = self.library_op([query, key, cos, sin], self.__dict__["_apart_text"], None)[:2]
        else:
            turned = [traced.rotary(t, cos, sin, self.rotary_dim, interleaved=self.interleaved) for t in (query, key)]
        return [heads_before(t, self.batch_first) for t in (*turned, value)]

    def _call(
        self,
        *tensors: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        positions: torch.Tensor | None,
        unsharded: Sequence[int] | None,
    ) -> tuple[torch.Tensor, ...]:
        is_traced = self.is_decomposed()
        if cos is None or is_traced:  # else tensors that are not known are checked where they are bound
            self._check(tensors)
        cos, sin = self._tables_of(tensors[0], cos, sin, positions, unsharded)
        if is_traced:
            self.check_plain(query=tensors[0], cos=cos)
            turned = [traced.rotary(x, cos, sin, self.rotary_dim, interleaved=self.interleaved) for x in tensors]
            return tuple(turned)
        return tuple(self.run((*tensors, cos, sin), unsharded)[: len(tensors)])

    def _tables_of(
        self,
        query: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        positions: torch.Tensor | None,
        unsharded: Sequence[int] | None,
    ) -> Tables:
        """Cosines and sines as ``_table`` has them, of what a call was given."""
        if (cos is None) != (sin is None) or (cos is not None and positions is not None):
            found = "cos and sin, or positions, not both" if positions is not None else "cos or sin alone"
            raise ModuleInputError(self.checked_name, "the call", found, "one of the two ways", "leave one out")
        if cos is None or sin is None:
            if positions is None:
                positions = self._positions(query, unsharded)
            else:
                self._check_positions(positions, query)
            cos, sin = self.tables(positions, torch.float64 if query.dtype == torch.float64 else torch.float32)
        cos, sin = self._table("cos", cos, query), self._table("sin", sin, query)
        return (
            (cos, sin) if unsharded is None else (self._even(cos, query, unsharded), self._even(sin, query, unsharded))
        )

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        *turned, cos, sin = tensors
        if sin.dtype != cos.dtype or sin.shape != cos.shape:
            found = f"shape {tuple(sin.shape)} of {sin.dtype}"
            expected = f"{tuple(cos.shape)} of {cos.dtype}, those of cos"
            raise ModuleInputError(self.checked_name, "sin", found, expected, "see tables()")
        if self.packed is None:
            self._check(turned)
        placement = self._input.resolve("input", 4).for_shape(self.mesh, unsharded)
        if any(d == 3 for d in placement.shards):
            raise PlacementError("input", ("Shard(-1)",), "pairs of features", "shard batch, heads or sequence")
        heads = [int(x.shape[self.heads_dim]) * placement.parts(self.mesh, self.heads_dim) for x in turned]
        if unsharded is not None and heads[0] != unsharded[self.heads_dim]:
            found, expected = f"{unsharded[self.heads_dim]} heads in all", "as many on each rank"
            raise ModuleInputError(self.checked_name, "query", found, expected, "shard heads that the ranks divide")
        if self.packed is not None:
            heads = [*self.packed, self.packed[1]]
        spec = RotarySpec(
            ndim=4,
            heads=tuple(heads),
            heads_dim=self.heads_dim,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            table=(*self._table_sizes(cos, unsharded), self.rotary_dim // 2),
            mesh=self.mesh,
            placement=placement,
            dtype=self.check_dtype("query", turned[0]),
            table_dtype=self.check_dtype("cos", cos),
        )
        return rotary_op(spec) if self.packed is None else packed_rotary_op(spec)

    def _uneven_dims(self, unsharded: Sequence[int] | None) -> list[int]:
        """The dims whose pieces differ in size between ranks: of 1 on one, which tells nothing of the others'."""
        placement = self._input.resolve("input", 4)
        return [] if unsharded is None else placement.uneven_dims(self.mesh, unsharded)

    def _table_sizes(self, cos: torch.Tensor, unsharded: Sequence[int] | None) -> list[int]:
        """Unsharded, 1 where the table is broadcast: alike on all ranks, for which ``_even`` has expanded it."""
        uneven = self._uneven_dims(unsharded)
        return [1 if n == 1 and d not in uneven else -1 for d, n in enumerate(cos.shape[:3])]

    def _even(self, table: torch.Tensor, query: torch.Tensor, unsharded: Sequence[int] | None) -> torch.Tensor:
        """``table`` with as many rows as the query along dims whose pieces differ in size."""
        for dim in self._uneven_dims(unsharded):
            if dim != self.heads_dim and table.shape[dim] == 1 != query.shape[dim]:
                table = table.expand(*table.shape[:dim], query.shape[dim], *table.shape[dim + 1 :])
        return table

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """The query, and the key where there is one."""
        query = tensors[0]
        for name, x in zip(("query", "key"), tensors, strict=False):
            if x.ndim != 4:
                expected = "pass [batch, heads, sequence, head_dim]"
                raise ModuleInputError(self.checked_name, name, f"{x.ndim} dims", "4", expected)
            self.check_size(name, x, -1, self.head_dim)
            if x.dtype != query.dtype:
                expected = f"{query.dtype}, the query's"
                raise ModuleInputError(self.checked_name, name, f"dtype {x.dtype}", expected, "cast one")
            for dim in (0, self._sequence_dim):
                self.check_size(name, x, dim, query.shape[dim])

    def _check_positions(self, positions: torch.Tensor, query: torch.Tensor) -> None:
        """Raise ModuleInputError for positions of another shape than the query's."""
        self.check_type("positions", positions)
        _check_local(self, "positions", positions)
        if positions.shape == query.shape[self._sequence_dim : self._sequence_dim + 1]:  # what most calls pass
            return
        if self.packed is None:
            self._check((query,))
        sizes = (query.shape[0 if self.batch_first else 1], query.shape[self._sequence_dim])
        given = (1,) * (positions.ndim == 1) + tuple(positions.shape)
        if len(given) != 2 or any(n not in (1, size) for n, size in zip(given, sizes, strict=True)):
            expected = f"[{sizes[1]}] or {list(sizes)}, those of the query's sequence, or of its batch and sequence"
            found = f"shape {list(positions.shape)}"
            raise ModuleInputError(self.checked_name, "positions", found, expected, "pass this rank's")

    def _positions(self, query: torch.Tensor, unsharded: Sequence[int] | None) -> torch.Tensor:
        """Those of this rank's part of the sequence."""
        placement = self._input.resolve("input", 4)
        dim = self._sequence_dim
        local = query.shape[dim]
        whole = local * placement.parts(self.mesh, dim) if unsharded is None else unsharded[dim]
        everywhere = torch.arange(whole, device=query.device)
        return placement.only(dim).local(self.mesh, everywhere)

    def _table(self, name: str, table: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """[batch or 1, heads as 1, sequence, rotary_dim / 2], in the order of the query's dims."""
        half, along = self.rotary_dim // 2, self._sequence_dim
        if type(table) not in PLAIN:
            _check_local(self, name, table)
        if table.requires_grad and torch.is_grad_enabled():
            expected, advice = "one that requires none, as none is computed", f"pass {name}.detach()"
            raise ModuleInputError(self.checked_name, name, "a gradient that is wanted", expected, advice)
        if query.ndim in (3, 4) and table.shape == (query.shape[along], half):  # what most calls pass
            sizes = [1, 1, 1, half]
            sizes[2 if self.heads_dim == 1 else along] = table.shape[0]
            table = table.view(sizes)
            return table.detach() if table.requires_grad else table
        if self.packed is None:
            self._check((query,))
        expected = f"[sequence, {half}] or [batch, sequence, {half}] for this query (or {2 * half} in place of {half})"
        if table.ndim not in (2, 3) or table.shape[-1] not in (half, 2 * half):
            raise ModuleInputError(self.checked_name, name, f"shape {tuple(table.shape)}", expected, "see tables()")
        table = table if table.ndim == 3 else table[None]
        batch_dim = 0 if self.batch_first else 1
        sizes = (query.shape[batch_dim], query.shape[along])
        if any(n not in (1, size) for n, size in zip(table.shape, sizes, strict=False)):
            raise ModuleInputError(self.checked_name, name, f"shape {tuple(table.shape)}", expected, "see tables()")
        if table.shape[-1] == 2 * half:  # each angle is there twice
            table = table[..., ::2] if self.interleaved else table[..., :half]
        table = table if self.batch_first else table.transpose(0, 1)
        return table.unsqueeze(self.heads_dim).detach()

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"


def _check_local(module: RotaryEmbedding, name: str, table: torch.Tensor) -> None:
    """Raise ModuleInputError for positions, cosines and sines that are DTensors."""
    if has_dtensor((table,)):
        expected, advice = "this rank's local tensor, whatever the query is", f"pass {name}.to_local()"
        raise ModuleInputError(module.checked_name, name, "a DTensor", expected, advice)
