"""Changes of the code that `scripts/mutate.py` finds and that change no behaviour, each with the reason."""

from __future__ import annotations

_PRINTED = "a printed trace alone is another"
_KIND = "an input that is a TensorView is bound to a BoundTensor: the question is one for the type checker"
_FLOAT = "torch.full of a float has the default dtype where none is given"
_CHILDLESS = "no module of shardfuse.nn has modules inside of it"
_PLACED = "a placement without a mesh has no shards"
_EQUAL_MESH = "a copy of a mesh is equal to it, and finds the same process groups"

_NO_SUCH_SIZE = "no dtype has three bytes"
_FILTERED = "what is no scalar input is left out at the end"
_NEVER_READ = "no Expr reads a number as a tensor"
_NEVER_NONE = "fewer communications than Exprs have returned above"

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "shardfuse/ir/printer.py",
        "return value.name if isinstance(value, BoundTensor) else repr(value)",
        "`isinstance(value, BoundTensor)` becomes `(False)`",
    ): _PRINTED,
    (
        "shardfuse/passes/settle_inputs.py",
        "if isinstance(tv, TensorView) and isinstance(tensor, BoundTensor) and tv in unsaid:",
        "`isinstance(tv, TensorView) and isinstance(tensor, BoundTensor) and tv in unsaid` "
        "becomes `(isinstance(tv, TensorView) and tv in unsaid)`",
    ): _KIND,
    (
        "shardfuse/nn/parameters.py",
        "size if isinstance(size, tuple) else (size,), value, device=device, dtype=dtype or torch.get_default_dtype()",
        "`dtype or torch.get_default_dtype()` becomes `(dtype)`",
    ): _FLOAT,
    (
        "shardfuse/nn/parameters.py",
        "def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:",
        "`True` becomes `(False)`",
    ): _CHILDLESS,
    (
        "shardfuse/nn/placement.py",
        "count *= mesh.shape[mesh_dim] if mesh is not None and shard_dim == dim else 1",
        "`mesh is not None and shard_dim == dim` becomes `(shard_dim == dim)`",
    ): _PLACED,
    (
        "shardfuse/frontend/dtensor.py",
        "meshes = [tv.domain.mesh for tv in self.fusion.tensors() if tv.domain.mesh is not None]",
        "`tv.domain.mesh is not None` becomes `(True)`",
    ): _EQUAL_MESH,
    (
        "shardfuse/frontend/dtensor.py",
        "meshes = [tv.domain.mesh for tv in self.fusion.tensors() if tv.domain.mesh is not None]",
        "`tv.domain.mesh is not None` becomes `(tv.domain.mesh is None)`",
    ): _EQUAL_MESH,
    (
        "shardfuse/ir/dtype.py",
        "return self.is_floating and self.itemsize <= 2",
        "`2` becomes `(3)`",
    ): _NO_SUCH_SIZE,
    (
        "shardfuse/ir/fusion.py",
        "todo += [v for v in made[scalar].inputs if isinstance(v, Scalar)]",
        "`isinstance(v, Scalar)` becomes `(True)`",
    ): _FILTERED,
    (
        "shardfuse/ir/verify.py",
        "known = dict.fromkeys(v for v in fusion.inputs if isinstance(v, BoundTensor))",
        "`isinstance(v, BoundTensor)` becomes `(True)`",
    ): _NEVER_READ,
    (
        "shardfuse/analysis/communication_table.py",
        "if size > PACKED_BYTES or found[0] is None:",
        "`size > PACKED_BYTES or found[0] is None` becomes `(size > PACKED_BYTES)`",
    ): _NEVER_NONE,
}
"""By the file, the line of code (without the blanks around it) and what becomes of it, as the script prints it."""
