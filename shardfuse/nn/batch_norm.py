"""BatchNorm of vectors, images and volumes, over the whole batch also where that is sharded over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..arguments import checked
from ..errors import ModuleArgumentError, ModuleInputError, PlacementError
from ..frontend.detection import has_dtensor
from ..mesh import DeviceMesh
from .batch_norm_fusions import BatchNormSpec, batch_norm_op
from .channels import channels_last, channels_second, is_channels_last, placement_of_channels_last
from .dtensor import Given, Result, on_local_tensors
from .parameters import ParameterKind, ParameterModule
from .placement import TensorPlacement

if TYPE_CHECKING:
    from .placement import Placements


class _BatchNorm(ParameterModule):
    """(x - mean) * rsqrt(var + eps) * weight + bias over all but the channels, with torch's running statistics.

    num_features, eps, momentum, affine, track_running_stats: as of torch's module of the same name, as are parameters,
    buffers, their names, and ``eval()``.
    mesh, input: on a mesh, where x and the result live: Shard of the batch or of image dims, or Replicate; statistics
    are those of the whole, in one exchange of a few numbers for each channel.  Buffers are the same on every rank.
    parameters: as of ``RMSNorm``.
    x: in float64, float32, bfloat16 or float16; channels-last images stay so.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Ioffe & Szegedy 2015.
    """

    _version = 2
    _dims: tuple[int, ...] = ()
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        parameters: ParameterKind = "dtensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        placement = TensorPlacement.of("input", input, mesh)
        super().__init__(mesh, placement.replicated(), parameters)
        if num_features < 1:
            raise ModuleArgumentError(name, "num_features", num_features, "1 or more")
        if not eps >= 0:
            raise ModuleArgumentError(name, "eps", eps, "0 or more")
        if momentum is not None and not 0 <= momentum <= 1:
            raise ModuleArgumentError(name, "momentum", momentum, "None, or a number from 0 to 1")
        if placement.is_partial:
            raise PlacementError("input", (input,), "a norm, which needs whole values", "pass Shard or Replicate")
        if any(d is not None and (d < 0 or d == 1) for d in placement.shards):
            advice = (
                "shard batch or image dims, counted from the front; for channels make one of theirs, without a mesh"
            )
            raise PlacementError("input", (input,), "[batch, channels, ...]", advice)
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats, self._input = affine, track_running_stats, placement
        self.weight = self.make_parameter("weight", num_features, 1.0, device, dtype) if affine else None
        self.bias = self.make_parameter("bias", num_features, 0.0, device, dtype) if affine else None
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        tracked = track_running_stats
        self.register_buffer("running_mean", torch.zeros(num_features, **where) if tracked else None)
        self.register_buffer("running_var", torch.ones(num_features, **where) if tracked else None)
        count = torch.tensor(0, dtype=torch.long, device=device) if tracked else None
        self.register_buffer("num_batches_tracked", count)

    def reset_running_stats(self) -> None:
        """The mean to zero, the variance to one, the count to zero."""
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Weight to one, bias to zero, and the running statistics as ``reset_running_stats``."""
        self.reset_running_stats()
        if self.weight is not None and self.bias is not None:
            torch.nn.init.ones_(self.weight)
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: [batch, channels, ...] (local) -> the same shape, dtype and memory format.

        ``unsharded``: the shape of the whole x, where local tensors are shards that differ in size.
        """
        if has_dtensor((x,)):
            result = Result(tuple(x.shape), self._input, self._input)
            here = partial(self._forward, unsharded=tuple(x.shape))
            return on_local_tensors(here, self.mesh, [Given("x", x, self._input)], [result])
        return self._forward(x, unsharded=unsharded)

    def _forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        name = type(self).__name__
        if x.ndim < 2 or (self._dims and x.ndim not in self._dims):
            expected = " or ".join(map(str, self._dims)) or "2 or more"
            raise ModuleInputError(name, "x", f"{x.ndim} dims", expected, "pass [batch, channels, ...]")
        self.check_size("x", x, 1, self.num_features)
        kept = () if self.running_mean is None or self.running_var is None else (self.running_mean, self.running_var)
        by_kept = kept if not self.training else ()
        placement = self._input.resolve("input", x.ndim).for_shape(self.mesh, unsharded)
        if not by_kept:
            self._check_count(x, placement, unsharded)
        affine = self.affine_parameters()
        is_last = is_channels_last(x)
        if is_last:
            placement = placement_of_channels_last(placement, x.ndim)
            unsharded = None if unsharded is None else (unsharded[0], *unsharded[2:], unsharded[1])
        spec = BatchNormSpec(
            ndim=x.ndim,
            channel_dim=x.ndim - 1 if is_last else 1,
            channels=self.num_features,
            eps=self.eps,
            mesh=self.mesh,
            mesh_id=id(self.mesh),
            placement=placement,
            dtype=self.check_dtype("x", x),
            affine_dtype=self.check_dtype("weight", affine[0]) if affine else None,
            kept_dtype=self.check_dtype("running_mean", by_kept[0]) if by_kept else None,
        )
        given = channels_last(x) if is_last else x
        result, *statistics = batch_norm_op(spec).apply(self.timer, unsharded, given, *affine, *by_kept)
        if self.training and kept:
            self._track(*kept, *statistics)
        return channels_second(result) if is_last else result

    def affine_parameters(self) -> tuple[torch.Tensor, ...]:
        """Weight and bias as local tensors, or none."""
        return self.local_parameters(weight=self.weight, bias=self.bias)

    def _check_count(self, x: torch.Tensor, placement: TensorPlacement, unsharded: Sequence[int] | None) -> None:
        """torch refuses a channel of one element, whose variance says nothing."""
        sizes = [n * placement.parts(self.mesh, k) for k, n in enumerate(x.shape)] if unsharded is None else unsharded
        if torch.Size(sizes).numel() == self.num_features:
            found = f"shape {tuple(x.shape)}, one value per channel,"
            raise ModuleInputError(type(self).__name__, "x", found, "more in training", "pass more, or call eval()")

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, new: torch.Tensor, unbiased: torch.Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # Without a momentum they are the average of all batches.
        for running, batch in ((mean, new), (variance, unbiased)):
            if self.momentum is None:
                running.lerp_(batch.to(running.dtype), self.num_batches_tracked.to(running.dtype).reciprocal())
            else:
                running.lerp_(batch.to(running.dtype), self.momentum)

    def extra_repr(self) -> str:
        kept = f"momentum={self.momentum}, affine={self.affine}, track_running_stats={self.track_running_stats}"
        return f"{self.num_features}, eps={self.eps}, {kept}, mesh={self.mesh}"


@checked(ModuleArgumentError, ("__init__",))
class BatchNorm1d(_BatchNorm):
    __doc__ = f"""BatchNorm of vectors [batch, channels] or sequences [batch, channels, length].

    {_BatchNorm.__doc__}"""

    _dims = (2, 3)


@checked(ModuleArgumentError, ("__init__",))
class BatchNorm2d(_BatchNorm):
    __doc__ = f"""BatchNorm of images [batch, channels, height, width].

    {_BatchNorm.__doc__}"""

    _dims = (4,)


@checked(ModuleArgumentError, ("__init__",))
class BatchNorm3d(_BatchNorm):
    __doc__ = f"""BatchNorm of volumes [batch, channels, depth, height, width].

    {_BatchNorm.__doc__}"""

    _dims = (5,)


@checked(ModuleArgumentError, ("__init__",))
class SyncBatchNorm(_BatchNorm):
    """BatchNorm of [batch, channels, ...] over the batches of all ranks of a process group, as torch.nn.SyncBatchNorm.

    process_group: torch's handle; the default group where it is left out.  Every rank's batch has as many samples.  In
    ``eval()``, on one rank, and without a process group it is a BatchNorm.
    Gradients of weight and bias are the ranks' average, as DistributedDataParallel makes them of its own.
    Arguments, parameters and buffers are otherwise those of ``BatchNorm2d`` without a mesh.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: [batch, channels, ...], this rank's batch -> the same shape, dtype and memory format."""
        if self.mesh is None and dist.is_initialized() and dist.get_world_size(self.process_group) > 1:
            from torch.distributed.tensor import Shard

            ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
            self.mesh = DeviceMesh(ranks)
            self._input = TensorPlacement.of("input", Shard(0), self.mesh)
        return super().forward(x, unsharded=unsharded)

    def affine_parameters(self) -> tuple[torch.Tensor, ...]:
        """Weight and bias; the fusion adds their gradients up over all ranks, of which this is one."""
        return tuple(self._averaged(p) for p in super().affine_parameters())

    def _averaged(self, parameter: torch.Tensor) -> torch.Tensor:
        if self.mesh is None or not parameter.requires_grad or not torch.is_grad_enabled():
            return parameter
        size = self.mesh.size

        def average(gradient: torch.Tensor) -> torch.Tensor:
            return gradient / size

        own = parameter.view_as(parameter)
        own.register_hook(average)  # pyright: ignore[reportUnknownMemberType]
        return own
