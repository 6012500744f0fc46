"""BatchNorm of vectors, images and volumes, over the whole batch also where that is sharded over a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from math import prod
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from ..errors import ModuleInputError, PlacementError, PromiseError
from ..frontend.detection import has_dtensor
from ..ir import DataType
from ..mesh import DeviceMesh
from ..mesh.groups import world_key
from . import traced
from .batch_norm_fusions import BatchNormSpec, batch_norm_op
from .channel_norm import ChannelNorm
from .fused import PLAIN, FusedOp
from .moved_statistics import is_end_of_recomputation, move_towards
from .parameters import ParameterKind
from .placement import TensorPlacement
from .settings import Checked, Setting, checked_module

if TYPE_CHECKING:
    from .placement import Placements


def _check_momentum(module: BatchNorm, momentum: object) -> None:
    """Raise ModuleArgumentError for what is no momentum."""
    is_share: bool = momentum is None or (isinstance(momentum, Real) and 0 <= cast(Any, momentum) <= 1)
    module.check_argument("momentum", momentum, is_share, "None, or a number from 0 to 1")


def _check_group(module: SyncBatchNorm, group: object) -> None:
    """Raise ModuleArgumentError for what is no process group."""
    # What new_group() returns on ranks that are not in the group is no group: there it is a BatchNorm.
    outside = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
    is_outside = type(group) is type(outside) and group == outside  # a tensor that is compared is no truth value
    is_group: bool = group is None or isinstance(group, dist.ProcessGroup) or is_outside
    module.check_argument("process_group", group, is_group, "a group of torch.distributed, or None for all ranks")


class BatchNorm(ChannelNorm):
    """(x - mean) * rsqrt(var + eps) * weight + bias over all but the channels, with torch's running statistics.

    num_features, eps, momentum, affine, track_running_stats, bias: as of torch's module of the same name, as are
    parameters, buffers, their names, and ``eval()``.
    mesh, input: on a mesh, how x and the result are placed: Shard of the batch or of image dims, or Replicate;
    statistics are those of the whole, in one exchange of a few numbers for each channel.  Buffers are the same on
    every rank.
    parameters: as of ``RMSNorm``.
    x: in float64, float32, bfloat16 or float16; channels-last images stay so.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError, and PromiseError where rows are promised
    the same bits in any batch and normed by statistics of theirs.  Source: Ioffe & Szegedy 2015.
    """

    family = "batch_norm"
    _version = 2
    _dims: tuple[int, ...] = ()
    num_features: Setting[int] = Setting()
    momentum: Checked[float | None] = Checked(_check_momentum)
    track_running_stats: Checked[bool] = Checked()
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        parameters: ParameterKind = "dtensor",
    ) -> None:
        placement = TensorPlacement.of_whole_values("input", input, mesh, "a norm")
        super().__init__(mesh, placement.replicated(), parameters)
        self.check_argument("num_features", num_features, num_features >= 1, "1 or more")
        self.check_eps(eps)
        if any(d is not None and (d < 0 or d == 1) for d in placement.shards):
            advice = (
                "shard batch or image dims, counted from the front; for channels make one of theirs, without a mesh"
            )
            raise PlacementError("input", (input,), "[batch, channels, ...]", advice)
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.track_running_stats, self._input = track_running_stats, placement
        self.make_affine(num_features, affine, bias, device, dtype)
        self.check_own_dtype(dtype)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        tracked = track_running_stats
        self.register_buffer("running_mean", torch.zeros(num_features, **where) if tracked else None)
        self.register_buffer("running_var", torch.ones(num_features, **where) if tracked else None)
        count = torch.tensor(0, dtype=torch.long, device=device) if tracked else None
        self.register_buffer("num_batches_tracked", count)
        self.describe()

    def settings(self) -> dict[str, object]:
        sizes = {"num_features": self.num_features, "eps": self.eps, "given": " ".join(self.given)}
        return {**sizes, "mesh": self.mesh, "input": self._input}

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        return super().made_again({**settings, "track_running_stats": False})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As torch's: state dicts of before version 2, or of no version, need not have num_batches_tracked."""
        version = cast("int | None", local_metadata.get("version"))
        key, count = f"{prefix}num_batches_tracked", self.num_batches_tracked
        if (version is None or version < 2) and self.track_running_stats and key not in state_dict:
            is_there = count is not None and count.device.type != "meta"
            state_dict[key] = count if is_there else torch.tensor(0, dtype=torch.long)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def reset_running_stats(self) -> None:
        """The mean to zero, the variance to one, the count to zero."""
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Weight to one, bias to zero, and the running statistics as ``reset_running_stats``."""
        self.reset_running_stats()
        super().reset_parameters()

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: [batch, channels, ...] (local) -> the same shape, dtype and memory format.

        ``unsharded``: the shape of the whole x, where local tensors are shards that differ in size.
        """
        if type(x) not in PLAIN and has_dtensor((x,)):
            return self.on_dtensor(self._forward, x, self._input, unsharded)
        return self._forward(x, unsharded=unsharded)

    def _forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None) -> torch.Tensor:
        if self._dims and x.ndim not in self._dims:
            self._check(x, 1)
        kept = () if self.running_mean is None or self.running_var is None else (self.running_mean, self.running_var)
        if not kept and (self.running_mean is not None or self.running_var is not None):
            missing = "running_mean" if self.running_mean is None else "running_var"
            advice = "assign it, or None to both to norm by the batch's own"
            raise ModuleInputError(type(self).__name__, missing, "None", "a tensor, as the other one is", advice)
        if self.training and kept:
            self._check_kept(*kept)  # before one of them is written
        by_kept = kept if not self.training else ()
        if self.is_decomposed():
            self._check(x, 1)
            self.check_plain(x=x, weight=self.weight, bias=self.bias)
            if not by_kept:
                self._check_count(x.shape)
            results = traced.batch_norm(x, self.weight, self.bias, self.eps, by_kept)
        else:
            try:
                results = self.run_images((x, *self.vectors_here(), *by_kept), unsharded)
            except Exception as error:
                if self.training and is_end_of_recomputation(error):
                    with torch.no_grad():  # torch has moved its statistics by then
                        self._forward(x, unsharded=unsharded)
                raise
        if self.training and kept and self.track_running_stats:
            is_empty = prod(x.shape if unsharded is None else unsharded) == 0
            move_towards(kept, () if is_empty else tuple(results[1:]), self.momentum, self.num_batches_tracked)
        elif self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)  # as torch's counts, of statistics that were put away
        return results[0]

    def _check(self, x: torch.Tensor, channel_dim: int) -> None:
        if x.ndim < 2 or (self._dims and x.ndim not in self._dims):
            expected = " or ".join(map(str, self._dims)) or "2 or more"
            advice = "pass [batch, channels, ...]"
            raise ModuleInputError(type(self).__name__, "x", f"{x.ndim} dims", expected, advice)
        self.check_size("x", x, channel_dim, self.num_features)

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        x, *vectors = tensors
        affine, kept = vectors[: len(self.given)], vectors[len(self.given) :]
        channel_dim = x.ndim - 1 if self.is_last else 1
        self._check(x, channel_dim)
        placement = self.placed(self._input, x.ndim, unsharded)
        if kept:
            self._check_kept(*kept)
        else:
            self._check_promises()
            parts = [n * placement.parts(self.mesh, k) for k, n in enumerate(x.shape)]
            self._check_count(parts if unsharded is None else unsharded)
        spec = BatchNormSpec(
            ndim=x.ndim,
            channel_dim=channel_dim,
            channels=self.num_features,
            eps=self.eps,
            mesh=self.mesh,
            placement=placement,
            dtype=self.check_dtype("x", x),
            **self.vector_dtypes(affine, x.shape[channel_dim]),
            kept_dtype=self._kept_dtype(*kept) if kept else None,
        )
        return batch_norm_op(spec)

    def _check_kept(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Each call of training asks."""
        if not (mean.shape == variance.shape == (self.num_features,)):
            self.check_vectors({"running_mean": mean, "running_var": variance}, self.num_features)
        if mean.dtype is not variance.dtype:
            self._kept_dtype(mean, variance)

    def _kept_dtype(self, mean: torch.Tensor, variance: torch.Tensor) -> DataType:
        """Raises ModuleInputError unless both are of one dtype that is computed with."""
        if variance.dtype != mean.dtype:
            found, expected = f"dtype {variance.dtype}", f"{mean.dtype}, that of running_mean"
            raise ModuleInputError(type(self).__name__, "running_var", found, expected, "cast one of them")
        return self.check_dtype("running_mean", mean)

    def _check_promises(self) -> None:
        """Rows that are normed by the mean of all rows change with them, in whatever order that is added up."""
        if self.promises is not None and self.promises.batch:
            found = f"{type(self).__name__} norms each row by the mean and variance of the whole batch in training"
            remedy = "call eval() on it, which norms by the running statistics, or take GroupNorm"
            raise PromiseError(str(self.promises), found, remedy)

    def _check_count(self, sizes: Sequence[int]) -> None:
        """torch refuses a channel of one element, whose variance says nothing."""
        if prod(sizes) == self.num_features:  # a torch.Size would make numbers of a graph's symbols
            found = f"shape {tuple(sizes)}, one value per channel"
            expected = "more in training" if self.training else "more without running statistics"
            advice = "pass more, or call eval()" if self.training else "pass more"
            raise ModuleInputError(type(self).__name__, "x", found, expected, advice)

    def extra_repr(self) -> str:
        kept = f"momentum={self.momentum}, affine={self.affine}, track_running_stats={self.track_running_stats}"
        return f"{self.num_features}, eps={self.eps}, {kept}, mesh={self.mesh}"


@checked_module
class BatchNorm1d(BatchNorm):
    __doc__ = f"""BatchNorm of vectors [batch, channels] or sequences [batch, channels, length].

    {BatchNorm.__doc__}"""

    _dims = (2, 3)


@checked_module
class BatchNorm2d(BatchNorm):
    __doc__ = f"""BatchNorm of images [batch, channels, height, width].

    {BatchNorm.__doc__}"""

    _dims = (4,)


@checked_module
class BatchNorm3d(BatchNorm):
    __doc__ = f"""BatchNorm of volumes [batch, channels, depth, height, width].

    {BatchNorm.__doc__}"""

    _dims = (5,)


class _Together(NamedTuple):
    """Where a SyncBatchNorm is with the ranks of its group.  world: the process group that it was made in."""

    world: tuple[int, int]
    group: Any
    input: TensorPlacement
    mesh: DeviceMesh


@checked_module
class SyncBatchNorm(BatchNorm):
    """BatchNorm of [batch, channels, ...] over the batches of all ranks of a process group, as torch.nn.SyncBatchNorm.

    process_group: torch's handle; the default group where it is left out.  Batches of all ranks have one size in each
    call, of images too: of others come wrong numbers, in silence where ``shardfuse.initialize()`` has not made the
    process group.  In ``eval()``, on one rank, and without a group it is a BatchNorm, which any rank may call alone.
    Gradients of weight and bias are, in training, the ranks' average, as DistributedDataParallel makes them of its own.
    Arguments, parameters and buffers are otherwise those of ``BatchNorm2d`` without a mesh.
    """

    numbered: ClassVar[WeakValueDictionary[int, SyncBatchNorm]] = WeakValueDictionary()
    """By a number that Dynamo hands over as a constant."""
    _count: ClassVar[count[int]] = count()
    process_group: Checked[Any] = Checked(_check_group)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self.process_group = process_group
        self._together: _Together | None = None
        self._enter()

    def _enter(self) -> None:
        self.number = next(self._count)
        self.numbered[self.number] = self

    def __getstate__(self) -> dict[str, object]:
        """Alone: the ranks may be others where a copy is called."""
        return {**super().__getstate__(), "_together": None, "_input": TensorPlacement(), "mesh": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter()  # a copy is another module

    def forward(self, x: torch.Tensor, *, unsharded: Sequence[int] | None = None) -> torch.Tensor:
        """x: [batch, channels, ...], this rank's batch -> the same shape, dtype and memory format."""
        if self.training and dist.is_initialized() and dist.get_world_size(self.process_group) > 1:
            _join(self.number)
        elif self.mesh is not None:
            _leave(self.number)
        return super().forward(x, unsharded=unsharded)

    def train(self, mode: bool = True) -> Self:
        """As torch's; outside of training there are no other ranks."""
        if not mode:
            self.leave()
        elif self._together is not None and self._together.world == world_key():
            self.join()  # as the graphs of torch.compile have found it, which are made anew otherwise
        return super().train(mode)

    def join(self) -> None:
        """Be with the ranks of the group, of which a mesh is made in the first call in this world."""
        world = world_key()
        group = self.process_group
        if self._together is None or self._together.world != world or self._together.group is not group:
            from torch.distributed.tensor import Shard  # slow to import, and needed on a process group only

            mesh = DeviceMesh(dist.get_process_group_ranks(group or dist.group.WORLD))
            self._together = _Together(world, group, TensorPlacement.of("input", Shard(0), mesh), mesh)
        if self.mesh is not self._together.mesh:
            self._input, self.mesh = self._together.input, self._together.mesh

    def leave(self) -> None:
        """Be alone, as in evaluation."""
        if self.mesh is not None:
            self._input, self.mesh = TensorPlacement(), None

    def vectors_here(self) -> list[torch.Tensor]:
        """Weight and bias; the fusion adds their gradients up over all ranks, of which this is one."""
        return [self._averaged(p) for p in super().vectors_here()]

    def _averaged(self, parameter: torch.Tensor) -> torch.Tensor:
        if self.mesh is None or not parameter.requires_grad or not torch.is_grad_enabled():
            return parameter
        size = self.mesh.size

        if torch.compiler.is_compiling():  # which has no hooks of tensors that it computes
            return parameter.detach() + (parameter - parameter.detach()) / size

        def average(gradient: torch.Tensor) -> torch.Tensor:
            return gradient / size

        own = parameter.view_as(parameter)
        own.register_hook(average)  # pyright: ignore[reportUnknownMemberType]
        return own


def _join(number: int) -> None:
    """``join()`` of a SyncBatchNorm, which torch.compile calls while it compiles: the mesh is a constant of a graph."""
    SyncBatchNorm.numbered[number].join()


def _leave(number: int) -> None:
    SyncBatchNorm.numbered[number].leave()


for _of_graph in (_join, _leave):
    cast("Any", _of_graph)._dynamo_marked_constant = True
