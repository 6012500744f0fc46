"""Ops: what an Expr, or a record of a definition, does to its inputs.  One frozen class for each way to do it.

A class holds its op's parameters, which are no tensors, and refuses what cannot be.  In a definition, sizes and indices
may be scalars of the fusion; ``bind`` puts numbers in their place.  A printed program shows an op as its name, its
inputs, and those of its fields that have no default or differ from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeGuard

from ..mesh import ParallelType
from .base_op import BaseOp, check_axes
from .call import Call
from .dtype import DataType
from .scalar import Number, Scalar, Size
from .stream import Stream
from .window import Read

ReductionKind = Literal["sum", "prod", "max", "min", "any", "all"]
StatisticKind = Literal["online_softmax", "welford"]
RandomKind = Literal["uniform", "normal"]
MoveKind = Literal["send", "broadcast", "scatter", "gather"]


# element by element


@dataclass(frozen=True)
class Pointwise(BaseOp):
    """An entry of the table of pointwise ops (``ops/table.py``), of tensors and numbers.

    is_rough: may a kernel take the op's rough text (``PointwiseOp.rough``)?  A pass decides it for fusions that promise
    the same bits on any number of ranks (``passes/roughness.py``); ``None`` in any other fusion, where each kernel
    decides.  Ops with different values of it are not equal: ask for an op by its name (``is_pointwise``).
    """

    name: str
    is_rough: bool | None = None


def is_pointwise(op: Op, *names: str) -> bool:
    """Is it one of these entries of the table?"""
    return isinstance(op, Pointwise) and op.name in names


@dataclass(frozen=True)
class Cast(BaseOp):
    """To the dtype of the output; ``dtype`` is kept where a definition says it."""

    name: ClassVar[str] = "cast"
    dtype: DataType | None = None


@dataclass(frozen=True)
class Set(BaseOp):
    """A copy on the same ranks, in the order in which the output is stored."""

    name: ClassVar[str] = "set"


# the same elements under other axes


class View(BaseOp):
    """Computes nothing: the same elements under regrouped axes."""


@dataclass(frozen=True)
class Broadcast(View):
    """Axes of 1 where ``new`` is true, and those of the input in between."""

    name: ClassVar[str] = "broadcast"
    new: tuple[bool, ...]


@dataclass(frozen=True)
class Expand(View):
    """Axes of 1 repeated to ``shape``; in a definition, -1 keeps an axis.

    called: the op of the caller's line, by which errors go.
    """

    name: ClassVar[str] = "expand"
    shape: tuple[Size, ...]
    called: str = field(default="expand", compare=False, repr=False)


@dataclass(frozen=True)
class Squeeze(View):
    """Without ``axes``, which have one element."""

    name: ClassVar[str] = "squeeze"
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        check_axes(self.axes)


@dataclass(frozen=True)
class Permute(View):
    """Axis k of the output is axis ``dims[k]`` of the input."""

    name: ClassVar[str] = "permute"
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        assert sorted(self.dims) == list(range(len(self.dims))), f"{self.dims} are no order of axes"


@dataclass(frozen=True)
class Reshape(View):
    """The same elements in row-major order under ``shape``; in a definition, one size may be -1.

    segments: into how many an axis is cut for sums that do not depend on the number of ranks; 0 for any other reshape.
    """

    name: ClassVar[str] = "reshape"
    shape: tuple[Size, ...]
    segments: int = 0


@dataclass(frozen=True)
class Relabel(BaseOp):
    """The same storage under other roots."""

    name: ClassVar[str] = "relabel"


@dataclass(frozen=True)
class Window(BaseOp):
    """A stored tensor read at other places along some axes: see ``ir/window.py``."""

    name: ClassVar[str] = "window"
    reads: tuple[Read, ...]

    def __post_init__(self) -> None:
        check_axes([read.axis for read in self.reads])


# tensors made of numbers


class Factory(BaseOp):
    """Makes a tensor of a shape and numbers; each element depends on its unsharded index alone."""


@dataclass(frozen=True)
class Full(Factory):
    """The one input everywhere."""

    name: ClassVar[str] = "full"
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Iota(Factory):
    """``start + step * k``, where k is the unsharded index along the only axis."""

    name: ClassVar[str] = "iota"
    shape: tuple[Size, ...]
    start: Number | Scalar
    step: Number | Scalar

    def __post_init__(self) -> None:
        assert len(self.shape) == 1, f"an iota has one axis, not {self.shape}"

    @property
    def counting(self) -> tuple[Number, Number]:
        """Start and step, of a bound Expr."""
        assert not isinstance(self.start, Scalar), f"{self.start} is not known yet"
        assert not isinstance(self.step, Scalar), f"{self.step} is not known yet"
        return self.start, self.step


@dataclass(frozen=True)
class Random(Factory):
    """Numbers by the row-major index of each element.  Inputs: two parameters of ``name``, a seed and an offset.

    drawn: are seed and offset those of torch's generator, and not the caller's?
    """

    name: RandomKind
    shape: tuple[Size, ...]
    drawn: bool


# reductions


@dataclass(frozen=True)
class Reduce(BaseOp):
    """Over ``axes``, which the output does not have.

    mesh_dims: the mesh dimensions on which the reduced axes are, of a collective; none of a local reduction.
    segments: into how many the axis was cut of which each is reduced by itself (see ``Reshape``), else 0.
    in_pairs: 0, or the elements of a run.  In each, as if it had a power of two of them, neighbours are added two and
    two, and so are these sums, until one is left; and so are those of runs, of which there is a power of two, as of
    those that a rank has.  Of a run of a power of two a rank may have a part, where there are no ``parts``.
    parts: into how many each run is cut, all of one power of two, but that the last may be shorter.  Elements that are
    in the same place of them are added up first, one after another; what that leaves of a run is added up in pairs.
    """

    kind: ReductionKind
    axes: tuple[int, ...]
    mesh_dims: tuple[ParallelType, ...] = ()
    segments: int = 0
    in_pairs: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        check_axes(self.axes)
        assert len(self.mesh_dims) in (0, len(self.axes)), f"axes {self.axes} on {self.mesh_dims}"

    @property
    def name(self) -> str:
        return self.kind

    def arguments(self) -> list[tuple[str, object]]:
        segments = [("segments", self.segments)] if self.segments else []
        in_pairs = [("in_pairs", self.in_pairs)] if self.in_pairs else []
        in_pairs += [("parts", self.parts)] if self.parts > 1 else []
        return [("axes", self.axes), *_mesh(self.mesh_dims), *segments, *in_pairs]


@dataclass(frozen=True)
class Statistic(BaseOp):
    """Inside of one kernel, several reductions over ``axes`` in one walk, with an output for each.

    online_softmax: of ``x`` the maximum, the sum of exp(x - maximum) and, where it is wanted, the sum of x - maximum;
    with ``is_weighted`` each distance in it times its exponential, and 0 where that is 0.
    welford: the sum, and the sum of squared distances to the mean.
    """

    kind: StatisticKind
    axes: tuple[int, ...]
    is_weighted: bool = False

    def __post_init__(self) -> None:
        check_axes(self.axes)

    @property
    def name(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Pick(BaseOp):
    """Inside of one kernel: of each row of the first input the element at the second, and whether there is one.

    Of a sharded axis the third input is the iota that counts its elements through all ranks.
    """

    name: ClassVar[str] = "pick"


# over a mesh


@dataclass(frozen=True)
class Reshard(BaseOp):
    """The same logical axes, sharded otherwise over ``mesh_dims``.

    is_exchange: between any two layouts of one axis, by one all-to-all.
    stream: of a gather whose pieces are chunks, which come one by one.
    """

    name: ClassVar[str] = "set"
    mesh_dims: tuple[ParallelType, ...]
    is_exchange: bool = False
    stream: Stream | None = None

    def __post_init__(self) -> None:
        assert self.mesh_dims, "a sharding changes over some mesh dimension"
        assert self.stream is None or len(self.mesh_dims) == 1, f"chunks are gathered over {self.mesh_dims}"

    def arguments(self) -> list[tuple[str, object]]:
        return [("mesh", self.mesh_dims), ("exchange", True)] if self.is_exchange else _mesh(self.mesh_dims)


def _mesh(dims: tuple[ParallelType, ...]) -> list[tuple[str, object]]:
    return [("mesh", dims[0] if len(dims) == 1 else dims)] if dims else []


@dataclass(frozen=True)
class Move(BaseOp):
    """From one mesh to another, by one call."""

    name: ClassVar[str] = "set"
    move: MoveKind


@dataclass(frozen=True)
class OfRank(BaseOp):
    """Inside of one kernel: what rank ``rank`` (its index along a mesh dimension) has of the input, which all send."""

    name: ClassVar[str] = "of_rank"
    rank: int

    def __post_init__(self) -> None:
        assert self.rank >= 0, f"{self.rank} is no index of a rank"


# chunks


@dataclass(frozen=True)
class StreamSlice(BaseOp):
    """Of the input the chunk of that stage which the Expr works on."""

    name: ClassVar[str] = "stream_slice"
    stream: Stream


@dataclass(frozen=True)
class StreamCat(BaseOp):
    """A tensor of its chunks in the order of their stages, or of equal parts of one axis."""

    name: ClassVar[str] = "stream_cat"
    stream: Stream


# numbers on the host


@dataclass(frozen=True)
class SizeOf(BaseOp):
    """The product of the unsharded extents of ``dims``."""

    name: ClassVar[str] = "size"
    dims: tuple[int, ...]


@dataclass(frozen=True)
class RngSeed(BaseOp):
    """The seed of torch's generator, drawn in every call."""

    name: ClassVar[str] = "rng_seed"


@dataclass(frozen=True)
class RngOffset(BaseOp):
    """The offset that was drawn with the seed that is the input."""

    name: ClassVar[str] = "rng_offset"


ViewOp = Broadcast | Expand | Squeeze | Permute | Reshape
Op = (
    Pointwise | Cast | Set | ViewOp | Relabel | Window | Full | Iota | Random
    | Reduce | Statistic | Pick | Reshard | Move | OfRank | StreamSlice | StreamCat | Call
)  # fmt: skip
"""What an Expr does."""
HostOp = Pointwise | Cast | RngSeed | RngOffset
"""What is worked out on the host in every call."""
RecordOp = Pointwise | Cast | Set | ViewOp | Full | Iota | Random | Reduce | Call | SizeOf | RngSeed | RngOffset
"""What a definition says."""


def is_reduction(op: BaseOp, *kinds: ReductionKind) -> TypeGuard[Reduce]:
    """Is it a reduction, of one of ``kinds``?"""
    return isinstance(op, Reduce) and op.kind in kinds


def is_statistic(op: BaseOp, *kinds: StatisticKind) -> TypeGuard[Statistic]:
    """Is it several reductions in one walk, of one of ``kinds``?"""
    return isinstance(op, Statistic) and op.kind in kinds
