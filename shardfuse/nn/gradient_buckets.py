"""Gradients of the parameters of many norms, which are sums over the ranks, reduced together.

Where ranks hold rows, the gradient of a norm's weight is a sum over the ranks, and each norm's backward ends with an
all-reduce of a few thousand numbers.  In a bucket the backward of a norm gives this rank's summand, and the parameters
stand in autograd's graph behind one node::

    parameter ---+                   +--- norm of layer 0
    parameter ---+--- _Together ---- +--- norm of layer 1
    parameter ---+                   +--- ...

Autograd runs that node once in a backward, when all summands have arrived: it joins them, adds them up by one
all-reduce, and hands each parameter its gradient.  So whatever waits for a parameter's gradient (accumulation, hooks,
DDP, `torch.autograd.grad`) sees the sum, only later in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, cast

import torch

from ..executor import packing
from ..executor.launch import queue_on
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from .parameters import ParameterModule
from .promising import check_model
from .redistribution import redistribute
from .row_norm import RowNorm
from .second_derivatives import Once
from .tensor_kinds import PLAIN
from .transforms import check_no_transform

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

_Key = tuple[int, tuple[bool, ...]]


def bucket_gradients(model: torch.nn.Module) -> int:
    """From now on one all-reduce a backward adds up the gradients of all norms in ``model``; how many they are.

    These are the parameters of RMSNorm, AddRMSNorm, LayerNorm, AddLayerNorm and DropoutAddNorm that are whole on each
    rank while the rows are sharded.  Values are as without, up to the order in which NCCL adds; gradients arrive at the
    end of the backward instead of layer by layer.  All ranks of a mesh call it for the same modules, and the forward of
    each uses the same norms, as they do without: a norm that a forward has not used has no part in the all-reduce, and
    its gradients stay None.
    Gradients are reduced one by one, as before, in calls that do not fit: under torch.compile and torch.func, of 16-bit
    parameters, of rows that ranks do not divide, and of parameters that something put in the place of those that the
    model has now, as FSDP does.
    """
    check_model("bucket_gradients", model)
    found: dict[_Key, list[tuple[RowNorm, str]]] = {}
    meshes: dict[_Key, DeviceMesh] = {}
    for module in dict.fromkeys(m for m in model.modules() if isinstance(m, RowNorm)):
        module.bucket = None
        cut = module.cut_rows
        if module.mesh is not None and module.mesh.size > 1 and any(cut):
            key = id(module.mesh), cut
            meshes[key] = module.mesh
            found.setdefault(key, []).extend((module, name) for name in module.given)
    for key, members in found.items():
        GradientBucket(meshes[key], key[1], members)
    return sum(map(len, found.values()))


class GradientBucket:
    """The parameters of one mesh whose summands are added up together.

    cut: for each mesh dimension, does it cut rows?  ``modules`` know their bucket, and ask it in each call.
    """

    def __init__(self, mesh: DeviceMesh, cut: Sequence[bool], members: Sequence[tuple[ParameterModule, str]]) -> None:
        from torch.distributed.tensor import Partial, Replicate

        self._mesh = mesh
        self._summands, self._whole = [Partial() if c else Replicate() for c in cut], [Replicate() for _ in cut]
        self._members = [(module, name, _parameter(module, name)) for module, name in members]
        self._places: dict[ParameterModule, slice] = {}
        for k, (module, _) in enumerate(members):  # those of a module follow one another
            first = self._places[module].start if module in self._places else k
            self._places[module] = slice(first, k + 1)
            cast("Any", module).bucket = self
        self._parameters = [p for _, _, p in self._members]
        self._made_for: object = None
        self._addresses: list[int] = []
        self._frozen: list[torch.Tensor] = []
        """Those that required no gradient when the node was made, which therefore leads to none of theirs."""
        self._behind: tuple[torch.Tensor, ...] = ()
        """The values of the parameters, in graph behind the node."""

    def of(self, module: ParameterModule, vectors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """The local parameters of a module, to be computed with; None where it has others by now, or frozen ones.

        vectors: those that it has.
        Their storage may have changed, a frozen one may require a gradient now, and a node runs on the stream on which
        it was made: then there is another one.
        """
        places = self._places[module]
        own = self._parameters[places]
        if len(vectors) != len(own) or not all(map(is_, vectors, own)) or not all(map(_wants_gradient, own)):
            return None
        local = own if PLAIN.issuperset(map(type, own)) else [*map(_local, own)]
        device = local[0].device
        stream = device, _queue_on(device)()
        if (
            self._made_for != stream
            or [*map(_address, local)] != self._addresses[places]
            or any(map(_wants_gradient, self._frozen))
        ):
            self._make(stream)
        return self._behind[places]

    def _make(self, stream: object) -> None:
        check_no_transform()
        self._behind = ()  # with the nodes that were made on another stream, those of the parameters too
        with torch.enable_grad():
            local = [p if (take := m.take(p)) is None else take(p) for m, _, p in self._members]
            self._behind = cast("Any", _Together).apply(self, *local)
        self._made_for, self._addresses = stream, [_address(_local(p)) for p in self._parameters]
        self._frozen = [p for p in self._parameters if not p.requires_grad]

    def reduce(self, summands: Sequence[torch.Tensor]) -> None:
        """Replace this rank's summands by their sums over the ranks."""
        flat = torch.cat([s.view(-1) for s in summands])
        whole = redistribute(flat, self._mesh, self._summands, self._whole)
        parts = whole.split_with_sizes([s.numel() for s in summands])
        packing.copy_all(list(summands), [part.view_as(s) for part, s in zip(parts, summands, strict=True)])


class _Together(torch.autograd.Function):
    """Parameters as they are, and their gradients by one all-reduce."""

    @staticmethod
    def forward(ctx: FunctionCtx, bucket: GradientBucket, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cast("Any", ctx).bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(p.data for p in parameters)  # views of no other tensor: versions of a parameter are not theirs

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> tuple[object, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = [g for g in gradients if g is not None]
        if not given:
            return None, *gradients
        with torch.no_grad():
            summed = [g.clone() if torch.is_grad_enabled() or not g.is_contiguous() else g for g in given]
            cast("Any", ctx).bucket.reduce(summed)
        if torch.is_grad_enabled():
            summed = cast("Any", Once).apply("bucket_gradients", len(summed), *summed, *given)
        found = iter(summed)
        return None, *(None if g is None else next(found) for g in gradients)


def _parameter(module: ParameterModule, name: str) -> torch.Tensor:
    found = module.parameter(name)
    assert found is not None, "a norm has the parameters that it names"
    return found


def _local(parameter: Any) -> torch.Tensor:
    return parameter._local_tensor if has_dtensor((parameter,)) else parameter


_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_wants_gradient = attrgetter("requires_grad")


@lru_cache(maxsize=64)
def _queue_on(device: torch.device) -> Callable[[], int]:
    return queue_on(device)
