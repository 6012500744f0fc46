"""nvFuser's handles: ``Val``, ``TensorView``, ``IterDomain`` and ``TensorDomain`` over shardfuse's own objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from shardfuse.compat.nvfuser_direct.names import MemoryType
from shardfuse.compat.nvfuser_direct.nvfuser_errors import translated
from shardfuse.errors import ScheduleError
from shardfuse.ir import domain as native_domain
from shardfuse.ir import tensor_view as native
from shardfuse.ir.dtype import DataType
from shardfuse.ir.fusion import Fusion
from shardfuse.ir.scalar import Number, Scalar
from shardfuse.mesh import DeviceMesh, ParallelType
from shardfuse.ops.build import Ops


class Val:
    """A number of a fusion: an input, a constant, or what is computed from others."""

    def __init__(self, value: Scalar | Number) -> None:
        self.value = value

    def is_symbolic(self) -> bool:
        return isinstance(self.value, Scalar) and self.value.value is None

    def is_tensor(self) -> bool:
        return False

    def dtype(self) -> DataType:
        if isinstance(self.value, Scalar):
            return self.value.dtype
        if isinstance(self.value, bool):
            return DataType.Bool
        return DataType.Int if isinstance(self.value, int) else DataType.Double

    def __str__(self) -> str:
        return str(self.value.value if isinstance(self.value, Scalar) and self.value.value is not None else self.value)

    __repr__ = __str__


class IterDomain:
    """An axis of a TensorView."""

    def __init__(self, axis: native.Axis) -> None:
        self.native = axis

    def extent(self) -> Val:
        return Val(self.native.extent)

    def is_reduction(self) -> bool:
        return self.native.is_reduction

    @translated
    def parallelize(self, parallel_type: ParallelType) -> None:
        self.native.parallelize(parallel_type)

    def __str__(self) -> str:
        return str(self.native)

    __repr__ = __str__


class TensorDomain:
    """The loop axes of a TensorView."""

    def __init__(self, axes: Sequence[native.Axis]) -> None:
        self.axes = list(axes)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.axes))}]"

    __repr__ = __str__


class TensorView:
    """A tensor of a fusion; ``native`` is shardfuse's TensorView."""

    def __init__(self, tv: native.TensorView, fusion: Fusion) -> None:
        self.native = tv
        self.fusion = fusion

    @property
    def ndim(self) -> int:
        return self.native.ndim

    def is_tensor(self) -> bool:
        return True

    @translated
    def size(self, dim: int) -> Val:
        return Val(cast("Scalar | Number", Ops(self.fusion).size(self.native, dim)))

    @translated
    def shape(self) -> list[Val]:
        return [self.size(k) for k in range(self.ndim)]

    def dtype(self) -> DataType:
        return self.native.dtype

    def has_root(self) -> bool:
        return False

    def domain(self) -> TensorDomain:
        return TensorDomain(self.native.get_loop_domain())

    def get_root_domain(self) -> list[IterDomain]:
        return self.get_logical_domain()

    def get_logical_domain(self) -> list[IterDomain]:
        return [IterDomain(a) for a in self.native.get_logical_domain()]

    def get_loop_domain(self) -> list[IterDomain]:
        return [IterDomain(a) for a in self.native.get_loop_domain()]

    @translated
    def axis(self, index: int) -> IterDomain:
        return IterDomain(self.native.axis(index))

    @translated
    def split(self, axis: int, factor: int, inner_split: bool = True, *, uneven: bool = False) -> TensorView:
        """``uneven`` is shardfuse's: the last shards may be short."""
        self.native.split(axis, factor, inner_split, uneven=uneven)
        return self

    @translated
    def inner_split(self, axis: int, factor: int, *, uneven: bool = False) -> TensorView:
        """``uneven``: as of ``split``."""
        self.native.inner_split(axis, factor, uneven=uneven)
        return self

    @translated
    def outer_split(self, axis: int, factor: int, *, uneven: bool = False) -> TensorView:
        """``uneven``: as of ``split``."""
        self.native.outer_split(axis, factor, uneven=uneven)
        return self

    @translated
    def merge(self, axis_o: int, axis_i: int | None = None) -> TensorView:
        self.native.merge(axis_o, axis_i)
        return self

    @translated
    def reorder(self, old2new: Mapping[int, int] | Sequence[int]) -> TensorView:
        self.native.reorder(old2new)
        return self

    @translated
    def set_device_mesh(self, mesh: DeviceMesh) -> None:
        self.native.set_device_mesh(mesh)

    @translated
    def set_allocation_domain(
        self, axes: Sequence[IterDomain], contiguity: bool | Sequence[bool | None] = True
    ) -> None:
        self.native.set_allocation_domain([a.native for a in axes], contiguity)

    @translated
    def rfactor(self, axes: Sequence[int]) -> TensorView:
        """The local part of a reduction, to be put on a mesh.

        shardfuse makes it of every reduction over a sharded axis, and computes it where the operands are; what is said
        about the TensorView that this returns changes nothing.
        """
        domain = self.native.domain
        chosen = [self.native.axis(k).domain for k in axes]
        if not all(axis.is_reduction for axis in chosen):
            raise self._by_hand(f"rfactor({list(axes)}) of an axis that is not reduced")
        local = native.TensorView(f"{self.native.name}_local", [], self.native.dtype)
        loop = tuple(native_domain.IterDomain(a.name, a.extent, is_reduction=a in chosen) for a in domain.loop)
        local.domain = replace(local.domain, loop=loop)
        self.native.reschedule("rfactor", loop=tuple(a for a in domain.loop if a not in chosen))
        return TensorView(local, self.fusion)

    @translated
    def swizzle1d(self, axis: int, parallel_type: ParallelType) -> TensorView:
        """Chunks of a stream-parallel axis in a ring from each rank's own."""
        self.native.swizzle1d(axis, parallel_type)
        return self

    @translated
    def cache_before(self, *arguments: object) -> TensorView:
        raise self._by_hand("cache_before")

    @translated
    def cache_after(self, *arguments: object) -> TensorView:
        raise self._by_hand("cache_after")

    @translated
    def set_memory_type(self, memory_type: object) -> None:
        """Symmetric memory, which other ranks reach: collectives are NCCL's or gloo's, which need none."""
        if memory_type is not MemoryType.symmetric:
            raise self._by_hand(f"set_memory_type({memory_type})")

    def _by_hand(self, what: str) -> ScheduleError:
        return ScheduleError(
            self.native.name,
            what,
            "shardfuse schedules kernels by itself",
            "leave it out: sharding and layout can be said",
        )

    def __str__(self) -> str:
        return repr(self.native)

    __repr__ = __str__


def plain(value: object) -> object:
    """shardfuse's own object behind a handle, in lists too; anything else as it is."""
    if isinstance(value, TensorView | IterDomain):
        return value.native
    if isinstance(value, Val):
        return value.value
    if isinstance(value, list | tuple):
        return [plain(v) for v in cast("Sequence[object]", value)]
    if isinstance(value, torch.Size):
        return list(value)
    return value


def handle(value: object, fusion: Fusion) -> object:
    """The handle of shardfuse's own object, in tuples and lists too."""
    if isinstance(value, native.TensorView):
        return TensorView(value, fusion)
    if isinstance(value, Scalar | int | float | complex):
        return Val(value)
    if isinstance(value, tuple):
        return tuple(handle(v, fusion) for v in cast("tuple[object, ...]", value))
    if isinstance(value, list):
        return [handle(v, fusion) for v in cast("list[object]", value)]
    return value
