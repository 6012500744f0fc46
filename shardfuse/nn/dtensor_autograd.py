"""DTensors into the modules and out of them, through autograd."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ..errors import PlacementError
from ..executor.plain_arguments import waited
from ..frontend.detection import has_dtensor
from ..frontend.moves import Move, move_in
from ..frontend.shard_order import dtensor_of, left_to_right, shard_order_of
from ..mesh import DeviceMesh, current_rank
from .placement import TensorPlacement, is_taken
from .saved_versions import taken_of, watch_results
from .transforms import check_no_transform

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Given:
    """An argument of a module: what it is called, and where the module has it live."""

    name: str
    tensor: torch.Tensor
    placement: TensorPlacement


@dataclass(frozen=True)
class Result:
    """The unsharded shape of a result, where it lives, and where the module wants its gradient."""

    shape: tuple[int, ...]
    placement: TensorPlacement
    gradient: TensorPlacement


def on_local_tensors(
    call: Callable[..., object], mesh: DeviceMesh | None, arguments: Sequence[Given], results: Sequence[Result]
) -> Any:
    """``call`` on the local tensors of DTensors; its results as DTensors.  A plain tensor is local already.

    Raises PlacementError for a DTensor that does not live where the module was made for, TransformError in torch.func.
    """
    if torch.compiler.is_compiling():
        from shardfuse.nn.traced_dtensors import on_traced

        return on_traced(call, mesh, arguments, results)
    check_no_transform()
    found = next(a.tensor for a in arguments if has_dtensor((a.tensor,)))
    torch_mesh = cast("DTensor", found).device_mesh
    local = [local_of(a.name, a.tensor, mesh, a.placement) for a in arguments]
    with taken_of(local, [a.tensor for a in arguments]) as kept:
        outputs = call(*local)
    several = cast("tuple[torch.Tensor, ...]", outputs if isinstance(outputs, tuple) else (outputs,))
    wrap = cast("Callable[..., torch.Tensor]", _ToDTensor.apply)  # pyright: ignore[reportUnknownMemberType]
    wrapped = tuple(
        wrap(x, torch_mesh, r.shape, placements_of(r.placement, x.ndim), placements_of(r.gradient, x.ndim))
        for x, r in zip(several, results, strict=True)
    )
    watch_results(kept, several, wrapped)
    return wrapped if isinstance(outputs, tuple) else wrapped[0]


def on_local_input(
    call: Callable[..., torch.Tensor],
    mesh: DeviceMesh | None,
    x: torch.Tensor,
    at: TensorPlacement,
    result: tuple[TensorPlacement, TensorPlacement] | None = None,
) -> torch.Tensor:
    """``call(local x, unsharded=...)`` of a DTensor x that lives ``at``; its result, of x's shape, as a DTensor.

    result: where it lives, and where its gradient is wanted; as x by default.  Raises as ``on_local_tensors``.
    """
    shape = tuple(x.shape)
    results = [Result(shape, *(result or (at, at)))]
    return on_local_tensors(partial(call, unsharded=shape), mesh, [Given("x", x, at)], results)


def unsharded_shapes(tensors: Sequence[torch.Tensor], dim: int, parts: int) -> list[tuple[int, ...]]:
    """The shapes of tensors that differ along ``dim`` alone, some of which are DTensors, as wholes.

    A plain one is a rank's part: along ``dim`` one of ``parts`` of one size, and along others like that of a DTensor.
    """
    whole = next(tuple(t.shape) for t in tensors if has_dtensor((t,)))
    return [
        tuple(t.shape)
        if has_dtensor((t,)) or t.ndim != len(whole)
        else (*whole[:dim], t.shape[dim] * parts, *whole[dim + 1 :])
        for t in tensors
    ]


def local_of(name: str, tensor: torch.Tensor, mesh: DeviceMesh | None, placement: TensorPlacement) -> torch.Tensor:
    """The local tensor of a DTensor that lives as ``placement`` says; any other tensor as it is.

    Raises PlacementError, and TransformError inside of torch.func.
    """
    if not has_dtensor((tensor,)):
        return tensor
    dtensor = cast("DTensor", tensor)
    gradient, move = checked(name, dtensor, mesh, placement)
    local = local_part(gradient, dtensor)
    if move is None:
        return local
    if tuple(local.shape) != move.shape:
        piece = f"a local tensor of {list(local.shape)}, where this rank's is {list(move.shape)}"
        raise PlacementError(name, dtensor.placements, piece, "make it with distribute_tensor")
    check_no_transform()
    enter = cast("Callable[..., torch.Tensor]", _Entering.apply)  # pyright: ignore[reportUnknownMemberType]
    return enter(local, move)


def checked(
    name: str, dtensor: DTensor, mesh: DeviceMesh | None, placement: TensorPlacement
) -> tuple[tuple[Placement, ...], Move | None]:
    """The placements of an argument's gradient, and how its pieces are exchanged where torch cuts it elsewhere.

    Raises PlacementError for a DTensor that lives elsewhere.
    """
    shape, order = tuple(dtensor.shape), shard_order_of(dtensor)
    found = _Found(dtensor.device_mesh, dtensor.placements, shape, dtensor.device, order)
    return _checked(name, found, mesh, placement, current_rank())


class _Found(NamedTuple):
    """What a DTensor says of itself."""

    mesh: TorchDeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    device: torch.device
    shard_order: Hashable


@lru_cache(maxsize=1024)
def _checked(
    name: str, found: _Found, mesh: DeviceMesh | None, placement: TensorPlacement, rank: int
) -> tuple[tuple[Placement, ...], Move | None]:
    """As `checked`; kept, since a call asks this of each of its tensors."""
    own = DeviceMesh.from_torch(found.mesh)
    if own.coordinate(rank) is None:
        against, advice = f"this rank, which is not on {own}", "call the module on the ranks of its mesh alone"
        raise PlacementError(name, found.placements, against, advice)
    if mesh is None or (mesh.ranks, mesh.shape) != (own.ranks, own.shape):
        advice = f"make the module with mesh={own!r}"
        raise PlacementError(name, found.placements, f"the module's mesh, {mesh}", advice)
    ndim = len(found.shape)
    wanted = placements_of(placement, ndim)
    has = left_to_right(name, found.mesh, tuple(found.placements), found.shape, found.shard_order)
    if has != wanted:
        raise elsewhere(name, has, wanted)
    move = move_in(found.mesh, wanted, found.shape, found.device)
    return placements_of(placement.gradient(), ndim), move


def elsewhere(name: str, has: Sequence[Placement], wanted: Sequence[Placement]) -> PlacementError:
    """The error of a DTensor that lives where the module was not made for."""
    against = f"{wanted}, which the module was made for"
    if all(is_taken(p) for p in has):
        return PlacementError(name, has, against, "redistribute it, or make the module so")
    advice = "redistribute it to Replicate(), or to a Shard, and make the module for that: no module takes it as it is"
    return PlacementError(name, has, against, advice)


def placements_of(placement: TensorPlacement, ndim: int) -> tuple[Placement, ...]:
    """In torch's words, for a tensor of ``ndim`` dims."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    resolved = placement.resolve("placement", ndim)
    pairs = zip(resolved.shards, resolved.partial, strict=True)
    return tuple(Partial() if is_partial else Replicate() if dim is None else Shard(dim) for dim, is_partial in pairs)


def local_part(gradient: tuple[Placement, ...], dtensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, whose gradient arrives as a DTensor of placements ``gradient``.

    Raises TransformError inside of torch.func, where a gradient is to be recorded.
    """
    if torch.is_grad_enabled() and dtensor.requires_grad:
        check_no_transform()
        return cast("Any", _ToLocal).apply(dtensor, gradient, *_dense_layout(dtensor))
    return cast("Any", dtensor)._local_tensor


class _ToLocal(torch.autograd.Function):
    """The local tensor of a DTensor; the gradient becomes a DTensor of its strides that begins its storage.

    Gradients of several parameters come as parts of one all-reduce.  copy.deepcopy fails for a DTensor whose local
    tensor does not begin its storage (torch 2.11 to 2.13).  Autograd copies a gradient of strides that are not its
    leaf's, as ``DTensor.to_local`` makes them of shards that differ in size, and torch 2.11 replicates such a copy.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx,
        x: DTensor,
        gradient: tuple[Placement, ...],
        order: tuple[int, ...] | None,
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        kept = cast(Any, ctx)
        kept.mesh, kept.gradient, kept.shape, kept.is_leaf = x.device_mesh, gradient, x.shape, x.is_leaf
        kept.order, kept.stride = order, stride
        local = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:  # of a bucket's norm that the forward has not used
            return None, None, None, None
        kept = cast(Any, ctx)
        order: tuple[int, ...] | None = kept.order
        if order is None:
            grad = grad.contiguous()
        else:
            grad = grad.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
        if kept.is_leaf and grad.storage_offset():
            grad = grad.clone()
        return dtensor_of(grad, kept.mesh, kept.gradient, kept.shape, kept.stride), None, None, None


def _dense_layout(x: torch.Tensor) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """The dims of ``x`` from the outermost in memory, ``None`` if as they stand, and its strides without gaps."""
    stride = x.stride()
    if x.is_contiguous():
        return None, stride
    order = tuple(sorted(range(x.ndim), key=lambda dim: stride[dim], reverse=True))
    return order, dense_strides(x.shape, order)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor without gaps whose dims are stored in this order, the outermost first."""
    found, step = [1] * len(shape), 1
    for dim in reversed(order):
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


class _Entering(torch.autograd.Function):
    """The piece of a DTensor that torch cuts elsewhere, as modules take it; the gradient goes back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, move: Move) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        cast(Any, ctx).move = move
        return move.enter(waited(x))

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return cast(Any, ctx).move.leave(grad), None


class _ToDTensor(torch.autograd.Function):
    """A local tensor as a DTensor; the gradient comes back as the local tensor of ``gradient``."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx,
        x: torch.Tensor,
        mesh: TorchDeviceMesh,
        shape: tuple[int, ...],
        placements: tuple[Placement, ...],
        gradient: tuple[Placement, ...],
    ) -> torch.Tensor:
        kept = cast(Any, ctx)
        ctx.set_materialize_grads(False)  # autograd would make a plain tensor of the unsharded shape
        kept.mesh, kept.placements, kept.gradient = mesh, placements, gradient
        move = move_in(mesh, placements, shape, x.device)
        x = x.detach() if move is None else move.leave(x)
        # Of short shards no rank could tell the shape by its own.
        stride = torch.empty(shape, device="meta").stride()
        return dtensor_of(x, mesh, placements, shape, stride)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:  # the module's own node fills local zeros in
            return None, None, None, None, None
        kept = cast(Any, ctx)
        dtensor = cast("DTensor", grad) if has_dtensor((grad,)) else _replicated(grad, kept.mesh)
        local = waited(gradient_as(dtensor, kept.placements, kept.gradient))
        move = move_in(dtensor.device_mesh, kept.gradient, tuple(grad.shape), local.device)
        return local if move is None else move.enter(local), None, None, None, None


def _replicated(grad: torch.Tensor, mesh: TorchDeviceMesh) -> DTensor:
    """A plain gradient of a DTensor: the same unsharded values on every rank.

    Autograd fills plain zeros in for a result that is not used, where the function that returned it, as a reentrant
    checkpoint does, is one of Python's.
    """
    from torch.distributed.tensor import Replicate

    return dtensor_of(grad, mesh, (Replicate(),) * mesh.ndim, tuple(grad.shape), grad.stride())


def gradient_as(grad: DTensor, placements: Sequence[Placement], wanted: Sequence[Placement]) -> torch.Tensor:
    """The local tensor of ``wanted``.  A whole gradient becomes summands by being one of them, the others being 0."""
    by_way_of = [
        w if not w.is_partial() or g.is_partial() else p
        for g, p, w in zip(grad.placements, placements, wanted, strict=True)
    ]
    local = grad.redistribute(grad.device_mesh, by_way_of).to_local()
    coordinate = cast("Sequence[int]", grad.device_mesh.get_coordinate())  # of a rank of the mesh
    for at, has, want in zip(coordinate, by_way_of, wanted, strict=True):
        if want.is_partial() and not has.is_partial() and at != 0:
            local = torch.zeros_like(local)
    return local
