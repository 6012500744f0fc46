"""nvFuser's multidevice names: Communicator, DeviceMesh, shard_tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from shardfuse.compat.nvfuser_direct.execution import Fusion, FusionExecutorCache
from shardfuse.compat.nvfuser_direct.execution import Sharding as Sharding
from shardfuse.compat.nvfuser_direct.names import CommunicatorBackend
from shardfuse.compat.nvfuser_direct.nvfuser_errors import translated
from shardfuse.compat.nvfuser_direct.values import TensorView
from shardfuse.config import read_launch
from shardfuse.errors import ShapeError
from shardfuse.executor.binding import Argument
from shardfuse.ir.digits import Root, axis_of
from shardfuse.ir.domain import BoundDomain
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.tensor_view import TensorView as NativeTensorView
from shardfuse.mesh import DeviceMesh as DeviceMesh
from shardfuse.mesh import current_rank, finalize, initialize, world_size
from shardfuse.ops.evaluate import unsharded_index
from shardfuse.passes.recorded_domains import bound_domain


class Communicator:
    """Rank and size from the launch environment."""

    _only: Communicator | None = None

    @staticmethod
    def instance() -> Communicator:
        """The process's communicator; the default process group is made with it where the program has made none.

        A program that makes the default process group later on, as it may beside nvFuser's communicator, takes its
        place: everything runs in the program's group from then on.
        """
        if not dist.is_initialized():
            initialize()
            _make_way()
        if Communicator._only is None:
            Communicator._only = Communicator()
        return Communicator._only

    def size(self) -> int:
        return world_size()

    def rank(self) -> int:
        return current_rank()

    def local_size(self) -> int:
        return read_launch().local_size

    def local_rank(self) -> int:
        return read_launch().local_rank

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()  # pyright: ignore[reportUnknownMemberType]


def _make_way() -> None:
    """End the communicator's process group when the program calls ``init_process_group``: torch has one default."""
    make = dist.init_process_group

    @wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        dist.init_process_group = make
        finalize()
        make(*args, **kwargs)

    dist.init_process_group = init_process_group


@dataclass
class MultiDeviceExecutorParams:
    """nvFuser's switches of its host program.  Taken and not used: collectives are torch.distributed's NCCL or gloo."""

    backend_type: CommunicatorBackend = CommunicatorBackend.nccl
    use_allocation_cache: bool = False
    number_of_streams: int = 0
    offset_stream_indexing_by_rank: bool = False
    inter_stream_synchronization: bool = False


class MultiDeviceExecutor:
    """Runs one fusion on this rank's tensors."""

    def __init__(self, fusion: Fusion, params: MultiDeviceExecutorParams | None = None) -> None:
        self._fec = FusionExecutorCache(fusion)
        self.params = params or MultiDeviceExecutorParams()

    def run(self, args: Sequence[Argument]) -> list[torch.Tensor]:
        return self._fec.execute(args)

    def __str__(self) -> str:
        return self._fec.get_most_recent_scheduled_ir() if self._fec.native.last_plan else "MultiDeviceExecutor()"


@translated
def shard_tensor(tensor: torch.Tensor, tv: TensorView) -> torch.Tensor:
    """This rank's piece of the unsharded ``tensor``, as the splits of ``tv`` say.

    Raises ``NvFuserError`` where ``tensor`` has other dims or sizes than ``tv`` was declared with.
    """
    native = tv.native
    _check_shape(tensor, native)
    singles = native.domain.shared_singles(tensor.shape)
    axes = tuple(axis_of(Root(f"i{k}", n), own) for k, (n, own) in enumerate(zip(tensor.shape, singles, strict=True)))
    domain = bound_domain(native, BoundTensor(native.name, native.dtype, BoundDomain(axes)))
    for k in range(tensor.ndim):
        tensor = tensor.index_select(k, unsharded_index(domain, k, current_rank(), tensor.device))
    return tensor


def _check_shape(tensor: torch.Tensor, declared: NativeTensorView) -> None:
    """Raise ShapeError where an unsharded tensor is not what was declared; sizes of -1 may be any."""
    if len(declared.shape) != tensor.ndim or any(
        m not in (n, -1) for n, m in zip(tensor.shape, declared.shape, strict=True)
    ):
        expected = f"{list(declared.shape)}, as {declared.name} is declared"
        raise ShapeError("shard_tensor", f"a tensor of shape {list(tensor.shape)}", expected, "pass the whole tensor")
