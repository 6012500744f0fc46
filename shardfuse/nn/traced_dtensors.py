"""DTensors into the modules and out of them, in words that torch.compile knows.

From torch 2.13 these are DTensor's own, which torch's cache of compiled graphs takes.  Before, ``from_local`` has no
``grad_placements``, and gradients of short shards come out whole: Dynamo takes two functions as they are into its
graph, which AOTAutograd traces.  (Where Dynamo traces an autograd function itself, it loses sizes that are symbols.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import torch

from ..errors import PlacementError
from ..mesh import DeviceMesh
from .dtensor_autograd import Given, Result, dense_strides, elsewhere, gradient_as, local_part, placements_of
from .placement import TensorPlacement
from .symbolic_strides import mend_symbolic_strides

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_REPLICATE, _PARTIAL = -1, -2
"""In place of the dim that a mesh dimension cuts: graphs know integers, and no placements."""
DTENSORS_OWN: bool = cast("Any", torch.__version__) >= (2, 13)
"""Are DTensor's own words right?"""
P = ParamSpec("P")


def _in_graph(function: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """``function``, which Dynamo calls in its graph and does not trace."""
    return cast("Any", torch.compiler).allow_in_graph(function)


def on_traced(
    call: Callable[..., object], mesh: DeviceMesh | None, arguments: Sequence[Given], results: Sequence[Result]
) -> Any:
    """As ``on_local_tensors``, in words that torch.compile knows."""
    from torch.distributed.tensor import DTensor

    like = next(a.tensor for a in arguments if isinstance(a.tensor, DTensor))
    outputs = call(*[local_traced(a.name, a.tensor, mesh, a.placement) for a in arguments])
    several = cast("tuple[torch.Tensor, ...]", outputs if isinstance(outputs, tuple) else (outputs,))
    wrapped = [_dtensor_traced(x, like, r) for x, r in zip(several, results, strict=True)]
    return tuple(wrapped) if isinstance(outputs, tuple) else wrapped[0]


def _dtensor_traced(x: torch.Tensor, like: DTensor, result: Result) -> torch.Tensor:
    """A result as a DTensor on the mesh of ``like``."""
    from torch.distributed.tensor import DTensor

    where, gradient = result.placement, result.gradient
    if not DTENSORS_OWN:
        return _dtensor_in_graph(x, like, result.shape, _encoded(where, x.ndim), _encoded(gradient, x.ndim))
    placements, wanted = placements_of(where, x.ndim), placements_of(gradient, x.ndim)
    stride = dense_strides(result.shape, range(len(result.shape)))
    given: dict[str, Any] = {"run_check": False, "shape": torch.Size(result.shape), "stride": stride}
    if wanted != placements:
        given["grad_placements"] = wanted
    return DTensor.from_local(x, like.device_mesh, placements, **given)


def local_traced(name: str, tensor: torch.Tensor, mesh: DeviceMesh | None, placement: TensorPlacement) -> torch.Tensor:
    """As ``local_of``, in words that torch.compile knows."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    wanted, placement = placements_of(placement, tensor.ndim), placement.resolve(name, tensor.ndim)
    if tuple(tensor.placements) != wanted:
        raise elsewhere(name, tensor.placements, wanted)
    if placement.cuts_unevenly(mesh, tensor.shape) and len(set(placement.cut_dims)) < len(placement.cut_dims):
        advice = "pad it, or call the module outside of torch.compile"
        raise PlacementError(name, tensor.placements, "torch.compile, where two cuts of a dim are uneven", advice)
    if DTENSORS_OWN:
        local = tensor.to_local(grad_placements=placements_of(placement.gradient(), tensor.ndim))
    else:
        local = _local_in_graph(tensor, _encoded(placement.gradient(), tensor.ndim))
    _relate_sizes(name, tensor, local, mesh, placement)
    return local


def _relate_sizes(
    name: str, tensor: DTensor, local: torch.Tensor, mesh: DeviceMesh | None, placement: TensorPlacement
) -> None:
    """Have the graph know that dims which are cut evenly are that many times as long as this rank's piece of them.

    A module may fix the size of the piece, as RMSNorm does.  AOTAutograd, which would find out about the whole in the
    backward, does not return a size that was a symbol while it looked at the forward: DTensor gets None for it.
    Raises PlacementError where that does not hold.
    """
    for dim in placement.cut_dims:
        size, parts = tensor.shape[dim], placement.parts(mesh, dim)
        if size % parts == 0 and size != parts * local.shape[dim]:
            piece = f"a local tensor of {list(local.shape)} of {list(tensor.shape)}"
            raise PlacementError(name, tensor.placements, piece, "make it with distribute_tensor")


@_in_graph
def _local_in_graph(dtensor: DTensor, gradient: tuple[int, ...]) -> torch.Tensor:
    """As ``local_part``: autograd's functions and placements are no words of a graph, but may be within one."""
    mend_symbolic_strides()
    return local_part(_decoded(gradient), dtensor)


@_in_graph
def _dtensor_in_graph(
    x: torch.Tensor, like: DTensor, shape: tuple[int, ...], placements: tuple[int, ...], gradient: tuple[int, ...]
) -> torch.Tensor:
    """As `_ToDTensor`, on the mesh of ``like``."""
    mend_symbolic_strides()
    wrap = cast("Callable[..., torch.Tensor]", _TracedToDTensor.apply)  # pyright: ignore[reportUnknownMemberType]
    stride = dense_strides(shape, range(len(shape)))
    return wrap(x, like.device_mesh, shape, stride, _decoded(placements), _decoded(gradient))


def _encoded(placement: TensorPlacement, ndim: int) -> tuple[int, ...]:
    """The dim that each mesh dimension cuts, or which of the others it is."""
    resolved = placement.resolve("placement", ndim)
    pairs = zip(resolved.shards, resolved.partial, strict=True)
    return tuple(_PARTIAL if is_partial else _REPLICATE if dim is None else dim for dim, is_partial in pairs)


def _decoded(placements: tuple[int, ...]) -> tuple[Placement, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return tuple(Partial() if k == _PARTIAL else Replicate() if k == _REPLICATE else Shard(k) for k in placements)


class _TracedToDTensor(torch.autograd.Function):
    """As `_ToDTensor`, in words that torch.compile knows, for shards that torch cuts as modules do.

    ``DTensor.from_local`` has ``grad_placements`` since torch 2.13 only.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx,
        x: torch.Tensor,
        mesh: TorchDeviceMesh,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        placements: tuple[Placement, ...],
        gradient: tuple[Placement, ...],
    ) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        kept = cast(Any, ctx)
        kept.placements, kept.gradient = placements, gradient
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept = cast(Any, ctx)
        local = gradient_as(cast("DTensor", grad.detach()), kept.placements, kept.gradient)
        return local, None, None, None, None, None
